"""Fields of bodies that several wires share, with the same ranges on each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec.structs import replace

from tailrace.errors import RequestError
from tailrace.types import NO_LIMIT, Sampling, TemplateValue

__all__ = [
    "MAX_STOPS",
    "AnswerTokens",
    "CommonFields",
    "Fraction",
    "LogitBias",
    "ReasoningTokens",
    "RepetitionPenalty",
    "SamplingFields",
    "Temperature",
    "TemplateValues",
    "TokenFields",
    "Tokens",
    "TopK",
    "TopLogprobs",
    "answer_tokens",
    "bad_words",
    "logit_biases",
    "sampling_of",
    "seed_of",
    "stops",
    "template_values",
]

MAX_STOPS = 32
_MAX_STOPS_CHARACTERS = 2_048  # of all stop strings together
_MAX_TOP_K = 1_000_000  # more than any vocabulary has
_MAX_TEMPLATE_VALUES = 16
_MAX_NUMBER = 2**53
_WORD = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_MAX_STOP_CHARACTERS = 256
_MAX_TOKEN_IDS = 1_024  # in a list of token ids
_MAX_BIASED = 300
_MAX_BAD_WORDS = 128

Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
AnswerTokens = Annotated[int, msgspec.Meta(ge=-1)]  # for `answer_tokens`
ReasoningTokens = Annotated[int, msgspec.Meta(ge=-1)]  # for `reasoning_budget`
RepetitionPenalty = Annotated[float, msgspec.Meta(gt=0, le=100)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
TopK = Annotated[int, msgspec.Meta(ge=-1)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=20)]
TokenIds = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]], msgspec.Meta(max_length=_MAX_TOKEN_IDS)]
# By the token's id, or llama.cpp's pairs of an id and a number, or false for a token that never comes.
LogitBias: TypeAlias = dict[str, float] | list[tuple[int, float | bool]]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class CommonFields(msgspec.Struct, kw_only=True):
    """Sampling parameters with the names of almost all APIs. None means absent."""

    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    typical_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


class SamplingFields(CommonFields, kw_only=True):
    """Also the parameters of OpenAI, vLLM and llama.cpp, with their names."""

    repetition_penalty: RepetitionPenalty | None = None
    max_tokens: AnswerTokens | None = None
    max_completion_tokens: AnswerTokens | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None


class TokenFields(SamplingFields, kw_only=True):
    """Also the parameters of OpenAI and vLLM about single tokens and about what is shown of them."""

    logit_bias: LogitBias | None = None
    prompt_logprobs: TopLogprobs | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None


TemplateValues: TypeAlias = dict[str, TemplateValue]  # by their names in the chat template


_LENGTHS = ("max_completion_tokens", "max_tokens")
_SAMPLING = set(SamplingFields.__struct_fields__) - {*_LENGTHS, "seed", "stop"}  # as in `Sampling`


def sampling_of(fields: SamplingFields, recommended: Mapping[str, float]) -> Sampling:
    """Return the sampling parameters. Absent ones have the values that the model's makers recommend, or neutral ones.
    Raises: RequestError."""
    given: dict[str, Any] = {**recommended}
    given |= {name: value for name in _SAMPLING if (value := getattr(fields, name)) is not None}
    if given.get("top_k", 0) > _MAX_TOP_K or given.get("top_k") == -1:  # off, in vLLM
        del given["top_k"]
    if given.get("top_p") == 0:  # nothing but the likeliest token
        given["temperature"] = 0
    if given.get("temperature") == 0:
        # They do not change the likeliest token, so engines without them can serve the request.
        for name in ("top_p", "top_k", "min_p", "typical_p"):
            given.pop(name, None)
    lengths = [length for name in _LENGTHS if (length := answer_tokens(getattr(fields, name), name)) is not None]
    sampling = Sampling(
        **given, max_tokens=lengths[0] if lengths else None, seed=seed_of(fields.seed), stop=stops(fields.stop)
    )
    if not isinstance(fields, TokenFields):
        return sampling
    return replace(
        sampling,
        logit_bias=logit_biases(fields.logit_bias or {}),
        prompt_logprobs=fields.prompt_logprobs,
        min_tokens=fields.min_tokens or 0,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        allowed_token_ids=tuple(fields.allowed_token_ids or ()),
        include_stop=bool(fields.include_stop_str_in_output),
        include_special=fields.skip_special_tokens is False,
    )


def logit_biases(bias: LogitBias) -> tuple[tuple[int, float], ...]:
    """Return token ids, and the numbers to add to their logits. Raises: RequestError."""
    param = "logit_bias"
    if len(bias) > _MAX_BIASED:
        raise RequestError(f"{param} has more than {_MAX_BIASED} entries.", param=param)
    if isinstance(bias, dict):
        if not all(name.isascii() and name.isdigit() and len(name) < 10 for name in bias):
            raise RequestError(f"The names in {param} must be token ids.", param=param)
        biases = {int(name): value for name, value in bias.items()}
    else:
        biases = {token_id: -100.0 if value is False else value for token_id, value in bias}
    if not all(value is not True and -100 <= value <= 100 for value in biases.values()):
        raise RequestError(f"The values of {param} must be from -100 to 100.", param=param)
    return tuple(biases.items())


def bad_words(fields: TokenFields) -> tuple[str, ...]:
    """Return the texts that an answer must not have. Raises: RequestError."""
    words, name = tuple(fields.bad_words or ()), "bad_words"
    if len(words) > _MAX_BAD_WORDS or any(len(word) > _MAX_STOP_CHARACTERS for word in words):
        raise RequestError(
            f"{name} has at most {_MAX_BAD_WORDS} texts of at most {_MAX_STOP_CHARACTERS} characters.", param=name
        )
    if not all(word.strip() for word in words):
        raise RequestError(f"A text in {name} is empty.", param=name)
    return words


def answer_tokens(given: int | None, name: str) -> int | None:
    """Return the largest length of an answer; None is the server's default, and -1 no limit. Raises: RequestError."""
    if given == 0:
        raise RequestError(f"{name} must be at least 1, or -1 for no limit.", param=name)
    if given is None:
        return None
    return NO_LIMIT if given < 0 else min(given, NO_LIMIT)


