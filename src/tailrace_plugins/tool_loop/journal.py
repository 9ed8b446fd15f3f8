"""Where responses with MCP tools are kept: the notes of the server's journal, in the order of what happened.

A note survives a crash of the server when `add` returns, and a power cut when `sync` returns.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time

import msgspec

from tailrace.errors import RequestError
from tailrace.server import LocalNotes
from tailrace_plugins.tool_loop.records import Begun, Planned, Step

__all__ = ["LOOP_ID", "Journal", "new_loop_id"]

LOOP_ID = re.compile(r"mcp_[0-9a-f]{32}")
_TIME_DIGITS = 8
_STEPS, _OPEN, _USED, _CLAIMS = b"steps/", b"open/", b"used/", b"claims/"
_encode = msgspec.msgpack.Encoder().encode
_step = msgspec.msgpack.Decoder(Step).decode


def new_loop_id() -> str:
    """Return the id of a new response, which begins with its time."""
    return f"mcp_{int(time.time()):0{_TIME_DIGITS}x}{secrets.token_hex(12)}"


class Journal:
    """Reads and writes the steps of responses. Methods raise StorageError."""

    def __init__(self, notes: LocalNotes) -> None:
        self._notes = notes

    def begin(self, begun: Begun, claim: bytes) -> None:
        """Keep a new response, with the approvals that it uses and the digest of its body for its Idempotency-Key.

        Raises: RequestError, StorageError.
        """
        owner, loop_id = begun.sender.owner, begun.loop_id
        try:
            notes = [(_key(owner, loop_id), _encode(begun))]
        except OverflowError:
            raise RequestError("An integer in this request is too large.", param="tools") from None
        notes.append((_OPEN + loop_id.encode(), owner.encode()))
        notes += [(_used_key(owner, call), loop_id.encode()) for call in begun.decided if call.known is None]
        if begun.claim:
            notes.append((_claim_key(owner, begun.claim), loop_id.encode() + claim))
        self._notes.add_all(notes)

    def add(self, begun: Begun, *steps: Step) -> None:
        key = _key(begun.sender.owner, begun.loop_id)
        self._notes.add_all([(key, _encode(step)) for step in steps])

    async def sync(self) -> None:
        """Return when all steps are on the disk."""
        await self._notes.sync()

    def end(self, begun: Begun) -> None:
        """The next process does not continue a response."""
        self._notes.erase(_OPEN + begun.loop_id.encode())

    def load(self, owner: str, loop_id: str) -> tuple[Begun, list[Step]] | None:
        """Return a response and its further steps in their order; None if there is none, or it is damaged."""
        notes = list(self._notes.read(_key(owner, loop_id)))
        steps = [_step(note.body) for note in notes if note.body is not None]
        if not steps or len(steps) < len(notes) or not isinstance(steps[0], Begun):
            return None
        return steps[0], steps[1:]

    def unfinished(self) -> list[tuple[str, str]]:
        """Return owner and id of the responses that have not ended."""
        notes = {note.key: note.body for note in self._notes.read(_OPEN)}
        return [(body.decode(), key.removeprefix(_OPEN).decode()) for key, body in notes.items() if body is not None]

    def used_by(self, owner: str, call: Planned) -> str | None:
        """Return the id of the response that has used the approval of a call."""
        found = self._notes.get(_used_key(owner, call))
        return found.decode() if found is not None else None

    def claimed(self, owner: str, claim: str) -> tuple[str, bytes] | None:
        """Return the response of an Idempotency-Key, and the digest of its body."""
        found = self._notes.get(_claim_key(owner, claim))
        return (found[:36].decode(), found[36:]) if found is not None else None

    def delete(self, begun: Begun) -> None:
        """Forget a response, but not that its approvals are used: those go with the response that asked for them."""
        owner = begun.sender.owner
        keys = [_key(owner, begun.loop_id), _OPEN + begun.loop_id.encode()]
        if begun.claim:
            keys.append(_claim_key(owner, begun.claim))
        used = _USED + _digest(owner) + begun.loop_id.removeprefix("mcp_").encode()
        self._notes.erase(*keys, *self._notes.sizes(used))

    def delete_id(self, owner: str, loop_id: str) -> None:
        """Forget a response, which may be damaged."""
        found = self.load(owner, loop_id)
        if found is not None:
            self.delete(found[0])
        else:
            self._notes.erase(_key(owner, loop_id), _OPEN + loop_id.encode())

    def of(self, owner: str) -> list[str]:
        """Return the ids of an owner's responses, the oldest first."""
        prefix = _STEPS + _digest(owner)
        return [key.removeprefix(prefix).decode() for key in self._notes.sizes(prefix)]

    def older_than(self, time_s: float) -> list[Begun]:
        """Return the responses that began before a time."""
        found = []
        for key in self._notes.sizes(_STEPS):
            begun_s = int(key.rpartition(b"mcp_")[2][:_TIME_DIGITS], 16)
            if begun_s < time_s:
                first = next(iter(self._notes.read(key)), None)
                step = _step(first.body) if first is not None and first.body is not None else None
                if isinstance(step, Begun):
                    found.append(step)
                else:
                    self._notes.erase(key)
        return found


def _digest(owner: str) -> bytes:
    return hashlib.sha256(owner.encode()).hexdigest()[:32].encode() + b"/"


def _key(owner: str, loop_id: str) -> bytes:
    return _STEPS + _digest(owner) + loop_id.encode()


def _used_key(owner: str, call: Planned) -> bytes:
    """Return a key below that of the response that asked for the approval."""
    return _USED + _digest(owner) + (call.approval_id or "").removeprefix("mcpr_").encode()


def _claim_key(owner: str, claim: str) -> bytes:
    return _CLAIMS + hashlib.sha256(f"{owner}\0{claim}".encode()).digest()
