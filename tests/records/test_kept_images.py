"""Images in the database, on each kind of database: stored once, bounded, deleted with the last thing that has them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace
from sqlalchemy import func, select

from tailrace.conversations.item_images import MAX_BYTES, MAX_IMAGES, ItemImage
from tailrace.conversations.items import Conversation, Item
from tailrace.conversations.turns import Spoken, Turn
from tailrace.errors import KeyRevoked, RequestError, UnknownConversation
from tailrace.records.conversation_store import ConversationStore
from tailrace.records.database_tables import image_uses, images
from tailrace.records.kept_images import KeptImages
from tailrace.records.kept_streams import KeptStreams
from tailrace.records.key_store import KeyStore
from tailrace.records.record_database import RecordDatabase
from tailrace.types import KeptImage

ME, YOU = "me", "you"


def _image(number: int, num_bytes: int = 10) -> tuple[KeptImage, bytes]:
    return KeptImage(f"{number:064x}", "image/png", num_bytes), bytes([number % 256]) * num_bytes


@pytest.fixture
def store(database: RecordDatabase) -> ConversationStore:
    return ConversationStore(database)


@pytest.fixture
def kept(database: RecordDatabase) -> KeptImages:
    return KeptImages(database, 50)


def _count(database: RecordDatabase) -> tuple[int, int]:
    """Return how many images there are, and how many uses of them."""
    with database.begin() as connection:
        one, two = (
            connection.execute(select(func.count()).select_from(table)).scalar_one() for table in (images, image_uses)
        )
    return one, two


def _digests(kept: KeptImages, owner: str = ME) -> set[int]:
    return {int(digest, 16) for digest in kept.get(owner, [_image(number)[0].digest for number in range(20)])}


def test_an_image_is_stored_once_for_an_owner(
    database: RecordDatabase, store: ConversationStore, kept: KeptImages
) -> None:
    places = [store.create(owner).conversation_id for owner in (ME, ME, YOU)]
    for owner, place in zip((ME, ME, YOU), places, strict=True):
        for _ in range(2):
            kept.put_in_conversation(owner, place, dict([_image(1)]))
    assert _count(database) == (2, 3)
    image, content = _image(1)
    assert kept.of_conversation(ME, places[1], image.digest) == (image, content)
    with pytest.raises(UnknownConversation):
        kept.of_conversation(YOU, places[0], image.digest)
    with pytest.raises(UnknownConversation):
        kept.put_in_conversation(YOU, places[0], dict([_image(2)]))
    store.delete(ME, places[0])
    assert _count(database) == (2, 2)
    store.delete(ME, places[1])
    assert (_digests(kept), _digests(kept, YOU)) == (set(), {1})


def test_the_oldest_responses_make_room_and_conversations_do_not(store: ConversationStore, kept: KeptImages) -> None:
    place = store.create(ME).conversation_id
    kept.put_in_conversation(ME, place, dict([_image(1)]))
    for number in range(2, 8):
        kept.put_in_response(ME, f"s{number}", dict([_image(number)]))
    assert _digests(kept) == {1, 4, 5, 6, 7}
    kept.put_in_conversation(ME, place, dict([_image(8, 40)]))
    assert _digests(kept) == {1, 8}
    with pytest.raises(RequestError, match="at most 50 bytes of images"):
        kept.put_in_conversation(ME, place, dict([_image(9)]))
    with pytest.raises(RequestError, match="at most 50 bytes of images"):
        kept.put_in_response(ME, "s", dict([_image(9)]))
    kept.put_in_response(YOU, "s", dict([_image(9)]))
    kept.put_in_conversation(ME, place, dict([_image(8, 40)]))  # it is there already
    assert (_digests(kept), _digests(kept, YOU)) == ({1, 8}, {9})


def test_a_server_may_keep_none(database: RecordDatabase, store: ConversationStore) -> None:
    place = store.create(ME).conversation_id
    with pytest.raises(RequestError, match="keeps no images"):
        KeptImages(database, 0).put_in_conversation(ME, place, dict([_image(1)]))
    assert _count(database) == (0, 0)


def test_a_conversation_has_limits(database: RecordDatabase, store: ConversationStore) -> None:
    kept, place = KeptImages(database, 2**40), store.create(ME).conversation_id
    with pytest.raises(RequestError, match="at most 256 images"):
        kept.put_in_conversation(ME, place, dict(_image(number, 1) for number in range(MAX_IMAGES + 1)))
    image, content = _image(1)
    with pytest.raises(RequestError, match="have at most 128 MiB"):
        kept.put_in_conversation(ME, place, {replace(image, num_bytes=MAX_BYTES + 1): content})
    kept.put_in_conversation(ME, place, {image: content})
    with pytest.raises(RequestError, match="have at most 128 MiB"):
        kept.put_in_conversation(ME, place, {replace(_image(2)[0], num_bytes=MAX_BYTES): content})
    kept.put_in_conversation(ME, place, dict(_image(number, 1) for number in range(MAX_IMAGES)))
    with pytest.raises(RequestError, match="at most 256 images"):
        kept.put_in_conversation(ME, place, {replace(image, digest="f" * 64): content})


def test_responses_lose_their_images_with_themselves(database: RecordDatabase, kept: KeptImages) -> None:
    streams = KeptStreams(database)
    for name in ("one", "two", "three"):
        kept.put_in_response(ME, name, dict([_image(1), _image(len(name) + 10)]))
    streams.delete(ME, "one")
    assert _digests(kept) == {1, 13, 15}
    streams.delete_before(time.time() - 60)
    assert _digests(kept) == {1, 13, 15}
    streams.forget(YOU)
    streams.delete_before(time.time() + 60)
    assert _count(database) == (0, 0)


def test_nothing_is_left_of_an_owner(database: RecordDatabase, store: ConversationStore, kept: KeptImages) -> None:
    key = KeyStore(database).create(ME).key
    place = store.create(ME).conversation_id
    kept.put_in_conversation(ME, place, dict([_image(1)]), key_id=key.key_id)
    kept.put_in_response(ME, "s", dict([_image(2)]), key_id=key.key_id)
    other = store.create(YOU).conversation_id
    kept.put_in_conversation(YOU, other, dict([_image(1)]))
    KeyStore(database).forget(ME)
    store.forget(ME)
    KeptStreams(database).forget(ME)
    assert _count(database) == (1, 1)
    with pytest.raises(KeyRevoked):
        kept.put_in_response(ME, "s", dict([_image(3)]), key_id=key.key_id)
    assert _digests(kept, YOU) == {1}


def _item(name: str, parent: str | None, *numbers: int) -> Item:
    places = tuple(ItemImage(1, _image(number)[0]) for number in numbers)
    return Item(item_id=name, parent_id=parent, role="user", text="ab", images=places)


def _given(*numbers: int) -> dict[KeptImage, bytes]:
    return dict(map(_image, numbers))


@pytest.fixture
def place(store: ConversationStore) -> str:
    """A conversation with images 1, 2 and 3 in two items."""
    items = [_item("a", None, 1, 2), _item("b", "a", 2, 3)]
    made = store.take_in(ME, [(Conversation(head="b"), items)], images=_given(1, 2, 3, 4))[0]
    assert store.tree(ME, made.conversation_id)[1] == items
    return made.conversation_id


def test_an_item_takes_its_images_with_it(store: ConversationStore, kept: KeptImages, place: str) -> None:
    assert _digests(kept) == {1, 2, 3}
    kept.put_in_conversation(ME, place, _given(4))  # a question with it may be on its way
    store.delete_item(ME, place, "a")
    assert _digests(kept) == {2, 3, 4}
    store.delete_item(ME, place, "b")
    assert _digests(kept) == {4}


def test_an_image_of_a_question_that_comes_stays(store: ConversationStore, kept: KeptImages, place: str) -> None:
    kept.put_in_conversation(ME, place, _given(1))
    store.delete_item(ME, place, "a")
    assert _digests(kept) == {1, 2, 3}
    turn = Turn(conversation_id=place, parent_id="b", input_items=(_item("", None, 1),))
    store.put_turn(ME, turn, "s", Spoken("yes", "completed"), time.time(), [_image(1)[0]])
    store.delete_item(ME, place, "msg_s_in0")
    assert _digests(kept) == {2, 3}


def test_images_without_a_message_are_deleted_after_an_hour(
    store: ConversationStore, kept: KeptImages, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.put_in_conversation(ME, place, _given(1, 4))
    kept.put_in_response(ME, "s", _given(5))
    before = store.get(ME, place)
    kept.delete_unused()
    assert _digests(kept) == {1, 2, 3, 4, 5}
    monkeypatch.setattr(time, "time", lambda clock=time.time: clock() + 7200)
    kept.delete_unused()
    assert (_digests(kept), store.get(ME, place)) == ({1, 2, 3, 5}, before)


def test_a_known_image_is_not_deleted_to_make_room(kept: KeptImages, store: ConversationStore) -> None:
    place = store.create(ME).conversation_id
    kept.put_in_response(ME, "old", dict([_image(1, 30)]))
    kept.put_in_conversation(ME, place, dict([_image(2, 20)]))
    with pytest.raises(RequestError, match="at most 50 bytes of images"):
        kept.put_in_conversation(ME, place, dict([_image(1, 30), _image(3, 20)]))
    assert _digests(kept) == {1, 2}


def test_no_more_are_read_than_a_request_may_have(kept: KeptImages) -> None:
    kept.put_in_response(ME, "s", _given(1, 2))
    digests = [_image(number)[0].digest for number in (1, 2)]
    assert set(kept.get(ME, digests, most_bytes=20)) == set(digests)
    with pytest.raises(RequestError, match="images of a request"):
        kept.get(ME, digests, most_bytes=19)


def test_images_that_come_and_go_at_once(database: RecordDatabase, store: ConversationStore, kept: KeptImages) -> None:
    """A deletion never takes an image from another conversation that has just got it."""
    image, content = _image(1)

    def come_and_go(round_number: int) -> str:
        place = store.create(ME).conversation_id
        kept.put_in_conversation(ME, place, {image: content})
        assert kept.of_conversation(ME, place, image.digest) == (image, content)
        if round_number % 4:
            store.delete(ME, place)
            return ""
        return place

    with ThreadPoolExecutor(8) as threads:
        left = [place for place in threads.map(come_and_go, range(60)) if place]
    assert _count(database) == (1, len(left))
