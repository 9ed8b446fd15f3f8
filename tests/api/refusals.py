"""The operations that get bad input, and what holds for every refusal.

The operations are those of the wires' tables, so a new operation gets all bad input, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from msgspec import inspect
from tests.api.process import Server
from tests.http.wire import Wire as Connection
from tests.http.wire import as_json

from tailrace.dialects import Wire, native
from tailrace.dialects.wire import Generate, MakeVectors, Operation
from tailrace.errors import RequestError, UnsupportedOperation
from tailrace.http.wires import ServedWires
from tailrace_plugins.tgi import tgi_wire as tgi

__all__ = [
    "BODIES", "CANARY", "CHAT", "EVERYTHING", "GENERATING", "LIMITS", "NATIVE", "NATIVE_SHAPE", "NOWHERE", "PLAIN",
    "TEXT", "TGI_SHAPE", "Endpoint", "Names", "Refusal", "ask", "expected_status", "in_turns", "named", "refusal_in",
    "refused", "with_each",
]  # fmt: skip

CANARY = "kanarie7f3a"
_MAX_ERROR_BYTES = 1000
_NAMES = {
    "chat": "chat-1",
    "stream_id": "x",
    "response_id": "x",
    "name": "scripted",
    "model": "scripted",
    "version": "1",
    "digest": "sha256:0",
}  # of what stands in paths
LIMITS = re.compile(r"max_[a-z_]*tokens|num_predict|n_predict")  # names of max_tokens

Names = dict[str, "Names"]
Json = Any  # Any: of JSON


def _names_in(value: object) -> Names:
    return {name: _names_in(inner) for name, inner in value.items()} if isinstance(value, dict) else {}


def _shape_of(wire: Wire) -> Names:
    """Return the names of the fields in a wire's refusals."""
    _, body = wire.encode_error(RequestError("why", param="where"))
    return _names_in(json.loads(body))


def _short(value: Json) -> Json:
    """Return an example with a short answer."""
    if isinstance(value, dict):
        return {name: 1 if LIMITS.fullmatch(name) else _short(inner) for name, inner in value.items()}
    return [_short(inner) for inner in value] if isinstance(value, list) else value


