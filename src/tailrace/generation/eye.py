"""Asks the engine how images are written in a prompt."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tailrace.admission import Gate
from tailrace.engines.supervisor import Supervisor
from tailrace.errors import EngineLost, QueueTimeout, RequestRefused
from tailrace.generation.blame import Blame
from tailrace.types import Image

__all__ = ["Eye"]


class Eye:
    """Shows images to an engine, one at a time: an engine that dies meanwhile has read this image."""

    def __init__(self, supervisor: Supervisor, gate: Gate, blame: Blame) -> None:
        self._supervisor = supervisor
        self._gate = gate
        self._blame = blame
        self._turn = asyncio.Lock()

    async def see(self, image: Image, within_s: float) -> Image:
        """Return an image with how it is written. Waits at most `within_s` seconds until the gate is open: before,
        streams may run alone to find the one that kills engines, and would be blamed for this image.

        Raises: RequestRefused if the model cannot read it, PoisonRequest if it has killed engines, AdmissionError,
        EngineLost.
        """
        async with self._turn:
            self._blame.check_image(image.digest)
            try:
                async with asyncio.timeout(within_s):
                    await self._gate.wait_open()
            except TimeoutError:
                raise QueueTimeout("The engine was not ready in time to read an image.") from None
            try:
                sight = await self._supervisor.see(image.content)
            except RequestRefused as error:
                error.param = image.param
                raise
            except EngineLost as error:
                if error.is_crash:
                    self._blame.add_image(image.digest)
                raise
            self._blame.clear_image(image.digest)
        return replace(image, placeholder=sight.placeholder, expansion=sight.expansion)
