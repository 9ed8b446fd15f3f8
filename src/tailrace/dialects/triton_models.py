"""What is asked about servers and models on the wire of Triton and KServe. There is one model here, of one version."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tailrace.dialects.bodies import JsonBody, to_json
from tailrace.dialects.triton_answers import VERSION
from tailrace.dialects.wire import Asked, Reply
from tailrace.errors import UnknownModel

__all__ = [
    "OUTPUTS",
    "require",
    "show_config",
    "show_live",
    "show_model",
    "show_model_ready",
    "show_ready",
    "show_server",
]

OUTPUTS = {
    "TEXT": "OUT",
    "text_input": "text_output",
    "prompt": "generated_text",
}  # by the inputs that a prompt can come as
_WORKSPACE = re.compile(r"_[0-9a-f]{32}$")  # what Inferless puts behind a model's name


def require(asked: Asked) -> None:
    """Raises: UnknownModel unless path and version name what is served, as Inferless writes it or as others do."""
    name, served = asked.path["model"], asked.server.model
    names = (served, served.rpartition("/")[2], "default")  # a slash does not fit into a path
    if name not in names and _WORKSPACE.sub("", name) not in names:
        raise UnknownModel(f"This server runs {served}; there is no such model here.", param="model")
    if asked.path.get("version", VERSION) != VERSION:
        raise UnknownModel(f"The only version is {VERSION}.", param="version")


def show_server(asked: Asked) -> Reply:
    return Reply(
        to_json(
            {"name": "tailrace", "version": asked.server.version, "extensions": ["generate", "model_configuration"]}
        )
    )


def show_live(asked: Asked) -> Reply:
    return Reply(to_json({"live": asked.server.is_live}), 200 if asked.server.is_live else 503)


def show_ready(asked: Asked) -> Reply:
    return _readiness(asked, {})


def show_model_ready(asked: Asked) -> Reply:
    """Raises: UnknownModel."""
    require(asked)
    return _readiness(asked, {"name": asked.server.model})


def _readiness(asked: Asked, named: JsonBody) -> Reply:
    ready = asked.server.is_ready
    return Reply(to_json({**named, "ready": ready}), 200 if ready else 503, retry_after_s=None if ready else 1.0)


def show_model(asked: Asked) -> Reply:
    """Raises: UnknownModel."""
    require(asked)

    def tensors(names: Iterable[str]) -> list[JsonBody]:
        return [{"name": name, "datatype": "BYTES", "shape": [1]} for name in names]

    body = {"name": asked.server.model, "versions": [VERSION], "platform": "tailrace"}
    return Reply(to_json({**body, "inputs": tensors(OUTPUTS), "outputs": tensors(OUTPUTS.values())}))


def show_config(asked: Asked) -> Reply:
    """Raises: UnknownModel."""
    require(asked)

    def tensors(names: Iterable[str], **more: object) -> list[JsonBody]:
        return [{"name": name, "data_type": "TYPE_STRING", "dims": [1], **more} for name in names]

    body = {"name": asked.server.model, "platform": "tailrace", "max_batch_size": 0}
    inputs, outputs = tensors(OUTPUTS, optional=True), tensors(OUTPUTS.values())
    return Reply(to_json({**body, "input": inputs, "output": outputs, "model_transaction_policy": {"decoupled": True}}))
