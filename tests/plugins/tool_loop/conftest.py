"""A client of the server that a module of tests has as its `rig`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import pytest
from openai import OpenAI
from tests.api.process import Server
from tests.plugins.tool_loop.tool_servers import client_of


class _Rig(Protocol):
    server: Server


@pytest.fixture
def client(rig: _Rig) -> Iterator[OpenAI]:
    with client_of(rig.server) as client:
        yield client
