"""Checks a request, and starts it on its way."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from tailrace.admission import Gate
from tailrace.engines import Supervisor
from tailrace.engines.grammars.check import GrammarCheck
from tailrace.engines.promise import Sequence
from tailrace.errors import (
    ContextLengthExceeded,
    EngineLost,
    RequestError,
    StorageError,
    UnknownModel,
    UnsupportedParameter,
)
from tailrace.generation.blame import Blame
from tailrace.generation.choice import SEEDS, Choice
from tailrace.generation.observers import Meter, Observers, Times
from tailrace.generation.prompts import PromptEncoder
from tailrace.generation.recovery import Recovery
from tailrace.generation.run import Run
from tailrace.streams import Claim, Lease, LogStore, Record, StreamLog, new_stream_id
from tailrace.types import Allowance, GenerateRequest, Sampling, means_any_model

__all__ = ["Generator", "Limits"]

_HOPELESS_FAILURES = 3  # starts in a row without success, after which nobody is let into the queue
# Kept by this room, whatever the engine.
_ALWAYS = frozenset({"max_tokens", "seed", "stop", "include_stop", "single_call", "n"})


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask. Tokens count prompt ids or new ids."""

    default_max_tokens: int = 1024
    max_n: int = 8
    max_choices: int = 64  # prompts times n
    queue_s: float = 60.0
    linger_s: float = 60.0
    recover_s: float = 120.0  # how long streams wait for an engine that is gone


