"""docs/compatibility.md states the effect of every field of every API. TAILRACE_REGENERATE=1 generates the page.

The fields come from the official clients if there are any, so that new fields show up here. The effect of a field is
the difference between a request parsed with the field and without it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec
import pytest
from starlette.datastructures import QueryParams
from tests.compatibility import APIS
from tests.described_api import ANY, Api, Value, fields_of
from tests.dialects.fake_server import FakeServer, parsed
from tests.dialects.transcripts import facts
from tests.generated import REGENERATE

from tailrace.dialects import GenerateCall, StreamFacts, Wire, websocket
from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.shapes import path_of
from tailrace.dialects.wire import Follow, Generate, MakeVectors, OnStream, Operation, Reply, Show, VectorCall
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.http.wires import ServedWires, is_meant
from tailrace.types import SHAPING, End, Event, GenerateRequest, Sampling, Usage
from tailrace_plugins.openvino.openvino_engine import PARAMETERS

WIRES = ServedWires().all
PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"
_EVERYWHERE = PARAMETERS | {"max_tokens", "seed", "stop", "include_stop", "single_call", "n", "max_reasoning_tokens",
                            "include_special"}  # fmt: skip
_UNKNOWN = "nobody_knows"

HONOURED, REFUSED, IGNORED = "honoured", "refused", "ignored, and named"
_ORDER = (HONOURED, REFUSED, IGNORED, "")


@dataclass(frozen=True)
class _Server(FakeServer):
    """A server with a stored response that `previous_response_id` can continue."""

    def past(self, stream_id: str) -> tuple[StreamFacts, list[Event]]:
        said = [{"role": "user", "content": "Before."}]
        return facts(memo=msgspec.json.encode({"said": said})), [End("done", Usage(1, 1))]

    def count_tokens(self, request: GenerateRequest) -> int:
        return crc32(repr(request).encode())  # another number for another prompt


class _Meant(NamedTuple):
    """The result of parsing a request. It is equal for requests with the same meaning."""

    told: object
    request: GenerateRequest | None
    ignored: tuple[str, ...] = ()  # paths


def _meant(api: Api, given: JsonBody) -> _Meant:
    """Raises: RequestError."""
    given = {name: value for name, value in given.items() if value is not None}
    if api.door.startswith("create "):
        command = websocket.parse_create({"type": "create", **given}, _Server())
        return _Meant(command, command.request)
    query = given if api.in_query else {}
    _, operation = _door(api, query)
    wanted = parsed(
        {} if api.in_query else api.form(given),
        query=query,
        path={"model": "scripted", "stream_id": "a", "response_id": "resp_a", "chat": "c"},
        headers={"accept": "text/event-stream"},
        server=_Server(),
    )
    wanted = replace(wanted, others=(_Server(model="other"),))
    known = [name.rstrip("!") for name in operation.query]
    unknown = tuple(name for name in query if name not in known)  # which the routes name, whatever the act
    match operation.act:
        case Generate(parse):
            call = parse(wanted)
            if isinstance(call, GenerateCall):
                told = (call.request, call.view, call.stream, call.at_once)
                return _Meant(told, call.request, (*map(path_of, call.ignored), *unknown))
            if isinstance(call, Reply):
                return _Meant(replace(call, ignored=()), None, (*map(path_of, call.ignored), *unknown))
            return _Meant(call, None, unknown)
        case MakeVectors(parse_vectors):
            vectors = parse_vectors(wanted)
            assert isinstance(vectors, VectorCall)
            return _Meant((vectors.request, vectors.view), None, (*map(path_of, vectors.ignored), *unknown))
        case Follow(parse_following, topic):
            named = topic(wanted) if topic is not None else None
            newest = facts(memo=b'{"question": "q"}')
            return _Meant((named, parse_following(replace(wanted, newest=newest))), None, unknown)
        case OnStream(find):
            return _Meant(find(wanted), None, unknown)
        case Show(render):
            reply = render(wanted)
            return _Meant(replace(reply, ignored=()), None, (*map(path_of, reply.ignored), *unknown))


def _operations(api: Api) -> list[tuple[Wire, Operation]]:
    """Return the operations of the API's route that take a body, or a query if `in_query`."""
    return [
        (wire, operation)
        for wire in WIRES
        for operation in wire.operations
        if f"{operation.method} {operation.path}" == api.door
        and (operation.body is None) == api.in_query
        and (operation.only_with_header or "") in (api.headers or {"": ""})
    ]


