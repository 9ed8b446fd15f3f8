"""Measures what the ways to keep weights cost: perplexity and the most likely token against transformers in float32.

    python bench/perplexity.py GGUF --huggingface DIRECTORY [--weights auto 4 8 16] [--tokens N] [--output FILE]

DIRECTORY has the GGUF file's weights in float32 (tests/checkpoints.py makes it from the file). The text is `docs/*.md`
of this checkout, in windows of 512 tokens. The model runs as in the engine with `--exact`: keys and values have eight
bits. The error is the standard error over the windows of the logarithm's difference.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.engines.protocol import EngineSpec
from tailrace.models.resolve import read_card
from tailrace_plugins.openvino.model_loading import load_runner
from tailrace_plugins.openvino.prepared import prepared_path
from tailrace_plugins.openvino.runner import Piece

WINDOW = 512
DOCS = Path(__file__).parent.parent / "docs"


@dataclass(frozen=True)
class Line:
    model: str
    weights: str
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


def score(windows: Any, logits_of: Callable[[Any], Any]) -> Scores:
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


def packed(gguf: Path, weights: str, cache: Path, windows: Any) -> tuple[Scores, int]:
    """Return the scores of the engine's model, and the bytes of its packed weights."""
    bits: Any = 0 if weights == "auto" else int(weights)
    spec = EngineSpec("openvino", str(gguf), kv_tokens=1024, cache_path=str(cache), exact=True, weight_bits=bits)
    runner = load_runner(spec, read_card(gguf, ""))
    table = range(1024 // 32)

    def logits_of(window: Any) -> Any:
        """Each token is a row of its own, which has the tokens before it as its past: so each has logits."""
        pieces = [Piece((int(token_id),), place, table, is_sampled=True) for place, token_id in enumerate(window)]
        return runner.run(pieces, is_batch=True)

    num_bytes = (prepared_path(gguf, cache, bits) / "weights.safetensors").stat().st_size
    return score(windows, logits_of), num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--huggingface", type=Path, required=True)
    parser.add_argument("--weights", nargs="+", choices=("auto", "4", "8", "16"), default=("auto", "8", "16"))
    parser.add_argument("--tokens", type=int, default=8 * WINDOW)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    windows, wanted = reference(options.huggingface, options.tokens)
    print(f"transformers, float32: {math.exp(statistics.fmean(wanted.losses)):.3f}", flush=True)
    lines = []
    for weights in options.weights:
        with tempfile.TemporaryDirectory(prefix="tailrace-perplexity-") as cache:
            found, num_bytes = packed(options.gguf, weights, Path(cache), windows)
        apart = [mine - other for mine, other in zip(found.losses, wanted.losses, strict=True)]
        same = np.mean([mine == other for mine, other in zip(found.likely, wanted.likely, strict=True)])
        line = Line(
            options.gguf.name,
            weights,
            int(windows.size),
            math.exp(statistics.fmean(found.losses)),
            math.exp(statistics.fmean(apart)),
            statistics.stdev(apart) / math.sqrt(len(apart)),
            float(same),
            num_bytes / 1e6,
        )
        lines.append(line)
        print(
            f"--weights {line.weights}: {line.perplexity:.3f}, x {line.ratio:.4f} ± {line.error:.4f}, "
            f"same token {line.same:.1%}, {line.megabytes:.0f} MB",
            flush=True,
        )
    if options.output:
        options.output.write_text(json.dumps([asdict(line) for line in lines], indent=2) + "\n")


if __name__ == "__main__":
    main()
