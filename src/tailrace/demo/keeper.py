"""The parent of the demo's server: starts it again when it was killed, and once more when the real model has come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from tailrace.errors import ModelError
from tailrace.models.catalogue import CatalogueEntry, HubSource, parse_source
from tailrace.models.fetch import locate

__all__ = ["FETCH_FILE", "FetchState", "Keeper"]

FETCH_FILE = "fetch.json"  # in the demo's directory: how far the model is, for the page
FetchState = Literal["fetching", "failed"]

_SHORT_LIFE_S = 1.0
_MAX_SHORT_LIVES = 5  # in a row, after which something is wrong that another start does not mend
_PERCENT = re.compile(r"\b(\d{1,3}) %")


class Keeper:
    """Keeps one demo going. `model` is the real one, as for `tailrace pull`; None is the simulated engine alone.

    Raises: ModelError for a name that can be no model.
    """

    def __init__(self, model: str | None, port: int, directory: Path, say: Callable[[str], None]) -> None:
        self._model = model
        self._port = port
        self._directory = directory
        self._say = say
        self._has_model = model is not None and _is_here(model)
        self._leaving = asyncio.Event()
        self._server: Process | None = None
        self._is_replaced = False  # the server was told to go, because the model has come

    async def run(self) -> int:
        """Return the exit status when SIGINT or SIGTERM has come, or the server cannot be kept."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._leave)
        async with asyncio.TaskGroup() as group:
            fetching = None
            if self._model is not None and not self._has_model:
                fetching = group.create_task(self._fetch(self._model))
            try:
                return await self._keep_server()
            finally:
                if fetching is not None:
                    fetching.cancel()

    async def _keep_server(self) -> int:
        num_short_lives = 0
        while True:
            since_s = time.monotonic()
            status = await self._serve()
            if self._leaving.is_set():
                return 0
            if self._is_replaced:
                self._is_replaced = False
                continue
            if status >= 0:
                return status  # it has said why
            num_short_lives = num_short_lives + 1 if time.monotonic() - since_s < _SHORT_LIFE_S else 0
            if num_short_lives == _MAX_SHORT_LIVES:
                self._say("The server is killed whenever it starts. The demo ends.")
                return 1
            self._say(f"The server was killed ({signal.Signals(-status).name}). Starting it again.")

    async def _serve(self) -> int:
        """One life of the server; returns its exit status."""
        model = self._model if self._has_model and self._model is not None else ""
        self._server = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "tailrace.demo.server",
            str(os.getpid()), str(self._directory), str(self._port), model,
            stdin=DEVNULL, stdout=DEVNULL,
            start_new_session=True,  # Ctrl-C on the terminal is for this process, which then ends the server
        )  # fmt: skip
        if self._leaving.is_set():
            self._stop_server()
        return await self._server.wait()

    def _stop_server(self) -> None:
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                self._server.terminate()

    def _leave(self) -> None:
        self._leaving.set()
        self._stop_server()

    async def _fetch(self, model: str) -> None:
        """Fetch the model in a process of its own, and have the server started again with it."""
        self._tell("fetching", f"Fetching {model}.")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "tailrace", "pull", model,
            stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        line = ""
        try:
            async for said in process.stdout:
                line = said.decode("utf-8", "replace").strip()
                self._say(line)
                self._tell("fetching", line)
            status = await process.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)  # on which it ends what it has started
            await process.wait()
            raise
        if status:
            self._say("The demo goes on with the simulated engine.")
            self._tell("failed", line)
            return
        (self._directory / FETCH_FILE).unlink()
        self._say(f"{model} is here. The server is started again with it; streams go on.")
        self._has_model = self._is_replaced = True
        self._stop_server()

    def _tell(self, state: FetchState, line: str) -> None:
        """Leave word for the server, whichever runs by then."""
        percent = _PERCENT.search(line)
        word = {"state": state, "line": line, "percent": int(percent[1]) if percent else None}
        part = self._directory / f"{FETCH_FILE}.part"
        part.write_text(json.dumps(word))
        part.replace(self._directory / FETCH_FILE)


def _is_here(model: str) -> bool:
    """Whether it need not be fetched. The hub's own cache is left to the hub's library. Raises: ModelError."""
    if model.partition(":")[0] in ("openai", "tgi"):
        raise ModelError("The demo runs a model of its own; it does not go in front of another server.")
    source = parse_source(model)
    if isinstance(source, CatalogueEntry):
        return locate(source) is not None
    return not isinstance(source, HubSource)
