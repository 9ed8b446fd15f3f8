"""All errors of tailrace.

::

    TailraceError                   500
      RequestError                  400  the request is invalid
        BodyTooLarge                413
        BodyTimeout                 408
        UnsupportedMediaType        415
        UnsupportedParameter        400  the engine does not support it
        UnsupportedOperation        400  a known operation of an API that this server does not support
        NotFound                    404  nothing at this path
        MethodNotAllowed            405
        UpgradeRequired             426
        ContextLengthExceeded       400  prompt (and answer) are too long for the model
        TemplateError               400  the model's chat template refuses the messages
        RequestRefused              400  the engine refuses the request
        UnknownModel                404
        UnknownResponse             400  a previous response that is not kept
        InvalidLane                 400  a name on a WebSocket that is not valid
        TooManyLanes                400  one name too many on a WebSocket
        UnknownKey                  404
        UnknownConversation         404
        UnknownShare                404  a link that is not valid
        ConversationLocked          409  its last answer is in progress
        Unauthenticated             401  no key, or an invalid one
        KeyRevoked                  401  the key of the stream was revoked
        Forbidden                   403  an unknown Host or Origin, or a key without the scope
        IdempotencyConflict         409  the key was used for another request
          ClaimTaken                409  another server has just begun a stream with the key
      AdmissionError                429
        QueueFull                   429  try again after `retry_after_s`
        QueueTimeout                429  the request waited too long
        QuotaExceeded               429  the key or its owner has reached a limit
        Draining                    503  the server is shutting down
      StreamError                   404
        UnknownStream               404
        StreamExpired               410
        ForeignCursor               409  a Last-Event-ID of another stream
        SeqOutOfRange               400
        StreamTooLong               507  an app's stream is too long
      StorageError                  503  the journal or the database cannot be used now
        JournalFull                 507  the journal's disk is full
        JournalDamaged              500  the journal was damaged
        LeaseLost                   503  another server has taken the stream over
      EngineError                   500
        SequenceFailed              500  one sequence failed; the others continue
        EngineLost                  503  the worker died
        EngineStalled               504  the worker made no progress
        PoisonRequest               422  the request was proven to crash engines
        Diverged                    500  a replay gave another answer
        Interrupted                 503  the server stopped
        Cancelled                   499
      AppFailed                     500  the user's app raised an exception
        AppUnavailable              503  no process of the app can answer
        AppOutput                   500  the app's output cannot be encoded as JSON
      ModelError                    -    a model cannot be found, fetched or read (command line)

`KINDS` has the classes by code. Wires use `status`, `code` and `retry_after_s`. Only the package `http` makes HTTP
responses of errors; after the response headers an error becomes an event in the stream. Messages never repeat the
client's input, except the cleaned name of an unknown field. A disconnect of the client is not an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

__all__ = [
    "AdmissionError",
    "AppFailed",
    "AppOutput",
    "AppUnavailable",
    "BodyTimeout",
    "BodyTooLarge",
    "Cancelled",
    "ClaimTaken",
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
    "InvalidLane",
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
    "StorageError",
    "StreamError",
    "StreamExpired",
    "StreamTooLong",
    "TailraceError",
    "TemplateError",
    "TooManyLanes",
    "Unauthenticated",
    "UnknownConversation",
    "UnknownKey",
    "UnknownModel",
    "UnknownResponse",
    "UnknownShare",
    "UnknownStream",
    "UnsupportedMediaType",
    "UnsupportedOperation",
    "UnsupportedParameter",
    "UpgradeRequired",
]


SHUTTING_DOWN = "The server is shutting down."  # the message of `Draining`


class TailraceError(Exception):
    """A bug of the server, and the base of all errors. `message` is written for the user of the API."""

    status = 500
    code = "internal_error"
    is_retryable = False  # whether the same request may be answered if it is sent again
    retry_after_s: float | None = None  # unless the one who raises it knows better
    # For programs, if a stream was cut off: is_retryable, and where the stream can be followed again (`failure_of`).
    cut_fields: Mapping[str, object] = MappingProxyType({})

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class RequestError(TailraceError):
    """The request is invalid. Sending it again does not help."""

    status = 400
    code = "invalid_request"


class BodyTooLarge(RequestError):
    """The request body is larger than `--body-bytes`."""

    status = 413
    code = "body_too_large"


class BodyTimeout(RequestError):
    """The request body did not arrive in time."""

    status = 408
    code = "body_timeout"
    is_retryable = True


class UnsupportedMediaType(RequestError):
    """The Content-Type of the body is not JSON."""

    status = 415
    code = "unsupported_media_type"


class UnsupportedOperation(RequestError):
    """An operation of a known API that this server does not support."""

    code = "unsupported_operation"


class NotFound(RequestError):
    """There is nothing at this path."""

    status = 404
    code = "not_found"


class MethodNotAllowed(RequestError):
    """The path does not have this method."""

    status = 405
    code = "method_not_allowed"


class UpgradeRequired(RequestError):
    """A request to `/v1/ws` without a WebSocket handshake."""

    status = 426
    code = "upgrade_required"


class UnsupportedParameter(RequestError):
    """A known parameter that this engine or wire does not support; `param` names it."""

    code = "unsupported_parameter"


class ContextLengthExceeded(RequestError):
    """The prompt, or prompt and answer together, have more tokens than the model or the engine's memory allows."""

    code = "context_length_exceeded"

    def __init__(
        self, num_prompt_tokens: int, limit_tokens: int, *, max_tokens: int = 0, at_least: bool = False
    ) -> None:
        # Clients look for "maximum context length" in the text, and then shorten the conversation by themselves.
        counted = f"{'at least ' if at_least else ''}{num_prompt_tokens}"
        text = f"The maximum context length is {limit_tokens} tokens, and the prompt has {counted}. Shorten the prompt."
        if max_tokens:
            text = (
                f"The maximum context length is {limit_tokens} tokens. The prompt has {counted}, and the answer may "
                f"have {max_tokens}. Shorten the prompt, or ask for a shorter answer."
            )
        super().__init__(text, param="max_tokens" if max_tokens else "prompt")
        self.num_prompt_tokens = num_prompt_tokens
        self.limit_tokens = limit_tokens
        self.max_tokens = max_tokens


