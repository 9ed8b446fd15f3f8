"""Tokens in OpenAI's completions: their names, and the logprobs and offsets of those of a prompt."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence

from tailrace.dialects.answers import finite
from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.facts import StreamFacts, TokenVocabulary
from tailrace.types import PromptLogprob

__all__ = ["by_name", "prompt_json", "token_name", "token_starts"]


def prompt_json(facts: StreamFacts, number: int, known: Sequence[PromptLogprob]) -> list[JsonBody | None]:
    """Return the logprobs of a prompt in vLLM's form: for each token the asked ones and its own, by id."""
    found: list[JsonBody | None] = [None]
    for token_id, one in zip(facts.record.prompts[number].ids[1:], known, strict=False):
        entries = {top_id: (logprob, rank) for rank, (top_id, logprob) in enumerate(one.top, 1)}
        entries.setdefault(token_id, (one.logprob, one.rank))
        found.append(
            {
                str(entry_id): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": facts.vocabulary.token_text(entry_id),
                }
                for entry_id, (logprob, rank) in entries.items()
            }
        )
    return found


def token_starts(vocabulary: TokenVocabulary, token_ids: Sequence[int], stop: int) -> Iterator[int]:
    """Yield where each token of a prompt begins in its text, which ends at `stop`. A token that the server put before
    the text begins where the text does."""
    decoder = getincrementaldecoder("utf-8")("replace")
    lengths = [len(decoder.decode(vocabulary.pieces[token_id])) for token_id in token_ids]
    start = stop - sum(lengths)
    for length in lengths:
        yield max(start, 0)
        start += length


def token_name(vocabulary: TokenVocabulary, token_id: int) -> str:
    """Return the text of a token, or its bytes, if they are only a part of a character, as OpenAI's API does."""
    piece = vocabulary.pieces[token_id] if token_id < len(vocabulary.pieces) else b""
    try:
        piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
    return vocabulary.token_text(token_id)


def by_name(vocabulary: TokenVocabulary, logprobs: Mapping[int, float]) -> JsonBody:
    """Return logprobs by the names of their tokens. Of tokens with one text, the later ones are named by their ids."""
    named: JsonBody = {}
    for token_id, logprob in logprobs.items():
        name = token_name(vocabulary, token_id)
        named[f"token_id:{token_id}" if name in named else name] = finite(logprob)
    return named
