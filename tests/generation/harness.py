"""A real generator with the real scripted engine. Tests step the engine; there is no worker and no socket."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import lru_cache
from weakref import WeakKeyDictionary

import msgspec
from msgspec.structs import replace

from tailrace.admission import Gate
from tailrace.engines import EngineSpec
from tailrace.engines.interface import Delta, Sequence, Sight
from tailrace.engines.supervisor import Supervisor
from tailrace.engines.worker_process import Receiver
from tailrace.errors import EngineError, EngineLost, SequenceFailed
from tailrace.generation import Generator, Limits, PromptEncoder, Run
from tailrace.streams import MemoryLogStore, StreamLog
from tailrace.streams.sqlite_store import SqliteLogStore
from tailrace.text import ChatEncoder, ChatTemplate, Tokenizer
from tailrace.text.reasoning import find_format
from tailrace.types import End, Event, GenerateRequest, Sampling, Task, TextDelta
from tailrace_outer.scripted.scripted_engine import (
    CHAT_TEMPLATE,
    THINKING_TEMPLATE,
    ScriptedEngine,
    read_ids,
    scripted_token,
    tokenizer_json,
)
from tailrace_outer.scripted.scripted_vectors import ScriptedVectors

__all__ = ["HandStepped", "Harness", "end_of", "greedy", "oracle", "text_of", "tokenizer"]


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    return Tokenizer.from_json(tokenizer_json())


def greedy(max_tokens: int | None = None, *, seed: int | None = 1, stop: tuple[str, ...] = (), n: int = 1) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=max_tokens, seed=seed, stop=stop, n=n)


_PROMPTS: WeakKeyDictionary[Run, tuple[int, ...]] = WeakKeyDictionary()


def prompt_ids_of(run: Run) -> tuple[int, ...]:
    """Return the ids of a run's prompt. The log drops them at its end."""
    return _PROMPTS[run] if run in _PROMPTS else read_ids(run.log.record.prompts[0].segments)


def oracle(prompt_ids: tuple[int, ...], seed: int, num_tokens: int) -> str:
    """Return the scripted engine's answer, decoded at once."""
    ids = [scripted_token(prompt_ids, seed % 2**64, index) for index in range(num_tokens)]
    return b"".join(tokenizer().pieces[i] for i in ids).decode("utf-8", "replace")


def text_of(log: StreamLog, choice: int = 0) -> str:
    return "".join(e.text for e in log.events if isinstance(e, TextDelta) and e.choice == choice)


def end_of(log: StreamLog) -> End:
    """Return the terminal event, which must be the last and only one."""
    assert [isinstance(event, End) for event in log.events].count(True) == 1
    last: Event = log.events[-1]
    assert isinstance(last, End)
    return last


def _engine(spec: EngineSpec) -> ScriptedEngine | ScriptedVectors:
    return ScriptedEngine(spec) if spec.task == "generate" else ScriptedVectors(spec)


