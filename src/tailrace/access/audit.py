"""`--audit-log`: who did what, when, and what came of it; one JSON object a line. Never a secret, a token or a text.

A process has one audit log at most, and `note` writes to it from anywhere. Where there is none, `note` does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from starlette.types import Scope

from tailrace import eventloop
from tailrace.access.keys import Key
from tailrace.access.principal import PRINCIPAL, caller_of, principal_of
from tailrace.errors import Forbidden, ModelError, TailraceError, Unauthenticated
from tailrace.settings import Settings
from tailrace.streams import is_stream_id

__all__ = ["note", "note_command", "note_refusal", "noting", "open_audit_log", "what_is_noted"]

logger = logging.getLogger("tailrace.server")

_REPEATS_S = 1.0
_MAX_CALLERS = 10  # with refusals of their own in that time; the others share a line


class _AuditFile:
    """Raises: OSError if it cannot be opened."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._handle = self._open()
        self._is_failing = False
        self._repeats: dict[tuple[str, str, str], _Repeats] = {}  # by event, outcome and caller
        self._is_counting = False

    def write(self, event: str, outcome: str, fields: dict[str, object]) -> None:
        """Add a line. One that cannot be written is lost, and the log of the server says so."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": now, "event": event, "outcome": outcome, **{name: it for name, it in fields.items() if it}}
        try:
            os.write(self._handle, json.dumps(line).encode() + b"\n")  # at once, so that lines of processes do not mix
        except OSError as error:
            if not self._is_failing:
                logger.error("the audit log cannot be written: %s", error.strerror)
            self._is_failing = True
        else:
            self._is_failing = False

    def write_refusal(self, event: str, outcome: str, caller: str, fields: dict[str, object]) -> None:
        """Add a line, unless the same caller had one within this second: those are counted, and told of at its end."""
        key = (event, outcome, caller)
        if key not in self._repeats and len(self._repeats) >= _MAX_CALLERS:
            key = (event, outcome, "others")
            fields = {"client": "others"}
        if key in self._repeats:
            self._repeats[key].count += 1
            return
        self._repeats[key] = _Repeats(fields)
        self.write(event, outcome, fields)
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_later(_REPEATS_S, self._tell_repeats)

    def _tell_repeats(self) -> None:
        self._is_counting = False
        for (event, outcome, _), more in self._repeats.items():
            if more.count:
                self.write(event, outcome, more.fields | {"repeated": more.count})
        self._repeats.clear()

    def reopen(self) -> None:
        """Go on in a new file, where the old one was moved away."""
        try:
            handle = self._open()
        except OSError as error:
            logger.error("the audit log cannot be opened again, and goes on in the file before: %s", error.strerror)
            return
        os.close(self._handle)
        self._handle = handle

    def close(self) -> None:
        self._tell_repeats()
        os.close(self._handle)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


@dataclass(slots=True)
class _Repeats:
    """How many more refusals there were like one that has a line."""

    fields: dict[str, object]
    count: int = 0


_file: _AuditFile | None = None


@contextlib.contextmanager
def open_audit_log(settings: Settings) -> Iterator[None]:
    """The audit log of this process, if the settings name one. On an event loop, SIGHUP has it opened again.

    Raises: ModelError if it cannot be written.
    """
    global _file
    if not settings.audit_log:
        yield
        return
    try:
        _file = _AuditFile(os.path.expanduser(settings.audit_log))
    except OSError as error:
        raise ModelError(f"The audit log {settings.audit_log} cannot be written: {error.strerror}.") from None
    try:
        with contextlib.ExitStack() as stack:
            if _runs_here() and threading.current_thread() is threading.main_thread():
                stack.enter_context(eventloop.on_hangup(_file.reopen))
            yield
    finally:
        _file.close()
        _file = None


def note(event: str, outcome: str, scope: Scope | None = None, **what: object) -> None:
    """Add a line: what happened; how it came out, `done` or the code of an error; who did it, if that was a request;
    and what it was done to. Empty fields are left out."""
    if _file is not None:
        _file.write(event, outcome, (_who(scope) if scope is not None else {}) | what)


def note_command(event: str, outcome: str, **what: object) -> None:
    """As `note`, of something that a person did on the command line of this machine."""
    if _file is not None:
        _file.write(event, outcome, {"user": _user()} | what)


@contextlib.contextmanager
def noting(event: str, scope: Scope, **what: object) -> Iterator[None]:
    """Note what the block does, and the code of the error that it ends with, if it does. An id that is no stream's is
    left out: it may be anything."""
    stream = what.get("stream")
    if isinstance(stream, str) and not is_stream_id(stream):
        what = what | {"stream": None}
    try:
        yield
    except TailraceError as error:
        note(event, error.code, scope, **what)
        raise
    note(event, "done", scope, **what)


def note_refusal(error: Exception, scope: Scope) -> None:
    """Note that a request was not let in, or not to this. Other errors are none of the audit log's."""
    if _file is None or not isinstance(error, Unauthenticated | Forbidden):
        return
    event = "authenticate" if isinstance(error, Unauthenticated) else "authorize"
    _file.write_refusal(event, error.code, caller_of(scope), _who(scope) | {"reason": error.message})


def what_is_noted(key: Key) -> dict[str, object]:
    """The fields of a key that something was done to."""
    return {"of_key": key.key_id, "of_owner": key.owner, "scopes": key.scopes}


def _who(scope: Scope) -> dict[str, object]:
    client = scope.get("client")
    who: dict[str, object] = {"client": client[0] if client else ""}
    if PRINCIPAL not in scope:  # it was not let in
        return who
    principal = principal_of(scope)
    return {"owner": principal.owner, "key": principal.key_id} | who


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an id without a name
        return str(os.getuid())


def _runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
