"""`/v1/usage`: requests and tokens by key, owner, model, wire and day."""

from __future__ import annotations

import csv
import io
import time
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tailrace.access.principal import principal_of
from tailrace.access.quotas import month_start
from tailrace.api.routes import route
from tailrace.errors import RequestError
from tailrace.http.asgi_answers import JsonAnswer
from tailrace.records.records_service import Records

__all__ = ["UsageRoutes"]

_PARAMETERS = ("by", "owner", "key", "since", "until", "format")


class UsageRoutes:
    """The route. A key with the scope `read` sees the usage of its owner, a key with `admin` that of all owners."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def table(self) -> list[Route]:
        return [route("GET", "/v1/usage", self._show)]

    async def _show(self, request: Request) -> ASGIApp:
        """Show sums of whole days in UTC, grouped by `by`. Raises: RequestError, Forbidden, StorageError."""
        principal, query = principal_of(request.scope), request.query_params
        unknown = next((name for name in query if name not in (*_PARAMETERS, "ticket")), None)
        if unknown is not None:
            raise RequestError(
                f"The query has an unknown parameter. Allowed are {', '.join(_PARAMETERS)}.", param="query"
            )
        is_admin = principal.scopes is None or "admin" in principal.scopes
        if not is_admin:
            principal.require("read")
        owner = query.get("owner") if is_admin else principal.owner
        if not is_admin and query.get("owner", owner) != owner:
            raise RequestError("A key without the scope admin sees only the usage of its own owner.", param="owner")
        for name in ("owner", "key"):
            if "\0" in query.get(name, ""):
                raise RequestError(f"{name} must not contain NUL characters.", param=name)
        since_s = _moment("since", query.get("since"))
        until_s = _moment("until", query.get("until"))
        form = query.get("format", "json")
        if form not in ("json", "csv"):
            raise RequestError("format must be json or csv.", param="format")
        by = _groups(query.get("by", "owner"))
        rows = []
        if not self._records.is_absent():  # opening it would create it, and the server would record requests
            found = await self._records.ask(
                self._records.requests,
                lambda store: store.usage(
                    by=by,
                    owner=owner,
                    key_id=query.get("key"),
                    since_s=month_start(time.time()) if since_s is None else since_s,
                    until_s=until_s,
                ),
            )
            rows = [msgspec.to_builtins(one) for one in found]
        if form == "csv":
            return Response(_csv(rows), media_type="text/csv; charset=utf-8")
        return JsonAnswer(msgspec.json.encode({"object": "list", "data": rows}))


def _groups(text: str) -> list[str]:
    """Raises: RequestError."""
    from tailrace.records.request_store import GROUPS

    names = ["key_id" if name == "key" else name for name in text.split(",") if name]
    if any(name not in GROUPS for name in names) or len(set(names)) != len(names):
        raise RequestError("by must be a list of owner, key, model, wire and day, separated by commas.", param="by")
    return names


def _moment(name: str, text: str | None) -> float | None:
    """Parse seconds since the epoch, or ISO 8601. Raises: RequestError."""
    if not text:
        return None
    try:
        if text.isascii() and text.isdigit():
            return float(datetime.fromtimestamp(int(text), UTC).timestamp())
        moment = datetime.fromisoformat(text.replace(" ", "+"))  # an unencoded + arrives as a space
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, OSError):
        raise RequestError(
            f"{name} must be a date such as 2026-11-01, or seconds since the epoch.", param=name
        ) from None


def _csv(rows: list[dict[str, Any]]) -> str:  # Any: text and numbers
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
