"""Checkpoints for tests that run `transformers`."""

from tests.checkpoints import tiny_gpt2_dir

__all__ = ["tiny_gpt2_dir"]
