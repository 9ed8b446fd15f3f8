"""The front beside a script that has called `serve.run`: `python -m tailrace_outer.apps.driven FD PARENT_PID`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from tailrace.settings import checked_settings, settings_of
from tailrace.system import eventloop
from tailrace.system.child import begin_child
from tailrace.transport.addresses import bind
from tailrace_outer.apps.front import Front
from tailrace_outer.apps.host import AppSpec, host
from tailrace_outer.apps.process import BootError
from tailrace_outer.serve.boot import Failed
from tailrace_outer.serve.link import Channel, Link
from tailrace_outer.serve.running import Ordered, Started

__all__ = ["main"]


class _Driver:
    """The connection to the script. Its first message says what to run; later messages are calls."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.front: Front | None = None
        self.ordered: asyncio.Future[tuple[Channel, Ordered]] = loop.create_future()
        self.link = Link(self._on_channel, self._lost, is_front=True)

    def _on_channel(self, channel: Channel, kind: str, head: bytes) -> None:
        if kind == "run":
            self.ordered.set_result((channel, msgspec.msgpack.decode(head, type=Ordered)))
        elif self.front is not None:
            self.front.on_channel(channel, kind, head)
        else:
            channel.close()

    def _lost(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


async def _run(fd: int) -> None:
    driver = _Driver()
    await asyncio.get_running_loop().create_unix_connection(lambda: driver.link, sock=socket.socket(fileno=fd))
    channel, ordered = await driver.ordered

    def reply(started: Started) -> None:
        channel.post(msgspec.msgpack.encode(started))

    def on_ready(front: Front, notes: tuple[str, ...]) -> None:
        driver.front = front
        for note in notes:
            sys.stderr.write(f"tailrace: {note}\n")
        address, port = sock.getsockname()[:2]
        reply(Started(f"http://{address}:{port}"))

    try:
        settings = settings_of(_checked_settings(ordered.settings))
        sock = bind(settings)
    except (ValueError, OSError) as error:
        where = f"Cannot listen on {settings.host}:{settings.port}: " if isinstance(error, OSError) else ""
        reply(Started(failure=Failed(f"{where}{getattr(error, 'strerror', None) or error}")))
        await asyncio.sleep(0)
        driver.link.close()
        return
    apps = [AppSpec(target, prefix) for target, prefix in ordered.apps]
    with sock, tempfile.TemporaryDirectory(prefix="tailrace-") as directory:
        try:
            await host(lambda: apps, settings, sock, data_path=Path(directory), on_ready=on_ready)
        except* BootError as errors:
            failure = eventloop.first_error(errors)
            assert isinstance(failure, BootError)
            reply(Started(failure=Failed(failure.message, failure.traceback)))
    await asyncio.sleep(0)
    driver.link.close()


def _checked_settings(settings: dict[str, Any]) -> dict[str, Any]:  # Any: of each setting's type
    for name, value in settings.items():
        try:
            checked_settings({name: value})
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    return settings


def main(argv: list[str]) -> None:
    """Run the front. `argv` is the socket's file descriptor and the script's process id."""
    begin_child(int(argv[1]))
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="tailrace: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    eventloop.run(_run(int(argv[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