def _strings(value: Json, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _strings(inner, (*path, name))


def _fields(shape: type[msgspec.Struct], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of a body's fields, including nested ones."""
    found = inspect.type_info(shape)
    assert isinstance(found, inspect.StructType)
    for one in found.fields:
        yield (*path, one.encode_name)
        kinds = one.type.types if isinstance(one.type, inspect.UnionType) else (one.type,)
        for kind in kinds:
            if isinstance(kind, inspect.StructType):
                yield from _fields(kind.cls, (*path, one.encode_name))


@dataclass(frozen=True)
class Endpoint:
    """One operation of one wire."""

    wire: Wire
    operation: Operation

    @property
    def name(self) -> str:
        return f"{self.operation.method} {self.operation.path}{'?' if self.operation.is_conditional else ''}"

    @property
    def path(self) -> str:
        """Return the path with a value for each parameter."""
        path = re.sub(r"\{([a-z_]+)(:path)?\}", lambda match: _NAMES[match[1]], self.operation.path)
        given = [f"{name[:-1]}=Hello" for name in self.operation.query if name.endswith("!")]
        if self.operation.only_with and "=" in self.operation.only_with:
            given = [self.operation.only_with]
        given += ["max_tokens=1"] if "max_tokens" in self.operation.query else []
        return path + ("?" + "&".join(given) if given else "")

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that distinguish it from other operations on its path."""
        return {self.operation.only_with_header: "1"} if self.operation.only_with_header else {}

    @property
    def served(self) -> tuple[int, ...]:
        """Return the statuses of a valid request. The scripted model makes no vectors."""
        if isinstance(self.operation.act, MakeVectors):
            return (self.wire.encode_error(UnsupportedOperation("why"))[0],)
        return (200, 201)

    @property
    def shape(self) -> Names:
        return _shape_of(self.wire)

    @property
    def good(self) -> Json:
        """Return a body that is answered quickly; None for an operation without a body."""
        if self.operation.body is None:
            return None
        assert self.operation.example is not None, f"{self.name} has no example"
        return _short(deepcopy(self.operation.example))

    @property
    def prompt_path(self) -> tuple[str | int, ...]:
        """Return the path of the prompt: the longest text of the example, or the first field if it has no text."""
        first = (next(iter(self.good)),)
        return max(_strings(self.good), key=lambda found: len(found[1]), default=(first, ""))[0]

    @property
    def fields(self) -> list[tuple[str, ...]]:
        return list(_fields(self.operation.body)) if self.operation.body is not None else []

    def with_at(self, path: tuple[str | int, ...], value: Json) -> Json:
        body = self.good
        inner = body
        for name in path[:-1]:
            if isinstance(inner, dict) and not isinstance(inner.get(name), dict | list):
                inner[name] = {}
            inner = inner[name]
        inner[path[-1]] = value
        return body

    def with_prompt(self, text: Json) -> Json:
        return self.with_at(self.prompt_path, text)

    def with_parameter(self, name: str, value: Json) -> Json:
        """Return a body with a sampling parameter at the place that this wire has for it."""
        return self.with_at(("parameters", name) if self.wire is tgi.WIRE else (name,), value)


WIRES = ServedWires().all
EVERYTHING = tuple(Endpoint(wire, operation) for wire in WIRES for operation in wire.operations)
BODIES = tuple(one for one in EVERYTHING if one.operation.body is not None)
GENERATING = tuple(one for one in BODIES if isinstance(one.operation.act, Generate))
NATIVE_SHAPE, TGI_SHAPE = _shape_of(native.WIRE), _shape_of(tgi.WIRE)
NOWHERE = NATIVE_SHAPE  # of what no wire has


def with_each(endpoints: Sequence[Endpoint]) -> pytest.MarkDecorator:
    """Run a test with one endpoint of each wire; with the others it is deep, because a wire reads all bodies alike."""
    first = _first_of_wires(endpoints)
    return pytest.mark.parametrize(
        "endpoint",
        [pytest.param(one, id=one.name, marks=() if one in first else pytest.mark.deep) for one in endpoints],
    )


def in_turns(name: str, cases: Collection[object]) -> pytest.MarkDecorator:
    """Run a test with each endpoint that takes a body, and with each case. All wires check their bodies
    with the same code: in `make test`, a wire gets every third case, and the wires take turns."""
    first = _first_of_wires(BODIES)
    return pytest.mark.parametrize(
        ("endpoint", name),
        [
            pytest.param(
                one,
                case,
                id=f"{one.name}-{case}",
                marks=() if one in first and (first.index(one) + number) % 3 == 0 else pytest.mark.deep,
            )
            for one in BODIES
            for number, case in enumerate(cases)
        ],
    )


def _first_of_wires(endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    return list({endpoint.wire.name: endpoint for endpoint in reversed(endpoints)}.values())


def named(name: str) -> Endpoint:
    (found,) = (one for one in EVERYTHING if one.name == name)
    return found


NATIVE, CHAT, TEXT = named("POST /v1/streams"), named("POST /v1/chat/completions"), named("POST /v1/completions")
PLAIN = named("POST /?")


@dataclass(frozen=True)
class Refusal:
    status: int
    message: str
    code: str | None  # or TGI's error_type
    param: str | None
    headers: dict[str, str]


def refused(wire: Connection, *shapes: Names) -> Refusal:
    """Read an answer, and check what holds for every refusal in one of these shapes."""
    wire.head()
    return refusal_in(wire, *shapes)


def refusal_in(wire: Connection, *shapes: Names) -> Refusal:
    """Check a refusal like `refused`, after the head was read."""
    status, body = wire.status, wire.body()
    assert 400 <= status < 500, (status, body)
    assert wire.headers["content-type"] == "application/json"
    assert wire.headers["content-length"] == str(len(body))
    assert wire.headers["x-request-id"]
    assert len(body) < _MAX_ERROR_BYTES
    assert CANARY.encode() not in body
    assert CANARY not in repr(wire.headers)
    found = as_json(body)
    assert _names_in(found) in shapes, found
    error = found["error"]
    if isinstance(error, str):
        assert error
        return Refusal(status, error, found.get("error_type"), None, wire.headers)
    assert error["message"]
    return Refusal(status, error["message"], error.get("code"), error.get("param"), wire.headers)


def ask(
    server: Server,
    endpoint: Endpoint,
    body: object = None,
    headers: dict[str, str] | None = None,
    path: str = "",
) -> Refusal:
    """Send a request, and expect a refusal. Then the connection must serve a valid request."""
    with server.wire() as wire:
        wire.send(endpoint.operation.method, path or endpoint.path, body, endpoint.headers | (headers or {}))
        refusal = refused(wire, endpoint.shape)
        if refusal.headers.get("connection") == "close":
            assert wire.is_closed()
            return refusal
        wire.send(endpoint.operation.method, endpoint.path, endpoint.good, endpoint.headers)
        assert wire.head() in endpoint.served
        wire.body()
    return refusal


def expected_status(endpoint: Endpoint, kind: type[RequestError] = RequestError) -> int:
    """Return the status of an error on this wire."""
    return endpoint.wire.encode_error(kind("why"))[0]
