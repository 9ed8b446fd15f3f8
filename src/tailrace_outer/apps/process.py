"""The front's handle on one process of user code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess

import msgspec

from tailrace.system.child import how_it_ended
from tailrace_outer.apps.interpreters import command_of
from tailrace_outer.serve.boot import AppTarget, Assignment, Described, Failed
from tailrace_outer.serve.link import ChannelClosed, Link, OnChannel

__all__ = ["BootError", "ReplicaProcess"]

_EXIT_TIMEOUT_S = 5.0
_decode = msgspec.msgpack.decode
_encode = msgspec.msgpack.encode


class BootError(Exception):
    """An app does not start. `message` is one line; `traceback` is that of the user's code."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.message = failed.message
        self.traceback = failed.traceback


class ReplicaProcess:
    """One process. `on_channel` is called for each channel that its code opens to call another deployment."""

    def __init__(self, process: asyncio.subprocess.Process, on_channel: OnChannel) -> None:
        self.process = process
        self.link = Link(on_channel, self._lost, is_front=True)
        self.exited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_ongoing = 0
        self.is_unhealthy = False  # its last health check failed

    @classmethod
    async def start(cls, on_channel: OnChannel, *, log_level: str = "warning", python: str = "") -> ReplicaProcess:
        """Start a process under the interpreter `python`; "" is the interpreter of this process.

        Raises: BootError if the process cannot be started.
        """
        try:
            ours, theirs = socket.socketpair()
            with contextlib.ExitStack() as undo, theirs:
                undo.callback(ours.close)
                process = await asyncio.create_subprocess_exec(
                    *command_of(python, "tailrace_outer.apps.replica"), str(theirs.fileno()), str(os.getpid()),
                    log_level,
                    stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C on the terminal is for the front alone
                )  # fmt: skip
                undo.pop_all()
        except OSError as error:
            raise BootError(Failed(f"No process can be started: {error}.")) from None
        replica = cls(process, on_channel)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: replica.link, sock=ours)
        except BaseException:
            ours.close()
            await replica.kill()
            raise
        return replica

    async def describe(self, target: AppTarget, *, within_s: float) -> Described:
        """Make the process import the app. Raises: BootError."""
        reply = await self._boot("import", _encode(target), within_s, f"importing {target.target}")
        described, failure = _decode(reply, type=tuple[Described | None, Failed | None])
        if described is None:
            raise BootError(failure or Failed("The app could not be imported."))
        return described

    async def become(self, assignment: Assignment, *, within_s: float) -> None:
        """Make the process construct a deployment. Raises: BootError."""
        reply = await self._boot("become", _encode(assignment), within_s, f"constructing {assignment.deployment}")
        failure = _decode(reply, type=Failed | None)
        if failure is not None:
            raise BootError(failure)

    async def check(self, *, within_s: float) -> Failed | None:
        """Check that the event loop responds and that `check_health` raises nothing. Returns the failure, or None."""
        try:
            await self.ask("check", within_s=within_s)
        except TimeoutError:
            return Failed(f"check was not answered within {within_s:g} s.")
        except ChannelClosed as end:
            return _decode(end.failure, type=Failed) if end.failure is not None else None
        return None

    async def ask(self, kind: str, head: bytes = b"", *, within_s: float) -> bytes:
        """Send a request on a new channel of this kind; returns the reply. Raises: TimeoutError, ChannelClosed."""
        channel = self.link.open(kind, head)
        try:
            async with asyncio.timeout(within_s):
                return await channel.receive()
        finally:
            channel.close()

    async def stop(self, *, within_s: float) -> None:
        """Run the user's teardown for at most `within_s`, then kill the process."""
        if not self.exited.done():
            with contextlib.suppress(ChannelClosed, TimeoutError):
                await self.ask("stop", within_s=within_s)
        await self.kill()

    async def kill(self) -> None:
        """End the process at once, without a teardown."""
        self.link.abort()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def exit_reason(self) -> str:
        """Say how the process ended, after its connection is lost."""
        try:
            status = await asyncio.wait_for(self.process.wait(), _EXIT_TIMEOUT_S)
        except TimeoutError:
            return "it closed its socket"
        return how_it_ended(status)

    async def _boot(self, kind: str, head: bytes, within_s: float, what: str) -> bytes:
        """Raises: BootError."""
        try:
            return await self.ask(kind, head, within_s=within_s)
        except TimeoutError:
            raise BootError(Failed(f"{what} took longer than {within_s:g} s.")) from None
        except ChannelClosed:
            raise BootError(Failed(f"{what} ended its process: {await self.exit_reason()}.")) from None

    def _lost(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)
