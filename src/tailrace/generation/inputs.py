"""Turns the inputs of embeddings and rankings into segments: tokenises them, adds the model's own tokens, checks
lengths."""

from __future__ import annotations

import asyncio
import re
from typing import NamedTuple

from tailrace.errors import ContextLengthExceeded, RequestError
from tailrace.text import Tokenizer
from tailrace.types import Prompt, Segment, VectorRequest, num_tokens_of

__all__ = ["Encoded", "InputEncoder", "PairTemplate"]

_INLINE_CHARACTERS = 8_192  # tokenised on the event loop in about 2 ms; more are tokenised in a thread


class PairTemplate:
    """A text with {query} and {document}, whose control tokens are those of the model. Texts never become any."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        control = tokenizer.control_tokens
        longest_first = sorted(control, key=len, reverse=True)
        known = re.compile("|".join(["({query}|{document})", *map(re.escape, longest_first)]))
        self._tokenizer = tokenizer
        self._parts: list[str | int] = []
        position = 0
        for found in known.finditer(text):
            self._parts += [text[position : found.start()], found[1] or control[found[0]]]
            position = found.end()
        self._parts.append(text[position:])

    def encode(self, query: str, document: str) -> list[int]:
        """Raises: RequestError for text with lone surrogates."""
        given = {"{query}": query, "{document}": document}
        return self._tokenizer.encode_parts(
            given.get(part, part) if isinstance(part, str) else part for part in self._parts
        )


class _Text:
    """A text that can be cut at any of its tokens. Its length is their number."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self._text = text
        self._starts = [start for _, start, _ in tokenizer.offsets_of_parts((text,))[1]]

    def __len__(self) -> int:
        return len(self._starts)

    def cut(self, num_tokens: int, truncate: str) -> str:
        """Return the text with about so many of its tokens."""
        if num_tokens >= len(self):
            return self._text
        if truncate == "start":
            return self._text[self._starts[len(self) - num_tokens] :] if num_tokens else ""
        return self._text[: self._starts[num_tokens]]


class Encoded(NamedTuple):
    """The inputs of a request, and whether a part of one was left out."""

    prompts: tuple[Prompt, ...]
    is_cut: bool


