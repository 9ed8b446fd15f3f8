"""Checkpoints for whatever runs `transformers`."""

from tests.checkpoints import tiny_gpt2_dir

__all__ = ["tiny_gpt2_dir"]
