"""Which requests were proven to kill engines, and which callers sent them. Which images engines died of."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from tailrace.errors import PoisonRequest
from tailrace.types import Record

__all__ = ["Blame", "Culprit"]

_BAN_S = 600.0
_WINDOW_S = 600.0  # how long a proven kill counts against its caller
_KILLS_TO_SLOW = 3  # within that time
_MAX_BANS = 1000
_MAX_CALLERS = 1000
_MAX_IMAGES = 1000
_KILLS_TO_REFUSE = 2  # a stream may have killed one of the engines while it read the image


@dataclass(frozen=True, slots=True)
class Culprit:
    """A request and its caller. A ban does not apply to the same request of another caller."""

    caller: str
    fingerprint: bytes  # equal for equal prompts and sampling; the seed does not count

    @classmethod
    def of_record(cls, record: Record) -> Culprit:
        request = [[prompt.segments for prompt in record.prompts], replace(record.sampling, seed=None)]
        return cls(record.caller, hashlib.sha256(msgspec.msgpack.encode(request)).digest())


class Blame:
    """Proven kills. They are forgotten after ten minutes, and when the server stops."""

    def __init__(self) -> None:
        self.bans: OrderedDict[Culprit, float] = OrderedDict()  # until when; monotonic
        self.kills: OrderedDict[str, list[float]] = OrderedDict()  # times of kills, by caller; monotonic
        self.images: OrderedDict[str, tuple[int, float]] = OrderedDict()  # engines, and until when; by digest

    def check(self, record: Record) -> None:
        """Raises: PoisonRequest if this caller's request is banned."""
        if not self.bans:
            return
        left_s = self.bans.get(Culprit.of_record(record), 0.0) - time.monotonic()
        if left_s > 0:
            raise PoisonRequest("This request has stopped the engine, and is refused for some minutes.")

    def add(self, culprit: Culprit) -> None:
        """Record that this request was proven to kill an engine."""
        now_s = time.monotonic()
        self.bans[culprit] = now_s + _BAN_S
        self.bans.move_to_end(culprit)
        if len(self.bans) > _MAX_BANS:
            self.bans.popitem(last=False)
        kills = self.kills.setdefault(culprit.caller, [])
        kills[:] = [*kills, now_s][-_KILLS_TO_SLOW:]
        self.kills.move_to_end(culprit.caller)
        if len(self.kills) > _MAX_CALLERS:
            self.kills.popitem(last=False)

    def check_image(self, digest: str) -> None:
        """Raises: PoisonRequest if this image is refused."""
        num_kills, until_s = self.images.get(digest, (0, 0.0))
        if num_kills >= _KILLS_TO_REFUSE and time.monotonic() < until_s:
            raise PoisonRequest("This image has stopped the engine, and is refused for some minutes.")

    def add_image(self, digest: str) -> None:
        """Record that an engine died while it read this image."""
        now_s = time.monotonic()
        num_kills, until_s = self.images.pop(digest, (0, 0.0))
        self.images[digest] = (num_kills + 1 if now_s < until_s else 1, now_s + _BAN_S)
        if len(self.images) > _MAX_IMAGES:
            self.images.popitem(last=False)

    def is_slowed(self, caller: str) -> bool:
        """Return whether this caller has recently killed so many engines that its requests start one at a time."""
        kills = self.kills.get(caller, ())
        return len(kills) >= _KILLS_TO_SLOW and kills[-_KILLS_TO_SLOW] > time.monotonic() - _WINDOW_S
