"""The field `conversation` of a body: the branch that a request continues, and the turn that is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from tailrace.conversations.item_images import with_newest_images
from tailrace.conversations.items import Branch, BranchPoint, Item, ItemId, check_items, items_of, without_marks
from tailrace.conversations.turns import Turn
from tailrace.dialects.answers import ToolsView
from tailrace.dialects.shapes import read_fields
from tailrace.dialects.wire import ParsedRequest
from tailrace.errors import RequestError
from tailrace.images.reader import MAX_BYTES, MAX_IMAGES
from tailrace.types import GenerateRequest, Image, Message

__all__ = [
    "ConversationField",
    "branch_point_of",
    "in_conversation",
    "open_branch",
    "recalled",
    "with_turn",
    "within_limits",
]

_EARLIER_BYTES = MAX_BYTES // 2  # of the images of earlier turns; the rest is for those of the question

ConversationField: TypeAlias = ItemId | BranchPoint | None


class _Conversation(msgspec.Struct):
    conversation: ConversationField = None


def branch_point_of(request: ParsedRequest) -> BranchPoint | None:
    """Raises: RequestError."""
    if request.body.get("conversation") is None:
        return None
    given = read_fields({"conversation": request.body["conversation"]}, _Conversation)[0].conversation
    return BranchPoint(given) if isinstance(given, str) else given


def open_branch(branch: Branch, *, has_input: bool) -> Branch:
    """Return the branch that a request continues. If the request has no input, and the last answer is empty because its
    stream failed, this is the branch before that answer, so it is generated again."""
    if has_input or not branch.items:
        return branch
    last = branch.items[-1]
    has_failed = last.kind == "message" and last.role == "assistant" and not (last.text + last.reasoning).strip()
    return branch.before_last() if has_failed else branch


def recalled(messages: Sequence[Message], images: list[Image] | None) -> tuple[Message, ...]:
    """Return the messages of earlier turns. `images` gets their images; None: the model reads none, and placeholders
    stand for them."""
    if images is None:
        return with_newest_images(messages, len(messages), num_images=0, num_bytes=0)
    images += (image for message in messages for image in message.images)
    return tuple(messages)


def within_limits(messages: Sequence[Message], num_before: int) -> tuple[Message, ...]:
    """Return messages of which the first `num_before`, those of earlier turns, have only so many images that all fit
    into a request: the newest ones."""
    if not num_before:
        return tuple(messages)
    num_new = sum(len(message.images) for message in messages[num_before:])
    return with_newest_images(messages, num_before, num_images=max(0, MAX_IMAGES - num_new), num_bytes=_EARLIER_BYTES)


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
    items = [without_marks(item) for item in items]
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
