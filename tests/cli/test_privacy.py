"""No connections without a request of the user: real commands under strace, whose system calls are read afterwards.

Asserted of every process of a command: it connects to nothing but this machine, looks up no name, and writes no file
outside the folders that are its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.api.process import TAILRACE, Server, environment
from tests.apps.process import AppServer, write
from tests.missing import skip_missing
from tests.waiting import LONG_S

import tailrace
from tailrace.errors import ModelError
from tailrace.models import NoProgress
from tailrace.models.catalogue import CATALOGUE, hub_models
from tailrace.models.directories import cache_path
from tailrace.models.fetch import fetch

pytestmark = pytest.mark.timeout(180)

_WRITES = "creat,mkdir,mkdirat,mknod,mknodat,rename,renameat,renameat2,link,linkat,symlink,symlinkat,truncate"
_CALLS = f"connect,sendto,sendmsg,sendmmsg,open,openat,openat2,{_WRITES}"
_LOOK_UPS = ("/etc/resolv.conf", "/etc/hosts", "/var/run/nscd/socket", "/run/systemd/resolve")
_DEVICES = ("/dev/null", "/dev/tty", "/dev/shm/", "/proc/")


@dataclass(frozen=True, slots=True)
class _Traced:
    """A folder for traces, and an empty home directory for the traced commands."""

    traces: Path
    home: Path
    own: list[str] = field(default_factory=list)  # folders where a command may write

    @property
    def command(self) -> tuple[str, ...]:
        # -D: the command is our child, and strace its grandchild. -ff: a file for each process, so no line is cut.
        options = ["-D", "-ff", "--seccomp-bpf", "-y", "-s", "4096", "-o", str(self.traces / "trace")]
        return ("strace", *options, "-e", f"trace={_CALLS}", sys.executable, TAILRACE)

    def check(self) -> list[str]:
        """Read all traces; returns the written paths. Raises: AssertionError with forbidden system calls."""
        calls = [
            line
            for path in self.traces.iterdir()
            for line in path.read_text(errors="replace").splitlines()
            if re.match(r"\w+\(", line)
        ]
        assert any("openvino" in call for call in calls), "the engine was not traced"
        assert [call for call in calls if _leaves(call)] == []
        assert [call for call in calls if any(f'"{path}' in call for path in _LOOK_UPS)] == []
        written = [path for call in calls for path in _written(call)]
        allowed = (*self.own, *_DEVICES)
        assert sorted({path for path in written if not path.startswith(allowed)}) == []
        assert [*self.home.rglob("*")] == []
        return written


def _leaves(call: str) -> bool:
    """Return whether a system call sends to an address outside of this machine."""
    return any(
        not address.startswith("127.") and address not in ("::1", "0.0.0.0", "::")
        for address in re.findall(r'inet_(?:addr\(|pton\(AF_INET6, )"([^"]+)"', call)
    )


def _written(call: str) -> Iterator[str]:
    """Return the absolute paths that a successful system call has created or opened for writing."""
    if re.search(r"= -1 E\w+", call) or call.startswith(("connect", "send")):
        return
    if call.startswith("open"):
        opened = re.search(r"= \d+<(.*?)>", call)
        if opened and re.search(r"O_(WRONLY|RDWR|CREAT|TRUNC|APPEND)", call):
            yield opened[1]
        return
    for folder, path in re.findall(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"([^"]*)"', call):
        yield os.path.join(folder, path)


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Traced:
    if not shutil.which("strace"):
        skip_missing("strace")
    try:
        subprocess.run(
            ["strace", "-f", "--seccomp-bpf", "-e", "trace=open", "-o", str(tmp_path / "probe"), "true"], check=True
        )
    except subprocess.CalledProcessError:
        skip_missing("the right to trace processes")
    try:
        fetch(CATALOGUE["smollm2"], NoProgress())
    except ModelError as error:
        skip_missing("smollm2", error.message)
    folders = {name: tmp_path / name for name in ("traces", "home", "temporary")}
    for folder in folders.values():
        folder.mkdir()
    monkeypatch.setenv("TAILRACE_HOME", str(cache_path()))
    monkeypatch.setenv("HOME", str(folders["home"]))
    monkeypatch.setenv("TMPDIR", str(folders["temporary"]))
    for name in [name for name in os.environ if name.startswith(("XDG_", "HF_")) or name == "DO_NOT_TRACK"]:
        monkeypatch.delenv(name)
    # Python keeps compiled modules beside their sources: those are the installation.
    installed = (sys.prefix, str(Path(tailrace.__file__).parent))
    own = [str(cache_path()), str(folders["temporary"]), *installed]
    return _Traced(folders["traces"], folders["home"], own)


@pytest.mark.deep
def test_serving_the_default_model(traced: _Traced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "command", traced.command)
    with contextlib.closing(Server("smollm2", directory=tmp_path / "temporary")) as server:
        server.wait_ready(timeout_s=LONG_S)
        larger = server.wait_line(r"Larger models: +tailrace serve (\S+) ")  # this machine has room for one
        assert larger[1] in hub_models()
        asked = {"model": "smollm2", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 8}
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        for more in ({}, {"response_format": wanted}):
            answer = server.http.post("/v1/chat/completions", json=asked | more, timeout=LONG_S)
            assert answer.status_code == 200, answer.text
    assert any(path.startswith(str(tmp_path / "temporary")) for path in traced.check()), "the journal was not traced"


@pytest.mark.deep
def test_doctor(traced: _Traced, tmp_path: Path) -> None:
    done = subprocess.run(
        [*traced.command, "doctor", "smollm2"],
        cwd=tmp_path / "temporary", env=environment(), capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    traced.check()


@pytest.mark.deep
def test_an_app_with_an_engine(traced: _Traced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        import tailrace
        from fastapi import FastAPI
        from tailrace import serve

        web = FastAPI()


        @serve.deployment
        @serve.ingress(web)
        class Storyteller:
            def __init__(self):
                self.model = tailrace.engine("smollm2")

            @web.post("/")
            async def tell(self, about: str):
                return serve.stream(await self.model.chat(f"Tell me about {about}.", max_tokens=8))


        app = Storyteller.bind()
    """
    write(tmp_path / "temporary", "story.py", source)
    monkeypatch.setattr(AppServer, "command", traced.command)
    with contextlib.closing(AppServer("story:app", directory=tmp_path / "temporary")) as server:
        server.wait_ready(timeout_s=LONG_S)
        assert server.http.post("/?about=rivers", timeout=LONG_S).status_code == 200
    traced.check()
