"""What authors of extensions need (docs/extending.md): the routes, the records and the streams of a server.

An extension is opened when the models are loaded, and closed when the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pkgutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Scope

from tailrace.access.keyring import Keyring
from tailrace.access.principal import Principal, owner_of, principal_of
from tailrace.assembly.models import Models
from tailrace.dialects.bodies import JsonBody, require_plain_utf8
from tailrace.dialects.native import event_json
from tailrace.dialects.queries import read_query
from tailrace.dialects.wire import HEARTBEAT
from tailrace.errors import SHUTTING_DOWN, ModelError, StorageError, StreamError, TailraceError, Unauthenticated
from tailrace.extensions import Extension, installed_extensions
from tailrace.generation.observers import Observer, Times
from tailrace.http.asgi_answers import STREAM_HEADERS, client_disconnected, unless_left
from tailrace.http.body_budget import BodyBudget
from tailrace.http.inner_requests import InnerAnswer, InnerStream, begin, post
from tailrace.http.lane_streams import LaneStream, LaneTake
from tailrace.http.linger import linger_of
from tailrace.http.stream_actions import StreamActions
from tailrace.http.wires import ServedWires
from tailrace.images.image_fetch import is_public
from tailrace.records.records_service import Records
from tailrace.settings import Settings
from tailrace.streams import Reader, StreamLog
from tailrace.streams.damage import missing_stream_error
from tailrace.streams.notes import AppendResult, Entry, EntryId, LoadedLog, LocalNotes, LogListener, Note, SharedLog
from tailrace.streams.opening import Store
from tailrace.streams.tables import LocalTable, Table, TableLease, account_of, look_at_changes, row_key
from tailrace.system.follower import Follower
from tailrace.text.templates import is_deeper
from tailrace.types import Record
from tailrace.wording import in_one_line

__all__ = [
    "HEARTBEAT",
    "SHUTTING_DOWN",
    "STREAM_HEADERS",
    "AppendResult",
    "Entry",
    "EntryId",
    "Follower",
    "InnerAnswer",
    "InnerStream",
    "LaneStream",
    "LaneTake",
    "LoadedLog",
    "LocalNotes",
    "LocalTable",
    "LogListener",
    "Note",
    "Observer",
    "Opened",
    "Options",
    "Reader",
    "Sender",
    "Server",
    "Settings",
    "SharedLog",
    "StreamLog",
    "Table",
    "TableLease",
    "Take",
    "Times",
    "account_of",
    "client_disconnected",
    "event_json",
    "is_deeper",
    "is_public",
    "linger_of",
    "look_at_changes",
    "missing_stream_error",
    "open_extensions",
    "owner_of",
    "principal_of",
    "read_query",
    "require_plain_utf8",
    "row_key",
    "unless_left",
]

logger = logging.getLogger("tailrace.plugins")

Options: TypeAlias = Mapping[str, Any]  # Any: of each setting's type
"""The values of an extension's settings, by name. Those that reload change here."""


