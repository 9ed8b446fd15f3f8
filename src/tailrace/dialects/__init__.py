"""Dialects: one file a wire, each a pure translation between its bytes and our vocabulary.

The room's law: no await, no clock, no state shared between streams. A wire is a table of operations (`wire.py`):
`parse` turns what was asked into a `Call`, the call's `View` opens an encoder for one stream, and the encoder turns
events into bytes. What a wire must look like stands in the tests' golden files. A wire is served when it stands in
`WIRES`.
"""

from __future__ import annotations

from tailrace.dialects import anthropic, cumulative, native, ollama, openai, plain, responses, tgi, triton
from tailrace.dialects.wire import Asked, Call, Encoder, ServerFacts, StreamFacts, View, Vocabulary, Wire

__all__ = ["WIRES", "Asked", "Call", "Encoder", "ServerFacts", "StreamFacts", "View", "Vocabulary", "Wire"]

# The first is the house's own: it answers where no other wire is meant.
WIRES: tuple[Wire, ...] = (
    native.WIRE,
    openai.WIRE,
    responses.WIRE,
    plain.WIRE,
    cumulative.WIRE,
    tgi.WIRE,
    anthropic.WIRE,
    ollama.WIRE,
    triton.WIRE,
)
