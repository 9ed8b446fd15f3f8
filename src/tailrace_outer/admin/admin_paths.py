"""The routes of keys, owners and usage in the OpenAPI document."""

from __future__ import annotations

from tailrace.api.openapi import RouteRow, described

__all__ = ["PATHS"]

_ROUTES = (
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
