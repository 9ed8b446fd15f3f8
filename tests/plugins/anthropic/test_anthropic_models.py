"""The pages of the list of models on Anthropic's wire."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.dialects.fake_server import FakeServer

from tailrace.dialects import ParsedRequest
from tailrace.errors import RequestError, UnknownModel
from tailrace_plugins.anthropic.anthropic_wire import list_models, show_model

NAMES = [f"model-{number}" for number in range(45)]
SERVERS = tuple(FakeServer(model=name, started_s=5, max_total_tokens=99) for name in NAMES)


def page(**query: str) -> Any:  # Any: of JSON
    return json.loads(list_models(ParsedRequest(SERVERS[0], query=query, others=SERVERS[1:])).body)


def names(found: Any) -> list[str]:  # Any: of JSON
    return [model["id"] for model in found["data"]]


def test_a_model() -> None:
    model = {
        "type": "model",
        "id": "model-3",
        "display_name": "model-3",
        "created_at": "1970-01-01T00:00:05Z",
        "lifecycle": "active",
        "max_input_tokens": 99,
    }
    assert page()["data"][3] == model
    assert json.loads(show_model(ParsedRequest(SERVERS[3], path={"name": "model-3"})).body) == model
    with pytest.raises(UnknownModel):
        show_model(ParsedRequest(SERVERS[3], path={"name": "model-4"}))


@pytest.mark.parametrize("limit", [1, 7, 20, 44, 45, 1000])
def test_all_pages_have_each_model_once(limit: int) -> None:
    forward, backward = [page(limit=str(limit))], [page(limit=str(limit), before_id=NAMES[-1])]
    while forward[-1]["has_more"]:
        forward.append(page(limit=str(limit), after_id=forward[-1]["last_id"]))
    while backward[-1]["has_more"]:
        backward.append(page(limit=str(limit), before_id=backward[-1]["first_id"]))
    assert [name for found in forward for name in names(found)] == NAMES
    assert [name for found in reversed(backward) for name in names(found)] == NAMES[:-1]
    assert len(names(forward[0])) == min(limit, 45)


def test_a_page_has_twenty_models_and_may_be_empty() -> None:
    assert names(page()) == NAMES[:20]
    assert page(after_id=NAMES[-1]) == {"data": [], "has_more": False, "first_id": None, "last_id": None}


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "1001"}, "limit"),
        ({"after_id": "model"}, "after_id"),
        ({"before_id": ""}, "before_id"),
        ({"after_id": "model-1", "before_id": "model-3"}, "before_id"),
    ],
)
def test_pages_that_cannot_be(query: dict[str, str], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        page(**query)
    assert refused.value.param == param
