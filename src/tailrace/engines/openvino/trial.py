"""Compiles grammars as OpenVINO's engine does, in a process that may die of them.

    python -m tailrace.engines.openvino.trial PARENT_PID

The first line of its standard input is an `EngineSpec`, each further one a `Grammar`, in JSON. It answers each with a
line of JSON: "" when it is ready, then a reason to refuse the grammar, or "". Where a grammar takes more than `CPU_S`
of processor time, the kernel ends the process with SIGPROF. It ends by itself when nobody asks for a while.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

import msgspec
import numpy as np
import openvino as ov

from tailrace.child import begin_child
from tailrace.engines.grammars.automata import GrammarError
from tailrace.engines.openvino.sampling import library_config
from tailrace.engines.openvino.toy import load_toy
from tailrace.engines.protocol import EngineSpec
from tailrace.types import Grammar, Sampling

__all__ = ["CPU_S", "main"]

# Of processor time, for all that one grammar takes before its first token. The library uses all cores, so on two of
# them nobody waits longer than 0.2 s for it.
CPU_S = 0.4
_NUM_TOKENS = 8  # of the answer that is tried: masks take no longer later on (see automata)
_MEMORY_BYTES = 512 * 2**20  # of addresses, beyond what is loaded
_IDLE_S = 300.0
_NICE = 5  # behind the engine, yet a busy machine leaves it some time: at 19 it stood still


class _Trial:
    def __init__(self, spec: EngineSpec) -> None:
        self._pipeline = load_toy(spec)
        self._eos_token_ids = spec.eos_token_ids
        self._num_run = 0

    def run(self, grammar: Grammar) -> str:
        """Why it cannot be used; "" if it can. Raises: RuntimeError, the library's."""
        sampling = Sampling(seed=0, max_tokens=_NUM_TOKENS, grammar=grammar)
        try:
            config = library_config(sampling, self._eos_token_ids)
        except GrammarError as error:
            return str(error)
        self._num_run += 1
        handle = self._pipeline.add_request(self._num_run, ov.Tensor(np.array([[1, 2, 3]], np.int64)), config)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return "" if handle.read_all() else "no answer could conform to it"


def main() -> int:
    begin_child(int(sys.argv[1]))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # where libraries print
    trial = _Trial(msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineSpec))
    answers.write(_line(trial.run(Grammar("regex", "[ab]"))))  # what the library makes once is not the first grammar's
    os.nice(_NICE)  # not before it is loaded, which whoever sent the first grammar waits for
    if sys.platform == "linux":
        with open("/proc/self/statm") as state:
            most = int(state.read().split()[0]) * os.sysconf("SC_PAGESIZE") + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    while True:
        signal.setitimer(signal.ITIMER_REAL, _IDLE_S)  # its signal ends the process
        line = sys.stdin.buffer.readline()
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not line:
            return 0
        grammar = msgspec.json.decode(line, type=Grammar)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            reason = trial.run(grammar)
        except RuntimeError:  # and nobody knows what is left of the pipeline
            answers.write(_line("it cannot be compiled"))
            return 0
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(_line(reason))


def _line(reason: str) -> str:
    return msgspec.json.encode(reason).decode() + "\n"


if __name__ == "__main__":
    sys.exit(main())