class Server:
    """What the routes of a server share.

    `bodies` limits the memory for request bodies; `streams` finds the streams of models. An extension keeps in the log
    store what `table_of` returns, a `Table`, or what `notes_of` returns: a `SharedLog` where servers share one, else
    `LocalNotes`. `ask` sends a request to
    the server itself; `error_answer` is how it answers with an error. `observe` calls an observer of all requests.
    `settings` may be others later (`Setting.reloads`): read them at each use, or ask with `on_reload` to be told.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        records: Records | None = None,
        models: Models | None = None,
    ) -> None:
        self.settings = settings
        self.bodies = BodyBudget(settings)
        self.streams = StreamActions(store, settings, records.conversations if records is not None else None)
        self.store = store
        self.records = records
        self.models = models
        self._keyring = records.keyring if records is not None else Keyring()
        self._app: ASGIApp | None = None
        self._on_reload: list[Callable[[Settings], None]] = [self.bodies.use, self.streams.use]
        if records is not None:
            self._on_reload.append(records.use)
        self._wires = ServedWires()
        self._answers = asyncio.Event()
        self._forgets: tuple[Forget, ...] = ()

    @property
    def model_names(self) -> Set[str]:
        """The names of the models and their adapters, which may change."""
        return self.models.by_name.keys() if self.models is not None else frozenset()

    def on_reload(self, call: Callable[[Settings], None]) -> None:
        """Call a function with the settings each time that they change while the server runs."""
        self._on_reload.append(call)

    def use(self, settings: Settings) -> None:
        """Use other settings from now on."""
        self.settings = settings
        for call in self._on_reload:
            try:
                call(settings)
            except Exception:  # extensions may raise anything
                logger.exception("a part of the server may have kept its settings")

    def observe(self, observer: Observer) -> None:
        """Call an observer for each request of all models. Streams that this server has taken over as it started may
        have begun to run already."""
        if self.models is not None:
            self.models.observers.add(observer)

    def add_headers(self, headers: Callable[[Record], Mapping[str, str]]) -> None:
        """Add headers to each answer with a stream."""
        self.streams.more_headers.append(headers)

    def answer_with(self, app: ASGIApp, wires: ServedWires) -> None:
        """Set the application that answers `ask`, and its wires."""
        self._app, self._wires = app, wires
        self._answers.set()

    def forget_with(self, *forgets: Forget) -> None:
        """Set what `forget` calls."""
        self._forgets = forgets

    async def forget(self, owner: str) -> dict[str, int]:
        """Delete what this server and its extensions have of an owner, except for streams and the database. Returns how
        much of each kind. Raises: StorageError, Draining."""
        counts: dict[str, int] = {}
        for forget in self._forgets:
            counts.update(await forget(owner))
        return counts

    async def drop(self, log: StreamLog) -> None:
        """Cancel a stream if it runs, and delete it: now, or with others later. Raises: StorageError."""
        with contextlib.suppress(StreamError):  # it has expired
            await self.stop(log)
            await self.store.drop(log)

    async def stop(self, log: StreamLog) -> None:
        """Cancel a stream if it runs. Raises: StreamError if it has expired, StorageError."""
        if log.end is None:
            await self.store.stop(log.record.owner, log.stream_id)

    async def ask(
        self, sender: Sender, path: str, body: bytes, *, headers: Mapping[str, str], logs: list[StreamLog]
    ) -> InnerAnswer:
        """Return the answer to a POST request with a body in JSON, as if the sender sent it now: with the limits of its
        key, and the errors of the path's wire. It waits until the server can answer. `logs` gets the stream that
        answers, as soon as there is one.

        *Cancellation:* as if the client left. *Raises:* Unauthenticated if the key of the sender is not valid any more.
        """
        app, principal = await self._inner(sender)
        return await post(app, path, body, principal=principal, address=sender.address, headers=headers, logs=logs)

    @contextlib.asynccontextmanager
    async def begin(
        self,
        sender: Sender,
        path: str,
        body: bytes,
        *,
        headers: Mapping[str, str],
        logs: list[StreamLog],
        found_only: bool = False,
    ) -> AsyncIterator[InnerStream]:
        """Context of an answer as it comes, as `ask`. Its end is as if the client left. With `found_only` no stream
        begins: without one of its Idempotency-Key, at any server, the answer is UnknownStream."""
        app, principal = await self._inner(sender)
        async with begin(
            app, path, body, principal=principal, address=sender.address, headers=headers, logs=logs,
            found_only=found_only,
        ) as answer:  # fmt: skip
            yield answer

    async def _inner(self, sender: Sender) -> tuple[ASGIApp, Principal]:
        """Return what answers a sender, as soon as it can. Raises: Unauthenticated."""
        await self._answers.wait()
        assert self._app is not None
        return self._app, self.principal_of(sender)

    def principal_of(self, sender: Sender) -> Principal:
        """Return what the key of a sender may do now. Raises: Unauthenticated if it is not valid any more."""
        principal = self._keyring.principal_of(sender.key_id)
        if principal is None or principal.owner != sender.owner:
            raise Unauthenticated("The key of this request is not valid any more.")
        return principal

    def error_answer(self, path: str, error: TailraceError) -> InnerAnswer:
        """Return what a request to a path gets for an error: in the form of the path's wire."""
        wire = self._wires.of({"path": path, "query_string": b"", "headers": []})
        status, body = wire.encode_error(error)
        return InnerAnswer(status, {}, body)

    async def notes_of(self, name: str) -> LocalNotes | SharedLog:
        """Raises: StorageError."""
        return await self.store.notes_of(name)

    async def table_of(self, name: str) -> Table:
        """Raises: StorageError."""
        return await self.store.table_of(name)