def _door(api: Api, query: JsonBody) -> tuple[Wire, Operation]:
    """Return the operation that the server would choose for this request."""
    found = sorted(_operations(api), key=lambda entry: not entry[1].is_conditional)
    return next(entry for entry in found if is_meant(entry[1], QueryParams(query), api.headers))


def _with(body: JsonBody, name: str, value: Value) -> JsonBody:
    outer, _, inner = name.partition(".")
    if outer.endswith("[]"):
        first, *others = body[outer[:-2]]
        return {**body, outer[:-2]: [_with(first, inner, value), *others]}
    return {**body, outer: _with(body.get(outer, {}), inner, value) if inner else value}


def _refusal(api: Api, name: str, error: RequestError) -> str:
    """Return status and code of an error, in the shape of its wire."""
    # Anything else than this is a sample that makes no sense, unless somebody chose it.
    assert isinstance(error, UnsupportedParameter) or name in api.samples, (
        f"{api.door} refuses {name}: {error.message} tests/compatibility.py needs a sample of {name} that is valid."
    )
    inner = name.rpartition(".")[2]
    assert error.param in (name, inner), f"{api.door}: {name} is refused as {error.param}"
    if api.door.startswith("create "):
        told = json.loads(websocket.encode_refusal(None, error))
        return f"a frame `{told['type']}`, `{told['error']['code']}`"
    wire, _ = _door(api, api.base if api.in_query else {})
    status, body = wire.encode_error(error)
    assert inner in body.decode(), f"{api.door}: the refusal does not name {name}"
    told = json.loads(body)
    shaped = told["error"] if isinstance(told["error"], dict) else told
    kind = shaped.get("code") or shaped.get("error_type") or shaped.get("type")
    return f"{status} `{kind}`" if kind else str(status)


@cache
def _verdicts(door: int) -> dict[str, str]:
    api = APIS[door]
    return {name: verdict(api, name) for name in sorted({*api.fields, ANY}, key=_place)}


def verdict(api: Api, shown: str) -> str:
    """Return the effect of a field. Fails if the field is accepted without an effect, except for those in `moot`."""
    name = shown.replace(ANY, _UNKNOWN)
    reason = api.moot.get(shown) or (None if name in api.base else api.moot.get(ANY))
    base = {**api.base, **api.companions.get(name, {})}
    try:
        meant = _meant(api, _with(base, name, api.samples.get(name, "something")))
    except RequestError as error:
        return f"{REFUSED}: {_refusal(api, name, error)}"
    if name in meant.ignored:
        return IGNORED
    try:
        without = _meant(api, base)
    except RequestError:
        assert None in api.companions[name].values(), f"{api.door}: the body without {name} is wrong"
        return HONOURED  # nothing goes without it
    if meant.told == without.told:
        assert reason, f"{api.door}: {name} is accepted and changes nothing"
        return f"without effect: {reason}"
    assert shown not in api.moot, f"{api.door}: {name} does change something"
    if meant.request is None or without.request is None:
        return HONOURED
    ours, theirs = meant.request.sampling, without.request.sampling
    changed = {name for name in Sampling.__struct_fields__ if getattr(ours, name) != getattr(theirs, name)}
    if changed <= _EVERYWHERE:
        return HONOURED
    if changed <= _EVERYWHERE | SHAPING:
        return f"{HONOURED} where the engine can, else {IGNORED}"
    unable = UnsupportedParameter(f"The engine has no {name}.", param=name)
    return f"{HONOURED} where the engine can, else refused: {_refusal(api, name, unable)}"


def _place(name: str) -> tuple[bool, str]:
    return name.endswith(ANY), name


def _shown(name: str) -> str:
    if name == ANY:
        return "any other"
    return f"any other of `{name[:-2]}`" if name.endswith(ANY) else f"`{name}`"


