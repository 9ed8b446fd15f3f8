"""`tailrace certify` on the scripted engine, with real workers and real kills."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from tests.waiting import LONG_S

from tailrace.cli import main
from tailrace.engines import EngineSpec
from tailrace.engines.certificate import Certificate, read_certificate, subject
from tailrace_outer.measure.certify_command import certify


def _certify(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tailrace", "certify", *arguments],
        env=os.environ | {"TAILRACE_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=True,
    )


@pytest.mark.deep
def test_the_scripted_engine_is_exact_and_its_certificate_is_kept(tmp_path: Path) -> None:
    done = _certify(tmp_path, "scripted", "--runs", "11", "--json", str(tmp_path / "found.json"))
    spec = EngineSpec(engine="scripted")
    kept = read_certificate(tmp_path / "data", subject("scripted 1", spec))
    assert kept is not None
    assert kept.verdict == "exact"
    assert msgspec.json.decode((tmp_path / "found.json").read_bytes(), type=Certificate) == kept
    runs = sum(finding.runs for finding in kept.findings)
    assert done.stdout.splitlines()[-1] == f"exact (none of {runs} replays differs)"
    assert all(any(line.startswith(finding.name) for line in done.stdout.splitlines()) for finding in kept.findings)
    assert "Traceback" not in done.stderr
    assert "killed" not in done.stderr


@pytest.mark.deep
def test_an_inexact_engine_is_reported_with_counts(tmp_path: Path) -> None:
    done = _certify(tmp_path, "scripted:drift=300,tokens_per_s=400", "--runs", "13")
    assert re.fullmatch(r"not exact: [1-9][0-9]* of 13 \(replays differ\)", done.stdout.splitlines()[-1])
    assert "exact 0" in done.stdout


def test_an_unknown_model_is_one_line_and_exit_1() -> None:
    result = CliRunner().invoke(main, ["certify", "smolm2"])
    assert result.exit_code == 1
    assert result.stderr.startswith("tailrace: No model is called `smolm2`.")


def test_a_missing_directory_is_reported_before_the_measurement(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["certify", "scripted", "--json", str(tmp_path / "missing" / "one.json")])
    assert result.exit_code == 2
    assert "its directory does not exist" in result.stderr


def test_help_names_the_engines_settings_and_no_others() -> None:
    output = CliRunner().invoke(certify, ["--help"]).output
    assert "--no-prefix-cache" in output
    assert "--max-step-tokens" in output
    assert "--port" not in output