class Generator:
    """Requests in, streams out, for one model."""

    def __init__(
        self,
        *,
        model: str,
        prompts: PromptEncoder,
        supervisor: Supervisor,
        gate: Gate,
        store: LogStore,
        limits: Limits,
    ) -> None:
        self.model = model
        self.prompts = prompts
        self.store = store
        self.gate = gate
        self.limits = limits
        self.live: set[Run] = set()  # without their terminal event
        self.observers = Observers()
        self.meter: Meter | None = None  # None: nobody has to ask
        self.is_asleep = False  # the engine is not wanted now, and is loaded when it is
        self.used_s = time.monotonic()  # when a stream began or ended last
        self._supervisor = supervisor
        self._grammars = GrammarCheck(supervisor.spec)
        self._has_ended = asyncio.Event()  # a stream, since somebody looked
        self.new_sequence_id: Callable[[], int] = itertools.count(1).__next__
        self._blame = Blame()
        self.recovery = Recovery(
            supervisor, self.new_sequence_id, self._blame, on_done=self._open_gate, on_caught_up=gate.caught_up
        )
        self._has_given_up = False
        self._gone_timer: asyncio.TimerHandle | None = None
        store.on_write_failure(self.fail_all)

    @property
    def state(self) -> str:
        """ready; unloaded, where the next request loads the engine; or why no request is taken or begun: draining,
        engine, journal."""
        if self.gate.is_draining:
            return "draining"
        if not self._supervisor.is_ready and not self.is_asleep:
            return "engine"
        if self.store.write_error is not None:
            return "journal"
        return "unloaded" if self.is_asleep else "ready"

    @property
    def is_taking(self) -> bool:
        """Whether requests are taken."""
        return self.state in ("ready", "unloaded")

    @property
    def is_busy(self) -> bool:
        """Something waits, runs, or is about to leave the engine."""
        return bool(self.live or self.gate.num_running or self.gate.num_waiting or self.recovery.is_trying)

    @property
    def num_restarts(self) -> int:
        """Engines that were lost and replaced."""
        return self._supervisor.restarts

    @property
    def is_live(self) -> bool:
        """Tokens move where some are wanted, or will before streams give up waiting for an engine."""
        return not self._has_given_up and self._supervisor.silent_s < self.limits.recover_s

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the sampling parameters that can be honoured now."""
        capabilities = self._supervisor.capabilities
        return _ALWAYS | (capabilities.parameters if capabilities is not None else frozenset())

    def num_ahead(self, log: StreamLog) -> int:
        """How many requests wait in front of a queued stream."""
        return next((run.num_ahead for run in self.live if run.log is log), 0)

    async def create(self, request: GenerateRequest, claim: Claim | None = None) -> Run:
        """Begin a stream, which an idempotency key may claim.

        Raises: RequestError in one of its kinds if the request cannot be served, AdmissionError if not now, EngineLost
        if there is no engine, StorageError if it cannot be kept. Nothing has begun then.
        """
        asked_s = time.monotonic()
        self._check(request)
        if request.sampling.grammar is not None:
            self.gate.check_open(request.owner)
            # Not as a coming request: those who wait for this must not take the places of requests without a grammar.
            await self._grammars.check(request.sampling.grammar, caller=request.caller, within_s=self.limits.queue_s)
        with self.gate.coming(request.owner):
            prompts = await self.prompts.encode(request)
        longest = max(len(prompt.ids) for prompt in prompts)
        num_choices = len(prompts) * request.sampling.n
        num_prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        allowance = self.meter.allowance(request.key_id, request.owner) if self.meter is not None else Allowance()
        sampling = self._complete(request.sampling, longest, num_prompt_tokens, num_choices, allowance)
        assert sampling.max_tokens is not None
        linger_s = self.limits.linger_s if request.linger_s is None else request.linger_s
        record = Record(
            stream_id=new_stream_id(),
            created_s=time.time(),
            model=self.model,
            memo=request.memo,
            turn=request.turn,
            keep=request.keep,
            prompts=prompts,
            sampling=sampling,
            num_prompt_tokens=num_prompt_tokens,
            num_choices=num_choices,
            linger_s=linger_s if request.on_disconnect == "detach" else 0.0,
            exact=request.exact,
            claim=claim,
            caller=request.caller,
            owner=request.owner,
            key_id=request.key_id,
            wire=request.wire,
        )
        self._blame.check(record)
        is_slowed = self._blame.is_slowed(request.caller)
        self.used_s = time.monotonic()
        with self._reserved(record):
            return await self._open(record, longest, asked_s, is_slowed=is_slowed)

    async def _open(self, record: Record, longest: int, asked_s: float, *, is_slowed: bool) -> Run:
        """Keep a stream, and give it a place in the queue. Raises: as `create`."""
        assert record.sampling.max_tokens is not None
        while True:
            if self.store.write_error is not None:
                with self.gate.coming(record.owner):
                    await self.store.wait_writable()
            num_tokens = self.gate.check(
                longest, record.sampling.max_tokens, record.num_choices, owner=record.owner, is_slowed=is_slowed
            )
            with contextlib.suppress(StorageError):  # a write error that has begun just now may be over soon
                with self.gate.coming(record.owner):  # the place in the queue that was checked is kept for it
                    lease = await self.store.open(record)
                run = self._run_of(lease, asked_s)
                self.observers.on_begun(record)
                run.enter(num_tokens, queue_s=self.limits.queue_s, is_slowed=is_slowed)
                return run

    @contextlib.contextmanager
    def _reserved(self, record: Record) -> Iterator[None]:
        """Around the opening of a stream: what it may use is reserved, and given back if it is not opened.

        Raises: AdmissionError, RequestError, StorageError.
        """
        if self.meter is None:
            yield
            return
        self.meter.reserve(record)
        try:
            yield
        except BaseException:
            self.meter.release(record)
            raise

    def recover(self, leases: Iterable[Lease]) -> int:
        """Take up streams that an earlier process left in the store; returns how many go on.

        One that nobody may come back to, or that cannot run here, ends as `interrupted`.
        """
        for lease in leases:
            record = lease.log.record
            run = self._run_of(lease, time.monotonic())
            run.restore()
            if run.end is not None:
                continue
            if record.model != self.model or not record.linger_s:
                run.interrupt()
                continue
            assert record.sampling.max_tokens is not None
            longest = max(len(prompt.ids) for prompt in record.prompts)
            try:
                num_tokens = self.gate.demand(longest, record.sampling.max_tokens, record.num_choices)
            except RequestError:  # this server has less memory than that one had
                run.interrupt()
            else:
                run.enter(num_tokens, queue_s=self.limits.recover_s)
        return sum(run.end is None for run in self.live)

    async def idle(self) -> None:
        """Return when no stream is without its end."""
        while self.live:
            self._has_ended.clear()
            await self._has_ended.wait()

    def on_engine_change(self) -> None:
        """The engine came or went: open or shut the gate accordingly, and bring back what ran on the last one."""
        if self._supervisor.is_ready:
            self._has_given_up = False
            if self._gone_timer is not None:
                self._gone_timer.cancel()
                self._gone_timer = None
            self.recovery.resume()
            return
        self.recovery.lost(crashed=self._supervisor.has_crashed)
        hopeless = self._supervisor.failures >= _HOPELESS_FAILURES
        retry_after_s = self._supervisor.retry_after_s
        self.gate.shut(EngineLost("The engine cannot be started.", retry_after_s=retry_after_s) if hopeless else None)
        if self._gone_timer is None and not self._has_given_up:
            self._gone_timer = asyncio.get_running_loop().call_later(self.limits.recover_s, self._give_up)

    def rest(self) -> None:
        """The engine is taken away on purpose, for as long as nobody asks."""
        self.is_asleep = True
        self._grammars.close()
        self.recovery.abandon()
        self._has_given_up = False
        if self._gone_timer is not None:
            self._gone_timer.cancel()
            self._gone_timer = None
        self.gate.shut()

    def wake(self) -> None:
        """The engine is there, for the first time or again. What waited for it and is too much for it ends."""
        self.is_asleep = False
        for run in list(self.live):
            record = run.log.record
            longest = max(len(prompt.ids) for prompt in record.prompts)
            if longest + (record.sampling.max_tokens or 0) > self.limit_tokens(record.num_choices):
                run.interrupt()
        self.on_engine_change()

    def _open_gate(self, rest_s: float) -> None:
        """All streams run again; whoever keeps killing engines has to wait for so long."""
        if rest_s:
            self.gate.rest(rest_s)
        capabilities = self._supervisor.capabilities
        if capabilities is not None and self._supervisor.is_ready:
            self.gate.open(
                capacity_tokens=capabilities.kv_tokens,
                capacity_sequences=capabilities.max_sequences,
                block_tokens=capabilities.block_tokens,
            )

    def _give_up(self) -> None:
        """The engine has been gone for too long."""
        self._gone_timer = None
        self._has_given_up = True
        self.recovery.abandon()
        for run in list(self.live):
            run.fail(EngineLost("The engine was lost, and did not come back in time."))

    def fail_all(self, error: StorageError) -> None:
        for run in list(self.live):
            run.fail_unpersisted(error)

    def on_end(self, run: Run) -> None:
        """A stream has its terminal event, or another server has taken it over."""
        self.live.discard(run)
        self.used_s = time.monotonic()
        self._has_ended.set()

    def _check(self, request: GenerateRequest) -> None:
        if request.model and request.model != self.model and not means_any_model(request.model):
            raise UnknownModel(f"This server runs {self.model}; there is no such model here.", param="model")
        sampling, plain = request.sampling, Sampling()
        if self._supervisor.capabilities is not None:
            parameters = self.parameters
            for name in Sampling.__slots__:
                if name not in parameters and getattr(sampling, name) != getattr(plain, name):
                    raise UnsupportedParameter(f"This engine does not support {name}.", param=name)
        if sampling.ignore_eos and sampling.grammar is not None:  # behind its end, libraries go on without one
            raise UnsupportedParameter("An answer ends where its grammar does.", param="ignore_eos")
        if sampling.n > self.limits.max_n:
            raise RequestError(f"n is at most {self.limits.max_n}.", param="n")
        if len(request.prompts) * sampling.n > self.limits.max_choices:
            most = self.limits.max_choices
            raise RequestError(f"A request has at most {most} answers: its prompts, each n times.", param="prompt")
        for token_id, _ in sampling.logit_bias:
            if not 0 <= token_id < self.prompts.tokenizer.vocab_size:
                raise RequestError("logit_bias names a token that the model does not have.", param="logit_bias")
        self.prompts.check(request)

    def count_tokens(self, request: GenerateRequest) -> int:
        """How many tokens the prompts of a request have, however many the model takes. May take a while.

        Raises: RequestError.
        """
        self._check(request)
        return self.prompts.count(request)

    def _complete(
        self, sampling: Sampling, longest: int, num_prompt_tokens: int, num_choices: int, allowance: Allowance
    ) -> Sampling:
        """Fill in what the client left open. `longest` is the number of tokens of the longest prompt. The default
        length of an answer shrinks to what its key can have at all. Raises: ContextLengthExceeded."""
        room = self.limit_tokens(num_choices) - longest
        max_tokens = sampling.max_tokens
        if max_tokens is None:
            max_tokens = min(self.limits.default_max_tokens, room)
            if allowance.all_tokens is not None:
                max_tokens = min(max_tokens, (allowance.all_tokens - num_prompt_tokens) // num_choices)
            max_tokens = max(1, max_tokens)
        if max_tokens > room:
            asked = sampling.max_tokens or 0
            raise ContextLengthExceeded(longest, self.limit_tokens(num_choices), max_tokens=asked)
        if allowance.answer_tokens is not None:
            max_tokens = min(max_tokens, allowance.answer_tokens)
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(32)
        return replace(sampling, max_tokens=max_tokens, seed=seed)

    def limit_tokens(self, num_choices: int = 1) -> int:
        """How long prompt and answer may be together: the model's window, or the engine's memory if that is less."""
        capabilities = self._supervisor.capabilities
        if capabilities is None:
            return self.prompts.context_tokens
        memory_tokens = capabilities.kv_tokens // num_choices - 2 * capabilities.block_tokens
        return min(self.prompts.context_tokens, capabilities.context_tokens, memory_tokens)

    def _run_of(self, lease: Lease, asked_s: float) -> Run:
        record = lease.log.record
        choices = []
        for index in range(record.num_choices):
            number, nth = divmod(index, record.sampling.n)
            sampling = replace(record.sampling, seed=(record.seed + nth) % SEEDS)
            prompt = record.prompts[number]
            sequence = Sequence(self.new_sequence_id(), prompt.ids, sampling)
            choices.append(Choice(index, sequence, self.prompts.tokenizer, prompt.reasoning))
        run = Run(
            lease=lease,
            choices=choices,
            times=Times(asked_s),
            store=self.store,
            gate=self.gate,
            engine=self._supervisor,
            new_sequence_id=self.new_sequence_id,
            rescuer=self.recovery,
            observers=self.observers,
            on_end=self.on_end,
        )
        lease.log.producer = run
        self.live.add(run)
        return run