class HandStepped(Supervisor):
    """An engine in this process that steps when a test calls `step`. Between its two halves, `compute` and `deliver`,
    deltas are on their way."""

    def __init__(self, spec: EngineSpec, on_change: Callable[[], None]) -> None:
        super().__init__(spec, on_change=on_change)
        self.on_change = on_change
        self.engine = _engine(spec)
        self.capabilities = self.engine.capabilities
        self.is_ready = True
        self.receivers: dict[int, Receiver] = {}
        self.submitted: list[Sequence] = []
        self.aborted: list[int] = []
        self.asked: list[bytes] = []  # images
        self.death_of_image: EngineLost | None = None  # it dies when it reads one
        self.num_delivered: dict[int, int] = {}  # tokens of each running sequence
        self._refused: list[Delta] = []
        self.seed_offset = 0  # added to the seeds of submitted sequences, so that the engine generates other tokens

    def submit(self, sequence: Sequence, receiver: Receiver) -> None:
        if not self.is_ready:
            raise EngineLost("The engine is not running.", retry_after_s=self.retry_after_s)
        self.submitted.append(sequence)
        if isinstance(receiver, Run):
            _PROMPTS[receiver] = read_ids(sequence.segments)
        self.receivers[sequence.sequence_id] = receiver
        self.num_delivered[sequence.sequence_id] = 0
        sampling = replace(sequence.sampling, seed=(sequence.sampling.seed or 0) + self.seed_offset)
        try:
            self.engine.submit(replace(sequence, sampling=sampling))
        except SequenceFailed as error:
            self._refused.append(Delta(sequence.sequence_id, 0, (), (), "error", error.message))

    def submit_all(self, sequences: Many[Sequence], receiver: Receiver) -> None:
        for sequence in sequences:
            self.submit(sequence, receiver)

    def abort(self, sequence_id: int) -> None:
        self.aborted.append(sequence_id)
        self.engine.abort(sequence_id)

    async def see(self, image: bytes) -> Sight:
        self.asked.append(image)
        if self.death_of_image is None:
            assert isinstance(self.engine, ScriptedEngine)
            return self.engine.see(image)
        self.fail(self.death_of_image)
        raise EngineLost("The engine was lost while it read an image.", is_crash=True)

    def compute(self, num_steps: int = 1) -> list[Delta]:
        """Run steps, and return their deltas. Those of one sequence are merged, as by an engine that is ahead."""
        merged: dict[int, Delta] = {}
        for delta in [*self._refused, *(one for _ in range(num_steps) for one in self.engine.step())]:
            before = merged.get(delta.sequence_id)
            if before is not None:
                delta = Delta(
                    delta.sequence_id,
                    before.start,
                    before.token_ids + delta.token_ids,
                    before.logprobs + delta.logprobs,
                    delta.finish_reason,
                    delta.failure,
                    num_cached_tokens=before.num_cached_tokens,
                )
            merged[delta.sequence_id] = delta
        self._refused = []
        return list(merged.values())

    def deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            receiver = self.receivers.get(delta.sequence_id)
            if receiver is not None:
                self.num_delivered[delta.sequence_id] += len(delta.token_ids)
                if delta.finish_reason is not None:
                    del self.receivers[delta.sequence_id], self.num_delivered[delta.sequence_id]
                receiver.push(delta)

    def progress_of(self, prompt: str) -> list[int]:
        """Return the number of delivered tokens of each running sequence with this prompt."""
        ids = tuple(prompt.encode())
        running = {one.sequence_id: one.prompt_ids for one in self.submitted}
        return [count for sequence_id, count in self.num_delivered.items() if running[sequence_id][: len(ids)] == ids]

    def step(self, num_steps: int = 1) -> None:
        self.deliver(self.compute(num_steps))

    def fail(self, error: EngineError) -> None:
        """Do what a dying worker causes: the gate is shut, then the sequences are lost."""
        if not self.is_ready:
            return
        self.is_ready = False
        self.has_crashed = isinstance(error, EngineLost) and error.is_crash
        self.engine.close()
        self.on_change()
        lost, self.receivers, self.num_delivered = list(self.receivers.values()), {}, {}
        for receiver in lost:
            receiver.lost(error)

    def restart(self, **options: float) -> None:
        """Do what a new worker causes when it is ready. It may have other options."""
        if options:
            self.engine = _engine(msgspec.structs.replace(self.spec, options=options))
        self.is_ready = True
        self.on_change()


@dataclass
class Harness:
    """A generator and its engine, for `max_sequences` at once."""

    max_sequences: int = 4
    context_tokens: int = 1_000
    kv_tokens: int = 10_000
    max_requests: int = 16
    has_chat: bool = True
    thinks: bool = False  # the chat template has reasoning markers
    limits: Limits = field(default_factory=Limits)
    options: dict[str, float] = field(default_factory=dict)
    task: Task = "generate"
    store: MemoryLogStore | SqliteLogStore = field(default_factory=MemoryLogStore)

    def __post_init__(self) -> None:
        spec = EngineSpec(
            "scripted",
            context_tokens=self.context_tokens,
            kv_tokens=self.kv_tokens,
            max_sequences=self.max_sequences,
            options=self.options,
            task=self.task,
        )
        source = THINKING_TEMPLATE if self.thinks else CHAT_TEMPLATE
        template = ChatTemplate(source, bos_token="", eos_token="<|end|>")
        known = find_format(source, tokenizer().pieces)
        self.engine = HandStepped(spec, lambda: self.generator.on_engine_change())
        self.gate = Gate(max_requests=self.max_requests)
        self.generator = Generator(
            model="scripted",
            prompts=PromptEncoder(
                tokenizer=tokenizer(),
                chat=ChatEncoder(tokenizer(), template, known) if self.has_chat else None,
                context_tokens=self.context_tokens,
                add_bos=False,
            ),
            supervisor=self.engine,
            gate=self.gate,
            store=self.store,
            limits=self.limits,
        )
        self.store.write_errors.on_give_up.append(self.generator.fail_all)
        self.generator.on_engine_change()

    async def create(
        self,
        prompt: str = "Hi",
        sampling: Sampling | None = None,
        *,
        linger_s: float = 1e6,
        is_background: bool = False,
        exact: bool = False,
    ) -> Run:
        """Create a stream, which by default continues without readers."""
        request = GenerateRequest(
            prompts=(prompt,),
            sampling=sampling or greedy(20),
            on_disconnect="detach",
            linger_s=linger_s,
            is_background=is_background,
            exact=exact,
        )
        return await self.generator.create(request)

    def finish(self, *runs: Run, num_steps: int = 1) -> None:
        """Step until these runs have ended, and the engine has no sequences."""
        for _ in range(2_000):
            if all(run.log.end is not None for run in runs) and not self.engine.receivers:
                return
            self.engine.step(num_steps)
        raise AssertionError("the runs do not end")

    def check_idle(self) -> None:
        """Assert that no request runs or waits, and no slot is in use."""
        assert (self.gate.num_running, self.gate.num_waiting) == (0, 0)
        assert self.gate.used_tokens == self.gate.used_sequences == 0
        assert not self.generator.live
        assert not self.engine.receivers
        assert self.engine.compute() == []
