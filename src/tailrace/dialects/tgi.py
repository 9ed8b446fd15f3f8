"""text-generation-inference's wire: `POST /`, `/generate`, `/generate_stream`, `/info`, `/health`.

One event a token, `data: ` with one line of JSON, no `[DONE]`; the last one carries `generated_text` and the details.
Defaults and error texts are those of TGI 3.3.7, with these divergences, each better for its clients:

1. Refusals of a streaming request are real 422 and 429 answers, as TGI's OpenAPI promises and its code does not.
2. Half a character at the very end is shown as U+FFFD; TGI then loses the whole `generated_text`.
3. A stop string is found wherever it ends, also inside a token, and nothing behind it is shown.
4. A prompt and `max_new_tokens` that exceed the window together are refused, also above 1,024 new tokens.
5. Text that was held back, as it could have become a stop string, until the end token came: that token shows it and is
   not marked special, because clients drop what is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from tailrace.dialects.fields import Tokens, stops
from tailrace.dialects.wire import (
    Call,
    Encoder,
    JsonBody,
    StreamFacts,
    deltas_by_choice,
    failure_of,
    quote,
    read_fields,
    refuse,
    to_json,
)
from tailrace.errors import AdmissionError, EngineError, RequestError, TailraceError
from tailrace.types import End, Event, GenerateRequest, Sampling, TextDelta

__all__ = ["encode_error", "encode_info", "parse"]

_MAX_STOP_SEQUENCES = 4
_MAX_FACTOR = 100.0  # beyond it engines compute infinities
_MIN_TEMPERATURE = 1e-3  # below it the likeliest token is certain, and logits overflow
_MAX_SEED = 2**64 - 1
_NOT_YET: dict[str, tuple[object, ...]] = {
    "adapter_id": (),
    "best_of": (0, 1),
    "decoder_input_details": (False,),
    "grammar": (),
    "top_n_tokens": (0,),
    "typical_p": (1.0,),
    "watermark": (False,),
}


class Parameters(msgspec.Struct, kw_only=True):
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None
    top_p: float | None = None
    do_sample: bool = False
    max_new_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None = None
    return_full_text: bool | None = None
    stop: list[str] = []
    truncate: Tokens | None = None
    details: bool = False
    seed: Annotated[int, msgspec.Meta(ge=0)] | None = None
    adapter_id: object = None
    best_of: object = None
    decoder_input_details: object = None
    grammar: object = None
    top_n_tokens: object = None
    typical_p: object = None
    watermark: object = None


class Body(msgspec.Struct, kw_only=True):
    inputs: str
    parameters: JsonBody | None = None
    stream: bool = False


def parse(body: JsonBody, *, stream: bool | None, full_text_by_default: bool = False) -> Call:
    """A body of any of the three routes; `stream` is None on `/`, where the body says. Raises: RequestError."""
    fields, ignored = read_fields(body, Body)
    given = fields.parameters if fields.parameters is not None else {"do_sample": True}
    parameters, ignored_parameters = read_fields(given, Parameters)
    refuse(given, _NOT_YET)
    _check(parameters)
    if not fields.inputs:
        raise RequestError("`inputs` cannot be empty", param="inputs")
    request = GenerateRequest(prompt=fields.inputs, sampling=_sampling(parameters), truncate=parameters.truncate)
    full_text = parameters.return_full_text
    view = _View(
        whole_in_list=stream is None,
        details=parameters.details,
        full_text=full_text_by_default if full_text is None else full_text,
        sampled=request.sampling.temperature > 0,
    )
    streaming = fields.stream if stream is None else stream
    return Call(request, view, streaming, ignored + ignored_parameters)


def _check(given: Parameters) -> None:
    """TGI's ranges, in its order and its words."""
    if given.temperature is not None and given.temperature <= 0:
        raise RequestError("`temperature` must be strictly positive", param="temperature")
    if given.repetition_penalty is not None and given.repetition_penalty <= 0:
        raise RequestError("`repetition_penalty` must be strictly positive", param="repetition_penalty")
    for name in ("temperature", "repetition_penalty"):
        if (getattr(given, name) or 0.0) > _MAX_FACTOR:
            raise RequestError(f"`{name}` must be <= {_MAX_FACTOR}", param=name)
    if given.frequency_penalty is not None and not -2 <= given.frequency_penalty <= 2:
        raise RequestError("`frequency_penalty` must be >= -2.0 and <= 2.0", param="frequency_penalty")
    if given.top_p is not None and not 0 < given.top_p < 1:
        raise RequestError("`top_p` must be > 0.0 and < 1.0", param="top_p")
    if given.top_k is not None and given.top_k <= 0:
        raise RequestError("`top_k` must be strictly positive", param="top_k")
    if given.max_new_tokens == 0:
        raise RequestError("`max_new_tokens` must be strictly positive", param="max_new_tokens")
    if given.seed is not None and given.seed > _MAX_SEED:
        raise RequestError(f"`seed` must be <= {_MAX_SEED}", param="seed")
    if len(given.stop) > _MAX_STOP_SEQUENCES:
        count = len(given.stop)
        raise RequestError(f"`stop` supports up to {_MAX_STOP_SEQUENCES} stop sequences. Given: {count}", param="stop")