@dataclass(frozen=True, slots=True)
class Sender:
    """Who has sent a request, to be kept for requests that follow from it."""

    owner: str
    key_id: str = ""
    address: str = ""

    @classmethod
    def of(cls, scope: Scope) -> Sender:
        principal = principal_of(scope)
        return cls(principal.owner, principal.key_id, scope["client"][0] if scope.get("client") else "")


Take: TypeAlias = Callable[[Request, JsonBody], Awaitable[ASGIApp | None]]
"""Answers a request to an operation of a wire, given its body, or returns None: the wire answers it. The key may use
the operation, the wire and the model. Errors are in the form of the wire."""


Forget: TypeAlias = Callable[[str], Awaitable[Mapping[str, int]]]
"""Deletes what an owner has, and returns how much of each kind."""


async def _forget_nothing(owner: str) -> Mapping[str, int]:
    return {}


@dataclass(frozen=True, slots=True)
class Opened:
    """What an extension adds to a running server.

    `routes` come after those of the server and of its wires. `paths` and `tag` describe them in the OpenAPI document.
    `exposed_headers` are those of answers that pages of other origins may read. `forget` deletes what an owner has and
    returns how much of each kind. `drain` is called when the server stops, before its connections are closed. `takes`
    are asked before the wires, by method and path, such as ("POST", "/v1/responses"); `lane_takes` those of a WebSocket
    with lanes, by its path. `on_metrics` is called with the server's metrics, whose `registry` takes collectors.
    `single_headers` are those of requests that have one value: the server refuses a request that repeats one.
    """

    routes: Sequence[BaseRoute] = ()
    paths: JsonBody | None = None
    tag: JsonBody | None = None
    exposed_headers: Sequence[str] = ()
    forget: Forget = _forget_nothing
    drain: Callable[[], None] = lambda: None
    takes: Mapping[tuple[str, str], Take] = field(default_factory=dict)
    lane_takes: Mapping[str, LaneTake] = field(default_factory=dict)
    on_metrics: Callable[[Any], None] = lambda metrics: None  # Any: `Metrics` of `api`, which is above this module
    single_headers: Sequence[str] = ()


Open: TypeAlias = Callable[[Server, Options], AbstractAsyncContextManager[Opened]]


@contextlib.asynccontextmanager
async def open_extensions(server: Server) -> AsyncIterator[list[Opened]]:
    """Open all extensions. One that fails is left out, with a line in the log.

    Raises: ModelError if an extension raises it, or StorageError: the server cannot start.
    """
    async with contextlib.AsyncExitStack() as stack:
        opened = []
        for extension in installed_extensions().values():
            try:
                opened.append(await stack.enter_async_context(_open(extension, server)))
            except StorageError as error:
                raise ModelError(error.message) from None
            except ModelError:
                raise
            except Exception as error:  # extensions may raise anything
                logger.warning("The extension %s is left out: %s.", extension.name, in_one_line(error))
                logger.debug("%s could not be opened", extension.opens, exc_info=error)
        yield opened


def _open(extension: Extension, server: Server) -> AbstractAsyncContextManager[Opened]:
    function: Open = pkgutil.resolve_name(extension.opens)
    options: dict[str, Any] = {}  # Any: as in Options

    def use(settings: Settings) -> None:
        options.update({row.name: settings.value_of(row) for row in extension.settings})

    use(server.settings)
    server.on_reload(use)
    return function(server, options)
