"""The models of the tests of engines, for the engines that are plugins."""

from __future__ import annotations

from tests.engines.conftest import card, chat, smollm2_dir, tiny_gpt2_dir

__all__ = ["card", "chat", "smollm2_dir", "tiny_gpt2_dir"]
