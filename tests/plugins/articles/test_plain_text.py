"""The wire of bare text: what its queries mean. Its bytes: tests/golden."""

from __future__ import annotations

import pytest
from tests.dialects.fake_server import FakeServer, prompt_of, tutorial

from tailrace.errors import RequestError

CANARY = "Xyzzy"  # stands in for what a client would not want to find in a log


def test_a_plain_query() -> None:
    call = tutorial({"prompt": "Hi", "max_tokens": "7"})
    assert [(message.role, message.content) for message in call.request.messages] == [("user", "Hi")]
    assert (call.request.sampling.max_tokens, call.request.sampling.temperature) == (7, 0.0)
    assert call.request.on_disconnect == "cancel"
    assert call.stream
    assert prompt_of(tutorial({"prompt": "Hi"}, server=FakeServer(can_chat=False)).request) == "Hi"


@pytest.mark.parametrize(
    "query",
    [
        {"prompt": ""},
        *({"prompt": "Hi", "max_tokens": digits} for digits in ("0", "-1", "", "1.0", "\u0661", "9" * 5000, CANARY)),
    ],
)
def test_a_plain_query_that_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(RequestError) as caught:
        tutorial(query)
    assert CANARY not in caught.value.message
