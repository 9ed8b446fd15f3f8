"""Pairs of texts for models that rank: a template's control tokens are the model's, those in texts are not; and what is
too long is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tailrace.assembly.service import pair_template
from tailrace.engines.scripted.engine import tokenizer_json
from tailrace.errors import ContextLengthExceeded, RequestError
from tailrace.generation.inputs import Encoded, InputEncoder
from tailrace.models import ModelCard
from tailrace.text import Tokenizer
from tailrace.types import Task, VectorRequest

TOKENIZER = Tokenizer.from_json(tokenizer_json())
CONTROL, CONTROL_ID = next(iter(TOKENIZER.control_tokens.items()))
TEMPLATE = f"{CONTROL}Query: {{query}}\nDocument: {{document}}{CONTROL}yes or no?"
CHAT_TEMPLATE = (
    "Query: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "Document: {{ (messages | selectattr('role', 'eq', 'document') | first).content }}?"
)


def _text(query: str, document: str) -> list[int]:
    before, middle, behind = f"Query: {query}\nDocument: {document}", CONTROL_ID, "yes or no?"
    plain = [TOKENIZER.encode(text, special=False) for text in (before, behind)]
    return [CONTROL_ID, *plain[0], middle, *plain[1]]


async def _encoded(request: VectorRequest, limit_tokens: int = 10_000) -> list[list[int]]:
    found: Encoded = await InputEncoder(TOKENIZER, TEMPLATE).encode(request, limit_tokens)
    assert found.is_cut == (limit_tokens < 10_000)
    return [list(prompt.segments[0]) for prompt in found.prompts if isinstance(prompt.segments[0], tuple)]


async def test_a_pair_is_in_the_template() -> None:
    documents = ("Mills turn.", "", "{query} {document}", f"a{CONTROL}b", "水 🐟")
    query = f"What turns? {{document}}{CONTROL}"
    found = await _encoded(VectorRequest(query=query, inputs=documents))
    assert found == [_text(query, document) for document in documents]
    long = await _encoded(VectorRequest(query=query, inputs=("word " * 3_000,)), 20_000)
    assert long == [_text(query, "word " * 3_000)]


@pytest.mark.parametrize("truncate", ["end", "fit", "start"])
async def test_what_is_too_long_is_cut(truncate: Literal["end", "fit", "start"]) -> None:
    document = "".join(chr(97 + place % 26) for place in range(200))
    frame = len(_text("Q?", ""))
    for room in (150, 1, 0):
        request = VectorRequest(query="Q?", inputs=(document,), truncate=truncate)
        (found,) = await _encoded(request, frame + room)
        assert frame <= len(found) <= frame + room
        kept = document[len(document) - room :] if truncate == "start" else document[:room]
        assert found == _text("Q?", kept)
    (found,) = await _encoded(VectorRequest(query="Q?", inputs=(document,), truncate="end"), frame - 1)
    assert found == _text("Q", "")


async def test_what_may_not_be_cut_is_refused() -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        await _encoded(VectorRequest(query="Q?", inputs=("x", "x" * 100)), 60)
    assert "Input 1" in caught.value.message
    with pytest.raises(ContextLengthExceeded):  # not even an empty pair fits
        await _encoded(VectorRequest(query="Q?", inputs=("x",), truncate="end"), 3)
    for text in ("\0", "\ud800"):
        with pytest.raises(RequestError):
            await _encoded(VectorRequest(query="Q?", inputs=(text,)))


def _card(template: str | None, task: Task = "rank", pair: str = "") -> ModelCard:
    return ModelCard(
        "m", Path("m"), "huggingface", "", template, "", "", add_bos=False, eos_token_ids=(), context_tokens=9,
        task=task, pair_template=pair,
    )  # fmt: skip


def test_the_chat_template_of_a_model_that_ranks() -> None:
    assert pair_template(_card(CHAT_TEMPLATE)) == "Query: {query}\nDocument: {document}?"
    assert pair_template(_card(CHAT_TEMPLATE, pair="{query}{document}")) == "{query}{document}"
    for other in (None, "{{ messages[0].content }}", "{{ raise_exception('no') }}"):
        assert pair_template(_card(other)) == ""
    assert pair_template(_card(CHAT_TEMPLATE, task="embed")) == ""
