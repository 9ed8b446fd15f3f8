"""Ollama's wire: embeddings. A text that is too long is cut at its end, unless `truncate` is false."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from tailrace.dialects import (
    Dimensions,
    JsonBody,
    MakeVectors,
    Operation,
    ParsedRequest,
    Reply,
    VectorCall,
    ignored,
    read_known,
    require_json_or_curl,
    to_json,
    vectors_json,
)
from tailrace.types import VectorForm, VectorRequest, Vectors

__all__ = ["OPERATIONS", "EmbedBody", "OldEmbeddingsBody"]

_UNUSED = {"keep_alive": ignored(-1, "-1", "-1s", "-1m", "-1h"), "options": ignored({})}
_Model = Annotated[str, msgspec.Meta(min_length=1)]


class EmbedBody(msgspec.Struct):
    model: _Model
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: Dimensions | None = None


class OldEmbeddingsBody(msgspec.Struct):
    model: _Model
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class EmbedView:
    model: str

    def encode(self, vectors: Vectors) -> bytes:
        return to_json(
            {
                "model": self.model,
                "embeddings": vectors_json(vectors),
                "total_duration": round(vectors.total_s * 1e9),  # nanoseconds
                "load_duration": round(vectors.waited_s * 1e9),
                "prompt_eval_count": sum(vectors.num_tokens),
            }
        )


@dataclass(frozen=True, slots=True)
class OldEmbeddingsView:
    def encode(self, vectors: Vectors) -> bytes:
        return to_json({"embedding": vectors_json(vectors)[0]})


def parse_embed(request: ParsedRequest) -> VectorCall | Reply:
    """Raises: RequestError."""
    fields, unused = read_known(request.body, EmbedBody, _UNUSED)
    if not fields.input:  # clients ask so whether the model is there
        return _empty({"model": fields.model, "embeddings": []}, unused)
    wanted = VectorRequest(
        inputs=(fields.input,) if isinstance(fields.input, str) else tuple(fields.input),
        form=VectorForm(num_dimensions=fields.dimensions or 0),
        truncate="" if fields.truncate is False else "end",
    )
    return VectorCall(wanted, EmbedView(fields.model), unused)


def parse_old(request: ParsedRequest) -> VectorCall | Reply:
    """Raises: RequestError."""
    fields, unused = read_known(request.body, OldEmbeddingsBody, _UNUSED)
    if not fields.prompt:
        return _empty({"embedding": []}, unused)
    return VectorCall(VectorRequest(inputs=(fields.prompt,), truncate="end"), OldEmbeddingsView(), unused)


def _empty(body: JsonBody, unused: tuple[str, ...]) -> Reply:
    return Reply(to_json(body), ignored=unused)


OPERATIONS = (
    Operation(
        "POST",
        "/api/embed",
        MakeVectors(parse_embed, "embed"),
        "Make embeddings of texts.",
        body=EmbedBody,
        check=require_json_or_curl,
        example={"model": "default", "input": ["The river runs over stones."]},
    ),
    Operation(
        "POST",
        "/api/embeddings",
        MakeVectors(parse_old, "embed"),
        "Make an embedding of a text: the older form.",
        body=OldEmbeddingsBody,
        check=require_json_or_curl,
        example={"model": "default", "prompt": "The river runs over stones."},
    ),
)
