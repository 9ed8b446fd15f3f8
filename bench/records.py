"""Measures the database with a million records: the queries of `tailrace usage`, and adding rows.

    python bench/records.py [--rows 1000000] [--database postgresql+psycopg://…]

Rows are random: 90 days, 100 owners with two keys each, and two wires. Prints medians of several turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tailrace.records.record_database import RecordDatabase
from tailrace.records.request_rows import RequestRow
from tailrace.records.request_store import RequestStore

_DAY_S = 86_400.0
_NUM_OWNERS = 100
_TURNS = 9


def _rows(count: int, now_s: float) -> list[RequestRow]:
    rng = random.Random(1)
    rows = []
    for number in range(count):
        owner = f"owner{rng.randrange(_NUM_OWNERS)}"
        rows.append(
            RequestRow(
                request_id=f"{number:016x}{rng.getrandbits(24):06x}",
                created_s=now_s - rng.random() * 90 * _DAY_S,
                owner=owner,
                key_id=f"{owner[5:]:0>8}key{rng.randrange(2)}",
                model="smollm2-135m",
                wire=rng.choice(("openai", "native")),
                status="done",
                finish="stop",
                parameters='{"max_tokens":256,"seed":123456789}',
                num_prompt_tokens=rng.randrange(10, 500),
                num_completion_tokens=rng.randrange(1, 256),
                queue_s=0.001,
                first_token_s=0.1,
                total_s=2.5,
            )
        )
    return rows


def _median_ms(call: Callable[[], object]) -> float:
    times_s = []
    for _ in range(_TURNS):
        start_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--database", default="", help="an empty database; the default is a new SQLite file")
    args = parser.parse_args()
    now_s = time.time()
    with tempfile.TemporaryDirectory() as directory:
        url = args.database or f"sqlite:///{Path(directory) / 'records.sqlite'}"
        with closing(RecordDatabase(url)) as database:
            database.prepare()
            store = RequestStore(database)
            rows = _rows(args.rows, now_s)
            start_s = time.perf_counter()
            store.add(rows)
            seconds = time.perf_counter() - start_s
            print(f"{len(rows)} rows added in {seconds:.0f} s, {len(rows) / seconds:.0f} a second")
            month_s = now_s - 30 * _DAY_S
            for name, call in (
                ("sums by owner, a month", lambda: store.usage(by=["owner"], since_s=month_s)),
                ("sums by owner and day, a month", lambda: store.usage(by=["owner", "day"], since_s=month_s)),
                ("sums by owner, all of it", lambda: store.usage(by=["owner"])),
                ("one owner by day, all of it", lambda: store.usage(by=["day"], owner="owner7")),
                ("what all have spent, at a start", lambda: store.spent(now_s)),
                ("the first page of an owner's rows", lambda: next(store.rows(owner="owner7", since_s=month_s))),
            ):
                print(f"{name}: {_median_ms(call):.1f} ms")


if __name__ == "__main__":
    main()
