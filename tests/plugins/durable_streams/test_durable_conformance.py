"""The Durable Streams protocol's own conformance suite for servers, and its client, against a real server."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.api.process import Server
from tests.clients.installed import node, scripts
from tests.plugins.durable_streams.durable_servers import KINDS, durable_server, in_turn

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]  # the first one has them installed

_SOURCE = Path(__file__).with_name("durable")
_RUN_S = 150
# The suite asks what a page of this origin may do. Without the flag it may nothing, and one case fails.
_FLAGS = ("--durable-poll-s", "0.5", "--allowed-origins", "https://example.com")


@pytest.mark.parametrize("kind", KINDS)
def test_the_suite_passes(kind: str, tmp_path: Path) -> None:
    """All cases pass, except the six about optional subscriptions, in which a server calls other servers. They are
    skipped. Two servers get the connections in turn."""
    with contextlib.closing(durable_server(kind, flags=_FLAGS)) as server, in_turn(server.wait_ready()) as url:
        _run_suite(url, tmp_path / "report.json")


def _run_suite(url: str, report: Path) -> None:
    folder = scripts(_SOURCE)
    vitest = folder.parent / "node_modules" / "vitest" / "vitest.mjs"
    done = subprocess.run(
        [str(node()), str(vitest), "run", "--reporter=json", f"--outputFile={report}"],
        cwd=folder, env=os.environ | {"DURABLE_URL": f"{url}/v1/durable"},
        capture_output=True, text=True, timeout=_RUN_S, check=False,
    )  # fmt: skip
    assert report.exists(), done.stderr
    counted = json.loads(report.read_text())
    cases = [case for file in counted["testResults"] for case in file["assertionResults"]]
    assert [case["fullName"] for case in cases if case["status"] == "failed"] == []
    skipped = [case["fullName"] for case in cases if case["status"] != "passed"]
    assert all(name.startswith("Reserved subscription APIs") for name in skipped)
    assert (counted["numTotalTests"], counted["numPassedTests"]) == (338, 332)


def test_the_client_reads_both_kinds_of_streams(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=100")
    stream_id = server.create({"prompt": "Tell me of rivers.", "max_tokens": 60})
    job = {"url": f"{server.url}/v1/durable/made", "tokens": f"{server.url}/v1/durable/streams/{stream_id}"}
    done = subprocess.run(
        [str(node()), str(scripts(_SOURCE) / "client.mjs"), json.dumps(job)],
        capture_output=True, text=True, timeout=_RUN_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    outcome = json.loads(done.stdout)
    assert all(messages == [{"n": n} for n in range(100)] for messages in outcome["made"].values())
    text = server.state(stream_id)["text"]
    for *deltas, end in outcome["tokens"].values():
        assert "".join(delta["text"] for delta in deltas) == text
        assert end["status"] == "done"
