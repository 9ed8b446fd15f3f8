"""Servers that recite the text that the prompt names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from tests.api.process import Server
from tests.clients.conftest import no_settings

__all__ = ["no_settings"]  # clients find the server by its address alone here, too


@pytest.fixture(scope="module")
def reciting() -> Iterator[Server]:
    # A proxy that is busy with many answers may be slow to pass on the body of a request.
    with contextlib.closing(Server("scripted:text=-1", "--body-gap-s", "20")) as server:
        yield server.wait_ready()