class TemplateError(RequestError):
    """The model's chat template refuses the messages, or fails on them."""

    code = "template_error"


class RequestRefused(RequestError):
    """The engine, or the upstream server behind it, refuses the request."""

    code = "request_refused"


class UnknownModel(RequestError):
    """This server does not have the model."""

    status = 404
    code = "model_not_found"


class UnknownResponse(RequestError):
    """The previous response of a request is not kept. The client has to send the conversation itself."""

    code = "previous_response_not_found"


class InvalidLane(RequestError):
    """A client's name for a lane of a WebSocket is not valid."""

    code = "invalid_stream_id"


class TooManyLanes(RequestError):
    """A WebSocket has as many names of its client as it may have."""

    code = "websocket_stream_limit_reached"


class UnknownKey(RequestError):
    """There is no key with this id."""

    status = 404
    code = "unknown_key"


class UnknownConversation(RequestError):
    """There is no such conversation, or it has no such item."""

    status = 404
    code = "conversation_not_found"


class UnknownShare(RequestError):
    """There is no such link, or it is not valid any more."""

    status = 404
    code = "unknown_share"


class ConversationLocked(RequestError):
    """The last answer of the branch is still in progress."""

    status = 409
    code = "conversation_locked"
    is_retryable = True


class Unauthenticated(RequestError):
    """The request has no key, or an invalid one."""

    status = 401
    code = "invalid_api_key"


class KeyRevoked(RequestError):
    """The key of the stream was revoked."""

    status = 401
    code = "key_revoked"


class Forbidden(RequestError):
    """The Host or Origin is not allowed, or the key does not have the scope."""

    status = 403
    code = "forbidden"


class IdempotencyConflict(RequestError):
    """The Idempotency-Key was used for another request."""

    status = 409
    code = "idempotency_conflict"


class ClaimTaken(IdempotencyConflict):
    """Another server has just begun a stream with this Idempotency-Key. Clients never see this error."""

    code = "idempotency_in_progress"


