"""Embeddings on the wire of llama.cpp's server: `POST /embedding` and `POST /embeddings`.

Tabby and other clients of that server use them. An answer is a list with one object for each input; `embedding` in it
is a list of one vector, because that server also has models without pooling. Source: the server's README, and Tabby's
`http-api-bindings`. OpenAI's form is on `/v1/embeddings`, as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from tailrace.dialects import (
    Inputs,
    MakeVectors,
    Operation,
    ParsedRequest,
    VectorCall,
    ignored,
    read_inputs,
    read_known,
    to_json,
)
from tailrace.errors import RequestError
from tailrace.types import VectorForm, VectorRequest, Vectors

__all__ = ["OPERATIONS", "LlamaEmbeddingBody"]

_UNUSED = {"encoding_format": ignored("float")}  # that server has it on /v1/embeddings alone
_LARGEST_INT16 = 32_760  # its scale for vectors whose largest number counts


class LlamaEmbeddingBody(msgspec.Struct, kw_only=True):
    content: Inputs | None = None
    input: Inputs | None = None  # another name of `content`
    embd_normalize: Annotated[int, msgspec.Meta(ge=-1, le=100)] | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class LlamaEmbeddingView:
    norm: int  # -1: as the model gives it. 0: the largest number. p ≥ 1: the p-norm

    def encode(self, vectors: Vectors) -> bytes:
        return to_json(
            [
                {"index": index, "embedding": [_scaled(vectors.numbers(index).tolist(), self.norm)]}
                for index in range(len(vectors.vectors))
            ]
        )


def _scaled(numbers: list[float], norm: int) -> list[float]:
    if norm in (-1, 2):  # the engine has done it
        return numbers
    largest = max(map(abs, numbers), default=0.0) or 1.0
    if norm == 0:
        return [number * _LARGEST_INT16 / largest for number in numbers]
    shares = [number / largest for number in numbers]  # so that no power overflows
    length = sum(abs(share) ** norm for share in shares) ** (1 / norm)
    return [share / (length or 1.0) for share in shares]


def parse(request: ParsedRequest) -> VectorCall:
    """Raises: RequestError."""
    fields, unused = read_known(request.body, LlamaEmbeddingBody, _UNUSED)
    name = "content" if fields.content is not None else "input"
    given = fields.content if fields.content is not None else fields.input
    if given is None:
        raise RequestError("content is missing: a text, token ids, or a list of them.", param="content")
    norm = 2 if fields.embd_normalize is None else fields.embd_normalize
    wanted = VectorRequest(inputs=read_inputs(given, name), form=VectorForm(norm == 2), truncate="fit")
    return VectorCall(wanted, LlamaEmbeddingView(norm), unused)


OPERATIONS = tuple(
    Operation(
        "POST",
        path,
        MakeVectors(parse, "embed"),
        "Make embeddings of texts, as on llama.cpp's server.",
        body=LlamaEmbeddingBody,
        example={"content": "The river runs over stones."},
    )
    for path in ("/embedding", "/embeddings")
)
