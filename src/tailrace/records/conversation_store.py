"""Conversations in the database."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict, replace
from sqlalchemy import ColumnElement, Connection, and_, delete, exists, insert, or_, select, update

from tailrace.conversations.drafts import clean
from tailrace.conversations.items import ID_PREFIXES, Branch, Conversation, Item, chained
from tailrace.conversations.turns import Spoken, Turn
from tailrace.errors import ConversationLocked, KeyRevoked, UnknownConversation
from tailrace.records._conversation_rows import (
    as_json,
    conversation_of,
    find,
    follow,
    lock,
    path_to,
    read_item,
    read_items,
    refresh,
    require_room,
    write,
)
from tailrace.records._image_rows import UNUSED_S, Contents, claim, digests_of, forget_images, hold, release
from tailrace.records.database_tables import conversation_items, conversations, requests
from tailrace.records.key_store import find_forgotten
from tailrace.records.record_database import RecordDatabase
from tailrace.types import NO_LIMIT, KeptImage

__all__ = ["AnswerRow", "ConversationStore"]

NO_IMAGES: Contents = {}


class AnswerRow(Struct, frozen=True):
    """What is kept of the request that an answer belongs to. Times are seconds since the request."""

    model: str
    status: str
    finish: str  # stop, length, …; or the error code
    num_prompt_tokens: int
    num_completion_tokens: int
    queue_s: float | None
    first_token_s: float | None
    total_s: float


class ConversationStore:
    """Conversations of all owners. Calls block; each is one transaction.

    Raises: UnknownConversation if this owner has no such conversation, or the conversation no such item; RequestError
    if it would become too large; StorageError.
    """

    def __init__(self, database: RecordDatabase, most_image_bytes: int = NO_LIMIT) -> None:
        """`most_image_bytes`: of all images of an owner."""
        self._database = database
        self._most_image_bytes = most_image_bytes

    # Conversations

    def create(
        self,
        owner: str,
        *,
        title: str = "",
        metadata: Mapping[str, str] | None = None,
        items: Sequence[Item] = (),
        images: Contents = NO_IMAGES,
        key_id: str = "",
    ) -> Conversation:
        """Create a conversation. Each item is the child of the previous one. The rest as in `take_in`."""
        now_s = time.time()
        placed = chained(items, _new_ids(items), None, now_s)
        head = placed[-1].item_id if placed else None
        made = Conversation(title=title, created_s=now_s, updated_s=now_s, metadata=metadata or {}, head=head)
        return self.take_in(owner, [(made, placed)], images=images, key_id=key_id)[0]

    def take_in(
        self,
        owner: str,
        given: Sequence[tuple[Conversation, Sequence[Item]]],
        *,
        images: Contents = NO_IMAGES,
        key_id: str = "",
    ) -> list[Conversation]:
        """Import whole conversations, all or none. Each gets a new id, and the current time if it has none. Items keep
        their ids. `images` are those of all items. `key_id` is the key of the request, if keys are in use.

        Raises: KeyRevoked if the owner of the key was deleted.
        """
        made, now_s = [], time.time()
        with self._database.begin() as connection:
            if find_forgotten(connection, [key_id]):
                raise KeyRevoked("The key was revoked.")
            for conversation, items in given:
                kept = replace(
                    conversation,
                    conversation_id=f"conv_{secrets.token_urlsafe(16)}",
                    created_s=conversation.created_s or now_s,
                    updated_s=conversation.updated_s or now_s,
                )
                row = {**asdict(kept), "metadata": as_json(kept.metadata), "owner": owner}
                connection.execute(insert(conversations).values(**row))
                write(connection, kept.conversation_id, items)
                self._hold(connection, owner, kept.conversation_id, items, images)
                kept = refresh(connection, owner, kept, head=kept.head, came=items)
                require_room(kept)
                made.append(kept)
        return made

    def page(
        self, owner: str, *, limit: int, after: str | None = None, search: str = ""
    ) -> tuple[list[Conversation], bool]:
        """Return conversations, the last changed first, and whether there are more. `search` filters for text in the
        title or in an item; case is ignored."""
        query = select(conversations).where(conversations.c.owner == owner)
        if search:
            in_an_item = exists().where(
                conversation_items.c.conversation_id == conversations.c.conversation_id,
                conversation_items.c.text.icontains(search, autoescape=True),
            )
            query = query.where(or_(conversations.c.title.icontains(search, autoescape=True), in_an_item))
        changed_s, its_id = conversations.c.updated_s, conversations.c.conversation_id
        with self._database.begin() as connection:
            if after is not None:
                last = find(connection, owner, after)
                is_level = and_(changed_s == last.updated_s, its_id < last.conversation_id)
                query = query.where(or_(changed_s < last.updated_s, is_level))
            rows = connection.execute(query.order_by(changed_s.desc(), its_id.desc()).limit(limit + 1)).all()
        return [conversation_of(row) for row in rows[:limit]], len(rows) > limit

    def ids(self, owner: str) -> Sequence[str]:
        query = select(conversations.c.conversation_id).where(conversations.c.owner == owner)
        with self._database.begin() as connection:
            return list(connection.execute(query.order_by(conversations.c.created_s.desc())).scalars())

    def get(self, owner: str, conversation_id: str) -> Conversation:
        with self._database.begin() as connection:
            return find(connection, owner, conversation_id)

    def update(
        self,
        owner: str,
        conversation_id: str,
        *,
        title: str | None = None,
        metadata: Mapping[str, str] | None = None,
        head: str | UnsetType | None = UNSET,
    ) -> Conversation:
        """Change the given fields. `head` selects the branch that ends in this item; None selects the empty branch."""
        changed: dict[str, Any] = {}  # Any: of each column's type
        if title is not None:
            changed["title"] = title
        if metadata is not None:
            changed["metadata"] = as_json(metadata)
        if head is not UNSET:
            changed["head"] = head
        with self._database.begin() as connection:
            lock(connection, owner, conversation_id)
            if isinstance(head, str):
                read_item(connection, conversation_id, head, param="head")
            if changed:
                of_it = conversations.c.conversation_id == conversation_id
                connection.execute(update(conversations).where(of_it).values(**changed))
            return find(connection, owner, conversation_id)

    def delete(self, owner: str, conversation_id: str) -> None:
        with self._database.begin() as connection:
            lock(connection, owner, conversation_id)
            connection.execute(delete(conversations).where(conversations.c.conversation_id == conversation_id))
            release(connection, owner, conversation_id)

    def forget(self, owner: str) -> int:
        """Delete all conversations of an owner; returns how many there were."""
        with self._database.begin(is_long=True) as connection:
            number = connection.execute(delete(conversations).where(conversations.c.owner == owner)).rowcount
            forget_images(connection, owner, of_responses=False)
            return number

    # Items

    def add(
        self,
        owner: str,
        conversation_id: str,
        items: Sequence[Item],
        parent_id: str | UnsetType | None = UNSET,
        *,
        images: Contents = NO_IMAGES,
    ) -> list[Item]:
        """Add a chain of items after `parent_id`, or at the end of the current branch. The last item becomes the end of
        the current branch."""
        with self._database.begin() as connection:
            before = lock(connection, owner, conversation_id)
            parent = before.head if isinstance(parent_id, UnsetType) else parent_id
            if parent is not None:
                read_item(connection, conversation_id, parent, param="parent_id")
            placed = chained(items, _new_ids(items), parent, time.time())
            write(connection, conversation_id, placed)
            self._hold(connection, owner, conversation_id, placed, images)
            head = placed[-1].item_id if placed else before.head
            require_room(refresh(connection, owner, before, head=head, came=placed))
        return placed

    def items(
        self,
        owner: str,
        conversation_id: str,
        *,
        limit: int,
        after: str | None = None,
        is_descending: bool = True,
    ) -> tuple[list[Item], bool]:
        """Return items of the current branch, and whether there are more."""
        with self._database.begin() as connection:
            path = path_to(connection, conversation_id, find(connection, owner, conversation_id).head)
            if is_descending:
                path.reverse()
            if after is not None:
                if after not in path:
                    raise UnknownConversation("The current branch has no item with this id.", param="after")
                path = path[path.index(after) + 1 :]
            found = {item.item_id: item for item in read_items(connection, conversation_id, path[:limit])}
        return [found[item_id] for item_id in path[:limit]], len(path) > limit

    def item(self, owner: str, conversation_id: str, item_id: str) -> Item:
        with self._database.begin() as connection:
            find(connection, owner, conversation_id)
            return read_item(connection, conversation_id, item_id)

    def delete_item(self, owner: str, conversation_id: str, item_id: str) -> Conversation:
        """Delete an item; its children move to its parent. Raises: ConversationLocked for an answer in progress."""
        with self._database.begin() as connection:
            before = lock(connection, owner, conversation_id)
            item = read_item(connection, conversation_id, item_id)
            if item.status == "in_progress":
                raise ConversationLocked("This answer is being written. Cancel its stream first.", param="item_id")
            connection.execute(delete(conversation_items).where(*_is(conversation_id, item_id)))
            follow(connection, conversation_id, item_id, item.parent_id)
            head = item.parent_id if before.head == item_id else before.head
            rest = digests_of(read_items(connection, conversation_id))
            release(connection, owner, conversation_id, keep=rest, before_s=time.time() - UNUSED_S)
            return refresh(connection, owner, before, head=head)

    def tree(self, owner: str, conversation_id: str) -> tuple[Conversation, list[Item]]:
        """Return the items of all branches in order of creation."""
        with self._database.begin() as connection:
            return find(connection, owner, conversation_id), read_items(connection, conversation_id)

    def answers(self, owner: str, conversation_id: str) -> dict[str, AnswerRow]:
        """Return the rows of the requests with a conversation's answers, by stream id. Running streams have
        none."""
        columns = [requests.c[name] for name in AnswerRow.__struct_fields__]
        query = (
            select(requests.c.request_id, *columns)
            .join(conversation_items, conversation_items.c.stream_id == requests.c.request_id)
            .where(conversation_items.c.conversation_id == conversation_id, requests.c.owner == owner)
        )
        with self._database.begin() as connection:
            rows = connection.execute(query).mappings().all()
        return {
            row["request_id"]: AnswerRow(**{name: row[name] for name in AnswerRow.__struct_fields__}) for row in rows
        }

    # Turns

    def branch(self, owner: str, conversation_id: str, parent_id: str | UnsetType | None = UNSET) -> Branch:
        """Return the branch that ends in an item, or the current branch. Raises: RequestError if the conversation is
        full."""
        with self._database.begin() as connection:
            found = find(connection, owner, conversation_id)
            if isinstance(parent_id, str):
                read_item(connection, conversation_id, parent_id, param="conversation")
            path = path_to(connection, conversation_id, found.head if isinstance(parent_id, UnsetType) else parent_id)
            items = {item.item_id: item for item in read_items(connection, conversation_id)}
        require_room(replace(found, num_items=found.num_items + 2))
        return Branch(conversation_id=conversation_id, items=tuple(items[item_id] for item_id in path))

    def put_turn(
        self,
        owner: str,
        turn: Turn,
        stream_id: str,
        spoken: Spoken,
        created_s: float,
        images: Sequence[KeptImage] = (),
    ) -> None:
        """Write the current state of a turn. Does nothing if its answer is already complete, or the conversation was
        deleted. `images` are those of the whole prompt; the conversation has them already."""
        head: str | None
        with self._database.begin() as connection:
            try:
                before = lock(connection, owner, turn.conversation_id)
            except UnknownConversation:
                return
            known = self._answer(connection, turn.conversation_id, stream_id)
            if not known:
                came = _whole_turn(connection, before, turn, stream_id, spoken, created_s, images)
                head = came[-1].item_id
            elif spoken.status == "in_progress" or not _is_awaited(known, turn):
                return
            else:
                awaited, head = known[0], before.head
                came = turn.answer(stream_id, spoken, awaited.parent_id, awaited.created_s)
                connection.execute(delete(conversation_items).where(*_is(turn.conversation_id, awaited.item_id)))
                follow(connection, turn.conversation_id, awaited.item_id, came[-1].item_id)
                if head == awaited.item_id:
                    head = came[-1].item_id
            came = [replace(item, text=clean(item.text), reasoning=clean(item.reasoning)) for item in came]
            write(connection, turn.conversation_id, came)
            claim(connection, owner, turn.conversation_id, came)
            refresh(connection, owner, before, head=head, came=came)

    def abandon(self, owner: str, conversation_id: str, item_id: str) -> None:
        """Mark an answer in progress as incomplete, because this server does not write it. If another server does, its
        `put_turn` replaces this."""
        with self._database.begin() as connection:
            lock(connection, owner, conversation_id)
            is_open = conversation_items.c.status == "in_progress"
            connection.execute(
                update(conversation_items).where(*_is(conversation_id, item_id), is_open).values(status="incomplete")
            )

    def in_progress(self) -> Sequence[tuple[str, str]]:
        """Return (owner, stream id) of each answer that is in progress, or was when its server died."""
        its_conversation = conversations.c.conversation_id == conversation_items.c.conversation_id
        query = (
            select(conversations.c.owner, conversation_items.c.stream_id)
            .join(conversations, its_conversation)
            .where(conversation_items.c.status == "in_progress")
        )
        with self._database.begin() as connection:
            return [(row.owner, row.stream_id) for row in connection.execute(query)]

    def _hold(
        self, connection: Connection, owner: str, conversation_id: str, items: Sequence[Item], images: Contents
    ) -> None:
        """Keep the images of items."""
        used = digests_of(items)
        given = {image: content for image, content in images.items() if image.digest in used}
        hold(connection, owner, conversation_id, given, most_bytes=self._most_image_bytes)
        claim(connection, owner, conversation_id, items)

    def _answer(self, connection: Connection, conversation_id: str, stream_id: str) -> list[Item]:
        of_stream = select(conversation_items.c.item_id).where(
            conversation_items.c.conversation_id == conversation_id, conversation_items.c.stream_id == stream_id
        )
        ids = list(connection.execute(of_stream).scalars())
        return read_items(connection, conversation_id, ids) if ids else []


def _whole_turn(
    connection: Connection,
    before: Conversation,
    turn: Turn,
    stream_id: str,
    spoken: Spoken,
    created_s: float,
    images: Sequence[KeptImage],
) -> list[Item]:
    """Return input and answer of a turn that has no rows yet."""
    parent = turn.parent_id
    if parent is not None and not read_items(connection, turn.conversation_id, [parent]):
        parent = before.head  # the parent was deleted
    input_items = replace(turn, parent_id=parent).input(stream_id, created_s, images)
    return input_items + turn.answer(stream_id, spoken, input_items[-1].item_id if input_items else parent, created_s)


def _is_awaited(answer: Sequence[Item], turn: Turn) -> bool:
    """Return whether the items are only the placeholder of an answer in progress, which may be abandoned."""
    item = answer[0]
    has_come = item.text not in ("", turn.prefix) or item.reasoning not in ("", turn.reasoning_prefix)
    return len(answer) == 1 and item.status != "completed" and not has_come


def _is(conversation_id: str, item_id: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return conversation_items.c.conversation_id == conversation_id, conversation_items.c.item_id == item_id


def _new_ids(items: Sequence[Item]) -> Iterator[str]:
    return (f"{ID_PREFIXES[item.kind]}_{secrets.token_urlsafe(16)}" for item in items)
