"""Dialects: one file a wire, each a pure translation between its bytes and our vocabulary.

The room's law: no await, no clock, no state shared between streams. `parse` turns a body into a `Call`, the call's
`View` opens an encoder for one stream, and the encoder turns events into bytes. What a wire must look like stands in
the tests' golden files.
"""

from __future__ import annotations

from tailrace.dialects.wire import Call, Dialect, Encoder, StreamFacts, View, Vocabulary

__all__ = ["Call", "Dialect", "Encoder", "StreamFacts", "View", "Vocabulary"]
