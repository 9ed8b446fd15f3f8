"""Checks a request, turns it into ids, and starts it on its way."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain

from tailrace.admission import Gate
from tailrace.engines import Supervisor
from tailrace.engines.grammar_check import GrammarCheck
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
from tailrace.generation.limits import Limits
from tailrace.generation.recovery import Recovery
from tailrace.generation.run import Run
from tailrace.streams import Claim, Record, StreamLog, StreamStore, new_stream_id
from tailrace.text import ChatEncoder, Tokenizer
from tailrace.types import GenerateRequest, Message, Prompt, Sampling, means_any_model

__all__ = ["Generator"]

_INLINE_CHARACTERS = 8_192  # tokenised on the event loop; longer prompts go to a thread. About 2 ms.
_MESSAGE_CHARACTERS = 32  # what the template makes of a message, however short
_HOPELESS_FAILURES = 3  # starts in a row without success, after which nobody is let into the queue
_ALWAYS = frozenset({"max_tokens", "seed", "stop", "include_stop", "n"})  # kept by this room, whatever the engine


class Generator:
    """Requests in, streams out, for one model."""

    def __init__(
        self,
        *,
        model: str,
        tokenizer: Tokenizer,
        chat: ChatEncoder | None,
        context_tokens: int,
        add_bos: bool,
        supervisor: Supervisor,
        gate: Gate,
        store: StreamStore,
        limits: Limits,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.context_tokens = context_tokens
        self.chat = chat
        self.store = store
        self.gate = gate
        self.limits = limits
        self.live: set[Run] = set()  # without their terminal event
        self.on_end: Callable[[Run], None] = lambda run: None  # called with each run that has ended
        self.is_asleep = False  # the engine is not wanted now, and is loaded when it is
        self.used_s = time.monotonic()  # when a stream began or ended last
        self._add_bos = add_bos
        self._supervisor = supervisor
        self._grammars = GrammarCheck(supervisor.spec)
        self._idle: asyncio.Future[None] | None = None
        self._sequence_ids = itertools.count(1)
        self._blame = Blame()
        self.recovery = Recovery(supervisor, self.new_sequence_id, self._blame, on_done=self._open_gate)
        self._has_given_up = False
        self._gone_timer: asyncio.TimerHandle | None = None
        store.journal.on_trouble = self.fail_all  # who has several generators calls each

    @property
    def state(self) -> str:
        """ready; unloaded, where the next request loads the engine; or why no request is taken or begun: draining,
        engine, journal."""
        if self.gate.is_draining:
            return "draining"
        if not self._supervisor.is_ready and not self.is_asleep:
            return "engine"
        if self.store.journal.trouble is not None:
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

    async def create(self, request: GenerateRequest, claim: Claim | None = None) -> Run:
        """Begin a stream, which an idempotency key may claim.

        Raises: RequestError in one of its kinds if the request cannot be served, AdmissionError if not now, EngineLost
        if there is no engine, StorageError if it cannot be kept. Nothing has begun then.
        """
        asked_s = time.monotonic()
        self._check(request)
        if request.sampling.grammar is not None:
            self.gate.check_open()
            # Not as a coming request: those who wait for this must not take the places of requests without a grammar.
            await self._grammars.check(request.sampling.grammar, caller=request.caller, within_s=self.limits.queue_s)
        with self.gate.coming():
            prompts = await self.encode(request)
        if not all(prompt.ids for prompt in prompts):
            raise RequestError("The prompt is empty.", param="prompt")
        longest = max(len(prompt.ids) for prompt in prompts)
        num_choices = len(prompts) * request.sampling.n
        sampling = self._complete(request.sampling, longest, num_choices)
        assert sampling.max_tokens is not None
        linger_s = self.limits.linger_s if request.linger_s is None else request.linger_s
        record = Record(
            stream_id=new_stream_id(),
            created_s=time.time(),
            model=self.model,
            memo=request.memo,
            prompts=prompts,
            sampling=sampling,
            num_prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
            num_choices=num_choices,
            linger_s=linger_s if request.on_disconnect == "detach" else 0.0,
            exact=request.exact,
            claim=claim,
            caller=request.caller,
        )
        self._blame.check(record)
        is_slowed = self._blame.is_slowed(request.caller)
        self.used_s = time.monotonic()
        while True:
            with self.gate.coming():
                await self.store.journal.well()
            # From here on nothing waits: the check and the place in the queue belong together.
            num_tokens = self.gate.check(longest, sampling.max_tokens, num_choices, is_slowed=is_slowed)
            with contextlib.suppress(StorageError):  # trouble that has begun just now may be over soon
                run = self._run_of(self.store.create(record), asked_s)
                run.enter(num_tokens, queue_s=self.limits.queue_s, is_slowed=is_slowed)
                return run

    def recover(self, logs: Iterable[StreamLog]) -> int:
        """Take up streams that an earlier process left in the journal; returns how many go on.

        One that nobody may come back to, or that cannot run here, ends as `interrupted`.
        """
        for log in logs:
            record = log.record
            run = self._run_of(log, time.monotonic())
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
        if self.live:
            if self._idle is None or self._idle.done():
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

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
            run.fail("engine_unavailable", "The engine was lost, and did not come back in time.")

    def fail_all(self, error: StorageError) -> None:
        for run in list(self.live):
            run.lose(error.code, error.message)

    def new_sequence_id(self) -> int:
        return next(self._sequence_ids)

    def ended(self, run: Run) -> None:
        """A stream has its terminal event."""
        self.live.discard(run)
        self.used_s = time.monotonic()
        self.on_end(run)
        if not self.live and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _check(self, request: GenerateRequest) -> None:
        if request.model and request.model != self.model and not means_any_model(request.model):
            raise UnknownModel(f"This server runs {self.model}; there is no such model here.", param="model")
        sampling, plain = request.sampling, Sampling()
        if self._supervisor.capabilities is not None:
            for name in Sampling.__slots__:
                if name not in self.parameters and getattr(sampling, name) != getattr(plain, name):
                    raise UnsupportedParameter(f"This engine does not support {name}.", param=name)
        if sampling.ignore_eos and sampling.grammar is not None:  # behind its end, libraries go on without one
            raise UnsupportedParameter("An answer ends where its grammar does.", param="ignore_eos")
        if sampling.n > self.limits.max_n:
            raise RequestError(f"n is at most {self.limits.max_n}.", param="n")
        if len(request.prompts) * sampling.n > self.limits.max_choices:
            most = self.limits.max_choices
            raise RequestError(f"A request has at most {most} answers: its prompts, each n times.", param="prompt")
        if request.messages and self.chat is None:
            raise UnsupportedParameter("This model has no chat template; send a prompt instead.", param="messages")
        for name in request.template_values:
            if self.chat is None or not self.chat.knows(name):
                raise UnsupportedParameter(
                    "This model's chat template asks for no value of that name.", param="chat_template_kwargs"
                )
        for token_id, _ in sampling.logit_bias:
            if not 0 <= token_id < self.tokenizer.vocab_size:
                raise RequestError("logit_bias names a token that the model does not have.", param="logit_bias")
        texts = [*(prompt for prompt in request.prompts if isinstance(prompt, str)), *sampling.stop]
        texts += chain.from_iterable(map(_said, request.messages))
        if any("\0" in text for text in texts):
            raise RequestError("Text must not contain NUL characters.", param="prompt")

    async def encode(self, request: GenerateRequest) -> tuple[Prompt, ...]:
        """The prompts' texts as the client knows them, and their ids. Raises: ContextLengthExceeded, RequestError."""
        texts = self._texts(request)
        for text in texts:
            at_least = self.tokenizer.at_least_tokens(text)
            if at_least > self.context_tokens and request.truncate is None:
                raise ContextLengthExceeded(at_least, self.context_tokens, at_least=True)
        num_characters = sum(map(len, texts)) + _MESSAGE_CHARACTERS * (len(request.messages) + len(texts))
        if num_characters <= _INLINE_CHARACTERS and not request.tools:
            return self._ids(request, texts)
        return await asyncio.to_thread(self._ids, request, texts)

    def _ids(self, request: GenerateRequest, texts: Iterable[str]) -> tuple[Prompt, ...]:
        if request.messages:
            assert self.chat is not None
            found = [
                self.chat.encode(
                    request.messages,
                    tools=request.tools,
                    values=request.template_values,
                    continue_final=request.continue_final,
                )
            ]
        else:
            found = [self._prompt_ids(prompt) for prompt in request.prompts]
        cut = slice(-request.truncate if request.truncate is not None else None, None)
        return tuple(Prompt(text, tuple(ids[cut])) for text, ids in zip(texts, found, strict=True))

    def _texts(self, request: GenerateRequest) -> list[str]:
        """What a request says, in one string for each prompt. Raises: ContextLengthExceeded, RequestError."""
        if request.messages:
            return ["".join(chain.from_iterable(map(_said, request.messages)))]
        return [self._text_of(prompt, request.truncate) for prompt in request.prompts]

    def _text_of(self, prompt: str | tuple[int, ...], truncate: int | None) -> str:
        if isinstance(prompt, str):
            return prompt
        if truncate is not None:
            prompt = prompt[-truncate:]
        if len(prompt) > self.context_tokens:
            raise ContextLengthExceeded(len(prompt), self.context_tokens)
        if not all(0 <= token_id < self.tokenizer.vocab_size for token_id in prompt):
            raise RequestError("The prompt names a token that the model does not have.", param="prompt")
        return b"".join(self.tokenizer.pieces[token_id] for token_id in prompt).decode("utf-8", "replace")

    def _prompt_ids(self, prompt: str | tuple[int, ...]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, special=True, bos=self._add_bos)
        return list(prompt)

    def count_tokens(self, request: GenerateRequest) -> int:
        """How many tokens the prompts of a request have, however many the model takes. May take a while.

        Raises: RequestError.
        """
        self._check(request)
        return sum(len(prompt.ids) for prompt in self._ids(request, self._texts(request)))

    def tokenize(self, text: str) -> list[tuple[int, int, int]]:
        """The ids of a prompt, each with the range of characters that it stands for. May take a while."""
        return self.tokenizer.offsets(text, bos=self._add_bos)

    def _complete(self, sampling: Sampling, num_prompt_tokens: int, num_choices: int) -> Sampling:
        """Fill in what the client left open. Raises: ContextLengthExceeded."""
        room = self.limit_tokens(num_choices) - num_prompt_tokens
        max_tokens = sampling.max_tokens
        if max_tokens is None:
            max_tokens = max(1, min(self.limits.default_max_tokens, room))
        if max_tokens > room:
            asked = sampling.max_tokens or 0
            raise ContextLengthExceeded(num_prompt_tokens, self.limit_tokens(num_choices), max_tokens=asked)
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(32)
        return replace(sampling, max_tokens=max_tokens, seed=seed)

    def limit_tokens(self, num_choices: int = 1) -> int:
        """How long prompt and answer may be together: the model's window, or the engine's memory if that is less."""
        capabilities = self._supervisor.capabilities
        if capabilities is None:
            return self.context_tokens
        memory_tokens = capabilities.kv_tokens // num_choices - 2 * capabilities.block_tokens
        return min(self.context_tokens, capabilities.context_tokens, memory_tokens)

    def _run_of(self, log: StreamLog, asked_s: float) -> Run:
        record = log.record
        run = Run(log, asked_s=asked_s, store=self.store, gate=self.gate, engine=self._supervisor, generator=self)
        for index in range(record.num_choices):
            number, nth = divmod(index, record.sampling.n)
            sampling = replace(record.sampling, seed=(record.seed + nth) % SEEDS)
            sequence = Sequence(self.new_sequence_id(), record.prompts[number].ids, sampling)
            run.choices.append(Choice(run, index, sequence, self.tokenizer))
        self.live.add(run)
        return run


def _said(message: Message) -> Iterator[str]:
    """All that somebody wrote in a message: its text, and the calls of tools."""
    yield message.content
    for call in message.tool_calls:
        yield call.name
        yield call.arguments
