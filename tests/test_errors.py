from __future__ import annotations

import inspect
import re

import pytest

from tailrace import errors
from tailrace.errors import ContextLengthExceeded, TailraceError

ALL = [getattr(errors, name) for name in errors.__all__]

# Clients compare these; a change here is a change of the API.
CODES = {
    "TailraceError": "internal_error",
    "RequestError": "invalid_request",
    "BodyTooLarge": "body_too_large",
    "BodyTimeout": "body_timeout",
    "UnsupportedMediaType": "unsupported_media_type",
    "UnsupportedOperation": "unsupported_operation",
    "UnsupportedParameter": "unsupported_parameter",
    "ContextLengthExceeded": "context_length_exceeded",
    "UnknownModel": "model_not_found",
    "UnknownResponse": "previous_response_not_found",
    "InvalidLane": "invalid_stream_id",
    "TooManyLanes": "websocket_stream_limit_reached",
    "UnknownKey": "unknown_key",
    "UnknownConversation": "conversation_not_found",
    "UnknownShare": "unknown_share",
    "ConversationLocked": "conversation_locked",
    "Unauthenticated": "invalid_api_key",
    "KeyRevoked": "key_revoked",
    "Forbidden": "forbidden",
    "IdempotencyConflict": "idempotency_conflict",
    "ClaimTaken": "idempotency_in_progress",
    "AdmissionError": "overloaded",
    "QueueFull": "overloaded",
    "Draining": "draining",
    "StreamError": "stream_error",
    "UnknownStream": "unknown_stream",
    "StreamExpired": "stream_expired",
    "ForeignCursor": "foreign_cursor",
    "SeqOutOfRange": "seq_out_of_range",
    "EngineError": "engine_error",
    "SequenceFailed": "sequence_failed",
    "EngineLost": "engine_unavailable",
    "EngineStalled": "engine_stalled",
    "AppFailed": "app_failed",
    "AppUnavailable": "app_unavailable",
    "ModelError": "model_error",
    "StorageError": "journal_unavailable",
    "JournalFull": "log_full",
    "JournalDamaged": "journal_damaged",
    "LeaseLost": "lease_lost",
    "PoisonRequest": "poison_request",
    "Diverged": "diverged",
    "NotFound": "not_found",
    "MethodNotAllowed": "method_not_allowed",
    "UpgradeRequired": "upgrade_required",
    "TemplateError": "template_error",
    "RequestRefused": "request_refused",
    "QueueTimeout": "queue_timeout",
    "QuotaExceeded": "rate_limit_exceeded",
    "StreamTooLong": "stream_too_long",
    "Interrupted": "interrupted",
    "Cancelled": "cancelled",
    "AppOutput": "app_output",
}


def drawn() -> dict[str, tuple[str | None, str]]:
    """Return the tree at the top of the module: each name with its parent and its status."""
    tree: dict[str, tuple[str | None, str]] = {}
    path: list[str] = []
    assert errors.__doc__
    for indent, name, status in re.findall(r"^ {4}( *)(\w+) +(\d{3}|-)(?: .*)?$", errors.__doc__, re.MULTILINE):
        depth = len(indent) // 2
        path[depth:] = [name]
        tree[name] = (path[depth - 1] if depth else None, status)
    return tree


def test_the_tree_in_the_docstring_equals_the_code() -> None:
    defined = {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, TailraceError) and kind.__module__ == errors.__name__
    }
    assert set(drawn()) == set(defined) == set(errors.__all__)
    for name, (parent, status) in drawn().items():
        assert parent is None or defined[name].__base__ is defined[parent]
        assert status in ("-", str(defined[name].status))


def test_codes_do_not_change() -> None:
    assert {kind.__name__: kind.code for kind in ALL} == CODES


def test_each_code_has_one_status() -> None:
    assert {kind.code: kind.status for kind in ALL} == {code: kind.status for code, kind in errors.KINDS.items()}
    assert all(errors.KINDS[kind.code].status == kind.status for kind in ALL)


def test_names_are_exported_in_order() -> None:
    assert errors.__all__ == sorted(errors.__all__)


def test_fields_of_an_error() -> None:
    error = errors.QueueFull("Later.", param="n", retry_after_s=1.5)
    assert (str(error), error.message, error.param, error.retry_after_s) == ("Later.", "Later.", "n", 1.5)
    assert (error.status, error.code) == (429, "overloaded")
    assert TailraceError("a").retry_after_s is None


@pytest.mark.parametrize(
    ("error", "message", "param"),
    [
        (
            ContextLengthExceeded(9, 8),
            "The maximum context length is 8 tokens, and the prompt has 9. Shorten the prompt.",
            "prompt",
        ),
        (
            ContextLengthExceeded(5, 8, max_tokens=4),
            "The maximum context length is 8 tokens. The prompt has 5, and the answer may have 4. "
            "Shorten the prompt, or ask for a shorter answer.",
            "max_tokens",
        ),
        (
            ContextLengthExceeded(9, 8, at_least=True),
            "The maximum context length is 8 tokens, and the prompt has at least 9. Shorten the prompt.",
            "prompt",
        ),
    ],
)
def test_a_context_length_error_has_its_counts(error: ContextLengthExceeded, message: str, param: str) -> None:
    assert (error.message, error.param, error.status) == (message, param, 400)
    assert error.limit_tokens == 8
