"""Measures the time to the first token at several turns of a growing conversation.

    python bench/turns.py SOURCE [--engine NAME] [--output FILE.json]

Each turn adds a question of some 60 tokens and an answer of 32. It is measured with the prefix cache, without it, and
with `--no-exact`, where the cache may also have the tokens of answers. Prints medians of a few conversations, which
differ from their first word.
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

TURNS = 20
SHOWN = (1, 5, 10, 20)
QUESTION = (
    "In conversation {number}, turn {turn}: a river runs past a mill, a dog sleeps in the shade of an old tree, and "
    "the miller counts his sacks. Tell me what the dog dreams of, what the miller says to it when it wakes, and which "
    "way the river goes on from there, in a few plain sentences."
)


def converse(client: httpx.Client, number: int) -> list[tuple[int, float]]:
    """Return prompt tokens and seconds to the first text, for each turn."""
    messages: list[dict[str, str]] = []
    turns_found = []
    for turn in range(1, TURNS + 1):
        messages.append({"role": "user", "content": QUESTION.format(number=number, turn=turn)})
        body = {
            "model": "default",
            "messages": messages,
            "max_tokens": 32,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start_s, first_s, answer_text, num_tokens = time.perf_counter(), 0.0, "", 0
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                for choice in event["choices"]:
                    text = choice["delta"].get("content") or ""
                    if text and not first_s:
                        first_s = time.perf_counter() - start_s
                    answer_text += text
                if event.get("usage"):
                    num_tokens = event["usage"]["prompt_tokens"]
        messages.append({"role": "assistant", "content": answer_text})
        turns_found.append((num_tokens, first_s))
    return turns_found


def measure(source: str, flags: list[str], conversations: int) -> list[tuple[int, int, float]]:
    """Return turns with prompt tokens and median seconds to the first token."""
    with (
        serving(source, "--journal", "memory", *flags) as server,
        httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client,
    ):
        converse(client, 0)
        runs = [converse(client, number) for number in range(1, conversations + 1)]
    return [(turn, runs[0][turn - 1][0], statistics.median(run[turn - 1][1] for run in runs)) for turn in SHOWN]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the time to the first token in long conversations.")
    parser.add_argument("source")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines = []
    for name, flags in {"cache": [], "no cache": ["--no-prefix-cache"], "cache, not exact": ["--no-exact"]}.items():
        for turn, num_tokens, first_s in measure(
            options.source, ["--engine", options.engine, *flags], options.conversations
        ):
            line = {"what": name, "turn": turn, "prompt_tokens": num_tokens, "first_s": round(first_s, 4)}
            print(json.dumps(line), flush=True)
            lines.append(line)
    if options.output:
        turns_found = {"machine": this_machine(), "engine": options.engine, "lines": lines}
        options.output.write_text(json.dumps(turns_found, indent=2) + "\n")


if __name__ == "__main__":
    main()
