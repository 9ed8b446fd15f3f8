"""The real engine is replaced when compiled grammars use too much memory. No stream is lost."""

from __future__ import annotations

import contextlib
import re

import pytest
from tests.api.process import Server

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]

_FULL = r"compiled grammars take .* MiB of memory; --grammar-memory-bytes is 2 MiB\. Interrupted sequences: "


def _ask(server: Server, number: int) -> None:
    body = {"prompt": "Say", "guided_regex": f"ab[a-z ]{{1,15}}x{number}", "max_tokens": 8, "seed": 1}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"].startswith("ab")


def test_an_engine_full_of_grammars_is_replaced() -> None:
    """Between requests, and while a stream runs, which continues exactly."""
    with contextlib.closing(Server("smollm2", "--grammar-memory-bytes", str(2 * 2**20))) as server:
        server.wait_ready(timeout_s=120)
        numbers = iter(range(500))
        while not re.search(_FULL + "0", server.log):
            _ask(server, next(numbers))
        request = {"prompt": "Count:", "max_tokens": 800, "ignore_eos": True, "seed": 5}
        while not re.search(_FULL + "[1-9]", server.log):
            stream_id = server.create(request)
            while not re.search(_FULL + "[1-9]", server.log) and server.state(stream_id)["status"] != "done":
                _ask(server, next(numbers))
        assert server.wait_state(stream_id, "done", timeout_s=120)["continuity"] == "replayed"  # every token is equal
        assert "poison" not in server.log
