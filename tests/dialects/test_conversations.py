"""The field `conversation` on the wires that have it: the prompt, and the kept turn."""

from __future__ import annotations

import msgspec
import pytest
from tests.dialects.fake_server import parsed

from tailrace.conversations.items import BranchPoint, Item
from tailrace.conversations.turns import Turn, read_turn
from tailrace.dialects import openai
from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.conversations import branch_point_of
from tailrace.errors import RequestError
from tailrace.types import GenerateRequest, Message
from tailrace_outer.responses import responses_wire

_HI = Item(item_id="a", role="user", text="Hi")
_HO = Item(item_id="b", parent_id="a", role="assistant", text="Ho")
_FAILED = Item(item_id="b", parent_id="a", role="assistant", status="incomplete")


def _chat(messages: list[JsonBody], *items: Item, **more: object) -> tuple[GenerateRequest, Turn]:
    body = {"messages": messages, "conversation": "c", **more}
    request = openai.parse_chat(parsed(body, items=items)).request
    return request, read_turn(request.turn)


def _respond(given: object, *items: Item, **more: object) -> tuple[GenerateRequest, Turn]:
    body = {"input": given, "conversation": {"id": "c"}, **more}
    request = responses_wire.parse(parsed(body, items=items)).request
    return request, read_turn(request.turn)


@pytest.mark.parametrize("given", ["c", {"id": "c"}, {"id": "c", "parent_id": None}, {"id": "c", "parent_id": "a"}])
def test_branch_points(given: object) -> None:
    point = branch_point_of(parsed({"conversation": given}))
    assert point is not None
    if isinstance(given, dict):
        assert msgspec.to_builtins(point) == given
    else:
        assert point == BranchPoint("c")


@pytest.mark.parametrize("given", ["", 5, [], {}, {"id": 5}, {"id": "c", "parent_id": 5}, "x" * 65, {"id": None}, True])
def test_branch_points_that_are_none(given: object) -> None:
    with pytest.raises(RequestError) as refused:
        branch_point_of(parsed({"conversation": given}))
    assert (refused.value.param or "").startswith("conversation")


def test_without_one_nothing_is_kept() -> None:
    request = openai.parse_chat(parsed({"messages": [{"role": "user", "content": "Hi"}], "conversation": None})).request
    assert request.turn == b""
    assert request.on_disconnect == "cancel"


def test_the_prompt_has_the_branch_and_the_new_items() -> None:
    more: JsonBody = {"role": "user", "content": "More"}
    for request, turn in (_chat([more], _HI, _HO), _respond([more], _HI, _HO), _respond("More", _HI, _HO)):
        assert request.messages == (Message("user", "Hi"), Message("assistant", "Ho"), Message("user", "More"))
        assert (turn.conversation_id, turn.parent_id) == ("c", "b")
        assert turn.input_items == (Item(role="user", text="More"),)
        assert request.on_disconnect == "detach"


def test_instructions_are_for_one_response() -> None:
    request, turn = _respond("More", _HI, _HO, instructions="Be kind.")
    assert request.messages[0] == Message("system", "Be kind.")
    assert [item.role for item in turn.input_items] == ["user"]


def test_a_stored_question_is_answered() -> None:
    for request, turn in (_chat([], _HI), _respond([], _HI)):
        assert request.messages == (Message("user", "Hi"),)
        assert (turn.parent_id, turn.input_items) == ("a", ())


def test_a_failed_answer_is_generated_again() -> None:
    for request, turn in (_chat([], _HI, _FAILED), _respond([], _HI, _FAILED)):
        assert request.messages == (Message("user", "Hi"),)
        assert turn.parent_id == "a"


def test_a_chat_continues_the_stored_answer() -> None:
    request, turn = _chat([], _HI, _HO)
    assert request.continue_final
    assert request.messages[-1] == Message("assistant", "Ho")
    assert (turn.parent_id, turn.input_items, turn.prefix) == ("a", (), "Ho")


def test_a_chat_continues_the_given_beginning() -> None:
    request, turn = _chat([{"role": "user", "content": "And?"}, {"role": "assistant", "content": "Well"}], _HI, _HO)
    assert request.continue_final
    assert (turn.parent_id, turn.prefix) == ("b", "Well")
    assert turn.input_items == (Item(role="user", text="And?"),)


def test_items_keep_their_roles() -> None:
    _, turn = _respond([{"role": "developer", "content": "Hm"}, {"role": "user", "content": "Hi"}])
    assert [item.role for item in turn.input_items] == ["developer", "user"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}], "n": 2}, "n"),
        ({"messages": [{"role": "user", "content": "a\0b"}]}, "items"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "messages"),
    ],
)
def test_chats_that_are_refused(body: JsonBody, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        openai.parse_chat(parsed({**body, "conversation": "c"}))
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "Hi", "previous_response_id": "resp_s"}, "conversation"),
        ({"input": []}, "input"),
        ({"input": "a\0b"}, "items"),
    ],
)
def test_responses_that_are_refused(body: JsonBody, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        responses_wire.parse(parsed({**body, "conversation": "c"}))
    assert refused.value.param == param
