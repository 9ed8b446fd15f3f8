"""Measures embeddings: tailrace over HTTP, and sentence-transformers in a process of its own, in turns.

    python bench/embeddings.py --python VENV/bin/python [--turns 9] [--flags ...]

`--python` is an interpreter with sentence-transformers. Both compute `minilm`. A turn makes the embeddings of 1, 8 and
64 texts, and of 64 texts of different lengths, with each of them. It prints the medians as JSON, and the largest
difference of a number. On a busy machine the clock shows little; `processor_ms` is the processor time of a request in
all processes, the median over the turns. The threads of torch do not spin while they wait, which would slow both on few
cores.
"""

from __future__ import annotations

import argparse
import array
import base64
import json
import os
import random
import statistics
import subprocess
import time

import httpx
import psutil

from machine import this_machine
from servers import serving
from tailrace.models import CATALOGUE, NoProgress
from tailrace.models.fetch import fetch

_CHILD = """
import json, sys, time
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
for line in sys.stdin:
    texts = json.loads(line)
    began_s = time.perf_counter()
    found = model.encode(texts, show_progress_bar=False)
    print(json.dumps([time.perf_counter() - began_s, found.tolist()]), flush=True)
"""
_WORDS = (
    "the",
    "river",
    "runs",
    "over",
    "stones",
    "and",
    "under",
    "old",
    "bridges",
    "a",
    "dog",
    "sleeps",
    "near",
    "mills",
)
_SHAPES = {"1": (1, 16, 16), "8": (8, 16, 16), "64": (64, 16, 16), "64, of 4 to 120 words": (64, 4, 120)}

Vectors = list[list[float]]


def _texts(shape: tuple[int, int, int], turn: int) -> list[str]:
    count, least, most = shape
    chosen = random.Random(f"{shape} {turn}")
    return [" ".join(chosen.choices(_WORDS, k=chosen.randint(least, most))) for _ in range(count)]


def _ask(client: httpx.Client, texts: list[str]) -> tuple[float, Vectors]:
    body = {"input": texts, "encoding_format": "base64"}
    began_s = time.perf_counter()
    answer = client.post("/v1/embeddings", json=body).raise_for_status()
    found = [array.array("f", base64.b64decode(one["embedding"])).tolist() for one in answer.json()["data"]]
    return time.perf_counter() - began_s, found


def _processor_s(process_id: int) -> float:
    """Return the processor time that a process and its children have used."""
    top = psutil.Process(process_id)
    return sum(one.cpu_times().user + one.cpu_times().system for one in (top, *top.children(recursive=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--flags", default="", help="of tailrace serve")
    given = parser.parse_args()
    path = str(fetch(CATALOGUE["minilm"], NoProgress()))
    with (
        serving("minilm", *given.flags.split()) as server,
        httpx.Client(base_url=server.url, timeout=600, trust_env=False) as client,
        subprocess.Popen(
            [given.python, "-c", _CHILD, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # as the engine has: Linux shares the processor among sessions
            env=os.environ | {"OMP_WAIT_POLICY": "passive"},
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        processor: dict[str, dict[str, list[float]]] = {name: {"tailrace": [], "other": []} for name in _SHAPES}
        times: dict[str, dict[str, list[float]]] = {name: {"tailrace": [], "other": []} for name in _SHAPES}
        difference = 0.0
        for turn in range(given.turns + 1):
            for name, shape in _SHAPES.items():
                texts = _texts(shape, turn)
                used_s = _processor_s(server.process.pid)
                ours_s, ours = _ask(client, texts)
                used_s, before_s = _processor_s(server.process.pid) - used_s, _processor_s(child.pid)
                child.stdin.write(json.dumps(texts) + "\n")
                child.stdin.flush()
                theirs_s, theirs = json.loads(child.stdout.readline())
                difference = max(
                    difference,
                    *(abs(a - b) for one, two in zip(ours, theirs, strict=True) for a, b in zip(one, two, strict=True)),
                )
                if turn:  # the first one warms up
                    times[name]["tailrace"].append(ours_s)
                    times[name]["other"].append(theirs_s)
                    processor[name]["tailrace"].append(used_s)
                    processor[name]["other"].append(_processor_s(child.pid) - before_s)
        child.stdin.close()
    found = {"median_ms": _medians_ms(times), "processor_ms": _medians_ms(processor)}
    print(json.dumps({**this_machine(), "flags": given.flags, **found, "largest_difference": difference}))


def _medians_ms(times: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    return {
        name: {who: round(1000 * statistics.median(taken), 2) for who, taken in of.items()}
        for name, of in times.items()
    }


if __name__ == "__main__":
    main()
