"""The routes of operators, sessions, keys, owners and usage in the OpenAPI document."""

from __future__ import annotations

from tailrace.api.openapi import RouteRow, described

__all__ = ["PATHS"]

_ROUTES = (
    RouteRow("get", "/v1/session", "show_session", "Shows who is signed in."),
    RouteRow("post", "/v1/session", "begin_session", "Signs a browser in with the key of the request."),
    RouteRow("delete", "/v1/session", "end_session", "Signs a browser out."),
    RouteRow("get", "/v1/admin/streams", "list_running_streams", "The running streams of all owners."),
    RouteRow("post", "/v1/admin/streams/{stream_id}/cancel", "stop_stream", "Ends a stream of any owner as cancelled."),
    RouteRow("get", "/v1/admin/models", "list_loaded_models", "The models, and how busy they are."),
    RouteRow("post", "/v1/admin/models/load", "load_model", "Loads a model.", {"model": "smollm2"}),
    RouteRow("post", "/v1/admin/models/unload", "unload_model", "Unloads an idle model, until its next request.", {
        "model": "smollm2",
    }),
    RouteRow("get", "/v1/admin/errors", "list_errors", "The last streams that failed, and requests that were refused."),
    RouteRow("get", "/v1/admin/keys", "list_keys", "Lists keys.", query=("owner",)),
    RouteRow("post", "/v1/admin/keys", "create_key", "Creates a key. Only this answer has its token.", {
        "owner": "alice", "name": "laptop", "expires_in_s": 86_400, "scopes": ["generate", "read"],
    }),
    RouteRow("get", "/v1/admin/keys/{key_id}", "show_key", "Shows a key."),
    RouteRow("delete", "/v1/admin/keys/{key_id}", "revoke_key", "Revokes a key, and ends its streams."),
    RouteRow("post", "/v1/admin/keys/{key_id}/rotate", "rotate_key", "Gives a key a new secret.", {"grace_s": 3600}),
    RouteRow(
        "post", "/v1/tickets", "issue_ticket", "Creates a ticket to follow one stream with ?ticket=, for a short time.",
        {"stream_id": "gvwLjBV1_uZRlZgD76TSZw"},
    ),
    RouteRow("put", "/v1/admin/keys/{key_id}/quota", "limit_key",
               "Sets the limits of a key. Missing fields mean no limit.", {
        "tokens_per_minute": 20_000, "streams_at_once": 4,
    }),
    RouteRow("delete", "/v1/admin/owners/{owner}", "forget_owner", "Deletes all data of an owner."),
    RouteRow("get", "/v1/admin/owners/{owner}/quota", "show_owner", "Shows the limits of an owner."),
    RouteRow("put", "/v1/admin/owners/{owner}/quota", "limit_owner", "Sets the limits of an owner.", {
        "tokens_per_month": 5_000_000,
    }),
    RouteRow("get", "/v1/usage", "usage", "Sums of requests and tokens.", query=(
        "by", "since", "until", "owner", "key", "format",
    )),
)  # fmt: skip
PATHS = described(_ROUTES)
