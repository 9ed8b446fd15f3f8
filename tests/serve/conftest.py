"""Checkpoints for whatever runs `transformers`."""

from tests.checkpoints import smollm2_dir, tiny_gpt2_dir

__all__ = ["smollm2_dir", "tiny_gpt2_dir"]
