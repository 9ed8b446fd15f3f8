"""`tailrace doctor` on existing and missing models."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any  # JSON

import pytest
from click.testing import CliRunner
from tests.api.process import TAILRACE, environment
from tests.waiting import LONG_S

from tailrace.assembly.source import find_source
from tailrace.cli import main
from tailrace.models import NoProgress
from tailrace.streams.disk import DiskJournal
from tailrace_outer.measure.doctor import chat_lines


def ask(*arguments: str) -> tuple[int, dict[str, Any], str]:
    result = CliRunner().invoke(main, ["doctor", "--json", *arguments])
    return result.exit_code, json.loads(result.stdout), result.stderr


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    status, report, stderr = ask("--quick", str(tmp_path / "gone.gguf"))
    assert status == 1
    assert "There is no file" in stderr
    assert report["machine"]["cores"] >= 1
    assert {row["name"] for row in report["engines"]} == {"openvino", "llamacpp", "vllm", "transformers"}
    assert all(row["version"] or "pip install" in row["remedy"] for row in report["engines"])
    assert report["model"] is None


def test_without_a_model_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TAILRACE_HOME", str(tmp_path / "home"))
    status, report, stderr = ask()
    assert (status, report["model"]) == (0, None)
    assert "`tailrace doctor smollm2` downloads one" in stderr
    assert not (tmp_path / "home" / "models").exists()


@pytest.mark.deep
def test_a_directory_of_hugging_face(tiny_gpt2_dir: Path) -> None:
    status, report, _ = ask("--quick", str(tiny_gpt2_dir))
    assert status == 0
    assert report["model"]["engine"] == "transformers"
    assert report["model"]["num_parameters"] > 10_000
    assert report["model"]["weight_bytes"] == 4 * report["model"]["num_parameters"]
    assert report["model"]["bytes_on_disk"] == sum(path.stat().st_size for path in tiny_gpt2_dir.iterdir())
    why_not = {row["name"]: row["why_not"] for row in report["engines"]}
    assert "GGUF files" in why_not["llamacpp"]
    assert not why_not["transformers"]


@pytest.mark.deep
@pytest.mark.timeout(120)
def test_measurements() -> None:
    status, report, _ = ask("scripted")
    assert status == 0, report["failure"]
    assert report["machine"]["read_bytes_per_s"] > 10**8
    assert report["machine"]["flops_per_s"] > 10**8
    assert [row["streams"] for row in report["speeds"]] == [1, 16]
    assert all(row["reached"] > 0 for row in report["speeds"])


def test_a_machine_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the report comes nevertheless."""
    monkeypatch.setattr("sys.executable", shutil.which("false"))
    status, report, stderr = ask("scripted")
    assert status == 1
    assert "The machine cannot be measured: the measuring process ended (exit status 1)." in stderr
    assert report["machine"]["cores"] >= 1
    assert report["speeds"] == []


@pytest.mark.deep
@pytest.mark.timeout(120)
def test_a_model_with_weights_has_a_limit(tiny_gpt2_dir: Path) -> None:
    pytest.importorskip("torch")
    status, report, _ = ask(str(tiny_gpt2_dir), "--engine", "transformers")
    assert status == 0, report["failure"]
    assert all(row["reached"] > 0 and row["limit"] > 0 and 0 <= row["spread"] < 1 for row in report["speeds"])


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_the_limit_of_openvino_is_measured_with_its_own_kernels() -> None:
    """The speed of float32 is no limit: with weights of eight bits OpenVINO computes in eight bits, which is several
    times as fast."""
    pytest.importorskip("openvino")
    status, report, _ = ask("smollm2", "--engine", "openvino")
    assert status == 0, report["failure"]
    assert report["machine"]["engine_ops_per_s"] > 0
    assert {row["by"] for row in report["speeds"]} <= {"memory", "arithmetic in eight bits"}
    assert all(0 < row["reached"] <= row["limit"] for row in report["speeds"])


