"""Conversations in the database, on each kind of database."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import func, select

from tailrace.conversations.items import MAX_CHARACTERS, MAX_ITEMS, Conversation, Item, chained
from tailrace.conversations.turns import Spoken, Turn
from tailrace.errors import ConversationLocked, RequestError, UnknownConversation
from tailrace.records.conversation_store import ConversationStore
from tailrace.records.database_tables import conversation_items
from tailrace.records.record_database import RecordDatabase
from tailrace.types import CallReading

ME, YOU = "me", "you"
_HI, _HO = Item(role="user", text="Hi"), Item(role="assistant", text="Ho")
_DONE = Spoken("Well.", "completed")


@pytest.fixture
def store(database: RecordDatabase) -> ConversationStore:
    return ConversationStore(database)


def _texts(store: ConversationStore, conversation_id: str) -> list[str]:
    """Return the texts of the current branch."""
    return [item.text for item in store.branch(ME, conversation_id).items]


def test_created_and_found(store: ConversationStore) -> None:
    made = store.create(ME, title="Dogs", metadata={"a": "é\0"}, items=[_HI, _HO])
    assert store.get(ME, made.conversation_id) == made
    assert (made.title, made.metadata, made.num_items, made.num_characters) == ("Dogs", {"a": "é\0"}, 2, 4)
    branch = store.branch(ME, made.conversation_id)
    assert [(item.role, item.text) for item in branch.items] == [("user", "Hi"), ("assistant", "Ho")]
    assert branch.parent_id == made.head == branch.items[1].item_id
    assert branch.items[1].parent_id == branch.items[0].item_id


def test_every_column_is_read(store: ConversationStore) -> None:
    item = Item(
        item_id="fc_1", kind="function_call", role="r", text="{}\u2028😀", call_id="c", name="look",
        status="incomplete", stream_id="s", created_s=1.5,
    )  # fmt: skip
    made = store.take_in(ME, [(Conversation(head="fc_1"), [item])])[0]
    assert store.item(ME, made.conversation_id, "fc_1") == item


def test_an_empty_conversation(store: ConversationStore) -> None:
    made = store.create(ME)
    assert (made.head, made.num_items, made.title) == (None, 0, "")
    assert store.items(ME, made.conversation_id, limit=5) == ([], False)
    assert store.branch(ME, made.conversation_id).items == ()


def test_a_title_is_made_from_the_first_message(store: ConversationStore) -> None:
    made = store.create(ME)
    store.add(ME, made.conversation_id, [Item(role="system", text="No"), _HI])
    store.add(ME, made.conversation_id, [Item(role="user", text="Later")])
    assert store.get(ME, made.conversation_id).title == "Hi"


def test_changed(store: ConversationStore) -> None:
    made = store.create(ME, title="Old", metadata={"a": "b"}, items=[_HI, _HO])
    assert store.update(ME, made.conversation_id, title="New").metadata == {"a": "b"}
    changed = store.update(ME, made.conversation_id, metadata={})
    assert (changed.title, changed.metadata, changed.head) == ("New", {}, made.head)
    first = store.branch(ME, made.conversation_id).items[0].item_id
    assert store.update(ME, made.conversation_id, head=first).head == first
    assert _texts(store, made.conversation_id) == ["Hi"]
    assert store.update(ME, made.conversation_id, head=None).head is None
    with pytest.raises(UnknownConversation) as unknown:
        store.update(ME, made.conversation_id, title="Not this", head="elsewhere")
    assert unknown.value.param == "head"
    assert store.get(ME, made.conversation_id).title == "New"


def test_owners_are_separate(store: ConversationStore) -> None:
    made = store.create(ME, items=[_HI])
    its_id, head = made.conversation_id, made.head or ""
    turn = Turn(conversation_id=its_id, input_items=(_HI,))
    calls = (
        lambda owner: store.get(owner, its_id),
        lambda owner: store.update(owner, its_id, title="x"),
        lambda owner: store.add(owner, its_id, [_HI]),
        lambda owner: store.items(owner, its_id, limit=5),
        lambda owner: store.item(owner, its_id, head),
        lambda owner: store.tree(owner, its_id),
        lambda owner: store.branch(owner, its_id),
        lambda owner: store.page(owner, limit=5, after=its_id),
        lambda owner: store.delete_item(owner, its_id, head),
        lambda owner: store.delete(owner, its_id),
    )
    for call in calls:
        with pytest.raises(UnknownConversation):
            call(YOU)
    store.put_turn(YOU, turn, "s", _DONE, 0.0)
    assert store.page(YOU, limit=5) == ([], False)
    assert store.get(ME, its_id) == made
    for call in calls:
        call(ME)


@pytest.mark.parametrize("bad", ["", "conv_nothing", "a" * 65, "a\0b", "a/b", "é", "%", "_"])
def test_invalid_ids(store: ConversationStore, bad: str) -> None:
    made = store.create(ME, items=[_HI])
    with pytest.raises(UnknownConversation):
        store.get(ME, bad)
    with pytest.raises(UnknownConversation):
        store.delete(ME, bad)
    with pytest.raises(UnknownConversation):
        store.item(ME, made.conversation_id, bad)
    with pytest.raises(UnknownConversation):
        store.items(ME, made.conversation_id, limit=5, after=bad)
    with pytest.raises(UnknownConversation):
        store.branch(ME, made.conversation_id, bad)


def test_an_item_belongs_to_one_conversation(store: ConversationStore) -> None:
    one, other = store.create(ME, items=[_HI]), store.create(ME)
    with pytest.raises(UnknownConversation):
        store.item(ME, other.conversation_id, one.head or "")
    with pytest.raises(UnknownConversation):
        store.add(ME, other.conversation_id, [_HI], one.head)


def test_deleted_with_all_its_items(store: ConversationStore, database: RecordDatabase) -> None:
    made, other = store.create(ME, items=[_HI, _HO]), store.create(ME, items=[_HI])
    store.delete(ME, made.conversation_id)
    with pytest.raises(UnknownConversation):
        store.get(ME, made.conversation_id)
    with database.begin() as connection:
        assert connection.execute(select(func.count()).select_from(conversation_items)).scalar() == 1
    assert store.get(ME, other.conversation_id) == other


# Branches


def test_another_parent_makes_a_branch(store: ConversationStore) -> None:
    made = store.create(ME, items=[_HI, _HO])
    its_id, first = made.conversation_id, store.branch(ME, made.conversation_id).items[0].item_id
    (edited,) = store.add(ME, its_id, [Item(role="user", text="Hello")], None)
    assert _texts(store, its_id) == ["Hello"]
    store.add(ME, its_id, [Item(role="assistant", text="Again")], first)
    assert _texts(store, its_id) == ["Hi", "Again"]
    store.update(ME, its_id, head=made.head)
    assert _texts(store, its_id) == ["Hi", "Ho"]
    conversation, items = store.tree(ME, its_id)
    assert conversation.head == made.head
    assert [item.text for item in items] == ["Hi", "Ho", "Hello", "Again"]
    assert [item.text for item in store.branch(ME, its_id, edited.item_id).items] == ["Hello"]
    assert store.branch(ME, its_id, None).items == ()


def test_items_after_a_deleted_item_move_up(store: ConversationStore) -> None:
    items = [Item(role="user", text=text) for text in "abc"]
    its_id = store.create(ME, items=items).conversation_id
    first, second, third = store.branch(ME, its_id).items
    (other,) = store.add(ME, its_id, [_HO], second.item_id)
    left = store.delete_item(ME, its_id, second.item_id)
    assert (left.num_items, left.num_characters) == (3, 4)
    assert store.item(ME, its_id, third.item_id).parent_id == first.item_id
    assert _texts(store, its_id) == ["a", "Ho"]
    assert store.delete_item(ME, its_id, other.item_id).head == first.item_id
    assert store.delete_item(ME, its_id, first.item_id).head is None
    assert store.item(ME, its_id, third.item_id).parent_id is None


def test_pages_of_items(store: ConversationStore) -> None:
    its_id = store.create(ME, items=[Item(role="user", text=str(number)) for number in range(5)]).conversation_id
    for is_descending in (True, False):
        seen: list[str] = []
        after: str | None = None
        while True:
            page, has_more = store.items(ME, its_id, limit=2, after=after, is_descending=is_descending)
            seen += [item.text for item in page]
            after = page[-1].item_id
            if not has_more:
                break
        assert seen == (list("43210") if is_descending else list("01234"))


# Lists


def test_pages_of_conversations(store: ConversationStore) -> None:
    made = [store.create(ME, title=str(number)) for number in range(5)]
    store.create(YOU)
    store.update(ME, made[0].conversation_id, title="0")  # touched
    seen: list[str] = []
    after: str | None = None
    has_more = True
    while has_more:
        page, has_more = store.page(ME, limit=2, after=after)
        seen += [one.title for one in page]
        after = page[-1].conversation_id
    assert seen == list("04321")


def test_search(store: ConversationStore) -> None:
    river = store.create(ME, title="Rivers of Europe")
    boat = store.create(ME, title="Boats", items=[_HI, Item(role="assistant", text="A RIVER has 100% water_y ways.")])
    store.create(YOU, title="River")

    def found(search: str) -> set[str]:
        return {one.conversation_id for one in store.page(ME, limit=9, search=search)[0]}

    both = {river.conversation_id, boat.conversation_id}
    assert found("river") == found("RIVER") == both
    assert found("boat") == found("100%") == found("water_") == {boat.conversation_id}
    assert found("1%") == found("waterxy") == found("%") - {boat.conversation_id} == found("/") == set()
    assert found("") == both
    assert len(store.page(ME, limit=1, search="river")[0]) == 1
    assert store.page(ME, limit=1, search="river")[1]


# Turns


def test_a_turn_is_kept_as_it_comes(store: ConversationStore) -> None:
    made = store.create(ME, items=[_HI, _HO])
    turn = Turn(
        conversation_id=made.conversation_id, parent_id=made.head, input_items=(Item(role="user", text="More"),)
    )
    store.put_turn(ME, turn, "s", Spoken(), 7.0)
    *_, asked, answer = store.branch(ME, made.conversation_id).items
    assert (asked.text, asked.status, asked.created_s) == ("More", "completed", 7.0)
    assert (answer.text, answer.status, answer.stream_id) == ("", "in_progress", "s")
    assert store.in_progress() == [(ME, "s")]
    with pytest.raises(ConversationLocked):
        store.delete_item(ME, made.conversation_id, answer.item_id)
    store.put_turn(ME, turn, "s", _DONE, 7.0)
    for spoken in (_DONE, Spoken(), Spoken("Other", "incomplete")):  # once is enough
        store.put_turn(ME, turn, "s", spoken, 7.0)
    assert _texts(store, made.conversation_id) == ["Hi", "Ho", "More", "Well."]
    assert store.get(ME, made.conversation_id).num_items == 4
    assert store.in_progress() == []


def test_only_an_end_keeps_the_whole_turn(store: ConversationStore) -> None:
    made = store.create(ME)
    turn = Turn(conversation_id=made.conversation_id, input_items=(_HI,))
    store.put_turn(ME, turn, "s", _DONE, 0.0)
    store.put_turn(ME, turn, "s", Spoken(), 0.0)
    assert _texts(store, made.conversation_id) == ["Hi", "Well."]
    assert store.get(ME, made.conversation_id).title == "Hi"


def test_two_turns_at_once_are_two_branches(store: ConversationStore) -> None:
    made = store.create(ME, items=[_HI, _HO])
    turns = [
        Turn(conversation_id=made.conversation_id, parent_id=made.head, input_items=(Item(role="user", text=text),))
        for text in "ab"
    ]
    for name, turn in zip("st", turns, strict=True):
        store.put_turn(ME, turn, name, Spoken(), 0.0)
    for name, turn in zip("st", turns, strict=True):
        store.put_turn(ME, turn, name, Spoken(name, "completed"), 0.0)
    assert _texts(store, made.conversation_id) == ["Hi", "Ho", "b", "t"]
    _, items = store.tree(ME, made.conversation_id)
    assert {item.text: item.parent_id for item in items if item.text in "st"} == {"s": "msg_s_in0", "t": "msg_t_in0"}


def test_an_abandoned_answer_can_be_continued_and_still_arrive(store: ConversationStore) -> None:
    made = store.create(ME)
    turn = Turn(conversation_id=made.conversation_id, input_items=(_HI,))
    store.put_turn(ME, turn, "s", Spoken(), 0.0)
    head = store.get(ME, made.conversation_id).head or ""
    store.abandon(ME, made.conversation_id, head)
    assert store.item(ME, made.conversation_id, head).status == "incomplete"
    store.add(ME, made.conversation_id, [Item(role="user", text="Then?")])
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    with_tools = Turn(conversation_id=made.conversation_id, input_items=(_HI,), calls=CallReading())
    store.put_turn(ME, with_tools, "s", Spoken(f"Late.{call}", "completed"), 0.0)
    branch = store.branch(ME, made.conversation_id).items
    assert [item.kind for item in branch] == ["message", "message", "function_call", "message"]
    assert [item.text for item in branch] == ["Hi", "Late.", "{}", "Then?"]
    store.abandon(ME, made.conversation_id, branch[1].item_id)
    assert store.item(ME, made.conversation_id, branch[1].item_id).status == "completed"


def test_a_turn_whose_parent_is_deleted(store: ConversationStore) -> None:
    made = store.create(ME, items=[_HI, _HO])
    turn = Turn(conversation_id=made.conversation_id, parent_id=made.head, input_items=(_HI,))
    store.delete_item(ME, made.conversation_id, made.head or "")
    store.put_turn(ME, turn, "s", _DONE, 0.0)
    assert _texts(store, made.conversation_id) == ["Hi", "Hi", "Well."]
    store.delete(ME, made.conversation_id)
    store.put_turn(ME, turn, "t", _DONE, 0.0)
    assert store.page(ME, limit=5) == ([], False)


def test_an_answer_with_nul_is_kept(store: ConversationStore) -> None:
    made = store.create(ME)
    store.put_turn(ME, Turn(conversation_id=made.conversation_id), "s", Spoken("a\0b", "completed"), 0.0)
    assert _texts(store, made.conversation_id) == ["a\ufffdb"]


# Bounds


def test_a_conversation_has_limits(store: ConversationStore) -> None:
    made = store.create(ME, items=[Item(role="user", text="x" * (MAX_CHARACTERS - 1))])
    store.add(ME, made.conversation_id, [Item(role="user", text="x")])
    with pytest.raises(RequestError, match="characters"):
        store.add(ME, made.conversation_id, [_HI])
    assert store.get(ME, made.conversation_id).num_items == 2
    many = chained([_HI] * (MAX_ITEMS - 1), map(str, range(MAX_ITEMS)), None, 0.0)
    (full,) = store.take_in(ME, [(Conversation(head=many[-1].item_id), many)])
    with pytest.raises(RequestError, match="items"):
        store.branch(ME, full.conversation_id)
    store.add(ME, full.conversation_id, [_HI])
    with pytest.raises(RequestError, match="items"):
        store.add(ME, full.conversation_id, [_HI])
    assert len(store.tree(ME, full.conversation_id)[1]) == MAX_ITEMS


def test_imports_are_atomic(store: ConversationStore) -> None:
    good = (Conversation(title="Good", head="a"), [Item(item_id="a", text="x")])
    too_long = (Conversation(head="a"), [Item(item_id="a", text="x" * (MAX_CHARACTERS + 1))])
    with pytest.raises(RequestError):
        store.take_in(ME, [good, too_long])
    assert store.page(ME, limit=5) == ([], False)
    twice = store.take_in(ME, [good, good])
    assert len({one.conversation_id for one in twice}) == 2
    assert {store.item(ME, one.conversation_id, "a").text for one in twice} == {"x"}


def test_concurrent_writes_to_one_conversation(store: ConversationStore) -> None:
    made = store.create(ME)
    with ThreadPoolExecutor(6) as threads:
        adding = [
            threads.submit(store.add, ME, made.conversation_id, [Item(role="user", text=str(number))])
            for number in range(30)
        ]
        for one in adding:
            one.result()
    branch = store.branch(ME, made.conversation_id)
    assert sorted(int(item.text) for item in branch.items) == list(range(30))
    assert store.get(ME, made.conversation_id).num_items == 30
