"""OpenAI's wire: embeddings. Other wires share how inputs are read.

A list of texts is several inputs. A list of numbers is one input, given as token ids of the model.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from tailrace.dialects.bodies import to_json
from tailrace.dialects.shapes import read_fields
from tailrace.dialects.wire import MakeVectors, Operation, ParsedRequest, VectorCall
from tailrace.errors import RequestError
from tailrace.types import VectorForm, VectorRequest, Vectors

__all__ = ["OPERATION", "Dimensions", "Inputs", "read_inputs", "vectors_json"]

Inputs = str | list[str | int | list[int]]
Dimensions = Annotated[int, msgspec.Meta(ge=1)]


class EmbeddingsBody(msgspec.Struct):
    input: Inputs
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None


def read_inputs(given: Inputs, name: str) -> tuple[str | tuple[int, ...], ...]:
    """Return the inputs, each a text or token ids. Raises: RequestError."""
    if isinstance(given, str):
        return (given,)
    ids = tuple(one for one in given if isinstance(one, int))
    if 0 < len(ids) < len(given):
        raise RequestError(f"{name}: token ids and texts cannot be mixed.", param=name)
    if ids:
        return (ids,)
    inputs = tuple(one if isinstance(one, str) else tuple(one) for one in given if not isinstance(one, int))
    if not inputs or () in inputs:
        raise RequestError(f"{name} is empty.", param=name)
    return inputs


def vectors_json(vectors: Vectors) -> list[msgspec.Raw]:
    """Return each vector as a JSON list of numbers."""
    return [msgspec.Raw(to_json(vectors.numbers(index).tolist())) for index in range(len(vectors.vectors))]


@dataclass(frozen=True, slots=True)
class EmbeddingsView:
    """A list of embeddings."""

    model: str
    is_base64: bool

    def encode(self, vectors: Vectors) -> bytes:
        shown: list[msgspec.Raw] | list[str] = (
            [base64.b64encode(vector).decode() for vector in vectors.vectors]
            if self.is_base64
            else vectors_json(vectors)
        )
        num_tokens = sum(vectors.num_tokens)
        return to_json(
            {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(shown)
                ],
                "model": self.model,
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            }
        )


def parse(request: ParsedRequest) -> VectorCall:
    """Raises: RequestError."""
    fields, unused = read_fields(request.body, EmbeddingsBody)
    wanted = VectorRequest(
        inputs=read_inputs(fields.input, "input"),
        form=VectorForm(num_dimensions=fields.dimensions or 0),
        truncate="fit",
    )
    return VectorCall(wanted, EmbeddingsView(request.server.model, fields.encoding_format == "base64"), unused)


OPERATION = Operation(
    "POST",
    "/v1/embeddings",
    MakeVectors(parse, "embed"),
    "Make embeddings of texts.",
    body=EmbeddingsBody,
    example={"input": ["The river runs over stones.", "A dog sleeps near the water."]},
)
