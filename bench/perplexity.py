"""Measures what the ways to keep weights cost: perplexity and the most likely token against transformers in float32.

    python bench/perplexity.py --huggingface DIRECTORY PREPARED [PREPARED …] [--tokens N] [--output FILE]

DIRECTORY has a GGUF file's weights in float32 (tests/checkpoints.py makes it from the file). Each PREPARED is a
directory that the openvino engine made of the same file (`prepared/` in the cache directory). The text is `docs/*.md`
of this checkout, in windows of 512 tokens. Each model runs twice: in float32, and as the engine runs it, with
activations in eight bits. The error is the standard error over the windows of the logarithm's difference.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

WINDOW = 512
DOCS = Path(__file__).parent.parent / "docs"
WAYS = {"float32": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}, "eight bits": {}}


@dataclass(frozen=True)
class Line:
    model: str
    activations: str
    tokens: int
    perplexity: float
    ratio: float  # perplexity ÷ that of the reference
    error: float
    same: float  # part of the tokens with the same most likely next one
    megabytes: float


@dataclass(frozen=True)
class Scores:
    """Of each window: the mean negative log-likelihood, and the most likely tokens."""

    losses: list[float]
    likely: list[Any]


def score(windows: Any, logits_of: Any) -> Scores:
    losses, likely = [], []
    for window in windows:
        logits = logits_of(window).astype(np.float64)[:-1]
        tops = logits.max(-1)
        sums = np.log(np.exp(logits - tops[:, None]).sum(-1)) + tops
        losses.append(float((sums - logits[np.arange(len(logits)), window[1:]]).mean()))
        likely.append(logits.argmax(-1))
    return Scores(losses, likely)


def reference(path: Path, tokens: int) -> tuple[Any, Scores]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    text = "\n".join(file.read_text("utf-8") for file in sorted(DOCS.glob("*.md")))
    windows = np.array(tokenizer(text)["input_ids"][: tokens // WINDOW * WINDOW]).reshape(-1, WINDOW)
    with torch.inference_mode():
        return windows, score(windows, lambda window: model(torch.tensor(window[None])).logits[0].numpy())


def prepared(directory: Path, windows: Any, properties: dict[str, Any]) -> Scores:
    exact = {"INFERENCE_PRECISION_HINT": "f32", **properties}
    request = ov.Core().compile_model(directory / "openvino_model.xml", "CPU", exact).create_infer_request()
    places = np.arange(WINDOW)[None]

    def logits_of(window: Any) -> Any:
        request.reset_state()
        inputs = {"input_ids": window[None], "attention_mask": np.ones((1, WINDOW), np.int64), "position_ids": places}
        return request.infer({**inputs, "beam_idx": np.zeros(1, np.int32)})["logits"][0]

    return score(windows, logits_of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--huggingface", type=Path, required=True)
    parser.add_argument("prepared", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=8 * WINDOW)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    windows, wanted = reference(options.huggingface, options.tokens)
    print(f"transformers, float32: {math.exp(statistics.fmean(wanted.losses)):.3f}")
    lines = []
    for directory in options.prepared:
        for name, properties in WAYS.items():
            found = prepared(directory, windows, properties)
            apart = [mine - other for mine, other in zip(found.losses, wanted.losses, strict=True)]
            same = np.mean([mine == other for mine, other in zip(found.likely, wanted.likely, strict=True)])
            line = Line(
                directory.name,
                name,
                int(windows.size),
                math.exp(statistics.fmean(found.losses)),
                math.exp(statistics.fmean(apart)),
                statistics.stdev(apart) / math.sqrt(len(apart)),
                float(same),
                (directory / "openvino_model.bin").stat().st_size / 1e6,
            )
            lines.append(line)
            print(
                f"{line.model}, activations in {name}: {line.perplexity:.3f}, x {line.ratio:.4f} ± {line.error:.4f}, "
                f"same token {line.same:.1%}, {line.megabytes:.0f} MB",
                flush=True,
            )
    if options.output:
        options.output.write_text(json.dumps([asdict(line) for line in lines], indent=2) + "\n")


if __name__ == "__main__":
    main()
