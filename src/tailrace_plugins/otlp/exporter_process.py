"""The server's end of the process that exports traces.

OpenTelemetry's SDK needs 0.25 ms of processor time for a request. In the server's process it would hold up the event
loop, also from another thread. Here a span costs what its line of JSON does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tailrace_plugins.otlp.spans import Span, encode

__all__ = ["ExporterProcess", "exporter_process"]

logger = logging.getLogger("tailrace.otlp")

_FLUSH_S = 0.1
_MOST_LINES = 1000  # until then
_MOST_BYTES = 4 * 2**20  # that wait for the process
_CLOSE_S = 12.0  # twice the timeout of an export, and a little
_RESTART_S = 5.0


class ExporterProcess:
    """Takes spans that are over. Call it on the event loop."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._input: asyncio.StreamWriter | None = None
        self._num_dropped = 0
        self._closes = False

    def add(self, span: Span) -> None:
        """Send a span soon. If the process does not keep up, it is dropped."""
        if not (span.ref.is_sampled or span.durations):
            return
        if not self._lines:
            asyncio.get_running_loop().call_later(_FLUSH_S, self._flush)
        self._lines.append(encode(span) + b"\n")
        if len(self._lines) >= _MOST_LINES:
            self._flush()

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if not lines:
            return
        if self._input is None or self._input.transport.get_write_buffer_size() > _MOST_BYTES:
            if not self._num_dropped:
                logger.warning("The process that exports traces takes none: spans are dropped.")
            self._num_dropped += len(lines)
            return
        if self._num_dropped:
            logger.warning("The process that exports traces takes spans again. %d were dropped.", self._num_dropped)
            self._num_dropped = 0
        self._input.write(b"".join(lines))

    async def run(self, address: str) -> None:
        """Run the process, and another one if it ends, until `close`."""
        while not self._closes:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "tailrace_plugins.otlp.exporter",
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
                    env=os.environ | {"TAILRACE_OTLP": address},
                    start_new_session=True,  # Ctrl-C on the terminal goes only to the server
                )  # fmt: skip
            except OSError as error:
                logger.error("The process that exports traces could not be started: %s.", error)
            else:
                await self._follow(process)
            if not self._closes:
                await asyncio.sleep(_RESTART_S)

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        """Log what a process has to say, until it ends."""
        assert process.stderr is not None
        self._input = process.stdin
        if self._closes:  # meanwhile
            self.close()
        try:
            while piece := await process.stderr.read(2**16):
                for line in piece.decode(errors="replace").splitlines():
                    logger.warning("%s", line)
            status = await process.wait()
        finally:
            self._input = None
            if process.returncode is None:
                process.kill()
        if not self._closes:
            logger.error("The process that exports traces has ended (%d). Another one is started.", status)

    def close(self) -> None:
        """Send what is left. The process ends when it has done so."""
        self._flush()
        self._closes = True
        if self._input is not None:
            self._input.close()


@asynccontextmanager
async def exporter_process(address: str) -> AsyncIterator[ExporterProcess]:
    """Context of a process that sends spans to a collector. At its end, the process has 12 s to send what is left."""
    exporter = ExporterProcess()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(exporter.run(address))
        try:
            yield exporter
        finally:
            exporter.close()
            await asyncio.wait([running], timeout=_CLOSE_S)
            running.cancel()
