"""Read and write the rows of images, within a transaction of the caller.

An image of an owner is stored once, whatever number of conversations and responses has it. Changes of one owner's
images come one after the other, so that none is deleted while another transaction begins to use it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping

from sqlalchemy import Connection, Select, delete, exists, func, insert, select, text, update

from tailrace.conversations.item_images import MAX_BYTES, MAX_IMAGES
from tailrace.conversations.items import Item
from tailrace.errors import RequestError
from tailrace.records.database_tables import image_uses, images
from tailrace.types import KeptImage

__all__ = [
    "RESPONSE",
    "UNUSED_S",
    "Contents",
    "claim",
    "digests_of",
    "forget_images",
    "hold",
    "read_images",
    "release",
    "release_responses_before",
    "unclaimed_before",
]

RESPONSE = "resp_"  # begins the holder of the images of a stored response
UNUSED_S = 3600.0  # how long an image stays in a conversation without a message that has it
_IS_RESPONSE = image_uses.c.holder.startswith(RESPONSE, autoescape=True)
_CLAIMED_S = 0.0  # the time of a use whose message is written

Contents = Mapping[KeptImage, bytes]


def hold(connection: Connection, owner: str, holder: str, given: Contents, *, most_bytes: int) -> None:
    """Keep images for a conversation or a response. An owner's images may have `most_bytes`: if there is no room, those
    of the oldest responses are deleted. Those of a conversation wait for their message from now on, also if it has them
    already. Raises: RequestError if there is still no room, or the conversation has too many.
    """
    if not given:
        return
    _lock(connection, owner)
    digests = {image.digest for image in given}
    known = {image.digest for image in read_images(connection, owner, digests)}
    held = {row.digest: row.num_bytes for row in connection.execute(_held_by(owner, holder))}
    new_bytes = sum(image.num_bytes for image in given if image.digest not in known)
    its_bytes = sum(held.values()) + sum(image.num_bytes for image in given if image.digest not in held)
    if not holder.startswith(RESPONSE):
        if len(digests | held.keys()) > MAX_IMAGES:
            raise RequestError(f"A conversation has at most {MAX_IMAGES} images. Start a new one.")
        if its_bytes > MAX_BYTES:
            raise RequestError(f"The images of a conversation have at most {MAX_BYTES // 2**20} MiB. Start a new one.")
    now_s = time.time()
    _set_times(connection, owner, holder, digests, now_s)
    for digest in digests - held.keys():  # before others are deleted, so that these are not
        connection.execute(insert(image_uses).values(owner=owner, holder=holder, digest=digest, created_s=now_s))
    _make_room(connection, owner, holder, new_bytes, most_bytes)
    for image, content in given.items():
        if image.digest not in known:
            row = {"media_type": image.media_type, "num_bytes": image.num_bytes, "content": content}
            connection.execute(insert(images).values(owner=owner, digest=image.digest, **row))
            known.add(image.digest)


def claim(connection: Connection, owner: str, conversation_id: str, items: Iterable[Item]) -> None:
    """Note that these items, which are written now, have their images: from now on they are deleted with their last
    item."""
    _set_times(connection, owner, conversation_id, digests_of(items), _CLAIMED_S)


def _set_times(connection: Connection, owner: str, holder: str, digests: Collection[str], created_s: float) -> None:
    if digests:
        its = image_uses.c.owner == owner, image_uses.c.holder == holder, image_uses.c.digest.in_(sorted(digests))
        connection.execute(update(image_uses).where(*its).values(created_s=created_s))


def unclaimed_before(connection: Connection, created_s: float) -> list[tuple[str, str]]:
    """Return (owner, conversation id) of each conversation with images that have waited for a message since then."""
    query = select(image_uses.c.owner, image_uses.c.holder).where(
        image_uses.c.created_s > _CLAIMED_S, image_uses.c.created_s < created_s, ~_IS_RESPONSE
    )
    return [(row.owner, row.holder) for row in connection.execute(query.distinct())]


def read_images(connection: Connection, owner: str, digests: Collection[str]) -> list[KeptImage]:
    """Return those of these images that an owner has."""
    if not digests:
        return []
    query = select(images.c.digest, images.c.media_type, images.c.num_bytes).where(
        images.c.owner == owner, images.c.digest.in_(sorted(digests))
    )
    return [KeptImage(*row) for row in connection.execute(query)]


def release(
    connection: Connection, owner: str, holder: str, *, keep: Collection[str] = (), before_s: float | None = None
) -> None:
    """Delete the images of a conversation or a response, unless another one has them, or they are in `keep`, or came
    after `before_s`."""
    of_it = [image_uses.c.owner == owner, image_uses.c.holder == holder]
    if keep:
        of_it.append(image_uses.c.digest.not_in(sorted(keep)))
    if before_s is not None:
        of_it.append(image_uses.c.created_s < before_s)
    if connection.execute(select(image_uses.c.digest).where(*of_it).limit(1)).first() is None:
        return
    _lock(connection, owner)
    digests = list(connection.execute(select(image_uses.c.digest).where(*of_it)).scalars())
    connection.execute(delete(image_uses).where(*of_it))
    is_used = exists().where(image_uses.c.owner == images.c.owner, image_uses.c.digest == images.c.digest)
    connection.execute(delete(images).where(images.c.owner == owner, images.c.digest.in_(digests), ~is_used))


def release_responses_before(connection: Connection, created_s: float) -> None:
    query = (
        select(image_uses.c.owner, image_uses.c.holder)
        .where(image_uses.c.created_s < created_s, _IS_RESPONSE)
        .distinct()
    )
    for owner, holder in connection.execute(query).all():
        release(connection, owner, holder)


def forget_images(connection: Connection, owner: str, *, of_responses: bool) -> None:
    """Release all images of an owner's conversations, or of the owner's responses."""
    query = select(image_uses.c.holder).where(
        image_uses.c.owner == owner, _IS_RESPONSE if of_responses else ~_IS_RESPONSE
    )
    for holder in connection.execute(query.distinct()).scalars().all():
        release(connection, owner, holder)


def digests_of(items: Iterable[Item]) -> set[str]:
    return {image.kept.digest for item in items for image in item.images if image.kept is not None}


def _held_by(owner: str, holder: str) -> Select[tuple[str, int]]:
    return (
        select(image_uses.c.digest, images.c.num_bytes)
        .join(images, (images.c.owner == image_uses.c.owner) & (images.c.digest == image_uses.c.digest))
        .where(image_uses.c.owner == owner, image_uses.c.holder == holder)
    )


def _make_room(connection: Connection, owner: str, holder: str, new_bytes: int, most_bytes: int) -> None:
    """Make room for images of this holder. Raises: RequestError."""
    total = select(func.coalesce(func.sum(images.c.num_bytes), 0)).where(images.c.owner == owner)
    if connection.execute(total).scalar_one() + new_bytes <= most_bytes:
        return
    oldest = (
        select(image_uses.c.holder)
        .where(image_uses.c.owner == owner, _IS_RESPONSE, image_uses.c.holder != holder)
        .group_by(image_uses.c.holder)
        .order_by(func.min(image_uses.c.created_s))
    )
    for response in connection.execute(oldest).scalars().all():
        release(connection, owner, response)
        if connection.execute(total).scalar_one() + new_bytes <= most_bytes:
            return
    raise RequestError(
        f"This server keeps at most {most_bytes} bytes of images for each owner. Delete conversations with images."
        if most_bytes
        else "This server keeps no images, so conversations cannot have any."
    )


def _lock(connection: Connection, owner: str) -> None:
    """Let other changes of this owner's images wait until the transaction ends."""
    if connection.dialect.name != "sqlite":
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtext(:owner))"), {"owner": f"images of {owner}"})
    elif not connection.connection.dbapi_connection.in_transaction:  # type: ignore[union-attr]
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # the driver begins a transaction only before the first change
