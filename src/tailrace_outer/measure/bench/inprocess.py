"""Runs the engine alone in a process: `python -m tailrace_outer.measure.bench.inprocess`.

Reads an engine's spec as the first line of JSON, then one line per round with the prompts' ids. Answers each round with
the times of its tokens. So it measures the engine without a server.
"""

from __future__ import annotations

import sys
import time

import msgspec

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.huge_pages import move_to_huge_pages
from tailrace.engines.interface import Engine, Sequence
from tailrace.types import Sampling
from tailrace_outer.measure.bench.load import Round, Timeline

__all__ = ["main", "run_round"]


def run_round(engine: Engine, load: Round, first_id: int) -> tuple[list[Timeline], float]:
    """Step the engine until all sequences have finished. Returns their timelines and the time in seconds."""
    sampling = Sampling(temperature=0.0, seed=1, max_tokens=load.max_tokens, ignore_eos=True)
    start_s = time.perf_counter()
    timelines = {}
    for sequence_id, prompt_ids in enumerate(load.prompts, first_id):
        timelines[sequence_id] = Timeline(start_s)
        engine.submit(Sequence(sequence_id, (prompt_ids,), sampling))
    live = set(timelines)
    while live:
        deltas = engine.step()
        now_s = time.perf_counter()
        for delta in deltas:
            timeline = timelines[delta.sequence_id]
            timeline.num_events += len(delta.token_ids)
            timeline.times_s.append(now_s)
            if delta.finish_reason is not None:
                live.discard(delta.sequence_id)
    engine.step()  # lets the engine clean up
    return list(timelines.values()), time.perf_counter() - start_s


def main() -> None:
    first_line = sys.stdin.buffer.readline()
    if not first_line.endswith(b"\n"):
        return  # the benchmark was stopped before it had written
    engine = load_engine(msgspec.json.decode(first_line, type=EngineSpec))
    for _ in move_to_huge_pages():
        pass
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    first_id = 1
    for line in sys.stdin.buffer:
        load = msgspec.json.decode(line, type=Round)
        result = run_round(engine, load, first_id)
        first_id += len(load.prompts)
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        sys.stdout.buffer.flush()
    engine.close()


if __name__ == "__main__":
    main()
