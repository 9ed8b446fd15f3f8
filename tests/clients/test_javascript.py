"""Clients in JavaScript that abort a request. tests/differential tests reading, resuming and failures of all
clients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.clients.installed import run_javascript

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]  # the first one has them installed

PROMPT = "Tell me of rivers."
ENDLESS = 20_000


@pytest.mark.parametrize(
    "client",
    ["openai chat stream", "openai chat helper", "openai completion stream", "hub chat stream", "hub text stream",
     "hub 4.13.16 text stream", "eventsource-parser chat stream", "fetch text", "fetch pieces"],
)  # fmt: skip
def test_aborting_cancels_on_wires_that_cannot_resume(client: str, paced: Server) -> None:
    (outcome,) = run_javascript(client, url=paced.url, prompts=[PROMPT], max_tokens=ENDLESS, abort=True)
    (stream_id,) = outcome["stream_ids"]
    state = paced.wait_state(stream_id, "cancelled")
    assert state["usage"]["completion_tokens"] < 1_000


def test_a_native_stream_continues_without_its_reader(paced: Server) -> None:
    (outcome,) = run_javascript("fetch-event-source", url=paced.url, prompts=[PROMPT], max_tokens=60, abort=True)
    (stream_id,) = outcome["stream_ids"]
    state = paced.wait_state(stream_id, "done")
    assert state["usage"]["completion_tokens"] == 60
    assert len(state["text"]) > 60


@pytest.mark.parametrize("client", ["ai sdk resumed", "ag-ui"])
def test_a_front_end_has_the_whole_answer(client: str, paced: Server) -> None:
    (outcome,) = run_javascript(client, url=paced.url, prompts=[PROMPT], max_tokens=60)
    assert outcome.get("text") == Answer(chat_ids(PROMPT), 60).text, outcome


def test_an_event_source_stops_at_the_end(server: Server) -> None:
    (outcome,) = run_javascript("eventsource left alone", url=server.url, prompts=[PROMPT], max_tokens=20)
    assert outcome.get("text"), outcome


@pytest.mark.parametrize(
    "client", ["openai completion stream", "hub text", "hub text stream", "hub 4.13.16 text", "hub 4.13.16 text stream"]
)
def test_the_death_of_the_worker_is_an_error(client: str, serve: Callable[..., Server]) -> None:
    url = serve("scripted").url
    (outcome,) = run_javascript(client, url=url, prompts=["<|crash|>"], max_tokens=20)
    assert outcome["error"] == ("APIError" if client.startswith("openai") else "ProviderApiError"), outcome
