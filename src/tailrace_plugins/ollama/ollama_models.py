"""Ollama's routes about models.

What the model's files do not say is left out, or is empty if clients need it.
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
    "QUANTIZATIONS",
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
_FORMATS = {"gguf": "gguf", "huggingface": "safetensors", "openvino": "openvino"}
_PREFIXES = ((10**9, "B"), (10**6, "M"), (10**3, "K"))

# The quantization of a GGUF file by its number, `general.file_type`. Source: `llama_ftype` of llama.cpp.
QUANTIZATIONS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip


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
    card = server.card
    architecture = card.architecture or "unknown"
    info = {
        "general.architecture": architecture,
        "general.basename": server.model,
        "general.file_type": card.file_type,
        "general.parameter_count": card.num_parameters or None,
        # Clients read the context length from the field `ARCHITECTURE.context_length`. It is that of this server.
        f"{architecture}.context_length": server.generator.limit_tokens(),
        f"{architecture}.embedding_length": server.num_dimensions or None,
    }
    shown = {
        "details": _details(server),
        "model_info": {key: value for key, value in info.items() if value is not None},
        "capabilities": capabilities_of(server),
        "modified_at": time_of(server.started_s),
    }
    return Reply(to_json(shown), ignored=ignored)


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
    size = server.card.weight_bytes
    details = _details(server)
    digest = hashlib.sha256(to_json([server.model, size, details])).hexdigest()
    return {"name": name, "model": name, "size": size, "digest": digest, "details": details}


def _details(server: ServerFacts) -> JsonBody:
    card = server.card
    families = [card.architecture, *(["clip"] if card.projector is not None else [])]  # the projector's architecture
    return {
        "parent_model": server.parent,
        "format": _FORMATS.get(card.format, ""),
        "family": card.architecture,
        "families": families if card.architecture else [],
        "parameter_size": _short(card.num_parameters),
        "quantization_level": QUANTIZATIONS.get(-1 if card.file_type is None else card.file_type)
        or card.quantized_by.upper()
        or card.weight_type,
    }


def _short(number: int) -> str:
    """Return a number of parameters as Ollama writes it, such as 3.2B or 134.52M; "" for 0, which is unknown."""
    for size, letter in _PREFIXES:
        if number >= size:
            num_decimals = 0 if letter == "K" or not number % size else 1 if letter == "B" else 2
            return f"{number / size:.{num_decimals}f}{letter}"
    return str(number or "")
