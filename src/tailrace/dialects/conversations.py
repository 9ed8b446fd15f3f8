"""`conversation` in a body: where a request goes on, and what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import msgspec

from tailrace.conversations.items import Branch, Item, ItemId, Place, check_items, items_of
from tailrace.conversations.turns import Turn
from tailrace.dialects.answers import ToolsView
from tailrace.dialects.bodies import read_fields
from tailrace.dialects.wire import ParsedRequest
from tailrace.errors import RequestError
from tailrace.types import GenerateRequest, Message

__all__ = ["ConversationField", "chat_in", "keeping", "open_branch", "place_of"]

ConversationField: TypeAlias = ItemId | Place | None


class _Conversation(msgspec.Struct):
    conversation: ConversationField = None


def place_of(request: ParsedRequest) -> Place | None:
    """Raises: RequestError."""
    if request.body.get("conversation") is None:
        return None
    given = read_fields({"conversation": request.body["conversation"]}, _Conversation)[0].conversation
    return Place(given) if isinstance(given, str) else given


def open_branch(branch: Branch, *, is_asked: bool) -> Branch:
    """Where a request goes on that asks something or nothing. Without a question, an answer that has no text, because
    its stream failed, is given anew."""
    if is_asked or not branch.items:
        return branch
    last = branch.items[-1]
    has_failed = last.kind == "message" and last.role == "assistant" and not (last.text + last.reasoning).strip()
    return branch.before_last() if has_failed else branch


def chat_in(branch: Branch, request: GenerateRequest, num_before: int, view: ToolsView) -> GenerateRequest:
    """A chat whose first `num_before` messages are those of the branch. Where the answer goes on from a message that is
    there, it becomes another one with the same beginning. Raises: RequestError."""
    said, prefix = request.messages[num_before:], None
    if request.continue_final:
        prefix = request.messages[-1]
        said, branch = (said[:-1], branch) if said else (said, branch.before_last())
    return keeping(request, branch, items_of(said), view, prefix=prefix)


def keeping(
    request: GenerateRequest,
    branch: Branch,
    said: Sequence[Item],
    view: ToolsView,
    *,
    prefix: Message | None = None,
    calls_by_item: bool = False,
) -> GenerateRequest:
    """The request, with what the conversation keeps of it. It runs on for a while without a reader: its answer can be
    read in the conversation. Raises: RequestError."""
    if request.sampling.n > 1:
        raise RequestError("A conversation takes one answer at a time.", param="n")
    check_items(said)
    turn = Turn(
        conversation_id=branch.conversation_id,
        parent_id=branch.parent_id,
        said=tuple(said),
        prefix=prefix.content if prefix is not None else "",
        reasoning_prefix=prefix.reasoning if prefix is not None else "",
        reads_tools=view.reads_tools,
        forced_tool=view.forced_tool,
        single_call=view.single_call,
        calls_by_item=calls_by_item,
    )
    return replace(request, turn=turn.encode(), on_disconnect="detach")
