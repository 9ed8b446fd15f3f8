"""Runs schedules until one breaks a law, or the time is over: `python -m tests.simulation --seconds 60`. `--seed 17`
runs one again, and shows what went wrong in it."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import count

from tests.simulation.schedule import Outcome, run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many at once")
    parser.add_argument("--first", type=int, default=secrets.randbits(40), help="the first seed; else a random one")
    parser.add_argument("--seed", type=int, help="run only the schedule of this seed")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first broken law")
    asked = parser.parse_args(arguments)
    if asked.seed is not None:
        outcome = run(asked.seed)
        _show(outcome)
        return bool(outcome.violation)
    with ProcessPoolExecutor(asked.processes) as pool:
        firsts = [asked.first + number for number in range(asked.processes)]
        shares = [pool.submit(_share, first, asked.processes, asked.seconds, asked.keep_going) for first in firsts]
        found = [share.result() for share in shares]
    num_runs, cpu_s = sum(share[0] for share in found), sum(share[1] for share in found)
    broken = [outcome for share in found for outcome in share[2]]
    per_hour = 3600 * num_runs / cpu_s
    sys.stdout.write(
        f"{num_runs} schedules from seed {asked.first} on, {len(broken)} broke a law. "
        f"{1000 * cpu_s / num_runs:.1f} ms of a processor each: {per_hour:.0f} an hour and processor.\n"
    )
    return bool(broken)


def _share(first: int, step: int, seconds: float, keeps_going: bool) -> tuple[int, float, list[Outcome]]:
    """Run every `step`-th seed. Returns how many ran, their processor time in seconds, and those that broke a law."""
    until_s, begun_s = time.monotonic() + seconds, time.process_time()
    broken: list[Outcome] = []
    num_runs = 0
    for seed in count(first, step):
        outcome = run(seed)
        num_runs += 1
        if outcome.violation:
            broken.append(outcome)
            _show(outcome)
        if time.monotonic() >= until_s or (broken and not keeps_going):
            break
    return num_runs, time.process_time() - begun_s, broken


def _show(outcome: Outcome) -> None:
    lines = [f"seed {outcome.seed}: {outcome.violation or 'no law was broken'}"]
    lines += [f"    {fault}" for fault in outcome.faults]
    keeps = "loses" if outcome.may_lose else "keeps"
    lines += [
        f"    Redis {keeps} what it has confirmed; {outcome.simulated_s:.1f} s, {outcome.num_commands} commands, "
        f"{outcome.num_steps} steps, digest {outcome.digest}"
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
