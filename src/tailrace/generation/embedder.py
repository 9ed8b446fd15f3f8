"""Checks requests for vectors, and runs them: embeddings of texts, and scores of pairs.

They go through the same queue, limits, observers and engine as streams. But a vector is only useful as a whole, and
making it again costs less than keeping it: so there is no stream, and nothing is written but the row of the request.
"""

from __future__ import annotations

import time

from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.generation.generator import Generator
from tailrace.generation.inputs import InputEncoder
from tailrace.generation.observers import Times
from tailrace.generation.vector_run import VectorRun
from tailrace.types import Pooling, Record, VectorRequest, new_stream_id

__all__ = ["Embedder"]


class Embedder:
    """Requests in, vectors out, for one model that embeds or ranks."""

    def __init__(
        self,
        generator: Generator,
        *,
        num_dimensions: int,
        may_shorten: bool,
        pair_template: str = "",
        pooling: Pooling = "mean",
    ) -> None:
        """`num_dimensions` are those of an embedding. `may_shorten`: its first dimensions are one, too.
        `pair_template` and `pooling`: as in `ModelCard`."""
        self._generator = generator
        self._inputs = InputEncoder(generator.prompts.tokenizer, pair_template)
        self.num_dimensions = num_dimensions
        self.pooling: Pooling = pooling
        self._may_shorten = may_shorten

    async def begin(self, request: VectorRequest) -> VectorRun:
        """Begin a request. Its caller awaits the result at once.

        Raises: RequestError if it cannot be served, AdmissionError if it cannot be served now, EngineLost if there is
        no engine, StorageError if it cannot be recorded.
        """
        times = Times(time.monotonic())
        generator = self._generator
        self._check(request)
        with generator.gate.coming(request):
            limit_tokens = generator.limit_tokens()
            prompts, is_cut = await self._inputs.encode(request, limit_tokens, generator.limits.max_input_tokens)
        record = Record(
            new_stream_id(),
            time.time(),
            request.model or generator.model,
            prompts=prompts,
            num_prompt_tokens=sum(prompt.num_tokens for prompt in prompts),
            **request.kept(),
        )
        generator.used_s = time.monotonic()
        run = generator.start_vectors(record, request.form, times)
        run.cut_to_tokens = limit_tokens if is_cut else None
        return run

    def _check(self, request: VectorRequest) -> None:
        """Raises: RequestError."""
        self._generator.check_task(request.task)
        most = self._generator.limits.max_inputs
        if not request.inputs:
            raise RequestError("There is no input.", param="input")
        if len(request.inputs) > most:
            raise RequestError(f"A request has at most {most} inputs.", param="input")
        wanted = request.form.num_dimensions
        if wanted and wanted != self.num_dimensions and not (self._may_shorten and wanted < self.num_dimensions):
            rest = "at most that many" if self._may_shorten else "no other number"
            raise UnsupportedParameter(
                f"Embeddings of this model have {self.num_dimensions} dimensions, and it can give {rest}.",
                param="dimensions",
            )
