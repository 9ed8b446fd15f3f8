"""Keys over HTTP: `/v1/admin/keys` for administrators, `/v1/tickets` for pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from tailrace.access.audit import note, what_is_noted
from tailrace.access.keys import DEFAULT_SCOPES, Key, NewKey
from tailrace.access.principal import owner_of, principal_of
from tailrace.access.quota import NO_LIMITS, Quota
from tailrace.access.tickets import LIFETIME_S
from tailrace.api.routes import route
from tailrace.dialects.bodies import read_json, require_plain_utf8
from tailrace.dialects.shapes import T, read_fields
from tailrace.errors import ModelError, RequestError, StorageError
from tailrace.http.asgi_answers import JsonAnswer
from tailrace.http.body_budget import BodyBudget
from tailrace.records.records_service import Records
from tailrace.types import is_stream_id
from tailrace_outer.admin.owner_deletion import OwnerDeletion

if TYPE_CHECKING:
    from tailrace.records.key_store import KeyStore

__all__ = ["KeyRoutes"]

_Result = TypeVar("_Result")
_MAX_LIFETIME_S = 100 * 365 * 86_400.0


class _NewKeyBody(msgspec.Struct):
    owner: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    name: Annotated[str, msgspec.Meta(max_length=200)] = ""
    scopes: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=100)] = DEFAULT_SCOPES
    expires_in_s: Annotated[float, msgspec.Meta(gt=0, le=_MAX_LIFETIME_S)] | None = None
    quota: Quota = NO_LIMITS


class _RotateBody(msgspec.Struct):
    grace_s: Annotated[float, msgspec.Meta(ge=0, le=_MAX_LIFETIME_S)] = 86_400.0


class _TicketBody(msgspec.Struct):
    stream_id: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]


class KeyRoutes:
    """The routes of keys and owners. They need the scope `admin`; tickets need `read`."""

    def __init__(self, records: Records, bodies: BodyBudget, owner_deletion: OwnerDeletion) -> None:
        self._records = records
        self._owner_deletion = owner_deletion
        self._authentication = records.authentication
        self._bodies = bodies

    def table(self) -> list[Route]:
        return [
            route("GET", "/v1/admin/keys", self._list),
            route("POST", "/v1/admin/keys", self._create),
            route("GET", "/v1/admin/keys/{key_id}", self._show),
            route("DELETE", "/v1/admin/keys/{key_id}", self._revoke),
            route("POST", "/v1/admin/keys/{key_id}/rotate", self._rotate),
            route("PUT", "/v1/admin/keys/{key_id}/quota", self._limit),
            route("GET", "/v1/admin/owners/{owner}/quota", self._show_owner),
            route("PUT", "/v1/admin/owners/{owner}/quota", self._limit_owner),
            route("DELETE", "/v1/admin/owners/{owner}", self._delete_owner),
            route("POST", "/v1/tickets", self._issue_ticket),
        ]

    async def _list(self, request: Request) -> ASGIApp:
        self._require_admin(request)
        owner = request.query_params.get("owner")
        found = await self._query(lambda keys: keys.list(owner))
        return JsonAnswer(msgspec.json.encode({"object": "list", "data": [_key_json(key) for key in found]}))

    async def _create(self, request: Request) -> ASGIApp:
        self._require_admin(request)
        body = await self._read(request, _NewKeyBody)
        created = await self._query(
            lambda keys: keys.create(
                body.owner, name=body.name, scopes=body.scopes, lifetime_s=body.expires_in_s, quota=body.quota
            )
        )
        note("key.create", "done", request.scope, **what_is_noted(created.key))
        return await self._show_token(created, 201)

    async def _show(self, request: Request) -> ASGIApp:
        self._require_admin(request)
        key = await self._query(lambda keys: keys.get(request.path_params["key_id"]))
        return JsonAnswer(msgspec.json.encode(_key_json(key)))

    async def _revoke(self, request: Request) -> ASGIApp:
        self._require_admin(request)
        key = await self._query(lambda keys: keys.revoke(request.path_params["key_id"]))
        note("key.revoke", "done", request.scope, **what_is_noted(key))
        await self._records.apply_own_change()  # other servers read it within a second
        return JsonAnswer(msgspec.json.encode(_key_json(key)))

    async def _rotate(self, request: Request) -> ASGIApp:
        self._require_admin(request)
        body = await self._read(request, _RotateBody)
        created = await self._query(lambda keys: keys.rotate(request.path_params["key_id"], grace_s=body.grace_s))
        note("key.rotate", "done", request.scope, **what_is_noted(created.key))
        return await self._show_token(created, 200)

    async def _limit(self, request: Request) -> ASGIApp:
        self._require_admin(request)
        quota = await self._read(request, Quota)
        key = await self._query(lambda keys: keys.limit(request.path_params["key_id"], quota))
        note("key.limit", "done", request.scope, **what_is_noted(key))
        await self._records.apply_own_change()
        return JsonAnswer(msgspec.json.encode(_key_json(key)))

    async def _show_owner(self, request: Request) -> ASGIApp:
        self._require_admin(request)
        owner = request.path_params["owner"]
        return _owner_answer(owner, await self._query(lambda keys: keys.quota_of(owner)))

    async def _limit_owner(self, request: Request) -> ASGIApp:
        self._require_admin(request)
        owner, quota = request.path_params["owner"], await self._read(request, Quota)
        await self._query(lambda keys: keys.limit_owner(owner, quota))
        note("owner.limit", "done", request.scope, of_owner=owner)
        await self._records.apply_own_change()
        return _owner_answer(owner, quota)

    async def _delete_owner(self, request: Request) -> ASGIApp:
        self._require_admin(request)
        owner = request.path_params["owner"]
        if owner == owner_of(request.scope):
            raise RequestError("A key cannot delete its own owner. Use a key of another owner.")
        try:
            deleted = await self._owner_deletion.delete(owner)
        except ValueError as error:
            raise RequestError(str(error)) from None
        except ModelError as error:
            raise StorageError(error.message) from None
        note("owner.forget", "done", request.scope, of_owner=owner)
        return JsonAnswer(msgspec.json.encode({"object": "owner.forgotten", "owner": owner, "deleted": deleted}))

    async def _issue_ticket(self, request: Request) -> ASGIApp:
        principal = principal_of(request.scope)
        principal.require("read")
        body = await self._read(request, _TicketBody)
        if not is_stream_id(body.stream_id):  # other text could match other paths
            raise RequestError("stream_id: This is not the id of a stream.", param="stream_id")
        ticket = self._authentication.issue_ticket(principal, body.stream_id)
        note("ticket.give", "done", request.scope, stream=body.stream_id)
        encoded = msgspec.json.encode({"ticket": ticket, "expires_in_s": LIFETIME_S})
        return JsonAnswer(encoded, 201, {"cache-control": "no-store"})

    def _require_admin(self, request: Request) -> None:
        """Raises: Forbidden; RequestError without a key. The first key can only be created on the command line, so that
        nobody else can take over the server."""
        principal = principal_of(request.scope)
        if not principal.key_id:
            raise RequestError("There are no keys yet. Create one on the server: tailrace keys create --scope admin.")
        principal.require("admin")

    async def _show_token(self, created: NewKey, status: int) -> ASGIApp:
        """Answer with the token. No other answer has it."""
        await self._records.apply_own_change()
        body = msgspec.json.encode({**_key_json(created.key), "token": created.token})
        return JsonAnswer(body, status, {"cache-control": "no-store"})

    async def _read(self, request: Request, kind: type[T]) -> T:
        """Raises: RequestError."""
        require_plain_utf8(request.headers)
        with self._bodies.reader(request.scope, is_small=True) as reader:
            text = await reader.read(request.headers, request.receive)
        return read_fields(read_json(text or b"{}"), kind, strict=True)[0]

    async def _query(self, call: Callable[[KeyStore], _Result]) -> _Result:
        """Query the database in a thread. Raises: RequestError, UnknownKey, StorageError."""
        try:
            return await self._records.ask(self._records.keys, call)
        except ValueError as error:
            raise RequestError(str(error)) from None


def _key_json(key: Key) -> dict[str, Any]:  # Any: of each field's type
    """Return a key without its secrets."""
    return {
        "id": key.key_id,
        "object": "key",
        "owner": key.owner,
        "name": key.name,
        "scopes": key.scopes,
        "created_s": key.created_s,
        "expires_s": key.expires_s,
        "revoked_s": key.revoked_s,
        "old_secret_expires_s": key.old_expires_s,
        "quota": key.quota,
    }


def _owner_answer(owner: str, quota: Quota) -> ASGIApp:
    return JsonAnswer(msgspec.json.encode({"object": "owner", "owner": owner, "quota": quota}))
