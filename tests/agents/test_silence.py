"""Agents give up on a silent stream, and count events, not bytes. So heartbeats are events."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.agents.page import TASK
from tests.agents.programs import run_agent
from tests.agents.scripts import Rules, scripted

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]

# Claude Code's limit cannot be lower than five minutes.
_LAST = 'wire_api = "responses"'
_IMPATIENT = {
    "Codex CLI": {_LAST: f"{_LAST}\nstream_idle_timeout_ms = 1500\nstream_max_retries = 0"},
    "Qwen Code": {"export ": "export QWEN_STREAM_IDLE_TIMEOUT_MS=1500 "},
}


@pytest.mark.parametrize("agent", _IMPATIENT)
def test_a_silent_stream_is_no_broken_stream(agent: str, work: Path) -> None:
    """The limit is 1.5 s here, and a token takes 3 s. The agent would try again, and then give up."""
    rules: Rules = [{"when": TASK, "say": "Yes"}, {"say": "-"}]  # the second is for what agents ask beside
    with scripted(work.parent, rules, "--heartbeat-s", "0.3", options="tokens_per_s=0.33") as server:
        said = run_agent(agent, server.url, work, changes=_IMPATIENT[agent])
    assert (said.status, said.out.strip()) == (0, "Yes"), said
    assert "etry" not in said.err
