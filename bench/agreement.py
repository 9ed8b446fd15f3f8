"""Measures how far greedy answers of engines with the same weights agree, and the gap of logits where they differ.

    python bench/agreement.py --gguf FILE --huggingface DIRECTORY [--vllm-python PATH] [--only NAME] [--output FILE]

FILE and DIRECTORY have the same model (tests/checkpoints.py makes the directory from the file). The reference is
`generate` of transformers in float32, without tailrace: 40 prompts, 64 tokens each, and the gap between the two largest
logits at each token. Then each engine answers the same prompts with `tailrace serve`, eight at a time.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from engines import FIRST_PORT, Server, running
from machine import this_machine

MAX_TOKENS = 64
TOPICS = ("a river", "bread", "the night sky", "a dog and a mill", "counting", "glass", "an old clock", "the sea")
OPENINGS = ("This is a story about {}.", "Five facts about {}:\n1.", "Dear friend, I write about {}",
            "def describe():\n    # {}\n", "Question: what is known of {}?\nAnswer:")  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """An answer of the reference, and the gap between the two largest logits at each token."""

    ids: list[int]
    gaps: list[float]


@dataclass(frozen=True)
class Line:
    """One engine. Gaps are medians; `parted_gap` is that of the first different tokens, `usual_gap` that of all."""

    engine: str
    answers: int
    same: int
    median_tokens_until: float  # tokens before the first different one, in answers that differ
    parted_gap: float
    usual_gap: float


def reference(path: Path, prompts: list[str]) -> list[Answer]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # the library does not annotate it
    tokenizer: Any = AutoTokenizer.from_pretrained(path)  # Any: its class depends on the model
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.eval()
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        outputs = model.generate(
            **ids,
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=-1,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tops = [logits[0].topk(2).values for logits in outputs.logits]
        new = outputs.sequences[0, ids["input_ids"].shape[1] :].tolist()
        answers.append(Answer(new, [float(top[0] - top[1]) for top in tops]))
    return answers


def answer_ids(prompt: str) -> list[int]:
    """Return the token ids of the answer to a prompt."""
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    ids: list[int] = []
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{FIRST_PORT}", timeout=300, trust_env=False) as client,
        client.stream("POST", "/v1/streams", json=body, headers={"Accept": "text/event-stream"}) as answer,
    ):
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                ids += json.loads(line[6:]).get("token_ids", [])
    return ids


def compare(engine: str, expected: list[Answer], outputs: list[list[int]]) -> Line:
    until, parted = [], []
    for answer, ids in zip(expected, outputs, strict=True):
        for position, (wanted, seen) in enumerate(zip(answer.ids, ids, strict=True)):
            if wanted != seen:
                until.append(position)
                parted.append(answer.gaps[position])
                break
    return Line(
        engine,
        len(expected),
        len(expected) - len(until),
        statistics.median(until or [MAX_TOKENS]),
        round(statistics.median(parted or [0.0]), 3),
        round(statistics.median(gap for answer in expected for gap in answer.gaps), 3),
    )


def servers(options: argparse.Namespace) -> Iterator[Server]:
    """Yield a server for each engine."""

    def our_server(name: str, python: object, path: Path, *flags: str) -> Server:
        command = [str(python), "-m", "tailrace", "serve", str(path), "--engine", name.partition(",")[0], *flags]
        return Server(name, "", FIRST_PORT, [*command, "--port", str(FIRST_PORT), "--journal", "memory"], {})

    python, gguf, directory = sys.executable, options.gguf, options.huggingface
    yield our_server("transformers, float32", python, directory, "--dtype", "float32")
    yield our_server("transformers, bfloat16", python, directory, "--dtype", "bfloat16")
    yield our_server("openvino", python, gguf)
    yield our_server("openvino, --no-exact", python, gguf, "--no-exact")
    yield our_server("llamacpp", python, gguf)
    yield our_server("llamacpp, --exact", python, gguf, "--exact")
    if options.vllm_python:
        yield our_server("vllm, float32", options.vllm_python, directory, "--dtype", "float32")
        yield our_server("vllm, bfloat16", options.vllm_python, directory, "--dtype", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures how far greedy answers of engines agree.")
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--huggingface", type=Path, required=True)
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--only", default="", help="only engines whose name contains this")
    parser.add_argument("--reference", type=Path, help="file that keeps the reference's answers for the next run")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    prompts = [opening.format(topic) for opening in OPENINGS for topic in TOPICS]
    reference_path: Path | None = options.reference
    if reference_path and reference_path.is_file():
        expected = [Answer(**answer) for answer in json.loads(reference_path.read_text())]
    else:
        expected = reference(options.huggingface, prompts)
        if reference_path:
            reference_path.write_text(json.dumps([asdict(answer) for answer in expected]))
    lines = []
    for server in servers(options):
        if options.only not in server.name:
            continue
        with running(server), concurrent.futures.ThreadPoolExecutor(8) as pool:
            line = compare(server.name, expected, list(pool.map(answer_ids, prompts)))
        print(json.dumps(asdict(line)), flush=True)
        lines.append(line)
    if options.output:
        found = {"machine": this_machine(), "max_tokens": MAX_TOKENS, "lines": [asdict(line) for line in lines]}
        options.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
