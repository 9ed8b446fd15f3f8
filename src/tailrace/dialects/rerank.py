"""Rankings as Jina and Cohere have them, on `/v1/rerank` and `/v2/rerank`: one answer has the fields of both.

A score is between 0 and 1: the sigmoid of what the model gives.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Annotated

import msgspec

from tailrace.dialects.bodies import JsonBody, to_json
from tailrace.dialects.shapes import read_fields
from tailrace.dialects.wire import MakeVectors, Operation, ParsedRequest, VectorCall
from tailrace.types import VectorRequest, Vectors

__all__ = ["OPERATIONS", "Count", "RerankBody", "Score", "parse_ranking", "ranked", "sigmoid"]

Count = Annotated[int, msgspec.Meta(ge=0)]
Score = tuple[int, float]  # the index of a document in the request, and its score


class RankedDocument(msgspec.Struct):
    text: str


class RerankBody(msgspec.Struct):
    query: str
    documents: list[str | RankedDocument]
    model: str | None = None
    top_n: Count | None = None
    return_documents: bool | None = None


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


def ranked(vectors: Vectors, *, is_raw: bool = False) -> list[Score]:
    """Return the documents of a ranking, the best one first."""
    raw = [vectors.numbers(index)[0] for index in range(len(vectors.vectors))]
    scores = [(index, value if is_raw else sigmoid(value)) for index, value in enumerate(raw)]
    return sorted(scores, key=lambda one: -one[1])


@dataclass(frozen=True, slots=True)
class RerankView:
    model: str
    most: int | None
    documents: tuple[str, ...]  # empty if they are not wanted

    def encode(self, vectors: Vectors) -> bytes:
        num_tokens = sum(vectors.num_tokens)
        return to_json(
            {
                "id": f"rerank-{secrets.token_hex(12)}",
                "object": "list",
                "model": self.model,
                "results": [self._result(*one) for one in ranked(vectors)[: self.most]],
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
                "meta": {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": num_tokens}},
            }
        )

    def _result(self, index: int, score: float) -> JsonBody:
        shown: JsonBody = {"index": index, "relevance_score": score}
        return shown | {"document": {"text": self.documents[index]}} if self.documents else shown


def parse_ranking(request: ParsedRequest) -> VectorCall:
    """Raises: RequestError."""
    fields, unused = read_fields(request.body, RerankBody)
    documents = tuple(one if isinstance(one, str) else one.text for one in fields.documents)
    wanted = VectorRequest(inputs=documents, query=fields.query, truncate="fit")
    view = RerankView(request.server.model, fields.top_n, documents if fields.return_documents else ())
    return VectorCall(wanted, view, unused)


OPERATIONS = tuple(
    Operation(
        "POST",
        f"/{version}/rerank",
        MakeVectors(parse_ranking, "rank"),
        "Rank documents by how well they fit a query.",
        body=RerankBody,
        example={"query": "Where do dogs sleep?", "documents": ["A dog sleeps near the water.", "Mills turn slowly."]},
    )
    for version in ("v1", "v2")
)
