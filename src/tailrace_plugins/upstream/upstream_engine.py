"""The engine `upstream`: another server computes, and tailrace keeps the stream.

Works with any OpenAI-compatible server and text-generation-inference. Prompts are passed on as text or messages. The
ids of answers are packed text (`upstream_text`): a chunk of an answer becomes a delta of a few ids. Usage is counted in
the upstream's tokens.
Each sequence is one HTTP request; their event loop runs inside `step`.
"""

from __future__ import annotations

import asyncio
import contextlib

from tailrace.engines import Capabilities, Delta, EngineSpec, Prefill, Sequence
from tailrace.errors import ModelError, SequenceFailed
from tailrace.types import FinishReason
from tailrace_kit.inner_loop import InnerLoop
from tailrace_plugins.upstream.upstream_answers import Timeouts, follow, new_client
from tailrace_plugins.upstream.upstream_decoders import AnswerEvent, UpstreamError
from tailrace_plugins.upstream.upstream_models import KEY_VARIABLE, Address
from tailrace_plugins.upstream.upstream_requests import PARAMETERS, UpstreamRequest, make_request
from tailrace_plugins.upstream.upstream_text import END_ID, pack

__all__ = ["UpstreamEngine"]

_STEP_S = 0.02  # longest step
_CLOSE_S = 0.05


class _Run:
    """One sequence: its counts, and its output since the last step."""

    def __init__(self, sequence: Sequence, host: str) -> None:
        self.sequence_id = sequence.sequence_id
        self.host = host
        self.count = 0  # ids
        self.usage = (sequence.num_prompt_tokens, 0)  # estimated until the server sends its counts
        self.num_cached: int | None = None  # tokens of the prompt, if the server says it
        self.progress: Prefill | None = None  # until there is text
        self.is_aborted = False
        self.task: asyncio.Task[None]
        self._text: list[str] = []
        self._finish_reason: FinishReason | None = None
        self._error: UpstreamError | None = None

    @property
    def has_news(self) -> bool:
        return bool(self._text) or self._finish_reason is not None or self._error is not None

    def add(self, event: AnswerEvent) -> None:
        if event.num_read is not None:
            self.progress = Prefill(self.sequence_id, *event.num_read)
            return
        self.progress = None
        if event.text:
            self._text.append(event.text)
        self.usage = event.usage or (self.usage[0], self.usage[1] + bool(event.text))
        self.num_cached = event.num_cached_tokens
        self._finish_reason = event.finish_reason

    def fail(self, error: UpstreamError) -> None:
        self._error = error

    def take(self) -> Delta | None:
        if not self.is_aborted and not self.has_news:
            return None
        start, ids = self.count, pack("".join(self._text).encode("utf-8", "replace"))
        self._text.clear()
        if self.is_aborted:
            return Delta(self.sequence_id, start, (), (), "cancelled", usage=self.usage)
        if self._finish_reason is not None and not ids:
            ids = (END_ID,)  # a finish_reason needs a token
        self.count += len(ids)
        if self._error is not None and not ids:
            error = self._error
            return Delta(
                self.sequence_id,
                start,
                (),
                (),
                "error",
                f"{self.host} {error.reason}",
                usage=self.usage,
                is_lost=error.is_temporary,
                is_refused=error.is_refusal,
            )
        return Delta(
            self.sequence_id,
            start,
            ids,
            (),
            self._finish_reason,
            usage=self.usage,
            num_cached_tokens=self.num_cached if self._finish_reason is not None else None,
        )


class UpstreamEngine:
    """Implements `Engine` with another server over HTTP.

    Raises: ModelError for an invalid address, or a key with characters that a header cannot contain.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._address = Address.parse(spec.path)
        self._timeouts = Timeouts(**spec.options)
        try:
            self._client = new_client(spec.secret, max_connections=2 * spec.max_sequences)
        except ValueError:
            raise ModelError(f"The key in {KEY_VARIABLE} has characters that an HTTP header cannot contain.") from None
        self._loop: InnerLoop[_Run] = InnerLoop()
        self.capabilities = Capabilities(
            engine=f"upstream ({self._address.kind} at {self._address.host})",
            context_tokens=spec.context_tokens,
            kv_tokens=(spec.context_tokens + 2)
            * spec.max_sequences,  # unknown: large enough that only `max_sequences` limits
            block_tokens=1,
            max_sequences=spec.max_sequences,
            parameters=PARAMETERS[self._address.kind],
            exact=False,
            reports_progress=self._address.kind == "llamacpp",
            waits=True,
            # Token ids are those of its own answers. Images are passed on in a chat, in the form in which they came.
            takes=frozenset({"text", "token_ids", *(f"image/{name}" for name in ("gif", "jpeg", "png", "webp"))}),
        )

    def return_for(self, descriptor: int) -> None:
        self._loop.return_for(descriptor)

    def submit(self, sequence: Sequence) -> None:
        if sequence.num_prompt_tokens > self.capabilities.context_tokens:
            raise SequenceFailed("the prompt is too long for this server")
        request = make_request(self._address, sequence)
        run = _Run(sequence, self._address.host)
        self._loop.begin(sequence.sequence_id, run, self._follow(run, request))

    def abort(self, sequence_id: int) -> None:
        self._loop.abort(sequence_id)

    def step(self) -> list[Delta]:
        has_aborted = self._loop.has_aborted
        if self._loop.runs and not has_aborted:
            is_short = any(run.has_news for run in self._loop.runs.values())
            self._loop.run(0.0 if is_short else _STEP_S)
        deltas = self._loop.take()
        if has_aborted or not self._loop.runs:
            self._loop.clean_up(_CLOSE_S)
        return deltas

    def progress(self) -> list[Prefill]:
        return [run.progress for run in self._loop.runs.values() if run.progress is not None]

    def close(self) -> None:
        if self._loop.is_closed:
            return
        self._loop.cancel_all(_CLOSE_S)
        with contextlib.suppress(Exception):  # connections may be in any state
            self._loop.complete(self._client.aclose())
        self._loop.close()

    async def _follow(self, run: _Run, request: UpstreamRequest) -> None:
        def on_event(event: AnswerEvent) -> None:
            run.add(event)
            self._loop.wake()

        try:
            await follow(self._client, request, self._timeouts, on_event)
        except UpstreamError as error:
            run.fail(error)
        except Exception as error:  # any error ends only this answer
            run.fail(UpstreamError(f"sent an answer that could not be read ({type(error).__name__})"))
        self._loop.wake()
