"""Fields of an API that this server does not use are ignored and named, or refused by name; their neutral values are
neither."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.dialects.fake_server import parsed

from tailrace.dialects import Wire
from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.shapes import Unused
from tailrace.dialects.wire import Generate, GenerateCall, MakeVectors, VectorCall
from tailrace.errors import UnsupportedParameter
from tailrace.http.wires import ServedWires

WIRES = ServedWires().all
# One body for each wire with a table.
_BODIES: dict[str, JsonBody] = {
    "native": {"prompt": "Hi"},
    "openai": {"messages": [{"role": "user", "content": "Hi"}]},
    "responses": {"input": "Hi"},
    "cumulative": {"prompt": "Hi"},
    "tgi": {"inputs": "Hi", "parameters": {}},
    "anthropic": {"model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]},
    "ollama": {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]},
    "llama-server": {"input_prefix": "a", "input_suffix": "z"},
    "tei": {"inputs": "Hi"},
    "triton": {"text_input": "Hi"},
    "ai_sdk": {"id": "c", "messages": [{"role": "user", "parts": [{"type": "text", "text": "Hi"}]}]},
    "ag_ui": {"threadId": "t", "runId": "r", "messages": [{"role": "user", "content": "Hi"}]},
}


def _tables() -> Iterator[tuple[Wire, str, Unused]]:
    for wire in WIRES:
        for name, unused in wire.unused.items():
            yield wire, name, unused


def _call(wire: Wire, name: str, value: object) -> GenerateCall | VectorCall:
    body, (outer, _, inner) = _BODIES[wire.name], name.partition(".")
    body = {**body, outer: {**body.get(outer, {}), inner: value} if inner else value}
    acts = (operation.act for operation in wire.operations if operation.body is not None)
    act = next(act for act in acts if isinstance(act, Generate | MakeVectors))
    call = act.parse(parsed(body, path={"model": "scripted"}))
    assert isinstance(call, GenerateCall | VectorCall)
    return call


@pytest.mark.parametrize(
    ("wire", "name", "unused"), list(_tables()), ids=lambda one: getattr(one, "name", str(one)[:30])
)
def test_each_field_of_each_table(wire: Wire, name: str, unused: Unused) -> None:
    plain = _call(wire, name, None)
    assert not plain.ignored
    for harmless in unused.neutral:
        assert _call(wire, name, harmless) == plain
    if unused.is_refused:
        with pytest.raises(UnsupportedParameter) as caught:
            _call(wire, name, {"anything": "else"})
        assert caught.value.param == name
    else:
        assert _call(wire, name, {"anything": "else"}).ignored == (name,)
