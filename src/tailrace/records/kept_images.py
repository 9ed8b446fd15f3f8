"""The images of conversations and of stored responses in the database."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping

from sqlalchemy import select

from tailrace.errors import KeyRevoked, RequestError, UnknownConversation
from tailrace.records._conversation_rows import lock, read_items
from tailrace.records._image_rows import (
    RESPONSE,
    UNUSED_S,
    claim,
    digests_of,
    hold,
    read_images,
    release,
    unclaimed_before,
)
from tailrace.records.database_tables import image_uses, images
from tailrace.records.key_store import find_forgotten
from tailrace.records.record_database import RecordDatabase
from tailrace.types import NO_LIMIT, KeptImage

__all__ = ["KeptImages"]


class KeptImages:
    """Stores and reads images. They are deleted with what has them. Calls block; each is one transaction. An owner's
    images may have `most_bytes`. Raises: StorageError."""

    def __init__(self, database: RecordDatabase, most_bytes: int) -> None:
        self._database = database
        self._most_bytes = most_bytes

    def put_in_conversation(
        self, owner: str, conversation_id: str, given: Mapping[KeptImage, bytes], *, key_id: str = ""
    ) -> None:
        """Keep images for a conversation. `key_id` is the key of the request, if keys are in use.

        Raises: KeyRevoked if the owner of the key was deleted, UnknownConversation, RequestError if there is no room.
        """
        with self._database.begin() as connection:
            if find_forgotten(connection, [key_id]):
                raise KeyRevoked("The key was revoked.")
            lock(connection, owner, conversation_id)
            hold(connection, owner, conversation_id, given, most_bytes=self._most_bytes)

    def put_in_response(
        self, owner: str, stream_id: str, given: Mapping[KeptImage, bytes], *, key_id: str = ""
    ) -> None:
        """As `put_in_conversation`, for a stored response."""
        with self._database.begin() as connection:
            if find_forgotten(connection, [key_id]):
                raise KeyRevoked("The key was revoked.")
            hold(connection, owner, RESPONSE + stream_id, given, most_bytes=self._most_bytes)

    def delete_unused(self) -> None:
        """Delete the images that have waited too long for a message of their conversation."""
        before_s = time.time() - UNUSED_S
        with self._database.begin() as connection:
            found = unclaimed_before(connection, before_s)
        for owner, conversation_id in found:
            with contextlib.suppress(UnknownConversation), self._database.begin() as connection:
                lock(connection, owner, conversation_id, is_change=False)
                items = read_items(connection, conversation_id)
                claim(connection, owner, conversation_id, items)
                release(connection, owner, conversation_id, keep=digests_of(items), before_s=before_s)

    def get(
        self, owner: str, digests: Collection[str], *, most_bytes: int = NO_LIMIT
    ) -> dict[str, tuple[KeptImage, bytes]]:
        """Return those of these images that the owner has, by digest. Raises: RequestError, before any is in memory, if
        they have more than `most_bytes`."""
        query = select(images.c.digest, images.c.media_type, images.c.num_bytes, images.c.content).where(
            images.c.owner == owner, images.c.digest.in_(sorted(digests))
        )
        with self._database.begin() as connection:
            if sum(image.num_bytes for image in read_images(connection, owner, digests)) > most_bytes:
                raise RequestError(
                    f"The images of a request have at most {most_bytes // 2**20} MiB. Send smaller ones."
                )
            return {row.digest: (KeptImage(*row[:3]), row.content) for row in connection.execute(query)}

    def of_conversation(self, owner: str, conversation_id: str, digest: str) -> tuple[KeptImage, bytes]:
        """Raises: UnknownConversation if the conversation has no such image."""
        query = (
            select(images.c.digest, images.c.media_type, images.c.num_bytes, images.c.content)
            .join(image_uses, (images.c.owner == image_uses.c.owner) & (images.c.digest == image_uses.c.digest))
            .where(image_uses.c.owner == owner, image_uses.c.holder == conversation_id, image_uses.c.digest == digest)
        )
        with self._database.begin() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            raise UnknownConversation("The conversation has no image with this id.", param="image_id")
        return KeptImage(*row[:3]), row.content
