from __future__ import annotations

from typing import Any

import pytest

from tailrace.settings import checked_settings


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"port": "x"}, "should be a whole number."),
        ({"port": True}, "should be a whole number."),
        ({"port": 99999}, "should be from 0 to 65535."),
        ({"queue_s": -1}, "should be from 0 to inf."),
        ({"host": 5}, "should be text."),
        ({"exact": 1}, "should be true or false."),
        ({"nothing": 1}, "is not a setting."),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        checked_settings(settings)


def test_settings_that_can() -> None:
    settings = {"port": 1, "queue_s": 5, "host": "::1", "exact": False}
    assert checked_settings(settings) == settings
