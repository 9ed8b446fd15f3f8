"""A Ray cluster: joined or started here, and left."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import ray
from ray import serve

from tailrace.apps.on_ray.spec import RayError
from tailrace.http.addresses import bind
from tailrace.settings import Settings

__all__ = ["deploy", "joins_cluster", "on_cluster", "say", "wait_for_signal"]


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
        ray.init(address="local" if is_own else "auto")
    except Exception as error:  # Ray's errors have no common class
        raise RayError(f"Ray does not start, or RAY_ADDRESS cannot be joined: {error}") from None
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
            for name in names:
                serve.delete(name)


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
