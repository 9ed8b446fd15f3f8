"""Everything that tailrace can refuse or fail with.

::

    TailraceError                   500
      RequestError                  400  the client asked for something that cannot be
        BodyTooLarge                413
        BodyTimeout                 408
        UnsupportedMediaType        415
        UnsupportedParameter        400  the engine cannot honour it
        UnsupportedOperation        400  a known path of an API that this server does not offer
        NotFound                    404  nothing is at this path
        MethodNotAllowed            405
        UpgradeRequired             426
        ContextLengthExceeded       400  prompt (and answer) do not fit the model
        TemplateError               400  the model's chat template refuses the messages
        RequestRefused              400  the engine does
        UnknownModel                404
        UnknownKey                  404
        UnknownConversation         404
        ConversationLocked          409  an answer is being written there
        Unauthenticated             401  no key, or one that is not valid
        KeyRevoked                  401  the key that began the stream
        Forbidden                   403  a Host or Origin that is not ours, or a key without the scope
        IdempotencyConflict         409  the key was used for another request
      AdmissionError                429
        QueueFull                   429  try again after `retry_after_s`
        QueueTimeout                429  it was not begun in time
        QuotaExceeded               429  the key or its owner has used what it may
        Draining                    503  this server is going away
      StreamError                   404
        UnknownStream               404
        StreamExpired               410
        ForeignCursor               409  a Last-Event-ID of another stream
        SeqOutOfRange               400
        StreamConflict              409  the stream is there, but not as the request takes it to be
          StreamClosed              409  nothing is appended any more
          SequenceGap               409  a producer's batches between were not seen
        StaleEpoch                  403  the producer has begun anew since
        StreamsFull                 507  the memory for durable streams is used up
        StreamTooLong               507  an app's stream is longer than may be kept
      StorageError                  503  the journal cannot keep anything just now
        JournalFull                 507  there is no room on its disk
        JournalDamaged              500  what it has kept is not what was written
        LeaseLost                   503  another server writes the stream now
      EngineError                   500
        SequenceFailed              500  one sequence; its neighbours live on
        EngineLost                  503  the worker died
        EngineStalled               504  the worker made no progress
        PoisonRequest               422  a request that was proven to kill engines
        Diverged                    500  a replay gave another answer
        Interrupted                 503  the server went away
        Cancelled                   499
      AppFailed                     500  what a user deployed raised
        AppUnavailable              503  no process of it can answer
        AppOutput                   500  it gave what JSON cannot hold
      ModelError                    -    a model cannot be found, fetched or read (command line)

The classes are the table of codes and statuses; `KINDS` has them by code. `status`, `code` and `retry_after_s` are
what a wire needs; only `http` turns them into HTTP, and after the headers they become an in-band event. Messages never
repeat what the client sent, but for the cleaned name of an unknown field. A client that leaves is not an error.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = [
    "AdmissionError",
    "AppFailed",
    "AppOutput",
    "AppUnavailable",
    "BodyTimeout",
    "BodyTooLarge",
    "Cancelled",
    "ContextLengthExceeded",
    "ConversationLocked",
    "Diverged",
    "Draining",
    "EngineError",
    "EngineLost",
    "EngineStalled",
    "Forbidden",
    "ForeignCursor",
    "IdempotencyConflict",
    "Interrupted",
    "JournalDamaged",
    "JournalFull",
    "KeyRevoked",
    "LeaseLost",
    "MethodNotAllowed",
    "ModelError",
    "NotFound",
    "PoisonRequest",
    "QueueFull",
    "QueueTimeout",
    "QuotaExceeded",
    "RequestError",
    "RequestRefused",
    "SeqOutOfRange",
    "SequenceFailed",
    "SequenceGap",
    "StaleEpoch",
    "StorageError",
    "StreamClosed",
    "StreamConflict",
    "StreamError",
    "StreamExpired",
    "StreamTooLong",
    "StreamsFull",
    "TailraceError",
    "TemplateError",
    "Unauthenticated",
    "UnknownConversation",
    "UnknownKey",
    "UnknownModel",
    "UnknownStream",
    "UnsupportedMediaType",
    "UnsupportedOperation",
    "UnsupportedParameter",
    "UpgradeRequired",
]


class TailraceError(Exception):
    """A defect of the server, or the root of the tree. `message` is written for the person who made the call."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class RequestError(TailraceError):
    """The request itself is wrong; sending it again will not help."""

    status = 400
    code = "invalid_request"


