"""Compiles grammars like OpenVINO's engine, in a process that a grammar may crash.

    python -m tailrace.engines.openvino.compile_grammars PARENT_PID

The first line of standard input is an `EngineSpec`, each further line a `Grammar`, in JSON. It answers each line with a
line of JSON: "" when it is ready, then the reason to refuse the grammar, or "". A grammar is refused if compiling it
takes more than `MAX_STEPS`. This does not depend on the machine. If compiling takes more than `CPU_S` of CPU time
nevertheless, the kernel ends the process with SIGPROF. An idle process ends by itself.
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
from tailrace.engines.grammars.automata import NO_ANSWER, NOT_COMPILED, TOO_MUCH, GrammarError
from tailrace.engines.grammars.ebnf import to_rules
from tailrace.engines.openvino.sampling import library_config
from tailrace.engines.openvino.toy import load_toy
from tailrace.engines.openvino.vocabulary import TokenTree
from tailrace.engines.protocol import EngineSpec
from tailrace.types import Grammar, Sampling

__all__ = ["CPU_S", "MAX_STEPS", "main"]

# Of one grammar, see `vocabulary`: 0.5 to 1 s of CPU time. The library uses all cores, so that other sequences wait
# half as long on two cores.
MAX_STEPS = 5_000_000
CPU_S = 3.0  # of one grammar before its first token. Within MAX_STEPS, a busy machine took at most 1 s
_NUM_TOKENS = 8  # of the answer that is generated: later tokens do not take longer (see automata)
_MEMORY_BYTES = 512 * 2**20  # of address space, in addition to the loaded libraries
_IDLE_S = 300.0
_NICE = 5  # lower priority than the engine; with 19 it got no CPU on a busy machine


class _Compiler:
    def __init__(self, spec: EngineSpec) -> None:
        self._pipeline = load_toy(spec)
        self._token_tree = TokenTree(self._pipeline.get_tokenizer().get_vocab())
        self._eos_token_ids = spec.eos_token_ids
        self._num_run = 0

    def run(self, grammar: Grammar, *, cpu_s: float = CPU_S) -> str:
        """Return why a grammar cannot be used, or "". `cpu_s`: 0 for no limit. Raises: the library's RuntimeError."""
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        sampling = Sampling(seed=0, max_tokens=_NUM_TOKENS, grammar=grammar)
        try:
            config = library_config(sampling, self._eos_token_ids)
            automata = to_rules(grammar).automata
        except GrammarError as error:
            return str(error)
        left = MAX_STEPS
        for automaton in automata:
            left -= self._token_tree.num_steps(automaton, left)
            if left < 0:
                return "it allows too many tokens at too many places, which takes too long to compile"
        self._num_run += 1
        handle = self._pipeline.add_request(self._num_run, ov.Tensor(np.array([[1, 2, 3]], np.int64)), config)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return "" if handle.read_all() else NO_ANSWER


def main() -> int:
    begin_child(int(sys.argv[1]))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print to stdout
    compiler = _Compiler(msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineSpec))
    answers.write(
        _line(compiler.run(Grammar("regex", "[ab]"), cpu_s=0))
    )  # warms the library up, so that the first grammar is not charged for it
    os.nice(_NICE)  # after loading, for which the first request waits
    if sys.platform == "linux":
        with open("/proc/self/statm") as state:
            most = int(state.read().split()[0]) * os.sysconf("SC_PAGESIZE") + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    while True:
        signal.setitimer(signal.ITIMER_REAL, _IDLE_S)  # SIGALRM ends the process
        line = sys.stdin.buffer.readline()
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not line:
            return 0
        grammar = msgspec.json.decode(line, type=Grammar)
        try:
            reason = compiler.run(grammar)
        except RuntimeError:  # the state of the pipeline is unknown now
            answers.write(_line(NOT_COMPILED))
            return 0
        except MemoryError:
            answers.write(_line(TOO_MUCH))
            return 0
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(_line(reason))


def _line(reason: str) -> str:
    return msgspec.json.encode(reason).decode() + "\n"


if __name__ == "__main__":
    sys.exit(main())