def _sampling(given: Parameters) -> Sampling:
    """Sampling is on where any field asks for it, as in TGI; otherwise the likeliest token is taken."""
    temperature = 1.0 if given.temperature is None else given.temperature
    sampled = given.do_sample or temperature != 1.0 or given.top_k is not None or given.top_p is not None
    sampled = sampled and temperature >= _MIN_TEMPERATURE
    return Sampling(
        temperature=temperature if sampled else 0.0,
        top_p=(given.top_p or 1.0) if sampled else 1.0,
        top_k=(given.top_k or 0) if sampled else 0,
        repetition_penalty=given.repetition_penalty or 1.0,
        frequency_penalty=given.frequency_penalty or 0.0,
        seed=given.seed,
        max_tokens=given.max_new_tokens,
        stop=stops(given.stop),
        include_stop=True,
        logprobs=True,
    )


@dataclass(frozen=True, slots=True)
class _View:
    whole_in_list: bool
    details: bool
    full_text: bool
    sampled: bool
    media_type = "text/event-stream; charset=utf-8"

    def open(self, facts: StreamFacts) -> Encoder:
        return _Encoder(facts, self)


class _Encoder:
    def __init__(self, facts: StreamFacts, view: _View) -> None:
        self._facts = facts
        self._view = view
        self._text: list[str] = []
        self._num_tokens = 0

    def encode(self, seq: int, event: Event) -> bytes:
        if type(event) is End:
            if event.status == "done":
                return b""
            _, body = encode_error(failure_of(event))
            return b"data: " + body + b"\n\n"
        assert type(event) is TextDelta
        self._text.append(event.text)
        if not event.token_ids:
            return b""
        frames = []
        last = len(event.token_ids) - 1
        for position, token in enumerate(self._tokens(event)):
            self._num_tokens += 1
            generated = details = "null"
            if position == last and event.finish_reason is not None:
                generated = quote(self._full("".join(self._text)))
                if self._view.details:
                    details = to_json(self._stream_details(event)).decode()
            frames.append(
                f'data: {{"index":{self._num_tokens},"token":{token},'
                f'"generated_text":{generated},"details":{details}}}\n\n'
            )
        return "".join(frames).encode("ascii")

    def whole(self, events: Sequence[Event]) -> bytes:
        end = events[-1] if events else None
        if not isinstance(end, End) or end.status != "done":
            raise failure_of(end if isinstance(end, End) else None)
        deltas = deltas_by_choice(events, 1)[0]
        answer: JsonBody = {"generated_text": self._full("".join(delta.text for delta in deltas))}
        if self._view.details:
            tokens = [msgspec.Raw(token.encode()) for delta in deltas for token in self._tokens(delta)]
            answer["details"] = {
                "finish_reason": _finish_reason(deltas[-1]),
                "generated_tokens": end.usage.num_completion_tokens,
                "seed": self._seed,
                "prefill": [],
                "tokens": tokens,
            }
        return to_json([answer] if self._view.whole_in_list else answer)

    @property
    def _seed(self) -> int | None:
        return self._facts.seed if self._view.sampled else None

    def _full(self, text: str) -> str:
        return self._facts.prompt_text + text if self._view.full_text else text

    def _tokens(self, delta: TextDelta) -> list[str]:
        """Each token's JSON. A step's text goes with the last of its tokens that is not special; special ones show
        their name."""
        vocabulary = self._facts.vocabulary
        places = [i for i, token_id in enumerate(delta.token_ids) if token_id not in vocabulary.special_ids]
        place = places[-1] if places else len(delta.token_ids) - 1
        tokens = []
        for position, token_id in enumerate(delta.token_ids):
            text = delta.text if position == place else ""
            special = token_id in vocabulary.special_ids and not text
            if special:
                text = vocabulary.token_text(token_id)
            logprob = _logprob(delta.logprobs[position]) if position < len(delta.logprobs) else "null"
            flag = "true" if special else "false"
            tokens.append(f'{{"id":{token_id},"text":{quote(text)},"logprob":{logprob},"special":{flag}}}')
        return tokens

    def _stream_details(self, last: TextDelta) -> JsonBody:
        return {
            "finish_reason": _finish_reason(last),
            "generated_tokens": self._num_tokens,
            "seed": self._seed,
            "input_length": self._facts.num_prompt_tokens,
        }


def _logprob(logprob: float) -> str:
    """As the single-precision number that it is in TGI; JSON has no infinity."""
    if not math.isfinite(logprob):
        return "null"
    digits = f"{logprob:.8g}"
    return digits if "." in digits or "e" in digits else digits + ".0"


def _finish_reason(last: TextDelta) -> str:
    if last.finish_reason == "stop":
        return "eos_token" if last.stop is None else "stop_sequence"
    return str(last.finish_reason)


def encode_error(error: TailraceError) -> tuple[int, bytes]:
    """`{"error", "error_type"}`; it is `error_type` that TGI's clients turn into exceptions."""
    if isinstance(error, AdmissionError):
        return error.status, to_json({"error": "Model is overloaded", "error_type": "overloaded"})
    if isinstance(error, EngineError):
        message = f"Request failed during generation: {error.message}"
        return 424, to_json({"error": message, "error_type": "generation"})
    if isinstance(error, RequestError):
        status = 422 if error.status == 400 else error.status
        return status, to_json({"error": f"Input validation error: {error.message}", "error_type": "validation"})
    return error.status, to_json({"error": error.message, "error_type": error.code})


def encode_info(*, model: str, max_requests: int, max_total_tokens: int, version: str) -> bytes:
    """The answer of `/info`."""
    return to_json(
        {
            "model_id": model,
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": max_requests,
            "max_best_of": 1,
            "max_stop_sequences": _MAX_STOP_SEQUENCES,
            "max_input_tokens": max_total_tokens - 1,
            "max_total_tokens": max_total_tokens,
            "validation_workers": 1,
            "max_client_batch_size": 1,
            "router": "tailrace",
            "version": version,
            "sha": None,
            "docker_label": None,
        }
    )
