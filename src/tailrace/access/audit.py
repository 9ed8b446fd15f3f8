"""`--audit-log`: who did what and when, and the outcome; one JSON object per line. It never has a secret, a token or a
text.

The edge puts the log of its server into the scope of each request, where `note` finds it.
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
from pathlib import Path

from starlette.types import Scope

from tailrace.access.keys import Key
from tailrace.access.principal import PRINCIPAL, caller_of, principal_of
from tailrace.errors import Forbidden, ModelError, TailraceError, Unauthenticated
from tailrace.settings import Settings
from tailrace.system import eventloop
from tailrace.system.owners import create_file

__all__ = ["AUDIT", "AuditLog", "note", "note_refusal", "noting", "open_audit_log", "what_is_noted"]

logger = logging.getLogger("tailrace.server")

AUDIT = "tailrace_audit"  # the key of the audit log in an ASGI scope

_REPEATS_S = 1.0
_MAX_CALLERS = 10  # callers per second whose refusals get their own lines; the others share a line


class AuditLog:
    """The audit log of a server or a command; without a path it writes nothing. Empty fields of a line are left out.

    Raises: OSError if its file cannot be opened.
    """

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._handle = self._open() if path else None
        self._is_failing = False
        self._repeats: dict[tuple[str, str, str], _Repeats] = {}  # by event, outcome and caller
        self._is_counting = False

    def add(self, event: str, outcome: str, **fields: object) -> None:
        """Add a line: the event, its outcome (`done` or an error code), and further fields. If it cannot be written, it
        is lost, and the server's log has an error."""
        if self._handle is None:
            return
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

    def add_command(self, event: str, key: Key | None = None, **fields: object) -> None:
        """Add a line for a command that a user ran on this machine, and the key that it has changed."""
        if self._handle is not None:
            self.add(event, "done", user=_user(), **(what_is_noted(key) if key is not None else {}), **fields)

    def add_refusal(self, event: str, outcome: str, caller: str, fields: dict[str, object]) -> None:
        """Add a line for a refusal. Repeated refusals of a caller within a second are counted, and written as one
        line."""
        if self._handle is None:
            return
        key = (event, outcome, caller)
        if key not in self._repeats and len(self._repeats) >= _MAX_CALLERS:
            key = (event, outcome, "others")
            fields = {"client": "others"}
        if key in self._repeats:
            self._repeats[key].count += 1
            return
        self._repeats[key] = _Repeats(fields)
        self.add(event, outcome, **fields)
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_later(_REPEATS_S, self._write_repeats)

    def _write_repeats(self) -> None:
        self._is_counting = False
        for (event, outcome, _), more in self._repeats.items():
            if more.count:
                self.add(event, outcome, **more.fields, repeated=more.count)
        self._repeats.clear()

    def reopen(self) -> None:
        """Open the file again, after log rotation has moved it."""
        if self._handle is None:
            return
        try:
            handle = self._open()
        except OSError as error:
            logger.error("the audit log cannot be reopened and continues in the old file: %s", error.strerror)
            return
        os.close(self._handle)
        self._handle = handle

    def close(self) -> None:
        """Write what is still counted. Lines that are added later are lost."""
        if self._handle is not None:
            self._write_repeats()
            os.close(self._handle)
            self._handle = None

    def _open(self) -> int:
        create_file(Path(self._path))  # root gives it to the server's user
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


@dataclass(slots=True)
class _Repeats:
    """How often a refusal was repeated since its line was written."""

    fields: dict[str, object]
    count: int = 0


_NO_LOG = AuditLog()


@contextlib.contextmanager
def open_audit_log(settings: Settings) -> Iterator[AuditLog]:
    """Open the audit log of the settings. On an event loop, SIGHUP reopens its file.

    Raises: ModelError if it cannot be written.
    """
    try:
        log = AuditLog(os.path.expanduser(settings.audit_log))
    except OSError as error:
        raise ModelError(f"The audit log {settings.audit_log} cannot be written: {error.strerror}.") from None
    with contextlib.ExitStack() as stack:
        stack.callback(log.close)
        if settings.audit_log and _has_event_loop() and threading.current_thread() is threading.main_thread():
            stack.enter_context(eventloop.on_hangup(log.reopen))
        yield log


def note(event: str, outcome: str, scope: Scope, **what: object) -> None:
    """Add a line for a request: as `AuditLog.add`, with the client of the request."""
    _log_of(scope).add(event, outcome, **_client_fields(scope), **what)


@contextlib.contextmanager
def noting(event: str, scope: Scope, **what: object) -> Iterator[None]:
    """Add a line for the block of a request, with its error code if it raises."""
    try:
        yield
    except TailraceError as error:
        note(event, error.code, scope, **what)
        raise
    note(event, "done", scope, **what)


def note_refusal(error: Exception, scope: Scope) -> None:
    """Add a line if the error is a failed authentication or authorization. Other errors are ignored."""
    if isinstance(error, Unauthenticated | Forbidden):
        event = "authenticate" if isinstance(error, Unauthenticated) else "authorize"
        fields = _client_fields(scope) | {"reason": error.message}
        _log_of(scope).add_refusal(event, error.code, caller_of(scope), fields)


def what_is_noted(key: Key) -> dict[str, object]:
    """Return the fields of a key that was created or changed."""
    return {"of_key": key.key_id, "of_owner": key.owner, "scopes": key.scopes}


def _log_of(scope: Scope) -> AuditLog:
    log = scope.get(AUDIT, _NO_LOG)
    assert isinstance(log, AuditLog)
    return log


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
