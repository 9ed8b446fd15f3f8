"""Frames are read as they were written, however the bytes are split, and anything else is refused."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.engines.interface import Capabilities, Delta, Sequence
from tailrace.engines.protocol import (
    PROTOCOL_VERSION,
    Abort,
    EngineSpec,
    Fatal,
    Frame,
    FromWorker,
    Ready,
    Start,
    Submit,
    ToWorker,
    decode_from_worker,
    decode_to_worker,
    encode,
)
from tailrace.system.frames import MAX_FRAME_BYTES, FrameBuffer
from tailrace.types import Sampling

_SPEC = EngineSpec(
    engine="openvino",
    path="/models/ä.gguf",
    context_tokens=4096,
    kv_tokens=8192,
    max_sequences=3,
    max_step_tokens=17,
    threads=2,
    eos_token_ids=(2, 7),
    cache_path="/cache",
    exact=True,
    options={"tokens_per_s": 12.5},
)
_SAMPLING = Sampling(
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    seed=2**64 - 1,
    max_tokens=99,
    stop=("\n\n", "ende 🌊"),
    include_stop=True,
    ignore_eos=True,
    logprobs=True,
    n=2,
)
_CAPABILITIES = Capabilities("engine 1.2", 4096, 8192, 32, 3, frozenset({"seed", "top_p"}), True)
_DELTAS = [
    Delta(1, 0, (5, 128_000), (-0.25, -1e-30)),
    Delta(2**63, 41, (), (), "error", "it broke: ä"),
    Delta(3, 7, (0,), (), "length"),
]


@pytest.mark.parametrize(
    "message",
    [Start(PROTOCOL_VERSION, 3, _SPEC), Submit(Sequence(2**63, ((0, 5, 2**31),), _SAMPLING)), Abort(2**63)],
    ids=lambda message: type(message).__name__,
)
def test_work_round_trips(message: ToWorker) -> None:
    (body,) = FrameBuffer().feed(encode(message))
    assert decode_to_worker(body) == message


@pytest.mark.parametrize(
    "message",
    [Ready(PROTOCOL_VERSION, 3, _CAPABILITIES), Frame(3, 2**40, _DELTAS), Frame(1, 1, []), Fatal("it broke: ä\n")],
    ids=lambda message: type(message).__name__,
)
def test_answers_round_trip(message: FromWorker) -> None:
    (body,) = FrameBuffer().feed(encode(message))
    decoded = decode_from_worker(body)
    assert decoded == message
    assert type(decoded) is type(message)


def test_messages_keep_their_types() -> None:
    (body,) = FrameBuffer().feed(encode(Frame(3, 4, _DELTAS)))
    decoded = decode_from_worker(body)
    assert isinstance(decoded, Frame)
    assert [type(delta) for delta in decoded.deltas] == [Delta] * 3
    assert isinstance(decoded.deltas[0].token_ids, tuple), "deltas are hashed and compared"


def test_each_end_refuses_its_own_messages() -> None:
    (work,) = FrameBuffer().feed(encode(Abort(1)))
    (answer,) = FrameBuffer().feed(encode(Fatal("")))
    with pytest.raises(msgspec.DecodeError):
        decode_from_worker(work)
    with pytest.raises(msgspec.DecodeError):
        decode_to_worker(answer)


_bodies = st.lists(st.binary(max_size=40), max_size=8)


@given(_bodies, st.data())
def test_any_chunking_gives_the_same_bodies(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
    buffer, got, start = FrameBuffer(), [], 0
    while start < len(stream):
        length = data.draw(st.integers(1, len(stream) - start))
        got += buffer.feed(stream[start : start + length])
        start += length
    assert got == bodies


@given(_bodies, st.binary(min_size=1, max_size=3))
def test_bodies_do_not_wait_for_the_next_one(bodies: list[bytes], rest: bytes) -> None:
    buffer = FrameBuffer()
    stream = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
    assert buffer.feed(stream + rest) == bodies
    assert buffer.feed(b"") == []


@given(st.integers(MAX_FRAME_BYTES + 1, 2**32 - 1), st.binary(max_size=8), st.integers(1, 4))
def test_absurd_lengths_are_refused(length: int, rest: bytes, cut: int) -> None:
    buffer = FrameBuffer()
    stream = struct.pack("<I", length) + rest
    if cut < 4:
        assert buffer.feed(stream[:cut]) == []
        stream = stream[cut:]
    with pytest.raises(ValueError, match=f"a frame of {length} bytes"):
        buffer.feed(stream)


@given(st.binary(max_size=60))
def test_garbage_is_refused_or_a_message(body: bytes) -> None:
    for decode in (decode_from_worker, decode_to_worker):
        try:
            message = decode(body)
        except (msgspec.DecodeError, ValueError):
            continue
        assert isinstance(message, ToWorker | FromWorker)


_LIES = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    msgspec.msgpack.encode(None),
    msgspec.msgpack.encode(["nobody", 1]),
    msgspec.msgpack.encode(["frame"]),
    msgspec.msgpack.encode(["frame", 1, 1, [[1, 0, "ids"]]]),
    msgspec.msgpack.encode(["frame", 1, 1, [[1, 0, [1], [], "bored"]]]),
    msgspec.msgpack.encode(["ready", 1, 1, {"engine": "x"}]),
    encode(Fatal("two"))[4:] + b"\x00",
]


@pytest.mark.parametrize("body", _LIES)
def test_wrong_lengths_are_refused(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_from_worker(body)
