"""The parent of the demo's server: restarts it after a kill, and once after the download of the real model."""

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

__all__ = ["FETCH_FILE", "FetchState", "Keeper"]

FETCH_FILE = "fetch.json"  # in the data directory: the progress of the download, for the page
FetchState = Literal["fetching", "failed"]

_SHORT_LIFE_S = 1.0
_MAX_SHORT_LIVES = 5  # in a row; after that, another start would not help
_PERCENT = re.compile(r"\b(\d{1,3}) %")


class Keeper:
    """Runs the server of one demo. `model` is the real model, as for `tailrace pull`; None uses only the simulated
    engine.

    Raises: ModelError for an invalid model name.
    """

    def __init__(self, model: str | None, port: int, directory: Path, say: Callable[[str], None]) -> None:
        self._model = model
        self._port = port
        self._directory = directory
        self._say = say
        self._has_model = model is not None and _is_available(model)
        self._stopping = asyncio.Event()
        self._server: Process | None = None
        self._is_replaced = False  # the server was stopped to load the new model

    async def run(self) -> int:
        """Return the exit status, after SIGINT, SIGTERM or SIGHUP, or when the server cannot run."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop)
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
            if self._stopping.is_set():
                return 0
            if self._is_replaced:
                self._is_replaced = False
                continue
            if status >= 0:
                return status  # the server has printed the reason
            num_short_lives = num_short_lives + 1 if time.monotonic() - since_s < _SHORT_LIFE_S else 0
            if num_short_lives == _MAX_SHORT_LIVES:
                self._say("The server is killed at every start. The demo ends.")
                return 1
            self._say(f"The server was killed ({signal.Signals(-status).name}). Starting a new one.")

    async def _serve(self) -> int:
        """Start the server, and return its exit status."""
        model = self._model if self._has_model and self._model is not None else ""
        self._server = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "tailrace_outer.demo.demo_server",
            str(os.getpid()), str(self._directory), str(self._port), model,
            stdin=DEVNULL, stdout=DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only this process, which then stops the server
        )  # fmt: skip
        if self._stopping.is_set():
            self._stop_server()
        return await self._server.wait()

    def _stop_server(self) -> None:
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                self._server.terminate()

    def _stop(self) -> None:
        self._stopping.set()
        self._stop_server()

    async def _fetch(self, model: str) -> None:
        """Download the model in a separate process, then restart the server with it."""
        self._write_progress("fetching", f"Fetching {model}.")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "tailrace", "pull", model,
            stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        line = ""
        try:
            async for raw_line in process.stdout:
                line = raw_line.decode("utf-8", "replace").strip()
                self._say(line)
                self._write_progress("fetching", line)
            status = await process.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)  # then it stops pip, too
            await process.wait()
            raise
        if status:
            self._say("The demo continues with the simulated engine.")
            self._write_progress("failed", line)
            return
        (self._directory / FETCH_FILE).unlink()
        self._say(f"{model} is downloaded. Restarting the server with it; running streams continue.")
        self._has_model = self._is_replaced = True
        self._stop_server()

    def _write_progress(self, state: FetchState, line: str) -> None:
        """Write the progress for the server."""
        percent = _PERCENT.search(line)
        progress = {"state": state, "line": line, "percent": int(percent[1]) if percent else None}
        part = self._directory / f"{FETCH_FILE}.part"
        part.write_text(json.dumps(progress))
        part.replace(self._directory / FETCH_FILE)


def _is_available(model: str) -> bool:
    """Whether no download is needed. For models of the hub, only its library knows. Raises: ModelError."""
    # Imported here, because --offline starts faster without them.
    from tailrace.models.catalogue import CatalogueEntry, HubModel, HubSource, parse_source
    from tailrace.models.fetch import locate

    if model.partition(":")[0] in ("openai", "tgi"):
        raise ModelError("The demo needs a local model; it cannot use another server.")
    source = parse_source(model)
    if isinstance(source, CatalogueEntry):
        return locate(source) is not None
    return not isinstance(source, HubModel | HubSource)
