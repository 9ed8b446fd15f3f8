"""What Codex CLI does beyond the loop: it gives up on a silent stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.agents.page import TASK
from tests.agents.programs import run_agent
from tests.agents.scripts import scripted

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]


def test_a_silent_stream_is_no_broken_stream(work: Path) -> None:
    """Its limit is 1.5 s here, and a token takes 3 s. It would try again, and then give up."""
    impatient = 'wire_api = "responses"\nstream_idle_timeout_ms = 1500\nstream_max_retries = 0'
    rules = [{"when": TASK, "say": "Yes"}]
    with scripted(work.parent, rules, "--heartbeat-s", "0.3", options="tokens_per_s=0.33") as server:
        said = run_agent("Codex CLI", server.url, work, changes={'wire_api = "responses"': impatient})
    assert (said.status, said.out) == (0, "Yes\n"), said
