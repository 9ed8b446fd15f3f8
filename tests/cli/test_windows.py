"""The server says at its start if a window is too small for coding agents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.api.process import Server

from tailrace.cli.windows import AGENT_TOKENS, small_window
from tailrace.settings import Settings

LARGE = 4 * AGENT_TOKENS


@pytest.mark.parametrize(
    ("limit_tokens", "model_tokens", "settings", "named"),
    [
        (8192, 8192, Settings(), "this model has 8192, which --context-tokens cannot raise"),
        (8192, LARGE, Settings(context_tokens=8192), "raise --context-tokens"),
        (8192, LARGE, Settings(kv_tokens=8192), "raise --kv-tokens"),
        (8192, LARGE, Settings(kv_tokens=8192, context_tokens=AGENT_TOKENS), "raise --kv-tokens"),
    ],
)
def test_what_to_do(limit_tokens: int, model_tokens: int, settings: Settings, named: str) -> None:
    line = small_window(limit_tokens, model_tokens, settings)
    assert named in line
    assert str(limit_tokens) in line


def test_a_large_window_needs_no_word() -> None:
    assert small_window(AGENT_TOKENS, AGENT_TOKENS, Settings()) == ""


def test_the_start_names_the_flag(serve: Callable[..., Server]) -> None:
    server = serve("scripted", "--context-tokens", "4096")
    server.wait_line(r"^  Coding agents: .*here they get 4096: raise --context-tokens")
    assert "Coding agents" not in serve("scripted").log
