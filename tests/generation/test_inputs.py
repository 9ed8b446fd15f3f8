"""Pairs of texts for models that rank: a template's control tokens are the model's, those in texts are not; and what is
too long is cut."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pytest

from tailrace.assembly.service import pair_template
from tailrace.errors import ContextLengthExceeded, RequestError
from tailrace.generation.inputs import Encoded, InputEncoder
from tailrace.models import ModelCard
from tailrace.text import Tokenizer
from tailrace.types import Task, VectorRequest
from tailrace_outer.scripted.scripted_engine import tokenizer_json

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
    found: Encoded = await InputEncoder(TOKENIZER, TEMPLATE).encode(request, limit_tokens, 300_000)
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
    for room, of_query, of_document in ((150, 2, 150), (2, 2, 2), (1, 1, 2), (0, 1, 1), (-1, 0, 1), (-2, 0, 0)):
        request = VectorRequest(query="Q?", inputs=(document,), truncate=truncate)
        (found,) = await _encoded(request, frame + room)
        kept = [
            text[len(text) - left :] if truncate == "start" else text[:left]
            for text, left in (("Q?", of_query), (document, of_document))
        ]
        assert found == _text(*kept)


class _Counting(Tokenizer):
    """Notes how much it encodes."""

    longest = 0

    def encode_parts(self, parts: Iterable[str | int]) -> list[int]:
        ids = super().encode_parts(parts)
        self.longest = max(self.longest, len(ids))
        return ids


async def test_of_a_long_query_and_short_documents_the_query_is_cut() -> None:
    tokenizer = _Counting(tokenizer_json())
    query, documents = "".join(chr(97 + place % 26) for place in range(40_000)), ("Mills turn.", "Fish swim.")
    request = VectorRequest(query=query, inputs=documents, truncate="end")
    found = await InputEncoder(tokenizer, TEMPLATE).encode(request, 200, 300_000)
    assert found.is_cut
    frame = len(_text("", ""))
    for document, prompt in zip(documents, found.prompts, strict=True):
        room = 200 - frame - len(TOKENIZER.encode(document, special=False))
        assert prompt.segments == (tuple(_text(query[:room], document)),)
    assert tokenizer.longest <= 2 * 200 + frame  # the whole query is not encoded with each document


async def test_all_pairs_together_have_a_limit() -> None:
    tokenizer = _Counting(tokenizer_json())
    request = VectorRequest(query="Q" * 90, inputs=("x",) * 2_000)
    for template in (TEMPLATE, ""):
        with pytest.raises(RequestError, match="together have at most 1000 tokens"):
            await InputEncoder(tokenizer, template).encode(request, 200, 1_000)


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
