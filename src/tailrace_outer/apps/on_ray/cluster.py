"""A Ray cluster: joined or started here, and left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import ray
from ray import serve

from tailrace.settings import Settings
from tailrace.transport.addresses import bind
from tailrace_outer.apps.on_ray.spec import RayError

__all__ = ["deploy", "joins_cluster", "on_cluster", "say", "wait_for_signal"]


_CONNECT_S = 10.0
_JOIN_S = 60.0
_CANNOT_JOIN = "The cluster at RAY_ADDRESS cannot be joined"


def joins_cluster() -> bool:
    """Return whether the cluster runs already."""
    return bool(os.environ.get("RAY_ADDRESS"))


@contextlib.contextmanager
def on_cluster(settings: Settings) -> Iterator[list[str]]:
    """Join the cluster of RAY_ADDRESS, or start one, with Ray Serve on the settings' address. Yields a list for the
    names of applications, which are deleted at the end. A cluster that was started here ends, too.

    Raises: RayError.
    """
    is_own = not joins_cluster()
    if is_own:
        try:  # Ray would share the port with another process that allows it, such as another Ray
            bind(settings).close()
        except OSError as error:
            raise RayError(
                f"cannot listen on {settings.host}:{settings.port} ({error.strerror}). Choose another --port."
            ) from None
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default is 15, as for work in the background
    try:
        if is_own:
            ray.init(address="local")
        else:
            _join(os.environ["RAY_ADDRESS"])
    except Exception as error:  # Ray's errors have no common class
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise RayError(f"{'Ray does not start' if is_own else _CANNOT_JOIN}: {reason}") from None
    if serve.status().proxies:
        say("tailrace: Ray Serve runs in this cluster already: its address stays, whatever --host and --port say.")
    address = {"host": settings.host, "port": settings.port, "keep_alive_timeout_s": settings.keep_alive_s}
    serve.start(http_options=address)
    names: list[str] = []
    try:
        yield names
    finally:
        if is_own:
            serve.shutdown()
        else:
            for name in reversed(names):
                serve.delete(name)


def _join(address: str) -> None:
    """Join a cluster. If nothing answers for a minute, the process ends: Ray itself would try for several minutes.

    Raises: OSError if nothing listens there; errors of Ray.
    """
    if found := re.fullmatch(r"(?:ray://)?\[?([^/\]]+)\]?:([0-9]{1,5})", address):
        socket.create_connection((found[1], int(found[2])), timeout=_CONNECT_S).close()

    def give_up() -> None:
        say(f"tailrace: {_CANNOT_JOIN}: no Ray has answered within {_JOIN_S:.0f} s.")
        os._exit(1)  # no exception can interrupt Ray

    watch = threading.Timer(_JOIN_S, give_up)
    watch.start()
    try:
        ray.init(address="auto")
    finally:
        watch.cancel()


def deploy(application: object, names: list[str], name: str, route_prefix: str) -> None:
    """Raises: RayError."""
    names.append(name)
    try:
        serve.run(application, name=name, route_prefix=route_prefix)
    except Exception as error:  # Ray has printed the details
        raise RayError(f"Ray could not deploy {name}: {type(error).__name__}: {error}") from None


def wait_for_signal() -> None:
    leaving = threading.Event()
    stop: Callable[..., None] = lambda *_: leaving.set()  # noqa: E731
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    leaving.wait()
    say("Stopping.")


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