def test_the_report_as_text() -> None:
    result = CliRunner().invoke(main, ["doctor", "--quick", "scripted"])
    assert result.exit_code == 0
    assert "scripted would run with scripted" in result.stdout
    assert "Machine" in result.stdout


def test_it_says_what_a_model_without_text_does() -> None:
    source = find_source("scripted", NoProgress())
    for task, expected in (
        ("embed", "  embeds     texts of up to 65536 tokens, in 384 dimensions"),
        ("rank", "  ranks      documents, with the query up to 65536 tokens"),
    ):
        card = replace(source.card, task=task, num_dimensions=384)  # type: ignore[arg-type]  # a literal
        assert list(chat_lines(replace(source, card=card))) == [expected]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[-1].content }}", "no: its chat template takes no tools"),
        (
            "{{ messages[-1].content }}{{ tools | tojson if tools }}",
            "no: the format of its calls is not known; choose one with --tool-format",
        ),
        (
            "{{ messages[-1].content }}{{ tools | tojson if tools }}{# <tool_call> of <function= with <parameter= #}",
            "yes, with calls in the format qwen3-coder",
        ),
    ],
    ids=["none", "unknown", "known"],
)
def test_it_says_whether_a_model_takes_tools(template: str, expected: str) -> None:
    source = find_source("scripted", NoProgress())
    source = replace(source, card=replace(source.card, chat_template=template))
    assert f"  tools      {expected}" in list(chat_lines(source))


@pytest.mark.parametrize(
    ("engine", "has_vision", "template", "expected"),
    [
        ("scripted", False, None, "yes"),
        ("transformers", True, None, "yes"),
        ("transformers", False, None, "no"),  # a model without eyes
        ("scripted", False, "{{ messages[-1].content }}", "no"),  # a template without a place for images
    ],
)
def test_it_says_whether_a_model_takes_images(
    engine: str, has_vision: bool, template: str | None, expected: str
) -> None:
    source = find_source("scripted", NoProgress())
    card = replace(source.card, has_vision=has_vision, chat_template=template or source.card.chat_template)
    assert f"  images     {expected}" in list(chat_lines(replace(source, engine=engine, card=card)))


def test_it_says_what_a_model_can_do() -> None:
    assert list(chat_lines(find_source("scripted:thinks=3", NoProgress()))) == [
        "  tools      no: its chat template takes no tools",
        "  images     no",
        "  reasoning  separated at </think>",
        "  sampling   no advice from the model; what a request says comes first",
    ]


def test_only_the_largest_of_many_journals_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_HOME", str(tmp_path))
    for number in range(7):
        DiskJournal(tmp_path / "data" / f"port-{number}").close()
    report = CliRunner().invoke(main, ["doctor", "--quick", "scripted"]).stdout
    assert re.search(r"^Journals of servers: 7, [0-9.]+ MB; the largest 5:$", report, re.M)
    assert report.count("last written") == 5
    assert "You may delete any journal that is not in use." in report


def test_journals_are_listed_and_serve_removes_the_expired_ones(tmp_path: Path) -> None:
    journal = tmp_path / "data" / "port-8001"
    DiskJournal(journal, lifetime_s=900.0).close()
    variables = environment() | {"TAILRACE_HOME": str(tmp_path)}
    command = [TAILRACE, "doctor", "--quick", "--json", "scripted"]
    report = json.loads(subprocess.run(command, env=variables, capture_output=True, check=True, timeout=LONG_S).stdout)
    (listed,) = report["journals"]
    assert (listed["path"], listed["is_held"]) == (str(journal), False)
    assert listed["num_bytes"] > 0
    for path in journal.iterdir():
        os.utime(path, (0, 0))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [TAILRACE, "serve", "scripted", "--port", str(port)], env=variables, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    lines = [next(line for line in process.stderr if "Removed" in line)]
    process.terminate()
    process.communicate(timeout=LONG_S)
    assert "port-8001" in lines[0]
    assert not journal.exists()
