"""Measures the processor time of the sampler for a step of 32 rows.

    python bench/sampling.py [--vocabulary 151936] [--rows 32]

The logits are random, with forty likely tokens in each row, as those of a model that has learned something. The figures
are processor time, medians of nine steps. The engine shares the rows among its threads.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from tailrace.engines import Sequence
from tailrace.types import Sampling
from tailrace_kit.sampler import Row

_STEPS = 9
_LIKELY = 40
_ASKED = {
    "greedy": Sampling(temperature=0.0),
    "temperature 0.8": Sampling(temperature=0.8),
    "top_p 0.95": Sampling(temperature=0.8, top_p=0.95),
    "top_k 40, top_p 0.95, min_p 0.05": Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    "top_p 0.95, presence_penalty": Sampling(temperature=0.8, top_p=0.95, presence_penalty=0.5),
    "top_p 0.95, logit_bias": Sampling(temperature=0.8, top_p=0.95, logit_bias=((5, 1.0),)),
    "top_p 0.95, 20 logprobs": Sampling(temperature=0.8, top_p=0.95, logprobs=True, top_logprobs=20),
    "typical_p 0.9": Sampling(temperature=0.8, typical_p=0.9),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the sampler.")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=32)
    given = parser.parse_args()
    random = np.random.default_rng(1)
    logits = (random.standard_normal((given.rows, given.vocabulary)) * 1.2).astype(np.float32)
    for row in logits:
        row[random.integers(0, given.vocabulary, _LIKELY)] += (14 * np.exp(-np.arange(_LIKELY) / 8)).astype(np.float32)
    np.zeros(2**24, np.uint8)  # freed memory of this size is kept by malloc from now on, as in an engine
    for name, sampling in _ASKED.items():
        taken_s = []
        for step in range(_STEPS):
            rows = [Row(Sequence(seed, ((1, 2),), sampling), frozenset({2})) for seed in range(step, step + given.rows)]
            began_s = time.process_time()
            for row, own in zip(rows, logits, strict=True):
                row.choose(own)
            taken_s.append(time.process_time() - began_s)
        print(f"{name:34} {statistics.median(taken_s) * 1000:7.1f} ms")


if __name__ == "__main__":
    main()