_INTRODUCTION = """# Compatibility

The effect of every field of every API. Made from the code by

    TAILRACE_REGENERATE=1 pytest tests/test_compatibility.py

- **honoured**: the field works with the default engine; [engines.md](engines.md#what-a-request-may-ask) has the others.
  *Where the engine can*: the default engine does not support the field, others may.
- **refused**: without the field the answer would be wrong, and the client could not know
  ([the rule](decisions/take-what-clients-send.md)). The table has the status, and the code or type of the error if the
  wire's errors have one (errors of Ollama and Triton are a sentence). The error names the field. A value that asks for
  nothing is not refused, because some clients send one by default.
- **ignored, and named**: the field has no effect, and the answer lists it in the header `X-Tailrace-Ignored`.
  `--strict` refuses it. `tools` are ignored if the model may choose whether to call one and its chat template does not
  support tools ([why](wires/openai.md#tools)).
- **without effect**: the field has no effect, for the given reason. No other field is silently accepted.
"""


def render() -> str:
    parts = [_INTRODUCTION]
    for title, doors in groupby(range(len(APIS)), key=lambda door: APIS[door].title):
        parts += [f"## {title}", ""]
        alike: dict[str, list[Api]] = {}
        for door in doors:
            alike.setdefault(_table(_verdicts(door)), []).append(APIS[door])
        for table, apis in alike.items():
            parts += [_heading(apis), "", table, ""]
    return "\n".join(parts)


@cache
def page() -> str:
    """Return the page; with TAILRACE_REGENERATE, generate it first."""
    if os.environ.get("TAILRACE_REGENERATE"):
        PAGE.write_text(render())
    return PAGE.read_text()


def _heading(apis: Sequence[Api]) -> str:
    """Return the routes of the APIs, and where their fields are."""
    doors = list(dict.fromkeys(f"`{door}`" for api in apis for door in _doors(api)))
    notes = list(dict.fromkeys(api.note for api in apis if api.note))
    if any(api.in_query for api in apis):
        notes.append("in the query")
    return ", ".join(doors) + (f"; {', or '.join(notes)}" if notes else "") + ":"


def _doors(api: Api) -> list[str]:
    """Return all routes with the same operation."""
    acts = [operation.act for _, operation in _operations(api)]
    same = [one for wire in WIRES for one in wire.operations if one.act in acts]
    return [f"{operation.method} {operation.path}" for operation in same] or [api.door]


def _table(verdicts: dict[str, str]) -> str:
    lines = ["| what becomes of it | fields |", "|---|---|"]
    for kind in sorted(set(verdicts.values()), key=_rank):
        names = [_shown(name) for name, one in verdicts.items() if one == kind]
        lines += [f"| {kind} | {', '.join(names)} |"]
    return "\n".join(lines)


def _rank(kind: str) -> tuple[int, str]:
    return next(place for place, word in enumerate(_ORDER) if kind.startswith(word)), kind


@pytest.mark.parametrize("door", range(len(APIS)), ids=lambda door: f"{APIS[door].door} {APIS[door].note}")
def test_no_field_is_accepted_without_effect(door: int) -> None:
    assert _verdicts(door)


def test_every_operation_that_takes_fields_has_its_entry() -> None:
    described = [operation.act for api in APIS for _, operation in _operations(api)]
    for wire in WIRES:
        for operation in wire.operations:
            if isinstance(operation.act, Generate) or operation.body is not None or operation.query:
                door = f"{operation.method} {operation.path}"
                assert operation.act in described, f"{wire.name}: tests/compatibility.py does not know {door}"
                assert f"`{door}`" in page(), f"{wire.name}: {door} is not in {PAGE.name}"


def test_every_field_of_a_body_has_its_entry() -> None:
    for api in APIS:
        for _, operation in _operations(api):
            known = fields_of(operation.body) if operation.body is not None else set(operation.query)
            listed = {part for name in api.fields for part in (name, name.partition(".")[0])}
            missing = {name.rstrip("!") for name in known} - listed
            missing -= {"inputs", "parameters"} if api.note else set()  # what holds the fields
            assert not missing, f"{api.door}: {sorted(missing)}"


def test_the_page_is_current() -> None:
    assert page() == render(), REGENERATE.format(test="test_compatibility.py")
