"""Which requests were proven to kill engines, and which callers sent them. Which images engines died of."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from tailrace.errors import PoisonRequest
from tailrace.types import Prompt, Record

__all__ = ["Blame", "Culprit"]

_BAN_S = 600.0
_WINDOW_S = 600.0  # how long a proven kill counts against its caller
_KILLS_TO_SLOW = 3  # within that time
_MAX_BANS = 1000
_MAX_CALLERS = 1000
_MAX_IMAGES = 1000
_IMAGE_KILLS_TO_REFUSE = 4  # two images, or ever new ones, within that time
_KILLS_TO_REFUSE = 2  # a stream may have killed one of the engines while it read the image


@dataclass(frozen=True, slots=True)
class Culprit:
    """A request and its caller. A ban does not apply to the same request of another caller."""

    caller: str
    fingerprint: bytes  # equal for equal prompts and sampling; the seed does not count

    @classmethod
    def of_record(cls, record: Record) -> Culprit:
        request = [[prompt.segments for prompt in record.prompts], replace(record.sampling, seed=None)]
        return cls(record.caller, _fingerprint(request))

    @classmethod
    def of_prompt(cls, caller: str, prompt: Prompt) -> Culprit:
        """Return one input of a request for vectors."""
        return cls(caller, _fingerprint(prompt.segments))


def _fingerprint(content: object) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(content)).digest()


class Blame:
    """Proven kills. They are forgotten after ten minutes, and when the server stops."""

    def __init__(self) -> None:
        self.bans: OrderedDict[Culprit, float] = OrderedDict()  # until when; monotonic
        self.kills: OrderedDict[str, list[float]] = OrderedDict()  # times of kills, by caller; monotonic
        self.image_kills: OrderedDict[str, list[float]] = OrderedDict()  # as `kills`, by images
        self.images: OrderedDict[str, tuple[int, float]] = OrderedDict()  # engines, and until when; by digest

    def check(self, record: Record) -> None:
        """Raises: PoisonRequest if this caller's request is banned."""
        if self.bans and self._is_banned(Culprit.of_record(record)):
            raise PoisonRequest("This request has stopped the engine, and is refused for some minutes.")

    def check_inputs(self, record: Record) -> None:
        """Raises: PoisonRequest if an input of this caller's request for vectors is banned."""
        for index, prompt in enumerate(record.prompts if self.bans else ()):
            if self._is_banned(Culprit.of_prompt(record.caller, prompt)):
                raise PoisonRequest(
                    f"Input {index}, counted from 0, has stopped the engine, and is refused for some minutes.",
                    param="input",
                )

    def _is_banned(self, culprit: Culprit) -> bool:
        return self.bans.get(culprit, 0.0) > time.monotonic()

    def add(self, culprit: Culprit) -> None:
        """Record that this request was proven to kill an engine."""
        now_s = time.monotonic()
        self.bans[culprit] = now_s + _BAN_S
        self.bans.move_to_end(culprit)
        if len(self.bans) > _MAX_BANS:
            self.bans.popitem(last=False)
        _add_kill(self.kills, culprit.caller, now_s, _KILLS_TO_SLOW)

    def check_image(self, digest: str, caller: str) -> None:
        """Raises: PoisonRequest if this image is refused, or every image of this caller that no engine has read yet."""
        num_kills, until_s = self.images.get(digest, (0, 0.0))
        if num_kills >= _KILLS_TO_REFUSE and time.monotonic() < until_s:
            raise PoisonRequest("This image has stopped the engine, and is refused for some minutes.")
        if _has_recent(self.image_kills.get(caller, ()), _IMAGE_KILLS_TO_REFUSE):
            raise PoisonRequest("Your images have stopped the engine. New ones are refused for some minutes.")

    def add_image(self, digest: str, caller: str) -> None:
        """Record that an engine died while it read this image of a caller."""
        now_s = time.monotonic()
        _add_kill(self.image_kills, caller, now_s, _IMAGE_KILLS_TO_REFUSE)
        num_kills, until_s = self.images.pop(digest, (0, 0.0))
        self.images[digest] = (num_kills + 1 if now_s < until_s else 1, now_s + _BAN_S)
        if len(self.images) > _MAX_IMAGES:
            self.images.popitem(last=False)

    def is_slowed(self, caller: str) -> bool:
        """Return whether this caller has recently killed so many engines that its requests start one at a time."""
        return _has_recent(self.kills.get(caller, ()), _KILLS_TO_SLOW)


def _add_kill(kills: OrderedDict[str, list[float]], caller: str, now_s: float, most: int) -> None:
    """Add a kill to the newest ones of a caller."""
    times = kills.setdefault(caller, [])
    times[:] = [*times, now_s][-most:]
    kills.move_to_end(caller)
    if len(kills) > _MAX_CALLERS:
        kills.popitem(last=False)


def _has_recent(times: Sequence[float], number: int) -> bool:
    """Return whether so many of the times, in order, are recent."""
    return len(times) >= number and times[-number] > time.monotonic() - _WINDOW_S
