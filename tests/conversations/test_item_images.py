"""Placeholders for the images that a model does not see again."""

from __future__ import annotations

import pytest

from tailrace.conversations.item_images import PLACEHOLDER, with_newest_images
from tailrace.types import IMAGE_MARK, Image, Message


@pytest.mark.parametrize(
    ("content", "num_kept", "shown"),
    [
        ("#", 0, "@"),
        ("##", 0, "@\n@"),
        ("a#b", 0, "a\n@\nb"),
        ("a#", 0, "a\n@"),
        ("#\nb", 0, "@\nb"),
        ("a\n#\n#\n", 0, "a\n@\n@\n"),
        ("a##b#", 1, "a\n@\n@\nb#"),
        ("##b", 1, "@\n#b"),
        ("a#b", 1, "a#b"),
    ],
)
def test_each_placeholder_has_a_line_of_its_own(content: str, num_kept: int, shown: str) -> None:
    images = tuple(Image(bytes([number])) for number in range(content.count("#")))
    message = Message("user", content.replace("#", IMAGE_MARK), images=images)
    (found,) = with_newest_images([message], 1, num_images=num_kept, num_bytes=100)
    assert found.content == shown.replace("#", IMAGE_MARK).replace("@", PLACEHOLDER)
    assert found.images == images[len(images) - num_kept :]
