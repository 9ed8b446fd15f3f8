"""`serve.run` and related functions, from scripts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.process import environment
from tests.waiting import LONG_S

from tailrace import serve
from tailrace.serve.exceptions import RayServeException

_SCRIPT = """
import asyncio, json, os, socket, threading, urllib.request
from tailrace import serve
from tailrace.serve.exceptions import RayServeException, RequestCancelledError

found = {}

@serve.deployment
class Adder:
    def __init__(self, n=1):
        self.n = n

    def __call__(self, x):
        return x + self.n

    async def hang(self):
        open("hanging", "w").close()
        try:
            await asyncio.sleep(500)
        finally:
            open("left", "w").close()

    def count(self, k):
        yield from range(k)

@serve.deployment
class Web:
    def __init__(self, adder):
        self.adder = adder

    async def __call__(self, request):
        return {"sum": await self.adder.remote(1), "path": request.url.path, "root": request.scope["root_path"]}

    async def ask(self, other):
        return await other.remote(1)

@serve.deployment
class Broken:
    def __init__(self):
        raise LookupError("no weights")

def get(url):
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)

if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    serve.start(http_options={"port": port}, detached=True)
    handle = serve.run(Adder.bind(10))
    found["result"] = handle.remote(1).result(timeout_s=100)
    found["stream"] = list(handle.options(stream=True).count.remote(3))

    async def on_a_loop_of_its_own():
        streamed = [item async for item in handle.options(stream=True).count.remote(2)]
        return [await handle.remote(2), streamed]

    found["loop"] = asyncio.run(on_a_loop_of_its_own())
    response = handle.hang.remote()
    while not os.path.exists("hanging"):
        pass
    response.cancel()
    try:
        response.result(timeout_s=100)
    except RequestCancelledError:
        found["cancelled"] = True
    while not os.path.exists("left"):
        pass

    second = serve.run(Web.bind(Adder.bind(5)), name="second", route_prefix="/web")
    found["web"] = get(base + "/web/x")
    found["routes"] = get(base + "/-/routes")
    found["first"] = serve.get_app_handle("default").remote(1).result(timeout_s=100)
    found["inner"] = serve.get_deployment_handle("Adder", "second").remote(1).result(timeout_s=100)
    found["other app"] = second.ask.remote(handle).result(timeout_s=100)

    for what, app in (("lock", Adder.bind(threading.Lock())), ("broken", Broken.bind())):
        try:
            serve.run(app, name="third", route_prefix="/third")
        except RayServeException as error:
            found[what] = str(error)
        found[what + " left"] = get(base + "/web/x")["sum"]

    for wrong in (lambda: serve.run(5), lambda: serve.start(nothing=1), lambda: serve.get_app_handle("third")):
        try:
            wrong()
        except (TypeError, RayServeException) as error:
            found.setdefault("wrong", []).append(str(error))

    serve.shutdown()
    serve.shutdown()
    try:
        handle.remote(1)
    except RayServeException as error:
        found["after"] = str(error)
    print(json.dumps(found))
"""


@contextlib.contextmanager
def _script(directory: Path, source: str) -> Iterator[subprocess.Popen[str]]:
    path = directory / "script.py"
    path.write_text(textwrap.dedent(source))
    with subprocess.Popen(
        [sys.executable, str(path)], cwd=directory, env=environment(), text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as script:  # fmt: skip
        try:
            yield script
        finally:
            script.kill()


@pytest.mark.deep
def test_a_script_runs_and_calls_apps(tmp_path: Path) -> None:
    with _script(tmp_path, _SCRIPT) as script:
        output, errors = script.communicate(timeout=LONG_S)
    assert output, errors
    found: dict[str, Any] = json.loads(output)
    assert found.pop("lock").startswith("The app cannot be pickled for its own process: ")
    broken = found.pop("broken")
    assert broken.startswith("constructing Broken raised LookupError: no weights\nTraceback (most recent call last):\n")
    assert re.search(r'File ".*", line \d+, in __init__\n', broken)  # cloudpickle 3.1.3 does not keep the file's name
    assert "/tailrace/" not in broken
    assert found == {
        "result": 11,
        "stream": [0, 1, 2],
        "loop": [12, [0, 1]],
        "cancelled": True,
        "web": {"sum": 6, "path": "/web/x", "root": "/web"},
        "routes": {"/": "default", "/web": "second"},
        "first": 11,
        "inner": 6,
        "other app": 11,
        "lock left": 6,
        "broken left": 6,
        "wrong": [
            "serve.run takes the result of .bind(…).",
            "serve.start has no argument nothing.",
            "No app third was started in this process.",
        ],
        "after": "Handles only work in apps that `tailrace run` or `serve.run` has started.",
    }
    assert "Traceback" not in errors, errors


def test_ctrl_c_ends_a_script_that_blocks(tmp_path: Path) -> None:
    source = """
        from tailrace import serve

        @serve.deployment
        class Bot:
            def __del__(self):
                open("torn-down", "a").write("once")

        serve.start(http_options={"port": 0})
        handle = serve.run(Bot.bind(), blocking=True)
        print(handle)
        """
    with _script(tmp_path, source) as script:
        assert script.stderr is not None
        assert "default runs at http://127.0.0.1:" in script.stderr.readline()
        os.killpg(script.pid, signal.SIGINT)  # all of the terminal's foreground get it
        output, errors = script.communicate(timeout=LONG_S)
    assert (script.returncode, output, errors) == (0, "DeploymentHandle('Bot')\n", "")
    assert (tmp_path / "torn-down").read_text() == "once"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"port": 99999}, "port should be from 0 to 65535."),
        ({"host": "no such host"}, "Cannot listen on no such host:8000: "),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], reason: str) -> None:
    try:
        serve.start(http_options=options)
        with pytest.raises(RayServeException) as refused:
            serve.run(serve.deployment(_nothing))
    finally:
        serve.shutdown()
    assert str(refused.value).startswith(reason)


def _nothing(request: object) -> None: ...


def test_an_app_that_cannot_be_pickled_starts_no_process() -> None:
    class Bot:
        def __init__(self, lock: object) -> None: ...

    before = threading.active_count()
    with pytest.raises(RayServeException, match="cannot be pickled for its own process"):
        serve.run(serve.deployment(Bot).bind(threading.Lock()))
    assert threading.active_count() == before
    serve.shutdown()