class AdmissionError(TailraceError):
    """The server cannot take the request now. `retry_after_s` says when to try again."""

    status = 429
    code = "overloaded"
    is_retryable = True


class QueueFull(AdmissionError):
    """`--max-concurrent-requests` requests are running and queued already."""


class QueueTimeout(AdmissionError):
    """The request was in the queue for longer than `--queue-s`."""

    code = "queue_timeout"


class QuotaExceeded(AdmissionError):
    """The key or its owner has reached a limit. `retry_after_s` says when to try again."""

    code = "rate_limit_exceeded"


class Draining(AdmissionError):
    """The server is shutting down."""

    status = 503
    code = "draining"


class StreamError(TailraceError):
    status = 404
    code = "stream_error"


class UnknownStream(StreamError):
    """There is no such stream."""

    code = "unknown_stream"


class StreamExpired(StreamError):
    """The stream has expired."""

    status = 410
    code = "stream_expired"


class ForeignCursor(StreamError):
    """The event id belongs to another stream."""

    status = 409
    code = "foreign_cursor"


class SeqOutOfRange(StreamError):
    """The event id is invalid, or the stream has fewer events."""

    status = 400
    code = "seq_out_of_range"


class StorageError(TailraceError):
    """The journal or the database cannot be used now, so no new stream can start."""

    status = 503
    code = "journal_unavailable"
    is_retryable = True
    retry_after_s: float | None = 1.0


class JournalFull(StorageError):
    """The journal's disk is full."""

    status = 507
    code = "log_full"
    retry_after_s = 5.0


class JournalDamaged(StorageError):
    """The journal was damaged on disk."""

    status = 500
    code = "journal_damaged"
    retry_after_s = None


class LeaseLost(StorageError):
    """Another server writes the stream now. Clients see this only as the reason why a reader was sent away."""

    code = "lease_lost"


class StreamTooLong(StreamError):
    """The stream of an app is longer than 64 MiB."""

    status = 507
    code = "stream_too_long"


class EngineError(TailraceError):
    """The engine failed."""

    code = "engine_error"


class SequenceFailed(EngineError):
    """The engine refused or lost one sequence. The others continue."""

    code = "sequence_failed"


class EngineLost(EngineError):
    """The worker died, or could not be started."""

    status = 503
    code = "engine_unavailable"
    is_retryable = True
    retry_after_s: float | None = 1.0

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        is_crash: bool = False,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.is_crash = is_crash  # it was not killed by the supervisor


class EngineStalled(EngineError):
    """The worker was alive but made no progress, and was killed."""

    status = 504
    code = "engine_stalled"
    is_retryable = True


class PoisonRequest(EngineError):
    """The engine crashed with this request, and crashed again when only this request ran."""

    status = 422
    code = "poison_request"


class Diverged(EngineError):
    """After its engine was lost, the replay gave another answer, and the stream could not continue."""

    code = "diverged"
    is_retryable = True


class Interrupted(EngineError):
    """The server was shut down before the answer was complete."""

    status = 503
    code = "interrupted"
    is_retryable = True


class Cancelled(EngineError):
    """The stream was cancelled before its answer in one piece was complete."""

    status = 499  # with 409, clients would retry
    code = "cancelled"


class AppFailed(TailraceError):
    """The user's app raised an exception. The server's log has it."""

    code = "app_failed"


class AppUnavailable(AppFailed):
    """No process of the user's app can answer, or the one that answered died."""

    status = 503
    code = "app_unavailable"
    is_retryable = True


class AppOutput(AppFailed):
    """The user's app sent a value that cannot be encoded as JSON."""

    code = "app_output"


class ModelError(TailraceError):
    """A model cannot be found, fetched or read. The message says what happened and what to do."""

    code = "model_error"


def _with_subclasses(kind: type[TailraceError]) -> Iterator[type[TailraceError]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _with_subclasses(subclass)


# By code. If a class and its base have the same code, the subclass is used.
KINDS: dict[str, type[TailraceError]] = {kind.code: kind for kind in _with_subclasses(TailraceError)}
