"""docs/compatibility.md says what becomes of every field of every API. TAILRACE_REGENERATE=1 writes it anew.

The fields are those of the official clients where there is one, so that a new one shows up here; what becomes of them
is found out by parsing a body with and without each, not written down.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path

import msgspec
import pytest
from tests.compatibility import APIS, Api, Value
from tests.dialects.asking import FakeServer, asked
from tests.dialects.transcripts import facts

from tailrace.dialects import WIRES, StreamFacts
from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.wire import Call, Generate
from tailrace.engines.openvino import PARAMETERS
from tailrace.errors import UnsupportedParameter
from tailrace.types import Event, Sampling

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"
_EVERYWHERE = PARAMETERS | {"max_tokens", "seed", "stop", "include_stop", "n"}

HONOURED, SOMETIMES = "honoured", "honoured where the engine can, else refused"
REFUSED, IGNORED = "refused", "ignored, and named in `X-Tailrace-Ignored`"


@dataclass(frozen=True)
class _Server(FakeServer):
    """One that has a response to go on from."""

    def past(self, stream_id: str) -> tuple[StreamFacts, list[Event]]:
        said = [{"role": "user", "content": "Before."}]
        return replace(facts(), memo=msgspec.json.encode({"said": said})), []


def _parse(api: Api, body: JsonBody) -> Call:
    for wire in WIRES:
        for operation in wire.operations:
            if (operation.method, operation.path) == ("POST", api.path) and isinstance(operation.act, Generate):
                call = operation.act.parse(asked(body, server=_Server()))
                assert isinstance(call, Call)
                return call
    raise AssertionError(f"no wire has {api.path}")


def _with(body: JsonBody, name: str, value: Value) -> JsonBody:
    outer, _, inner = name.partition(".")
    return {**body, outer: _with(body.get(outer, {}), inner, value) if inner else value}


def verdict(api: Api, name: str) -> str:
    """What becomes of a field. Fails for one that is accepted and changes nothing."""
    companions = api.companions.get(name, {})
    base = {**api.base, **companions}
    try:
        call = _parse(api, _with(base, name, api.samples.get(name, {"asks": "for something"})))
    except UnsupportedParameter as error:
        return REFUSED if error.param in (name, name.rpartition(".")[2]) else f"refused as {error.param}"
    if name in call.ignored:
        return IGNORED
    without = _parse(api, base)
    assert (call.request, call.view, call.stream) != (without.request, without.view, without.stream), (
        f"{api.title}: {name} is accepted and changes nothing"
    )
    ours, theirs = call.request.sampling, without.request.sampling
    changed = {one.name for one in fields(Sampling) if getattr(ours, one.name) != getattr(theirs, one.name)}
    return HONOURED if changed <= _EVERYWHERE else SOMETIMES


def render() -> str:
    lines = ["# Compatibility", ""]
    lines += ["What becomes of every field of every API. Made from the code by", ""]
    lines += ["    TAILRACE_REGENERATE=1 pytest tests/test_compatibility.py", ""]
    lines += [
        "A field that is refused is answered with 400 (422 on TGI's routes) and its name. A field that nobody here"
    ]
    lines += [
        "knows is ignored, and named in the header `X-Tailrace-Ignored`; `--strict` refuses those, too. Nothing is"
    ]
    lines += ["accepted without effect. Whether the default engine can is what the table says; others can do more.", ""]
    for api in APIS:
        lines += [f"## {api.title}: `POST {api.path}`", "", "| field | |", "|---|---|"]
        lines += [f"| `{name}` | {verdict(api, name)} |" for name in api.fields]
        lines += [""]
    return "\n".join(lines)


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
def test_no_field_is_accepted_without_effect(api: Api) -> None:
    for name in api.fields:
        verdict(api, name)


def test_the_page_is_current() -> None:
    if os.environ.get("TAILRACE_REGENERATE"):
        PAGE.write_text(render())
    assert PAGE.read_text() == render()
