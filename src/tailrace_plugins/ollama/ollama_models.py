"""Ollama's routes about models.

Unknown facts, such as size and family, are left out, or are empty if clients need them.
"""

from __future__ import annotations

import hashlib

import msgspec

from tailrace.dialects import (
    JsonBody,
    ParsedRequest,
    Reply,
    ServerFacts,
    capabilities_of,
    find_model,
    read_fields,
    time_of,
    to_json,
)
from tailrace.errors import RequestError, UnknownModel

__all__ = [
    "PullBody",
    "ShowBody",
    "find_tagged",
    "list_models",
    "list_running",
    "pull",
    "require",
    "served_name",
    "show_model",
    "show_version",
]

# Clients refuse an older server: Codex one before 0.13.4, the first with /v1/responses; others one before 0.14, the
# first with /v1/messages. Both paths are here.
_API_VERSION = "0.14.2"
_FOR_EVER = "9999-12-31T23:59:59Z"
_DETAILS = {"parent_model": "", "format": "", "family": "", "families": [], "parameter_size": "",
            "quantization_level": ""}  # fmt: skip


class ShowBody(msgspec.Struct):
    model: str | None = None
    name: str | None = None  # used by older clients
    verbose: bool | None = None


class PullBody(msgspec.Struct):
    model: str | None = None
    name: str | None = None  # used by older clients
    stream: bool | None = None
    insecure: bool | None = None


def served_name(server: ServerFacts, name: str) -> str:
    """Return the name of the model. Clients add `:latest` to a name without a tag."""
    return server.model if name.removesuffix(":latest") in (server.model, "default") else name


def require(server: ServerFacts, name: str) -> None:
    """Raises: UnknownModel for the name of another model."""
    if served_name(server, name) != server.model:
        raise UnknownModel(f"This server runs {server.model}; there is no such model here.", param="model")


def find_tagged(request: ParsedRequest) -> ServerFacts | None:
    """Return the model that a request names, with or without a tag."""
    name = request.body.get("model") or request.body.get("name")
    return find_model(request, name, name.removesuffix(":latest") if isinstance(name, str) else None)


def list_models(request: ParsedRequest) -> Reply:
    models = [_entry(server) | {"modified_at": time_of(server.started_s)} for server in request.every]
    return Reply(to_json({"models": models}))


def list_running(request: ParsedRequest) -> Reply:
    models = [
        _entry(server) | {"expires_at": _FOR_EVER, "context_length": server.generator.limit_tokens()}
        for server in request.every
        if server.state != "unloaded"
    ]
    return Reply(to_json({"models": models}))


def show_model(request: ParsedRequest) -> Reply:
    """Raises: RequestError."""
    fields, ignored = read_fields(request.body, ShowBody)
    name = fields.model or fields.name
    if not name:
        raise RequestError("model is required", param="model")
    server = request.server
    require(server, name)
    facts = {
        "details": _details(server),
        # Clients read the context length from the field `ARCHITECTURE.context_length`.
        "model_info": {
            "general.architecture": "unknown",
            "general.basename": server.model,
            "unknown.context_length": server.generator.limit_tokens(),
        }
        | ({"unknown.embedding_length": server.num_dimensions} if server.num_dimensions else {}),
        "capabilities": capabilities_of(server),
        "modified_at": time_of(server.started_s),
    }
    return Reply(to_json(facts), ignored=ignored)


def pull(request: ParsedRequest) -> Reply:
    """Answer as Ollama does if it has the model already. Raises: RequestError; UnknownModel for another model."""
    fields, unused = read_fields(request.body, PullBody)
    name = fields.model or fields.name
    if not name:
        raise RequestError("model is required", param="model")
    if served_name(request.server, name) != request.server.model:
        raise UnknownModel(
            f"This server runs {request.server.model}, and clients cannot fetch models. `tailrace serve MODEL` "
            "fetches one when it starts.",
            param="model",
        )
    success = to_json({"status": "success"})
    if fields.stream is False:
        return Reply(success, ignored=unused)
    lines = to_json({"status": "pulling manifest"}) + b"\n" + success + b"\n"
    return Reply(lines, media_type="application/x-ndjson", ignored=unused)


def show_version(request: ParsedRequest) -> Reply:
    return Reply(to_json({"version": _API_VERSION}))


def _entry(server: ServerFacts) -> JsonBody:
    name = server.model if ":" in server.model else server.model + ":latest"
    digest = hashlib.sha256(server.model.encode()).hexdigest()
    return {"name": name, "model": name, "digest": digest, "details": _details(server)}


def _details(server: ServerFacts) -> JsonBody:
    return {**_DETAILS, "parent_model": server.parent}
