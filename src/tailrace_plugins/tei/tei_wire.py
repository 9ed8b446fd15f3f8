"""The wire of Text Embeddings Inference: `/embed`, `/similarity` and `/rerank`. `/info` is in TGI's plugin.

1. An input that is too long gets 413, as there; `truncate` cuts it.
2. `prompt_name` is refused unless it is null: put the prompt before the text.

vLLM and llama.cpp's server have Jina's form at `/rerank`. A request with `documents` gets it here, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from tailrace.dialects import (
    Dimensions,
    Inputs,
    JsonBody,
    MakeVectors,
    Operation,
    ParsedRequest,
    ServerFacts,
    VectorCall,
    Wire,
    find_model,
    parse_ranking,
    ranked,
    read_fields,
    read_inputs,
    read_known,
    refused,
    to_json,
    vectors_json,
)
from tailrace.errors import AdmissionError, ContextLengthExceeded, EngineError, RequestError, TailraceError
from tailrace.types import VectorForm, VectorRequest, Vectors

__all__ = ["WIRE", "CompareBody", "EmbedInputsBody", "RerankTextsBody"]

_UNUSED = {"prompt_name": refused()}
_Direction = Literal["Left", "Right", "left", "right"]


class _Cut(msgspec.Struct, kw_only=True):
    truncate: bool | None = None
    truncation_direction: _Direction | None = None

    @property
    def side(self) -> Literal["", "start", "end"]:
        if not self.truncate:
            return ""
        return "start" if self.truncation_direction in ("Left", "left") else "end"


class EmbedInputsBody(_Cut, kw_only=True):
    inputs: Inputs
    normalize: bool | None = None
    dimensions: Dimensions | None = None


class _Compared(msgspec.Struct):
    source_sentence: str
    sentences: Annotated[list[str], msgspec.Meta(min_length=1)]


class _CompareSettings(_Cut):
    prompt_name: None = None  # refused, as above


class CompareBody(msgspec.Struct):
    inputs: _Compared
    parameters: _CompareSettings | None = None


class RerankTextsBody(_Cut, kw_only=True):
    query: str
    texts: Annotated[list[str], msgspec.Meta(min_length=1)]
    raw_scores: bool | None = None
    return_text: bool | None = None


@dataclass(frozen=True, slots=True)
class EmbedInputsView:
    def encode(self, vectors: Vectors) -> bytes:
        return to_json(vectors_json(vectors))


@dataclass(frozen=True, slots=True)
class CompareView:
    """The cosines between the first text and the others."""

    def encode(self, vectors: Vectors) -> bytes:
        first, *others = (vectors.numbers(index) for index in range(len(vectors.vectors)))
        return to_json([sum(a * b for a, b in zip(first, other, strict=True)) for other in others])


@dataclass(frozen=True, slots=True)
class RerankTextsView:
    is_raw: bool
    texts: tuple[str, ...]  # empty if they are not wanted

    def encode(self, vectors: Vectors) -> bytes:
        return to_json([self._result(*one) for one in ranked(vectors, is_raw=self.is_raw)])

    def _result(self, index: int, score: float) -> JsonBody:
        shown: JsonBody = {"index": index, "score": score}
        return shown | {"text": self.texts[index]} if self.texts else shown


def parse_embed(request: ParsedRequest) -> VectorCall:
    """Raises: RequestError."""
    fields, unused = read_known(request.body, EmbedInputsBody, _UNUSED)
    wanted = VectorRequest(
        inputs=read_inputs(fields.inputs, "inputs"),
        form=VectorForm(fields.normalize is not False, fields.dimensions or 0),
        truncate=fields.side,
    )
    return VectorCall(wanted, EmbedInputsView(), unused)


def parse_similarity(request: ParsedRequest) -> VectorCall:
    """Raises: RequestError."""
    fields, unused = read_fields(request.body, CompareBody)
    texts = (fields.inputs.source_sentence, *fields.inputs.sentences)
    side = fields.parameters.side if fields.parameters is not None else ""
    return VectorCall(VectorRequest(inputs=texts, truncate=side), CompareView(), unused)


def parse_rerank(request: ParsedRequest) -> VectorCall:
    """Raises: RequestError."""
    if "documents" in request.body:
        return parse_ranking(request)
    fields, unused = read_known(request.body, RerankTextsBody, _UNUSED)
    texts = tuple(fields.texts)
    wanted = VectorRequest(inputs=texts, query=fields.query, truncate=fields.side)
    return VectorCall(wanted, RerankTextsView(bool(fields.raw_scores), texts if fields.return_text else ()), unused)


def find_ranker(request: ParsedRequest) -> ServerFacts | None:
    """Only Jina's form names a model."""
    return find_model(request, request.body.get("model") if "documents" in request.body else None)


def encode_error(error: TailraceError) -> tuple[int, bytes]:
    """`{"error", "error_type"}`, with TEI's types and statuses."""
    status, kind = error.status, error.code
    if isinstance(error, AdmissionError):
        status, kind = 429, "overloaded"
    elif isinstance(error, EngineError):
        status, kind = 424, "backend"
    elif isinstance(error, ContextLengthExceeded):
        status, kind = 413, "validation"
    elif isinstance(error, RequestError):
        status, kind = (422 if error.status == 400 else error.status), "validation"
    return status, to_json({"error": error.message, "error_type": kind, **error.cut_fields})


WIRE = Wire(
    name="tei",
    title="Text Embeddings Inference",
    operations=(
        Operation(
            "POST",
            "/embed",
            MakeVectors(parse_embed, "embed"),
            "Make embeddings of texts.",
            body=EmbedInputsBody,
            example={"inputs": ["The river runs over stones."]},
        ),
        Operation(
            "POST",
            "/similarity",
            MakeVectors(parse_similarity, "embed"),
            "Compare texts by their embeddings.",
            body=CompareBody,
            example={
                "inputs": {
                    "source_sentence": "Where do dogs sleep?",
                    "sentences": ["A dog sleeps near the water.", "Mills turn slowly."],
                }
            },
        ),
        Operation(
            "POST",
            "/rerank",
            MakeVectors(parse_rerank, "rank"),
            "Rank texts by how well they fit a query.",
            body=RerankTextsBody,
            example={"query": "Where do dogs sleep?", "texts": ["A dog sleeps near the water.", "Mills turn slowly."]},
        ),
    ),
    encode_error=encode_error,
    find_model=find_ranker,
    unused=_UNUSED,
    names={"input": "inputs"},
)
