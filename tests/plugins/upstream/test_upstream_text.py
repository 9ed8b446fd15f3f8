"""Ids that contain text: nothing is lost in either direction, however the text is split."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.text import UNKNOWN, Detokenizer, StopMatcher
from tailrace.types import Infill, Message, Segment, TextSegment, ToolCall, num_tokens_of
from tailrace_plugins.upstream.upstream_text import (
    CHAT_ID,
    END_ID,
    ByteTokenizer,
    ChatBody,
    MessageEncoder,
    pack,
    unpack,
)

tokenizer = ByteTokenizer()
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(st.binary(max_size=60))
def test_bytes_are_ids_and_ids_are_bytes(text: bytes) -> None:
    ids = pack(text)
    assert unpack(ids) == text
    assert all(0 <= token_id < min(tokenizer.vocab_size, 2**53) for token_id in ids)
    assert not {CHAT_ID, END_ID}.intersection(ids)
    assert len(ids) == -(-len(text) // 6)


@example("", "0" * 19, "", 4)  # no room is left for what is before the gap
@given(st.text(max_size=400), st.text(max_size=400), st.text(max_size=400), st.integers(4, 200))
def test_an_infill_that_is_too_long_keeps_what_is_nearest_to_the_gap(
    before: str, after: str, other: str, room: int
) -> None:
    (segment,) = tokenizer.infill(Infill(before, after, (("a.py", other),)), bos=False, room=room)
    assert isinstance(segment, TextSegment)
    assert segment.num_tokens <= room
    assert f"{other}\n\n{before}".endswith(segment.text)
    assert after.startswith(segment.after)
    if len(before.encode()) + len(after.encode()) < 6 * room - 12:
        assert (segment.text[len(segment.text) - len(before) :], segment.after) == (before, after)


@given(st.integers(0, 2**50))
def test_an_id_is_at_most_one_piece(token_id: int) -> None:
    try:
        piece = unpack((token_id,))
    except ValueError:
        return
    assert pack(piece) == (token_id,)


@given(st.lists(texts, max_size=6))
def test_a_stream_shows_every_chunk_completely(chunks: list[str]) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(pack(chunk.encode())) for chunk in chunks] == chunks
    assert detokenizer.push((END_ID,)) == ""
    assert detokenizer.flush() == ""


@given(st.lists(texts, max_size=6))
def test_comparisons_ignore_cuts(chunks: list[str]) -> None:
    apart = [token_id for chunk in chunks for token_id in pack(chunk.encode())]
    together = pack("".join(chunks).encode())
    assert tokenizer.comparable([*apart, END_ID]) == tokenizer.comparable([*together, END_ID])


@given(texts)
def test_encoding(text: str) -> None:
    ids = tokenizer.encode(text, special=True, bos=True)
    assert b"".join(tokenizer.pieces[token_id] for token_id in ids).decode() == text
    assert tokenizer.at_least_tokens(text) == len(ids)


@given(texts, st.integers(1, 9))
def test_a_prompt_is_passed_on_as_text(text: str, num_tokens: int) -> None:
    prompt = tokenizer.segments(text, bos=True)
    assert "".join(one.text for one in prompt if isinstance(one, TextSegment)) == text
    assert num_tokens_of(prompt) == tokenizer.at_least_tokens(text)
    end = tokenizer.last_tokens(prompt, num_tokens)
    assert all(isinstance(one, TextSegment) and text.endswith(one.text) for one in end)
    assert num_tokens_of(end) <= num_tokens


@given(texts)
def test_offsets_cover_the_text(text: str) -> None:
    offsets = tokenizer.offsets(text)
    assert [token_id for token_id, _, _ in offsets] == tokenizer.encode(text, special=True)
    reached = 0
    for token_id, start, end in offsets:
        assert start in (reached, reached - 1)
        assert tokenizer.pieces[token_id] in text[start:end].encode()
        reached = end
    assert reached == len(text)


def test_a_stop_string_is_found_across_pieces() -> None:
    stops, detokenizer, shown = StopMatcher(("river",), False), Detokenizer(tokenizer), ""
    for token_id in (*pack(b"the old ri"), *pack(b"ver runs")):
        text, stop = stops.push(detokenizer.push((token_id,)))
        shown += text
        if stop is not None:
            break
    assert shown == "the old "


def test_ids_of_a_real_vocabulary_are_refused() -> None:
    with pytest.raises(RequestError, match="Send text"):
        tokenizer.pieces[4521]
    assert tokenizer.texts[4521] == ""
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("\ud83d", special=True)


def _chat(prompt: tuple[Segment, ...]) -> tuple[ChatBody, str]:
    chat, *beginning = prompt
    assert isinstance(chat, TextSegment)
    assert chat.is_chat
    return msgspec.json.decode(chat.text, type=ChatBody), "".join(
        one.text for one in beginning if isinstance(one, TextSegment) and not one.is_chat
    )


def test_a_chat_has_openais_format() -> None:
    call = ToolCall("c1", "look", '{"at": "🐕"}')
    messages = [
        Message("user", "Wie geht's?"),
        Message("assistant", "", (call,)),
        Message("tool", "fine", tool_call_id="c1"),
    ]
    tools = [{"type": "function", "function": {"name": "look"}}]
    encoder = MessageEncoder(continues=False)
    assert encoder.calls is UNKNOWN
    chat, beginning = _chat(encoder.encode(messages, tools=tools))
    assert (chat.tools, beginning) == (tools, "")
    function = {"name": "look", "arguments": '{"at": "🐕"}'}
    assert chat.messages == [
        {"role": "user", "content": "Wie geht's?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "content": "fine", "tool_call_id": "c1"},
    ]


def test_a_message_that_can_be_continued_is_left_open() -> None:
    messages = [Message("user", "Hi"), Message("assistant", "Hel")]
    chat, beginning = _chat(MessageEncoder(continues=True).encode(messages, continue_final=True))
    assert (chat.messages, beginning) == ([{"role": "user", "content": "Hi"}], "Hel")
    with pytest.raises(UnsupportedParameter):
        MessageEncoder(continues=False).encode(messages, continue_final=True)
    with pytest.raises(UnsupportedParameter):
        MessageEncoder(continues=True).offsets(messages)
    with pytest.raises(RequestError, match="surrogate"):
        MessageEncoder(continues=True).encode([Message("user", "\ud83d")])
