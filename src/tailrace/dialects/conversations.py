"""The field `conversation` of a body: the branch that a request continues, and the turn that is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from tailrace.conversations.items import Branch, Item, ItemId, Place, check_items, items_of
from tailrace.conversations.turns import Turn
from tailrace.dialects.answers import ToolsView
from tailrace.dialects.shapes import read_fields
from tailrace.dialects.wire import ParsedRequest
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.types import GenerateRequest, Message

__all__ = ["ConversationField", "in_conversation", "open_branch", "place_of", "with_turn"]

ConversationField: TypeAlias = ItemId | Place | None


class _Conversation(msgspec.Struct):
    conversation: ConversationField = None


def place_of(request: ParsedRequest) -> Place | None:
    """Raises: RequestError."""
    if request.body.get("conversation") is None:
        return None
    given = read_fields({"conversation": request.body["conversation"]}, _Conversation)[0].conversation
    return Place(given) if isinstance(given, str) else given


def open_branch(branch: Branch, *, has_input: bool) -> Branch:
    """Return the branch that a request continues. If the request has no input, and the last answer is empty because its
    stream failed, this is the branch before that answer, so it is generated again."""
    if has_input or not branch.items:
        return branch
    last = branch.items[-1]
    has_failed = last.kind == "message" and last.role == "assistant" and not (last.text + last.reasoning).strip()
    return branch.before_last() if has_failed else branch


def in_conversation(branch: Branch, request: GenerateRequest, num_before: int, view: ToolsView) -> GenerateRequest:
    """Keep a chat in its conversation. The first `num_before` messages are those of the branch. An answer that
    continues a message of the branch becomes a new message with the same beginning. Raises: RequestError."""
    items, prefix = request.messages[num_before:], None
    if request.continue_final:
        prefix = request.messages[-1]
        items, branch = (items[:-1], branch) if items else (items, branch.before_last())
    return with_turn(request, branch, items_of(items), view, prefix=prefix)


def with_turn(
    request: GenerateRequest,
    branch: Branch,
    items: Sequence[Item],
    view: ToolsView,
    *,
    prefix: Message | None = None,
    calls_by_item: bool = False,
) -> GenerateRequest:
    """Add the turn that the conversation keeps. The stream continues for a while without a reader, because its answer
    can be read in the conversation. Raises: RequestError."""
    if request.sampling.n > 1:
        raise RequestError("n must be 1 in a conversation.", param="n")
    for image in (image for message in request.messages for image in message.images):
        raise UnsupportedParameter(
            f"{image.param}: a conversation keeps no images. Send them without it.", param=image.param
        )
    check_items(items)
    turn = Turn(
        conversation_id=branch.conversation_id,
        parent_id=branch.parent_id,
        input_items=tuple(items),
        prefix=prefix.content if prefix is not None else "",
        reasoning_prefix=prefix.reasoning if prefix is not None else "",
        calls=view.calls,
        calls_by_item=calls_by_item,
    )
    return replace(request, turn=turn.encode(), on_disconnect="detach")