class BodyTooLarge(RequestError):
    """The body is larger than `--body-bytes`."""

    status = 413
    code = "body_too_large"


class BodyTimeout(RequestError):
    """The body stopped coming."""

    status = 408
    code = "body_timeout"


class UnsupportedMediaType(RequestError):
    """A body that does not say that it is JSON."""

    status = 415
    code = "unsupported_media_type"


class UnsupportedOperation(RequestError):
    """The path belongs to an API that is spoken here, but this server does not do what it asks for."""

    code = "unsupported_operation"


class NotFound(RequestError):
    """Nothing is at this path."""

    status = 404
    code = "not_found"


class MethodNotAllowed(RequestError):
    """The path is there, the method is not."""

    status = 405
    code = "method_not_allowed"


class UpgradeRequired(RequestError):
    """`/v1/ws` was asked for without WebSocket's handshake."""

    status = 426
    code = "upgrade_required"


class UnsupportedParameter(RequestError):
    """A known parameter that this engine or wire cannot honour; `param` names it."""

    code = "unsupported_parameter"


class ContextLengthExceeded(RequestError):
    """The prompt, or prompt and answer together, exceed what the model or its memory holds. Counts are tokens."""

    code = "context_length_exceeded"

    def __init__(
        self, num_prompt_tokens: int, limit_tokens: int, *, max_tokens: int = 0, at_least: bool = False
    ) -> None:
        counted = f"{'at least ' if at_least else ''}{num_prompt_tokens} token{'s' * (num_prompt_tokens != 1)}"
        answer = f" and {max_tokens} were asked for" if max_tokens else ""
        super().__init__(
            f"The prompt has {counted}{answer}, but {limit_tokens} is the limit.",
            param="max_tokens" if max_tokens else "prompt",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.limit_tokens = limit_tokens
        self.max_tokens = max_tokens


class TemplateError(RequestError):
    """The model's chat template refuses these messages, or failed on them."""

    code = "template_error"


class RequestRefused(RequestError):
    """The engine, or the server behind it, does not run such a request."""

    code = "request_refused"


class UnknownModel(RequestError):
    """The model is not one that this server runs."""

    status = 404
    code = "model_not_found"


class UnknownKey(RequestError):
    """There is no key with this id."""

    status = 404
    code = "unknown_key"


class UnknownConversation(RequestError):
    """There is no such conversation, or no such item in it."""

    status = 404
    code = "conversation_not_found"


class ConversationLocked(RequestError):
    """An answer is being written where the request would go on."""

    status = 409
    code = "conversation_locked"


class Unauthenticated(RequestError):
    """The request has no key, or one that is not valid here."""

    status = 401
    code = "invalid_api_key"


class KeyRevoked(RequestError):
    """The key that began the stream was revoked."""

    status = 401
    code = "key_revoked"


class Forbidden(RequestError):
    """The Host or Origin is not one of ours, or the key does not have the scope."""

    status = 403
    code = "forbidden"


class IdempotencyConflict(RequestError):
    """The Idempotency-Key was used for another request."""

    status = 409
    code = "idempotency_conflict"


class AdmissionError(TailraceError):
    """Not now; `retry_after_s` says when."""

    status = 429
    code = "overloaded"


class QueueFull(AdmissionError):
    """As many requests are running and waiting as `--max-concurrent-requests` lets in."""


class QueueTimeout(AdmissionError):
    """The request waited for its turn longer than `--queue-s`."""

    code = "queue_timeout"


class QuotaExceeded(AdmissionError):
    """The key, or its owner, has used what it may; `retry_after_s` says when there is more."""

    code = "rate_limit_exceeded"


class Draining(AdmissionError):
    """The server is shutting down."""

    status = 503
    code = "draining"


class StreamError(TailraceError):
    status = 404
    code = "stream_error"


class UnknownStream(StreamError):
    """There never was such a stream."""

    code = "unknown_stream"


class StreamExpired(StreamError):
    """The stream is no longer kept."""

    status = 410
    code = "stream_expired"


class ForeignCursor(StreamError):
    """The event id belongs to another stream."""

    status = 409
    code = "foreign_cursor"


class SeqOutOfRange(StreamError):
    """No event id, or one that the stream has not come to."""

    status = 400
    code = "seq_out_of_range"


class StorageError(TailraceError):
    """The journal cannot keep anything just now, so that nothing new is begun."""

    status = 503
    code = "journal_unavailable"


class JournalFull(StorageError):
    """No room is left where the journal is."""

    status = 507
    code = "log_full"


class JournalDamaged(StorageError):
    """What the journal gives back is not what was written."""

    status = 500
    code = "journal_damaged"


class LeaseLost(StorageError):
    """Another server has taken the stream over, and only that one may write it. No client is told so."""

    code = "lease_lost"


class StreamConflict(StreamError):
    """The stream is there, but not as the request takes it to be."""

    status = 409
    code = "stream_conflict"


class StreamClosed(StreamConflict):
    """Nothing is appended to the stream any more."""

    code = "stream_closed"

    def __init__(self, next_offset: str) -> None:
        super().__init__("This stream is closed.")
        self.next_offset = next_offset


class SequenceGap(StreamConflict):
    """Batches of this producer are missing between the last one and this."""

    code = "sequence_gap"

    def __init__(self, *, expected: int, received: int) -> None:
        super().__init__(f"The producer's next batch is number {expected}.", param="producer-seq")
        self.expected = expected
        self.received = received


class StaleEpoch(StreamError):
    """The producer has begun anew since."""

    status = 403
    code = "stale_epoch"

    def __init__(self, epoch: int) -> None:
        super().__init__("This producer has begun a later epoch.", param="producer-epoch")
        self.epoch = epoch


class StreamsFull(StreamError):
    """The memory for durable streams, `--durable-bytes`, is used up."""

    status = 507
    code = "streams_full"


class StreamTooLong(StreamError):
    """One stream of an app is longer than 64 MiB."""

    status = 507
    code = "stream_too_long"


class EngineError(TailraceError):
    code = "engine_error"


class SequenceFailed(EngineError):
    """The engine refused or lost one sequence; the others are untouched."""

    code = "sequence_failed"


class EngineLost(EngineError):
    """The worker died, or could not be started."""

    status = 503
    code = "engine_unavailable"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        is_crash: bool = False,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.is_crash = is_crash  # it went by itself: nobody killed it


class EngineStalled(EngineError):
    """The worker was alive but made no progress, and was killed."""

    status = 504
    code = "engine_stalled"


class PoisonRequest(EngineError):
    """The engine died with this request, and died again while this request alone ran on it."""

    status = 422
    code = "poison_request"


class Diverged(EngineError):
    """After its engine was lost, the answer came out differently, and could not go on."""

    code = "diverged"


class Interrupted(EngineError):
    """The server was shut down before the answer was complete."""

    status = 503
    code = "interrupted"


class Cancelled(EngineError):
    """Somebody cancelled the stream while an answer in one piece was awaited."""

    status = 499  # clients repeat a 409
    code = "cancelled"


class AppFailed(TailraceError):
    """What a user deployed raised an exception; the log has it."""

    code = "app_failed"


class AppUnavailable(AppFailed):
    """No process of what a user deployed can answer, or the one that did died."""

    status = 503
    code = "app_unavailable"


class AppOutput(AppFailed):
    """An app of the user's sent a value that JSON cannot hold."""

    code = "app_output"


class ModelError(TailraceError):
    """A model cannot be found, fetched or read. The message says what happened and what to do."""

    code = "model_error"


def _with_subclasses(kind: type[TailraceError]) -> Iterator[type[TailraceError]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _with_subclasses(subclass)


# By code. Where a class and its base have the same code, the subclass stands for both.
KINDS: dict[str, type[TailraceError]] = {kind.code: kind for kind in _with_subclasses(TailraceError)}
