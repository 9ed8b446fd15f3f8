"""`tailrace bench` on the scripted engine, with real processes and sockets."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from tests.waiting import LONG_S

from tailrace.cli import main


@pytest.mark.parametrize("streams", ["x", "0", "1,-1", "1,99999999999999999999"])
def test_loads_that_cannot_be_measured(streams: str) -> None:
    result = CliRunner().invoke(main, ["bench", "scripted", "--streams", streams])
    assert result.exit_code == 2
    assert "numbers from 1 to 10000" in result.stderr


@pytest.mark.deep
def test_bench_reports_all_comparisons() -> None:
    command = [sys.executable, "-m", "tailrace", "bench", "scripted:tokens_per_s=2000", "--json"]
    command += [
        "--streams",
        "1,3",
        "--max-tokens",
        "20",
        "--rounds",
        "1",
        "--server-streams",
        "4",
        "--server-tokens",
        "50",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=True)
    report = json.loads(done.stdout)
    loads = [(pair["ours"]["what"], pair["ours"]["streams"]) for pair in report["pairs"]]
    server = ("tailrace, scripted engine", 4)  # beside a raw writer, and beside itself without a journal
    assert loads == [("over HTTP", 1), ("over HTTP", 3), server, server]
    for pair in report["pairs"]:
        assert pair["ratio"] > 0
        assert pair["ours"]["tokens_per_s"] > 0
        assert pair["theirs"]["ttft_p50_ms"] > 0
    assert "Traceback" not in done.stderr
