"""A temporary server for one chat: a child process on a loopback port, which stores nothing."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from typing import IO

from tailrace.cli.commands import tailrace_child
from tailrace.client import AnswerFailed

__all__ = ["own_server"]

_LISTENING = "Listening on "


@contextlib.asynccontextmanager
async def own_server(model: str, say: Callable[[str], None]) -> AsyncIterator[str]:
    """Start a server with this model; yields its URL. Its messages during the start go to `say`. The server ends with
    the context and with this process.

    Raises: AnswerFailed if it does not start. Its messages give the reason.
    """
    with tempfile.TemporaryDirectory(prefix="tailrace-chat-") as directory:
        command = tailrace_child(
            "serve", model, "--for", "one", "--host", "127.0.0.1", "--port", "0", "--drain-s", "0",
            "--journal", "memory", "--database", f"sqlite:///{directory}/records.sqlite",
        )  # fmt: skip
        process = subprocess.Popen(  # noqa: ASYNC220 - starting one is quick
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,  # Ctrl-C on the terminal goes only to this process
        )  # fmt: skip
        assert process.stderr is not None
        try:
            # In a thread, so that Ctrl-C ends the wait: the end of the server ends the thread.
            yield await asyncio.to_thread(_url, process.stderr, say)
        finally:
            process.kill()  # there is nothing to save
            process.wait()


def _url(stderr: IO[str], say: Callable[[str], None]) -> str:
    """Pass the server's messages on until it listens; returns its URL. Raises: AnswerFailed."""
    for line in stderr:
        if line.startswith(_LISTENING):
            # Later messages would appear in the middle of an answer.
            threading.Thread(target=stderr.read, daemon=True).start()
            return line.removeprefix(_LISTENING).strip()
        say(line.rstrip("\n"))
    raise AnswerFailed("the server for this chat did not start")
