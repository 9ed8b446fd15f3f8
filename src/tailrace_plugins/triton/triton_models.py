"""Triton's and KServe's routes about servers and models. Each model has one version."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tailrace.dialects import JsonBody, ParsedRequest, Reply, ServerFacts, find_model, readiness, to_json
from tailrace.errors import UnknownModel

__all__ = [
    "OUTPUTS",
    "VERSION",
    "find_in_path",
    "list_models",
    "require",
    "show_config",
    "show_model",
    "show_model_ready",
    "show_ready",
    "show_server",
]

VERSION = "1"  # the only version of each model
OUTPUTS = {"TEXT": "OUT", "text_input": "text_output", "prompt": "generated_text"}  # by the name of the prompt's input
_EXTENSIONS = ["binary_tensor_data", "generate", "model_configuration"]
_WORKSPACE = re.compile(r"_[0-9a-f]{32}$")  # Inferless adds it to a model's name


def require(request: ParsedRequest) -> None:
    """Raises: UnknownModel for another model or version. The name may be in Inferless' form."""
    served = request.server.model
    if not _is_meant(request.server, request.path["model"], "default"):
        raise UnknownModel(f"This server runs {served}; there is no such model here.", param="model")
    if request.path.get("version", VERSION) != VERSION:
        raise UnknownModel(f"The only version is {VERSION}.", param="version")


def find_in_path(request: ParsedRequest) -> ServerFacts | None:
    """Return the model that a path names. A full name is preferred to the last part of another model's name."""
    name = request.path.get("model", "default")
    named = (server for server in request.every if _is_meant(server, name))
    return find_model(request, name, _WORKSPACE.sub("", name)) or next(named, None)


def _is_meant(server: ServerFacts, name: str, *more: str) -> bool:
    names = (server.model, server.model.rpartition("/")[2], *more)  # a name in a path cannot have a slash
    return name in names or _WORKSPACE.sub("", name) in names


def show_server(request: ParsedRequest) -> Reply:
    return Reply(to_json({"name": "tailrace", "version": request.server.version, "extensions": _EXTENSIONS}))


def list_models(request: ParsedRequest) -> Reply:
    """Show Triton's repository index. A model that is not loaded is UNAVAILABLE until a request loads it."""
    return Reply(to_json([_in_index(server) for server in request.every]))


def _in_index(server: ServerFacts) -> JsonBody:
    reason = "" if server.state == "ready" else server.state
    return {"name": server.model, "version": VERSION, "state": "UNAVAILABLE" if reason else "READY", "reason": reason}


def show_ready(request: ParsedRequest) -> Reply:
    return readiness(request.server, {"ready": request.server.generator.is_ready})


def show_model_ready(request: ParsedRequest) -> Reply:
    """Raises: UnknownModel."""
    require(request)
    return readiness(request.server, {"name": request.server.model, "ready": request.server.generator.is_ready})


def show_model(request: ParsedRequest) -> Reply:
    """Raises: UnknownModel."""
    require(request)

    def tensors(names: Iterable[str]) -> list[JsonBody]:
        return [{"name": name, "datatype": "BYTES", "shape": [1]} for name in names]

    body = {"name": request.server.model, "versions": [VERSION], "platform": "tailrace"}
    return Reply(to_json({**body, "inputs": tensors(OUTPUTS), "outputs": tensors(OUTPUTS.values())}))


def show_config(request: ParsedRequest) -> Reply:
    """Raises: UnknownModel."""
    require(request)

    def tensors(names: Iterable[str], **more: object) -> list[JsonBody]:
        return [{"name": name, "data_type": "TYPE_STRING", "dims": [1], **more} for name in names]

    body = {"name": request.server.model, "platform": "tailrace", "max_batch_size": 0}
    inputs, outputs = tensors(OUTPUTS, optional=True), tensors(OUTPUTS.values())
    return Reply(to_json({**body, "input": inputs, "output": outputs, "model_transaction_policy": {"decoupled": True}}))
