"""Measures the time to the first token of `/infill`, as an editor asks for it.

    python bench/infill.py MODEL [--engine NAME] [--requests 20] [--before 60] [--after 20]

MODEL has tokens for infill. The cursor is in a file of this repository, with so many lines before it and after it.
`places`: each request is at another place, so nothing of it is in the prefix cache. `keys`: each request has one
character more than the one before, as while somebody types. Every client leaves at its first token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import httpx

from machine import this_machine
from servers import serving

FILE = Path(__file__).parents[1] / "src/tailrace/generation/generator.py"
TIMEOUT_S = 120.0


def around(row: int, column: int, before: int, after: int) -> dict[str, str]:
    """Return the texts around a place in the file, as llama.vim sends them."""
    lines = FILE.read_text("utf-8").splitlines(keepends=True)
    line = lines[row]
    return {
        "input_prefix": "".join(lines[row - before : row]),
        "prompt": line[:column],
        "input_suffix": line[column:] + "".join(lines[row + 1 : row + 1 + after]),
    }


def first_token_s(client: httpx.Client, texts: dict[str, str]) -> float:
    body = {**texts, "n_predict": 64, "temperature": 0, "ignore_eos": True, "stream": True}
    start_s = time.perf_counter()
    with client.stream("POST", "/infill", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: ") and json.loads(line[6:])["content"]:
                return time.perf_counter() - start_s
    raise SystemExit("an answer had no text")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the time to the first token of infills.")
    parser.add_argument("model")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--before", type=int, default=60)
    parser.add_argument("--after", type=int, default=20)
    given = parser.parse_args()
    rows = [given.before + 7 * number for number in range(given.requests)]
    wide = max(rows, key=lambda row: len(around(row, -1, given.before, 0)["prompt"]))
    places = {
        "places": [around(row, 12, given.before, given.after) for row in rows],
        "keys": [around(wide, 8 + number, given.before, given.after) for number in range(given.requests)],
    }
    print(json.dumps(this_machine()))
    with (
        serving(given.model, "--journal", "memory", "--engine", given.engine) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT_S, trust_env=False) as client,
    ):
        first_token_s(client, around(400, 0, given.before, given.after))
        for name, requests in places.items():
            found = [first_token_s(client, texts) for texts in requests]
            counted = client.post("/infill", json={**requests[-1], "n_predict": 0}).json()["tokens_evaluated"]
            line = {"what": name, "requests": len(found), "prompt_tokens": counted}
            times = {"least": min(found), "p50": statistics.median(found), "max": max(found)}
            line |= {f"first_{key}_s": round(one, 4) for key, one in times.items()}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