def seed_of(given: int | None) -> int | None:
    """Return a seed that engines can use. Larger numbers are reduced to it."""
    return given if given is None or -(2**63) <= given < 2**63 else given % 2**63


def template_values(given: TemplateValues | None) -> TemplateValues:
    """Check `chat_template_kwargs`, which are vLLM's name for values of the template. Texts must be single words, which
    cannot become control tokens. Raises: RequestError."""
    param, values = "chat_template_kwargs", given or {}
    if len(values) > _MAX_TEMPLATE_VALUES:
        raise RequestError(f"{param} has more than {_MAX_TEMPLATE_VALUES} entries.", param=param)
    if not all(_is_plain(value) for value in values.values()):
        raise RequestError(f"Values of {param} must be numbers, true, false, null or single words.", param=param)
    return values


def _is_plain(value: TemplateValue) -> bool:
    if isinstance(value, str):
        return _WORD.fullmatch(value) is not None
    return value is None or abs(value) < _MAX_NUMBER


def stops(stop: str | list[str] | None, *, name: str = "stop") -> tuple[str, ...]:
    """Return the stop strings, given as one string or a list. An empty string is no stop. Raises: RequestError."""
    given = [one for one in ([stop] if isinstance(stop, str) else stop or []) if one]
    if len(given) > MAX_STOPS:
        raise RequestError(f"{name} takes at most {MAX_STOPS} strings.", param=name)
    if any(len(one) > _MAX_STOP_CHARACTERS for one in given) or sum(map(len, given)) > _MAX_STOPS_CHARACTERS:
        raise RequestError(
            f"A string in {name} has at most {_MAX_STOP_CHARACTERS} characters, and all of them have "
            f"{_MAX_STOPS_CHARACTERS}.",
            param=name,
        )
    return tuple(given)
