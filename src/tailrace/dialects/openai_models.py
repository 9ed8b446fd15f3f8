"""OpenAI's wire: the models, and the version of the server."""

from __future__ import annotations

from tailrace.dialects.bodies import JsonBody, to_json
from tailrace.dialects.facts import ServerFacts, capabilities_of
from tailrace.dialects.wire import ParsedRequest, Reply
from tailrace.errors import UnknownModel

__all__ = ["list_models", "show_model", "show_version"]


def list_models(request: ParsedRequest) -> Reply:
    found: JsonBody = {"object": "list", "data": [_model(server) for server in request.every]}
    if "client_version" in request.query:
        # Codex CLI asks so, and needs a list of its own form. An entry would replace Codex's instructions to the model.
        found["models"] = []
    return Reply(to_json(found))


def show_model(request: ParsedRequest) -> Reply:
    if request.path["name"] != request.server.model:
        raise UnknownModel("There is no such model here.", param="model")
    return Reply(to_json(_model(request.server)))


def show_version(request: ParsedRequest) -> Reply:
    """Answer as vLLM does."""
    return Reply(to_json({"version": request.server.version}))


def _model(server: ServerFacts) -> JsonBody:
    found: JsonBody = {
        "id": server.model,
        "object": "model",
        "created": server.started_s,
        "owned_by": "tailrace",
        "max_model_len": server.generator.limit_tokens(),
        "capabilities": capabilities_of(server),
        "state": server.state,
    }
    return found | {"parent": server.parent} if server.parent else found  # as vLLM shows adapters
