"""The front's end of one process of user code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable

import msgspec

from tailrace.apps.interpreters import command_of
from tailrace.serve.boot import AppTarget, Assignment, Described, Failed
from tailrace.serve.link import Channel, ChannelClosed, Link

__all__ = ["Answered", "BootError", "ReplicaProcess"]

_STOP_S = 5.0
_decode = msgspec.msgpack.decode
_encode = msgspec.msgpack.encode

Answered = Callable[[Channel, str, bytes], None]


class BootError(Exception):
    """An app that does not start: the message is one line, `traceback` the user's code's."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.message = failed.message
        self.traceback = failed.traceback


class ReplicaProcess:
    """One process. `opened` gets the channels that its code opens, which are calls of other deployments."""

    def __init__(self, process: asyncio.subprocess.Process, opened: Answered) -> None:
        self.process = process
        self.link = Link(opened, self._lost, is_front=True)
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_ongoing = 0
        self.is_unhealthy = False  # its last health check failed

    @classmethod
    async def start(cls, opened: Answered, *, log_level: str = "warning", python: str = "") -> ReplicaProcess:
        """`python` is the interpreter that it runs under, "" for the one that runs here.

        Raises: BootError if there can be no process.
        """
        try:
            ours, theirs = socket.socketpair()
            with contextlib.ExitStack() as undo, theirs:
                undo.callback(ours.close)
                process = await asyncio.create_subprocess_exec(
                    *command_of(python, "tailrace.apps.replica"), str(theirs.fileno()), str(os.getpid()),
                    log_level,
                    stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C on the terminal is for the front alone
                )  # fmt: skip
                undo.pop_all()
        except OSError as error:
            raise BootError(Failed(f"No process can be started: {error}.")) from None
        replica = cls(process, opened)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: replica.link, sock=ours)
        except BaseException:
            ours.close()
            await replica.kill()
            raise
        return replica

    async def describe(self, target: AppTarget, *, within_s: float) -> Described:
        """Have it import the app. Raises: BootError."""
        answer = await self._boot("import", _encode(target), within_s, f"importing {target.target}")
        described, failure = _decode(answer, type=tuple[Described | None, Failed | None])
        if described is None:
            raise BootError(failure or Failed("The app could not be imported."))
        return described

    async def become(self, assignment: Assignment, *, within_s: float) -> None:
        """Have it construct a deployment. Raises: BootError."""
        answer = await self._boot("become", _encode(assignment), within_s, f"constructing {assignment.deployment}")
        failure = _decode(answer, type=Failed | None)
        if failure is not None:
            raise BootError(failure)

    async def check(self, *, within_s: float) -> Failed | None:
        """Whether its event loop turns and its `check_health` has nothing to say; why not, otherwise."""
        try:
            await self.ask("check", within_s=within_s)
        except TimeoutError:
            return Failed(f"check was not answered within {within_s:g} s.")
        except ChannelClosed as end:
            return _decode(end.failure, type=Failed) if end.failure is not None else None
        return None

    async def ask(self, kind: str, head: bytes = b"", *, within_s: float) -> bytes:
        """Its answer on a channel of this kind. Raises: TimeoutError; ChannelClosed where it gives none."""
        channel = self.link.open(kind, head)
        try:
            async with asyncio.timeout(within_s):
                return await channel.receive()
        finally:
            channel.close()

    async def stop(self, *, within_s: float) -> None:
        """The user's teardown, for so long, and then the end."""
        if not self.gone.done():
            with contextlib.suppress(ChannelClosed, TimeoutError):
                await self.ask("stop", within_s=within_s)
        await self.kill()

    async def kill(self) -> None:
        """At once: whatever it has to say before its end, `stop` has waited for."""
        self.link.abort()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def why(self) -> str:
        """How it went, once it is gone."""
        try:
            status = await asyncio.wait_for(self.process.wait(), _STOP_S)
        except TimeoutError:
            return "it closed its socket"
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}"

    async def _boot(self, kind: str, head: bytes, within_s: float, what: str) -> bytes:
        """Raises: BootError."""
        try:
            return await self.ask(kind, head, within_s=within_s)
        except TimeoutError:
            raise BootError(Failed(f"{what} took longer than {within_s:g} s.")) from None
        except ChannelClosed:
            raise BootError(Failed(f"{what} ended its process: {await self.why()}.")) from None

    def _lost(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)
