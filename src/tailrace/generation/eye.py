"""Asks the engine how images are written in a prompt."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import replace

from tailrace.admission import Gate
from tailrace.engines.interface import Sight
from tailrace.engines.supervisor import Supervisor
from tailrace.errors import EngineLost, QueueTimeout, RequestRefused
from tailrace.generation.blame import Blame
from tailrace.images.owner_turns import OwnerTurns
from tailrace.images.reader import BUSY
from tailrace.types import Image

__all__ = ["Eye"]

_MAX_KNOWN = 256


class Eye:
    """Shows images to an engine, one at a time: an engine that dies meanwhile has read this image. What it says about
    an image is kept, since conversations have the same images again."""

    def __init__(self, supervisor: Supervisor, gate: Gate, blame: Blame) -> None:
        self._supervisor = supervisor
        self._gate = gate
        self._blame = blame
        self._turns = OwnerTurns(1)
        self._known: OrderedDict[str, Sight] = OrderedDict()  # by digest, the last used one last

    async def see(self, image: Image, within_s: float, *, owner: str, caller: str) -> Image:
        """Return an image with how it is written. Owners take turns. Waits at most `within_s` seconds for the turn, and
        then until the gate is open: before, streams may run alone to find the one that kills engines, and would be
        blamed for this image.

        Raises: RequestRefused if the model cannot read it, PoisonRequest if it has killed engines, or others of this
        caller have; AdmissionError, EngineLost.
        """
        digest = image.digest
        if (sight := self._known.get(digest)) is not None:
            self._known.move_to_end(digest)
        else:
            try:
                async with self._turns.turn(owner, within_s):
                    sight = self._known.get(digest) or await self._ask(image, digest, caller, within_s)
            except TimeoutError:
                raise QueueTimeout(BUSY) from None
            self._known[digest] = sight
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return replace(image, placeholder=sight.placeholder, expansion=sight.expansion)

    async def _ask(self, image: Image, digest: str, caller: str, within_s: float) -> Sight:
        self._blame.check_image(digest, caller)
        try:
            async with asyncio.timeout(within_s):
                await self._gate.wait_open()
        except TimeoutError:
            raise QueueTimeout("The engine was not ready in time to read an image.") from None
        try:
            return await self._supervisor.see(image.content)
        except RequestRefused as error:
            error.param = image.param
            raise
        except EngineLost as error:
            if error.is_crash:
                self._blame.add_image(digest, caller)
            raise
