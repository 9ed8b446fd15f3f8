"""`--audit-log`: who did what and when, and the outcome; one JSON object per line. It never has a secret, a token or a
text.

A process has at most one audit log. `note` writes to it from anywhere, and does nothing if there is none.
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
_MAX_CALLERS = 10  # callers per second whose refusals get their own lines; the others share a line


class _AuditFile:
    """The open log file. Raises: OSError if it cannot be opened."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._handle = self._open()
        self._is_failing = False
        self._repeats: dict[tuple[str, str, str], _Repeats] = {}  # by event, outcome and caller
        self._is_counting = False

    def write(self, event: str, outcome: str, fields: dict[str, object]) -> None:
        """Add a line. If the write fails, the line is lost, and the server's log has an error."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": now, "event": event, "outcome": outcome, **{name: it for name, it in fields.items() if it}}
        try:
            os.write(self._handle, json.dumps(line).encode() + b"\n")  # in one write
        except OSError as error:
            if not self._is_failing:
                logger.error("the audit log cannot be written: %s", error.strerror)
            self._is_failing = True
        else:
            self._is_failing = False

    def write_refusal(self, event: str, outcome: str, caller: str, fields: dict[str, object]) -> None:
        """Add a line for a refusal. Repeated refusals of a caller within a second are counted, and written as one
        line."""
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
            asyncio.get_running_loop().call_later(_REPEATS_S, self._write_repeats)

    def _write_repeats(self) -> None:
        self._is_counting = False
        for (event, outcome, _), more in self._repeats.items():
            if more.count:
                self.write(event, outcome, more.fields | {"repeated": more.count})
        self._repeats.clear()

    def reopen(self) -> None:
        """Open the file again, after log rotation has moved it."""
        try:
            handle = self._open()
        except OSError as error:
            logger.error("the audit log cannot be reopened and continues in the old file: %s", error.strerror)
            return
        os.close(self._handle)
        self._handle = handle

    def close(self) -> None:
        self._write_repeats()
        os.close(self._handle)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


@dataclass(slots=True)
class _Repeats:
    """How often a refusal was repeated since its line was written."""

    fields: dict[str, object]
    count: int = 0


_file: _AuditFile | None = None


@contextlib.contextmanager
def open_audit_log(settings: Settings) -> Iterator[None]:
    """Open the audit log of this process, if the settings have one. On an event loop, SIGHUP reopens it.

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
            if _has_event_loop() and threading.current_thread() is threading.main_thread():
                stack.enter_context(eventloop.on_hangup(_file.reopen))
            yield
    finally:
        _file.close()
        _file = None


def note(event: str, outcome: str, scope: Scope | None = None, **what: object) -> None:
    """Add a line: the event, its outcome (`done` or an error code), the client of the request `scope`, and further
    fields. Empty fields are left out."""
    if _file is not None:
        _file.write(event, outcome, (_client_fields(scope) if scope is not None else {}) | what)


def note_command(event: str, outcome: str, **what: object) -> None:
    """Add a line for a command that a user ran on this machine."""
    if _file is not None:
        _file.write(event, outcome, {"user": _user()} | what)


@contextlib.contextmanager
def noting(event: str, scope: Scope, **what: object) -> Iterator[None]:
    """Add a line for the block, with its error code if it raises. An invalid stream id is left out, because it may be
    any text."""
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
    """Add a line if the error is a failed authentication or authorization. Other errors are ignored."""
    if _file is None or not isinstance(error, Unauthenticated | Forbidden):
        return
    event = "authenticate" if isinstance(error, Unauthenticated) else "authorize"
    _file.write_refusal(event, error.code, caller_of(scope), _client_fields(scope) | {"reason": error.message})


def what_is_noted(key: Key) -> dict[str, object]:
    """Return the fields of a key that was created or changed."""
    return {"of_key": key.key_id, "of_owner": key.owner, "scopes": key.scopes}


def _client_fields(scope: Scope) -> dict[str, object]:
    client = scope.get("client")
    who: dict[str, object] = {"client": client[0] if client else ""}
    if PRINCIPAL not in scope:  # it was not authenticated
        return who
    principal = principal_of(scope)
    return {"owner": principal.owner, "key": principal.key_id} | who


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        return str(os.getuid())


def _has_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