class InputEncoder:
    """Encodes the inputs of one model that embeds or ranks."""

    def __init__(self, tokenizer: Tokenizer, pair_template: str = "") -> None:
        """`pair_template`: as in `ModelCard`."""
        self._tokenizer = tokenizer
        self._template = PairTemplate(pair_template, tokenizer) if pair_template else None

    async def encode(self, request: VectorRequest, limit_tokens: int, most_tokens: int) -> Encoded:
        """Return the inputs as segments; a pair may have two. Long texts are encoded in a thread, which ends as soon as
        they have more than `most_tokens` together.

        Raises: ContextLengthExceeded for an input of more than `limit_tokens`, unless it may be cut; RequestError.
        """
        texts = [one for one in (request.query, *request.inputs) if isinstance(one, str)]
        if any("\0" in text for text in texts):
            raise RequestError("Text must not contain NUL characters.", param="input")
        num_queries = len(request.inputs) if self._template is not None else 1  # it is encoded with each document
        num_characters = sum(map(len, texts)) + len(texts) + num_queries * len(request.query or "")
        work = self._encode if self._template is None or request.query is None else self._encode_pairs
        if num_characters <= _INLINE_CHARACTERS:
            return work(request, limit_tokens, most_tokens)
        return await asyncio.to_thread(work, request, limit_tokens, most_tokens)

    def _encode_pairs(self, request: VectorRequest, limit_tokens: int, most_tokens: int) -> Encoded:
        assert self._template is not None
        query = _Text(request.query or "", self._tokenizer)
        prompts, is_cut, num_tokens = [], False, 0
        for index, given in enumerate(request.inputs):
            document = _Text(given if isinstance(given, str) else "", self._tokenizer)
            room = num_both = len(query) + len(document)
            if request.truncate:  # neither text keeps more than the limit: a long query is not encoded again as a whole
                room = min(room, 2 * limit_tokens)
            while True:
                query_room, document_room = _shares(len(query), len(document), room)
                left = document.cut(document_room, request.truncate)
                ids = self._template.encode(query.cut(query_room, request.truncate), left)
                over = len(ids) - limit_tokens
                if over <= 0:
                    break
                if not request.truncate or not room:
                    raise _too_long(len(ids), limit_tokens, index if len(request.inputs) > 1 else None)
                room = max(0, room - over)
            is_cut |= room < num_both
            num_tokens += len(ids)
            _check_total(num_tokens, most_tokens)
            prompts.append(Prompt(left, (tuple(ids),)))
        return Encoded(tuple(prompts), is_cut)

    def _encode(self, request: VectorRequest, limit_tokens: int, most_tokens: int) -> Encoded:
        texts = [one for one in (request.query, *request.inputs) if isinstance(one, str)]
        encoded = iter(self._tokenizer.encode_all(texts))
        query = next(encoded) if request.query is not None else None
        prompts, is_cut, total = [], False, 0
        for index, given in enumerate(request.inputs):
            ids = next(encoded) if isinstance(given, str) else self._checked(given)
            segments = self._single(ids) if query is None else self._pair(query, ids)
            num_tokens = num_tokens_of(segments)
            if num_tokens > limit_tokens:
                room, is_cut = len(query or ()) + len(ids) - (num_tokens - limit_tokens), True
                if not request.truncate or room < 0:
                    raise _too_long(num_tokens, limit_tokens, index if len(request.inputs) > 1 else None)
                segments = (
                    self._single(_cut(ids, room, request.truncate))
                    if query is None
                    else self._pair(*_cut_pair(query, ids, room, request.truncate))
                )
            total += num_tokens_of(segments)
            _check_total(total, most_tokens)
            prompts.append(Prompt(given if isinstance(given, str) else "", segments))
        return Encoded(tuple(prompts), is_cut)

    def _checked(self, given: tuple[int, ...]) -> list[int]:
        """Return token ids without the model's own tokens around them. Raises: RequestError."""
        if not all(0 <= token_id < self._tokenizer.vocab_size for token_id in given):
            raise RequestError(
                "The input has a token id that the model does not have. Send texts, or ids of this model's tokenizer.",
                param="input",
            )
        before, behind = self._tokenizer.bos_ids, self._tokenizer.ends
        is_framed = given[: len(before)] == before and given[len(given) - len(behind) :] == behind
        return list(given[len(before) : len(given) - len(behind)] if is_framed else given)

    def _single(self, ids: list[int]) -> tuple[Segment, ...]:
        return ((*self._tokenizer.bos_ids, *ids, *self._tokenizer.ends),)

    def _pair(self, query: list[int], document: list[int]) -> tuple[Segment, ...]:
        before, between, behind = self._tokenizer.bos_ids, self._tokenizer.between, self._tokenizer.ends
        return (*before, *query, *between), (*document, *behind)


def _cut(ids: list[int], room: int, truncate: str) -> list[int]:
    if len(ids) <= room:
        return ids
    return ids[len(ids) - room :] if truncate == "start" else ids[:room]


def _cut_pair(query: list[int], document: list[int], room: int, truncate: str) -> tuple[list[int], list[int]]:
    query_room, document_room = _shares(len(query), len(document), room)
    return _cut(query, query_room, truncate), _cut(document, document_room, truncate)


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of each text of a pair are kept: the longer one is cut until both are equally long.

    Source: `LongestFirst` of the library tokenizers, which models of this kind were trained with.
    """
    shorter = min(first, second, room // 2)
    longer = min(max(first, second), room - shorter)
    return (shorter, longer) if first <= second else (longer, shorter)


def _check_total(num_tokens: int, most_tokens: int) -> None:
    if num_tokens > most_tokens:
        raise RequestError(f"All inputs of a request together have at most {most_tokens} tokens.", param="input")


def _too_long(num_tokens: int, limit_tokens: int, index: int | None) -> ContextLengthExceeded:
    error = ContextLengthExceeded(num_tokens, limit_tokens)
    error.param = "input"
    if index is not None:
        error.message = f"Input {index}, counted from 0: {error.message}"
    return error
