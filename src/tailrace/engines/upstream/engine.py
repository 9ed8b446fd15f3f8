"""The engine `upstream`: another server computes, and tailrace keeps the stream.

Any OpenAI-compatible server, or text-generation-inference. Ids are text in pieces (`tailrace.text.packed`), so a chunk
of an answer becomes a delta of a few ids, and usage is said in the upstream's own tokens. A sequence is a request, and
the event loop that carries them all runs inside `step`.

Until an answer has begun, it is asked for again and again, for a while. One that is cut off in the middle ends as lost:
whoever submitted it may submit it again, and compare.
"""

from __future__ import annotations

import asyncio
import contextlib

from tailrace.engines.inner_loop import InnerLoop
from tailrace.engines.promise import Capabilities, Delta, Sequence
from tailrace.engines.protocol import EngineSpec
from tailrace.engines.upstream.answers import Patience, follow, new_client
from tailrace.engines.upstream.wires import PARAMETERS, Ask, Heard, Trouble, ask
from tailrace.errors import ModelError, SequenceFailed
from tailrace.models.upstream import KEY_VARIABLE, Address
from tailrace.text.packed import END_ID, pack
from tailrace.types import FinishReason

__all__ = ["UpstreamEngine"]

_STEP_S = 0.02  # so long at most does what comes from the server wait
_CLOSE_S = 0.05


class _Run:
    """One sequence: what came of it since the last step, and what was said before."""

    def __init__(self, sequence: Sequence, host: str) -> None:
        self.sequence_id = sequence.sequence_id
        self.host = host
        self.count = 0  # ids
        self.usage = (len(sequence.prompt_ids), 0)  # estimated until the server tells
        self.is_aborted = False
        self.task: asyncio.Task[None]
        self._text: list[str] = []
        self._finish_reason: FinishReason | None = None
        self._trouble: Trouble | None = None

    @property
    def has_news(self) -> bool:
        return bool(self._text) or self._finish_reason is not None or self._trouble is not None

    def hear(self, heard: Heard) -> None:
        if heard.text:
            self._text.append(heard.text)
        self.usage = heard.usage or (self.usage[0], self.usage[1] + bool(heard.text))
        self._finish_reason = heard.finish_reason

    def fail(self, trouble: Trouble) -> None:
        self._trouble = trouble

    def take(self) -> Delta | None:
        if not self.is_aborted and not self.has_news:
            return None
        start, ids = self.count, pack("".join(self._text).encode("utf-8", "replace"))
        self._text.clear()
        if self.is_aborted:
            return Delta(self.sequence_id, start, (), (), "cancelled", usage=self.usage)
        if self._finish_reason is not None and not ids:
            ids = (END_ID,)  # an end comes with the token that it is about
        self.count += len(ids)
        if self._trouble is not None and not ids:
            trouble = self._trouble
            return Delta(
                self.sequence_id,
                start,
                (),
                (),
                "error",
                f"{self.host} {trouble.reason}",
                usage=self.usage,
                is_lost=trouble.is_passing,
                is_refused=trouble.is_refusal,
            )
        return Delta(self.sequence_id, start, ids, (), self._finish_reason, usage=self.usage)


class UpstreamEngine:
    """Keeps the `Engine` promise with a server at the other end of HTTP.

    Raises: ModelError for an address that is none, or a key that no header can hold.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._address = Address.parse(spec.path)
        self._patience = Patience(**spec.options)
        try:
            self._client = new_client(spec.secret, max_connections=2 * spec.max_sequences)
        except ValueError:
            raise ModelError(f"The key in {KEY_VARIABLE} has characters that a header cannot have.") from None
        self._loop: InnerLoop[_Run] = InnerLoop()
        self.capabilities = Capabilities(
            engine=f"upstream ({self._address.kind} at {self._address.host})",
            context_tokens=spec.context_tokens,
            kv_tokens=(spec.context_tokens + 2) * spec.max_sequences,  # its memory is its own; places count here
            block_tokens=1,
            max_sequences=spec.max_sequences,
            parameters=PARAMETERS[self._address.kind],
            exact=False,
        )

    def submit(self, sequence: Sequence) -> None:
        if len(sequence.prompt_ids) > self.capabilities.context_tokens:
            raise SequenceFailed("the prompt is too long for this server")
        asked = ask(self._address, sequence)
        run = _Run(sequence, self._address.host)
        self._loop.begin(sequence.sequence_id, run, self._follow(run, asked))

    def abort(self, sequence_id: int) -> None:
        self._loop.abort(sequence_id)

    def step(self) -> list[Delta]:
        has_aborted = self._loop.has_aborted
        if self._loop.runs and not has_aborted:
            is_short = any(run.has_news for run in self._loop.runs.values())
            self._loop.run(0.0 if is_short else _STEP_S)
        deltas = self._loop.take()
        if has_aborted or not self._loop.runs:
            self._loop.see_off(_CLOSE_S)
        return deltas

    def close(self) -> None:
        if self._loop.is_closed:
            return
        self._loop.see_off_all(_CLOSE_S)
        with contextlib.suppress(Exception):  # connections may be in any state
            self._loop.complete(self._client.aclose())
        self._loop.close()

    async def _follow(self, run: _Run, asked: Ask) -> None:
        def hear(heard: Heard) -> None:
            run.hear(heard)
            self._loop.tell()

        try:
            await follow(self._client, asked, self._patience, hear)
        except Trouble as trouble:
            run.fail(trouble)
        except Exception as error:  # one answer's, whatever it is; the others go on
            run.fail(Trouble(f"gave an answer that could not be followed ({type(error).__name__})"))
        self._loop.tell()
