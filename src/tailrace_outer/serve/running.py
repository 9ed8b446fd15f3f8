"""Running apps from a script, a notebook or a test: `serve.run(app)`.

The apps run as under `tailrace run`, in separate processes with a separate front. This process connects to that front
to call them.
"""

from __future__ import annotations

import asyncio
import atexit
import io
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import msgspec
from starlette.datastructures import State

from tailrace.system.child import stop
from tailrace_outer.serve.boot import AppTarget, Failed
from tailrace_outer.serve.deployment import Application, Deployment, nodes
from tailrace_outer.serve.exceptions import ServeError
from tailrace_outer.serve.handles import DeploymentHandle, connect, disconnect, is_connected
from tailrace_outer.serve.link import Channel, ChannelClosed, Link

__all__ = ["Ordered", "Started", "get_app_handle", "get_deployment_handle", "run", "shutdown", "start"]

_START_TIMEOUT_S = 900.0
_STOP_TIMEOUT_S = 60.0


class Ordered(msgspec.Struct, frozen=True):
    """The order to the front: apps with their route prefixes, and settings."""

    apps: list[tuple[AppTarget, str]]
    settings: dict[str, Any]  # Any: of each setting's type


class Started(msgspec.Struct, frozen=True):
    """The front's reply: its address, or the failure."""

    url: str = ""
    failure: Failed | None = None


class _Front:
    """The front's process, and the link to it. The link runs on an event loop in its own thread."""

    def __init__(self) -> None:
        self.apps: dict[str, tuple[Application, str]] = {}
        self.settings: dict[str, Any] = {}  # Any: of each setting's type
        self._process: subprocess.Popen[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread
        self._link: Link | None = None
        self.directory = tempfile.TemporaryDirectory(prefix="tailrace-run-")

    def start(self) -> str:
        """Start all apps; returns the front's address. Raises: ServeError with the user's traceback."""
        targets = [(self._target(name, app), prefix) for name, (app, prefix) in self.apps.items()]
        self.stop()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tailrace_outer.apps.driven", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C on the terminal goes to this process only, which then stops the front
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="tailrace-run")
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(self._order(ours, targets), self._loop).result(_START_TIMEOUT_S)
        if started.failure is not None:
            self.stop()
            raise ServeError(f"{started.failure.message}\n{started.failure.traceback}".rstrip())
        return started.url

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            stop(process, within_s=_STOP_TIMEOUT_S)
        disconnect()
        loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(_end(self._link), loop).result(_STOP_TIMEOUT_S)
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(_STOP_TIMEOUT_S)
            loop.close()

    def wait(self) -> None:
        if self._process is not None:
            self._process.wait()

    async def _order(self, sock: socket.socket, targets: list[tuple[AppTarget, str]]) -> Started:
        link = self._link = Link(_refuse, lambda: None, is_front=False)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: link, sock=sock)
        connect(link, loop)
        channel = link.open("run", msgspec.msgpack.encode(Ordered(targets, self.settings)))
        try:
            return msgspec.msgpack.decode(await channel.receive(), type=Started)
        except ChannelClosed:
            return Started(failure=Failed("The front ended before the app ran. Its output is above."))

    def _target(self, name: str, app: Application) -> AppTarget:
        """Pickle the app into a file, from which the replicas load it."""
        path = Path(self.directory.name) / f"{len(list(Path(self.directory.name).iterdir()))}.pickle"
        path.write_bytes(_pickled(app))
        return AppTarget(str(path), name, os.getcwd())


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # the library is untyped
    def reducer_override(self, obj: Any) -> Any:  # Any: whatever an app holds
        if isinstance(obj, State):  # the usual protocol recurses: State's __getattr__ reads its own attribute
            return State, ({name: obj[name] for name in obj},)
        return super().reducer_override(obj)


def _pickled(app: Application) -> bytes:
    """Pickle an app. Raises: ServeError if it cannot be pickled."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(app)
    except Exception as error:
        raise ServeError(
            f"The app cannot be pickled for its own process: {error}. Create such objects in the deployment's "
            "constructor, or put the app into a module and use `tailrace run module:app`."
        ) from None
    return buffer.getvalue()


_front: _Front | None = None


def start(*, http_options: Mapping[str, Any] | None = None, **others: object) -> None:  # Any: of each setting's type
    """Set the front's settings before `run`: `http_options={"host": …, "port": …}`, and any other setting of
    `tailrace run`. Raises: TypeError for other arguments."""
    for name in others:
        if name not in ("detached", "proxy_location", "grpc_options", "logging_config"):
            raise TypeError(f"serve.start has no argument {name}.")
    _get_front().settings = dict(http_options or {})


def run(
    target: Application | Deployment,
    *,
    blocking: bool = False,
    name: str = "default",
    route_prefix: str = "/",
) -> DeploymentHandle:
    """Run an app in separate processes. Returns a handle when the app is ready, or, with `blocking`, after it has
    ended. An app of the same name is replaced. The app ends with this script; use `tailrace run` for a longer life.

    Raises: ServeError with the user's traceback if the app does not start, TypeError if `target` is not an app.
    """
    app = target.bind() if isinstance(target, Deployment) else target
    if not isinstance(app, Application):
        raise TypeError("serve.run takes the result of .bind(…).")
    if _front is None and is_connected():
        raise ServeError(
            'serve.run cannot be called inside a process of an app. Put the call under `if __name__ == "__main__":`.'
        )
    front = _get_front()
    before = front.apps.get(name)
    front.apps[name] = (app, route_prefix.rstrip("/"))
    try:
        url = front.start()
    except BaseException as error:
        front.apps.pop(name)
        if before is not None:
            front.apps[name] = before
        if not isinstance(error, ServeError):
            front.stop()
        elif front.apps and not front.is_running:  # the other apps were stopped for this start
            front.start()
        raise
    handle = get_app_handle(name)
    try:
        sys.stderr.write(f"tailrace: {name} runs at {url}{front.apps[name][1] or '/'}\n")
        if blocking:
            front.wait()
    except KeyboardInterrupt:
        if not blocking:
            raise
        shutdown()
    return handle


def shutdown() -> None:
    """Stop all apps. Does nothing if none runs."""
    global _front  # one per process
    front, _front = _front, None
    if front is not None:
        front.stop()
        front.directory.cleanup()


def get_app_handle(name: str = "default") -> DeploymentHandle:
    """Return a handle to the ingress of an app that `run` has started. Raises: ServeError."""
    app = _app(name)
    return DeploymentHandle(next(reversed(nodes(app))), name)


def get_deployment_handle(deployment_name: str, app_name: str = "default") -> DeploymentHandle:
    """Return a handle to a deployment of an app that `run` has started. Raises: ServeError."""
    if deployment_name not in nodes(_app(app_name)):
        raise ServeError(f"The app {app_name} has no deployment {deployment_name}.")
    return DeploymentHandle(deployment_name, app_name)


def _app(name: str) -> Application:
    if _front is None or name not in _front.apps:
        raise ServeError(f"No app {name} was started in this process.")
    return _front.apps[name][0]


def _get_front() -> _Front:
    global _front  # one per process
    if _front is None:
        _front = _Front()
        atexit.register(shutdown)
    return _front


async def _end(link: Link | None) -> None:
    """Close the link, and let the tasks that wait for replies fail."""
    if link is not None:
        link.abort()
    await asyncio.sleep(0)
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    if others:
        await asyncio.wait(others, timeout=_STOP_TIMEOUT_S)


def _refuse(channel: Channel, kind: str, head: bytes) -> None:
    channel.close()  # this process has no deployments to call
