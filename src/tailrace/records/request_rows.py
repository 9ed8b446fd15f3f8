"""What the database keeps of a request: a row of the table `requests`."""

from __future__ import annotations

import time
from operator import attrgetter

import msgspec

from tailrace.errors import TailraceError
from tailrace.generation import Times
from tailrace.streams import StreamLog
from tailrace.types import Arrival, Record, Sampling, TextDelta

__all__ = ["REFUSED", "RUNNING", "RequestRow", "row_of_refusal", "row_of_start", "row_with_end"]

RUNNING = "running"  # status of an incomplete row; never in the database
REFUSED = "refused"
_LOST = "lost"
_SAMPLING_FIELDS = Sampling.__struct_fields__
_values = attrgetter(*_SAMPLING_FIELDS)
_DEFAULTS = _values(Sampling())


class RequestRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request. `created_s` is since the epoch.

    `status` is done, cancelled, interrupted, error, refused or lost. Lost means that the server died before the stream
    ended; then the token counts are upper bounds.
    """

    request_id: str  # the stream's id, if a stream was started
    created_s: float
    owner: str
    key_id: str
    model: str
    wire: str
    status: str
    finish: str = ""  # stop, length, …; or the error code
    num_requests: int = 1  # refusals of one kind within half a second share a row
    parameters: str = "{}"  # JSON: numbers and names, never the client's text
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_choices: int = 1
    queue_s: float | None = None  # from the request to its start on the engine
    first_token_s: float | None = None  # from the request to the first token
    total_s: float = 0.0
    replays: int = 0  # how often an engine or server died while it ran
    prompt: str | None = None  # only with --record-text
    answer: str | None = None

    @property
    def is_refusal(self) -> bool:
        return self.num_choices == 0

    def completed(self) -> RequestRow:
        """Return this row as the last one of its request: refused, or lost with its server."""
        assert self.status == RUNNING
        if self.is_refusal:
            return msgspec.structs.replace(self, status=REFUSED)
        return msgspec.structs.replace(self, status=_LOST, finish=_LOST)


def row_of_start(record: Record, *, with_text: bool = False) -> RequestRow:
    """Return the row of a stream that has begun. Its token counts are upper bounds."""
    return RequestRow(
        request_id=record.stream_id,
        created_s=record.created_s,
        owner=record.owner,
        key_id=record.key_id,
        model=record.model,
        wire=record.wire,
        status=RUNNING,
        parameters=_parameters(record.sampling),
        num_prompt_tokens=record.num_prompt_tokens,
        num_completion_tokens=record.most_tokens - record.num_prompt_tokens,
        num_choices=record.num_choices,
        prompt="\n".join(prompt.text for prompt in record.prompts) if with_text else None,
    )


def row_with_end(row: RequestRow, log: StreamLog, times: Times | None = None, *, with_text: bool = False) -> RequestRow:
    """Return the row of a stream that has ended. `times` is None if it ended in an earlier process."""
    end = log.end
    assert end is not None
    reasons = [event.finish_reason for event in log.events if type(event) is TextDelta and event.finish_reason]
    known = {} if times is None else _times(times)
    if times is None and end.spent is not None:
        known["total_s"] = end.spent.total_s
    return msgspec.structs.replace(
        row,
        status=end.status,
        finish=end.failure.code if end.failure is not None else reasons[0] if reasons else end.status,
        num_prompt_tokens=end.usage.num_prompt_tokens,
        num_completion_tokens=end.usage.num_completion_tokens,
        replays=max(times.num_losses if times is not None else 0, int(end.continuity is not None)),
        answer="\n".join(log.text(choice) for choice in range(row.num_choices)) if with_text else None,
        **known,
    )


def row_of_refusal(arrival: Arrival, error: TailraceError, request_id: str) -> RequestRow:
    """Return the row of a refusal, to which others of its kind may be added before it is `completed`."""
    return RequestRow(
        request_id,
        time.time(),
        arrival.owner,
        arrival.key_id,
        arrival.model,
        arrival.wire,
        RUNNING,
        error.code,
        num_choices=0,
    )


def _times(times: Times) -> dict[str, float | None]:
    def since(moment_s: float | None) -> float | None:
        return None if moment_s is None else moment_s - times.arrived_s

    return {
        "queue_s": since(times.admitted_s),
        "first_token_s": since(times.first_s),
        "total_s": since(times.ended_s) or 0.0,
    }


def _parameters(sampling: Sampling) -> str:
    """Return the parameters that differ from the defaults, as JSON. Texts are replaced by counts or kinds."""
    given: dict[str, object] = {}
    for name, value, default in zip(_SAMPLING_FIELDS, _values(sampling), _DEFAULTS, strict=True):
        if value == default:
            continue
        if name == "grammar":
            value = sampling.grammar.kind if sampling.grammar is not None else None
        given[name] = len(value) if isinstance(value, tuple) else value
    return msgspec.json.encode(given).decode()
