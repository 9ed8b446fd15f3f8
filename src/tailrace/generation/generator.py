"""Checks requests, and starts their streams."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from msgspec.structs import replace

from tailrace.admission import Gate
from tailrace.engines.grammars.check import GrammarCheck
from tailrace.engines.interface import Sequence
from tailrace.engines.kinds import find_kind
from tailrace.engines.supervisor import Supervisor
from tailrace.errors import (
    ContextLengthExceeded,
    EngineLost,
    RequestError,
    StorageError,
    UnsupportedOperation,
    UnsupportedParameter,
)
from tailrace.generation.blame import Blame
from tailrace.generation.choice import SEEDS, Choice
from tailrace.generation.eye import Eye
from tailrace.generation.grammar_fitter import GrammarFitter
from tailrace.generation.limits import Limits
from tailrace.generation.observers import Observers, Times
from tailrace.generation.prompts import PromptEncoder, images_of
from tailrace.generation.recovery import Recovery
from tailrace.generation.request_images import RequestImages
from tailrace.generation.run import Run
from tailrace.generation.vector_run import VectorRun
from tailrace.generation.vector_trials import VectorTrials
from tailrace.images.reader import CANONICAL_TYPE
from tailrace.schemas import PORTABLE
from tailrace.schemas.answer_check import AnswerCheck
from tailrace.streams import Lease, LogStore, StreamLog
from tailrace.types import (
    NO_LIMIT,
    Allowance,
    Claim,
    GenerateRequest,
    Grammar,
    Image,
    Infill,
    KeptImage,
    Record,
    Sampling,
    Segment,
    Task,
    VectorForm,
    kind_of,
    new_stream_id,
)

__all__ = ["Generator"]

_LEAVE_S = 5.0  # in which what runs in the background leaves the engine
_MAX_FAILED_STARTS = 3  # failed starts of the engine in a row, after which requests are refused
_TASKS: dict[Task, str] = {
    "generate": "write text", "embed": "make embeddings", "rank": "rank documents",
}  # fmt: skip
_CANNOT_CONTINUE = "The engine that runs now cannot continue this stream."
# Parameters that tailrace implements for every engine.
_DEFAULTS = Sampling()
_COMMON_PARAMETERS = frozenset(
    {"max_tokens", "seed", "stop", "include_stop", "single_call", "n", "max_reasoning_tokens", "include_special"}
)


@functools.cache  # of the few sets that engines have
def _absent(parameters: frozenset[str]) -> tuple[tuple[str, ...], Callable[[Sampling], object]]:
    """Return the other fields of `Sampling`, and a function that takes their values out of one."""
    names = tuple(name for name in Sampling.__struct_fields__ if name not in parameters)
    return names, attrgetter(*names) if names else lambda sampling: ()


def _as_kept(image: Image) -> KeptImage:
    return KeptImage(image.digest, image.media_type, len(image.content))


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
        may_see: bool = False,
        observers: Observers | None = None,
    ) -> None:
        """`may_see`: whether the model reads images, as far as this is known before its engine is loaded. `observers`
        are those of all models of a server."""
        self.model = model
        self.names = frozenset({model, *filter(None, supervisor.spec.adapters)})  # with those of its adapters
        self.prompts = prompts
        self.store = store
        self.gate = gate
        self.limits = limits
        self.live: dict[Run, None] = {}  # streams without a terminal event, in order
        self.vector_runs: dict[VectorRun, None] = {}  # requests for vectors in progress, in order
        self.observers = observers or Observers()
        self.is_unloaded = False  # the next request loads the engine
        self.may_see = may_see
        self.used_s = time.monotonic()  # when a stream last began or ended
        self._supervisor = supervisor
        kind = find_kind(supervisor.spec.engine)
        reach = kind.reach if kind is not None else PORTABLE
        self._grammars = GrammarFitter(GrammarCheck(), reach, prompts.tokenizer.control_tokens)
        self._answer_check = AnswerCheck()
        self._stream_ended = asyncio.Event()
        self.new_sequence_id: Callable[[], int] = itertools.count(1).__next__
        self._blame = Blame()
        self._images = RequestImages(limits.fetch_images, Eye(supervisor, gate, self._blame), self.live)
        self.recovery = Recovery(
            supervisor, self.new_sequence_id, self._blame, on_done=self._open_gate, on_caught_up=gate.caught_up
        )
        self._vector_trials = VectorTrials(supervisor, self.new_sequence_id, self._blame, self.vector_runs)
        self._has_given_up = False
        self._give_up_timer: asyncio.TimerHandle | None = None

    @property
    def state(self) -> str:
        """ready; unloaded, if the next request loads the engine; otherwise why requests are refused or wait: draining,
        engine, journal."""
        if self.gate.will_drain or self.gate.is_draining:
            return "draining"
        if not self._supervisor.is_ready and not self.is_unloaded:
            return "engine"
        if self.store.write_errors.current is not None:
            return "journal"
        return "unloaded" if self.is_unloaded else "ready"

    @property
    def is_ready(self) -> bool:
        """Whether load balancers should send requests."""
        return self.state in ("ready", "unloaded")

    @property
    def is_busy(self) -> bool:
        """Whether any request waits, runs, or is still on the engine."""
        is_used = self.live or self.vector_runs or self.gate.num_running or self.gate.num_waiting
        return bool(is_used or self.recovery.is_trying or self._vector_trials.is_trying)

    @property
    def is_behind(self) -> bool:
        """Whether all that waits and runs is in the background, and can wait."""
        every: list[Run | VectorRun] = [*self.live, *self.vector_runs]
        is_trying = self.recovery.is_trying or self._vector_trials.is_trying
        return not is_trying and all(run.record.is_background for run in every)

    @property
    def num_restarts(self) -> int:
        """How often the engine was lost and replaced."""
        return self._supervisor.restarts

    @property
    def is_live(self) -> bool:
        """Whether running streams get tokens, or may get an engine before they give up waiting for one."""
        return not self._has_given_up and self._supervisor.silent_s < self.limits.recover_s

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the supported sampling parameters."""
        capabilities = self._supervisor.capabilities
        common = _COMMON_PARAMETERS
        if not self.prompts.tokenizer.control_tokens:  # of an upstream server
            common -= {"include_special"}
        return common | (capabilities.parameters if capabilities is not None else frozenset())

    def num_ahead(self, log: StreamLog) -> int:
        """Return how many requests have their turn before a queued stream."""
        return next((run.num_ahead for run in self.live if run.log is log), 0)

    async def create(self, request: GenerateRequest, claim: Claim | None = None) -> Run:
        """Start a stream. `claim` is its idempotency key.

        Raises: RequestError if the request cannot be served, AdmissionError if it cannot be served now, EngineLost if
        there is no engine, StorageError if the stream cannot be kept. Then no stream exists.
        """
        with contextlib.ExitStack() as held:  # until a run holds its images itself
            return await self._create(request, claim, held)

    async def _create(self, request: GenerateRequest, claim: Claim | None, held: contextlib.ExitStack) -> Run:
        arrived_s = time.monotonic()
        request = self._with_token_ids(request)
        self._check(request)
        if request.sampling.grammar is not None:
            self.gate.check_open(request)
            # Outside `gate.coming`: requests that wait here must not take slots of requests without a grammar.
            request = await self._with_grammar(request, request.sampling.grammar)
        with self.gate.coming(request):
            request = await self._with_images(request, held)
            prompts = await self.prompts.encode(request)
        longest = max(prompt.num_tokens for prompt in prompts)
        num_choices = len(prompts) * request.sampling.n
        num_prompt_tokens = sum(prompt.num_tokens for prompt in prompts)
        meter, keeper = self.observers.meter, self.observers.keeper
        allowance = meter.allowance(request.key_id, request.owner) if meter is not None else Allowance()
        sampling = self._fill_in(request, longest, num_prompt_tokens, num_choices, allowance)
        assert sampling.max_tokens is not None
        is_kept = keeper is not None and keeper.keeps(request)
        linger_s = self.limits.linger_s if request.linger_s is None else request.linger_s
        record = Record(
            new_stream_id(),
            time.time(),
            request.model or self.model,
            prompts=prompts,
            sampling=sampling,
            num_prompt_tokens=num_prompt_tokens,
            num_choices=num_choices,
            linger_s=linger_s if request.on_disconnect == "detach" else 0.0,
            claim=claim,
            attachments={image.digest: image.content for image in images_of(request)},
            images=tuple(map(_as_kept, images_of(request))) if is_kept else (),
            is_chat=bool(request.messages),
            **request.kept(),
        )
        self._blame.check(record)
        is_slowed = self._blame.is_slowed(request.caller)
        self.used_s = time.monotonic()
        with self.reserved(record):
            if keeper is not None and record.images:
                self._check_queue(record, longest, is_slowed=is_slowed)
                with self.gate.coming(record):
                    await keeper.keep_images(record)
            try:
                return await self._open(record, longest, arrived_s, is_slowed=is_slowed)
            except BaseException:  # nobody knows the id of this stream, so nobody else can delete its images
                if keeper is not None and record.images and not record.turn:
                    with contextlib.suppress(StorageError):
                        await keeper.forget(record.owner, record.stream_id)
                raise

    def _with_token_ids(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with the tokens of its bad words, and those that end an infill."""
        sampling = request.sampling
        if request.bad_words:
            sampling = replace(sampling, bad_words=self.prompts.bad_words(request.bad_words))
        if any(isinstance(prompt, Infill) for prompt in request.prompts) and "stop_token_ids" in self.parameters:
            ends = sampling.stop_token_ids + self.prompts.tokenizer.infill_ends
            sampling = replace(sampling, stop_token_ids=ends)
        return replace(request, bad_words=(), sampling=sampling) if sampling is not request.sampling else request

    async def _with_images(self, request: GenerateRequest, held: contextlib.ExitStack) -> GenerateRequest:
        """Return the request with its images as the engine takes them, and how they are written in the prompt. Their
        room is reserved until `held` is closed. Raises: as `create`."""
        if not (images := images_of(request)):
            return request
        if self._supervisor.capabilities is None or self.is_unloaded:
            raise EngineLost("The engine is not running.", retry_after_s=self._supervisor.retry_after_s)
        self._check_quota(request, len(images))
        keeper = self.observers.keeper
        return await self._images.read(request, self._supervisor.capabilities, self.limits, keeper, held)

    def _check_quota(self, request: GenerateRequest, num_images: int) -> None:
        """Check that the limits of a key leave room for the smallest request with so many images, before the work of
        reading them begins. Raises: AdmissionError, RequestError."""
        if (meter := self.observers.meter) is not None:
            smallest = Record(
                new_stream_id(),
                time.time(),
                sampling=Sampling(max_tokens=1),
                num_prompt_tokens=num_images,
                **request.kept(),
            )
            meter.reserve(smallest)
            meter.release(smallest)

    async def _with_grammar(self, request: GenerateRequest, grammar: Grammar) -> GenerateRequest:
        """Return the request with a grammar that the engine takes. Raises: as `create`."""
        fitted = await self._grammars.fit(
            grammar,
            call_format=self.prompts.chat_facts.call_format,
            caller=request.caller,
            within_s=self.limits.queue_s,
        )
        if fitted.left_open and not request.may_loosen:
            path = fitted.left_open[0]
            raise UnsupportedParameter(f"{path} cannot be kept by this engine's grammar.", param=grammar.param)
        return replace(request, sampling=replace(request.sampling, grammar=fitted))

    async def _open(self, record: Record, longest: int, arrived_s: float, *, is_slowed: bool) -> Run:
        """Keep a stream in the log store, and queue it. Raises: as `create`."""
        while True:
            if self.store.write_errors.current is not None:
                with self.gate.coming(record):
                    await self.store.write_errors.wait()
            num_tokens = self._check_queue(record, longest, is_slowed=is_slowed)
            with contextlib.suppress(StorageError):  # a new write error: wait until it is over
                # Reserves the slot that was checked.
                with self.gate.coming(record):
                    lease = await self.store.open(record)
                run = self._make_run(lease, arrived_s)
                self.observers.on_begun(record)
                run.enter(num_tokens, queue_s=self.limits.queue_s, is_slowed=is_slowed)
                return run

    def _check_queue(self, record: Record, longest: int, *, is_slowed: bool) -> int:
        """Return how many tokens of the engine's memory a stream needs. Raises: as `create`."""
        assert record.sampling.max_tokens is not None
        return self.gate.check(longest, record.sampling.max_tokens, record.num_choices, record, is_slowed=is_slowed)

    @contextlib.contextmanager
    def reserved(self, record: Record) -> Iterator[None]:
        """Reserve the largest possible usage of a request. If it does not begin within this context, release it again.

        Raises: AdmissionError, RequestError, StorageError.
        """
        if (meter := self.observers.meter) is None:
            yield
            return
        meter.reserve(record)
        try:
            yield
        except BaseException:
            meter.release(record)
            raise

    def recover(self, leases: Iterable[Lease]) -> int:
        """Continue streams of an earlier process. Returns how many continue.

        Streams without linger time and readers, and streams that cannot run here, end as `interrupted`.
        """
        runs = [self._make_run(lease, time.monotonic()) for lease in leases]
        for run in sorted(runs, key=lambda run: not run.was_alone):
            record = run.record
            run.restore()
            if run.end is not None:
                continue
            is_wanted = record.linger_s or run.log.num_readers
            if record.model not in self.names or not self._takes(record) or not is_wanted:
                run.interrupt()
                continue
            assert record.sampling.max_tokens is not None
            longest = max(prompt.num_tokens for prompt in record.prompts)
            try:
                num_tokens = self.gate.demand(longest, record.sampling.max_tokens, record.num_choices)
            except RequestError:  # this engine has less memory than the earlier one
                run.interrupt(_CANNOT_CONTINUE)
            else:
                run.enter(num_tokens, queue_s=self.limits.recover_s)
        return sum(run.end is None for run in self.live)

    async def wait_idle(self) -> None:
        """Return when all streams and requests for vectors have ended that do not run in the background."""
        while not all(run.record.is_background for run in self.live) or not all(
            run.record.is_background for run in self.vector_runs
        ):
            self._stream_ended.clear()
            await self._stream_ended.wait()

    def on_engine_change(self) -> None:
        """An engine is ready: resume the streams of the last one. Or it was lost: shut the gate."""
        if self._supervisor.is_ready:
            self._stop_give_up_timer()
            self._vector_trials.resume(self.recovery.resume)
            return
        self.recovery.on_engine_down(crashed=self._supervisor.has_crashed)
        is_broken = self._supervisor.failures >= _MAX_FAILED_STARTS
        retry_after_s = self._supervisor.retry_after_s
        self.gate.shut(EngineLost("The engine cannot be started.", retry_after_s=retry_after_s) if is_broken else None)
        if self._give_up_timer is None and not self._has_given_up:
            self._give_up_timer = asyncio.get_running_loop().call_later(self.limits.recover_s, self._give_up)

    def use(self, limits: Limits) -> None:
        """Use other limits from now on. Requests that wait keep their times."""
        longer_s, self.limits = limits.recover_s - self.limits.recover_s, limits
        if (timer := self._give_up_timer) is not None:
            timer.cancel()
            self._give_up_timer = asyncio.get_running_loop().call_at(timer.when() + longer_s, self._give_up)

    async def leave(self) -> bool:
        """Take all that is in the background off the engine. Returns whether nothing else came meanwhile, so that the
        engine is free; otherwise all go on."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self.gate.clear()
        if self.is_behind and not self.gate.num_running:
            return True
        self._open_gate(0.0)
        self.gate.caught_up()
        return False

    def on_unload(self) -> None:
        """The engine is unloaded on purpose, until the next request."""
        self.is_unloaded = True
        self._abandon()
        self._stop_give_up_timer()
        self.gate.shut()

    def on_load(self) -> None:
        """The engine is loaded. End the waiting streams that it cannot run as `interrupted`."""
        self.is_unloaded = False
        for run in list(self.live):
            record = run.log.record
            longest = max(prompt.num_tokens for prompt in record.prompts)
            if not self._takes(record) or longest + (record.sampling.max_tokens or 0) > self.limit_tokens(
                record.num_choices
            ):
                run.interrupt(_CANNOT_CONTINUE)
        self.on_engine_change()

    def _open_gate(self, pause_s: float) -> None:
        """All streams run again. Requests of callers who kill engines wait for `pause_s`."""
        if pause_s:
            self.gate.pause_slowed(pause_s)
        capabilities = self._supervisor.capabilities
        if capabilities is not None and self._supervisor.is_ready:
            self.gate.open(
                capacity_tokens=capabilities.kv_tokens,
                capacity_sequences=capabilities.max_sequences,
                block_tokens=capabilities.block_tokens,
            )
            for run in list(self.vector_runs):
                run.resume()

    def _give_up(self) -> None:
        """There was no engine for too long: end all streams."""
        self._give_up_timer = None
        self._has_given_up = True
        self._abandon()
        every: list[Run | VectorRun] = [*self.live, *self.vector_runs]
        for run in every:
            run.fail(EngineLost("The engine was lost, and did not come back in time."))

    def _abandon(self) -> None:
        self.recovery.abandon()
        self._vector_trials.forget()

    def _stop_give_up_timer(self) -> None:
        self._has_given_up = False
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
            self._give_up_timer = None

    def fail_all(self, error: StorageError) -> None:
        for run in list(self.live):
            run.fail_unpersisted(error)

    def on_end(self, run: Run) -> None:
        """A stream has its terminal event, or another server has taken it over."""
        self.live.pop(run, None)
        self._note_end()

    def start_vectors(self, record: Record, form: VectorForm, times: Times) -> VectorRun:
        """Start a request for vectors. Its caller awaits the result at once.

        Raises: AdmissionError, RequestError, PoisonRequest, EngineLost, StorageError; then it has not begun.
        """
        self._blame.check_inputs(record)
        is_slowed = self._blame.is_slowed(record.caller)
        with self.reserved(record):
            self.gate.check(VectorRun.demand(record), 0, 1, record, is_slowed=is_slowed)
        run = VectorRun(
            record,
            form,
            times,
            gate=self.gate,
            engine=self._supervisor,
            new_sequence_id=self.new_sequence_id,
            observers=self.observers,
            on_lost=self._vector_trials.add,
            on_end=self._on_vectors_end,
        )
        self.vector_runs[run] = None
        self.observers.on_begun(record)
        run.enter(queue_s=self.limits.queue_s, is_slowed=is_slowed)
        return run

    def _on_vectors_end(self, run: VectorRun) -> None:
        del self.vector_runs[run]
        self._note_end()

    def _note_end(self) -> None:
        self.used_s = time.monotonic()
        self._stream_ended.set()

    @property
    def task(self) -> Task:
        return self._supervisor.spec.task

    def check_task(self, task: Task) -> None:
        """Raises: UnsupportedOperation if the model does something else."""
        if task != self.task:
            raise UnsupportedOperation(f"This model cannot {_TASKS[task]}. It can {_TASKS[self.task]}.", param="model")

    def _check(self, request: GenerateRequest) -> None:
        self.check_task("generate")
        sampling = request.sampling
        for name in self.unsupported(sampling):
            raise UnsupportedParameter(f"This engine does not support {name}.", param=name)
        if sampling.ignore_eos and sampling.grammar is not None:  # libraries would continue without the grammar
            raise UnsupportedParameter("ignore_eos cannot be used with a grammar.", param="ignore_eos")
        if sampling.n > self.limits.max_n:
            raise RequestError(f"n must be at most {self.limits.max_n}.", param="n")
        for kind in self._not_taken(prompt for prompt in request.prompts if isinstance(prompt, tuple)):
            raise UnsupportedParameter(f"This model does not take {kind}.", param="prompt")
        if len(request.prompts) * sampling.n > self.limits.max_choices:
            most = self.limits.max_choices
            raise RequestError(f"A request has at most {most} answers (prompts times n).", param="prompt")
        for image in images_of(request)[:1]:
            if not self.sees:
                raise UnsupportedParameter(f"{image.param}: this model reads no images.", param=image.param)
        self.prompts.check_ids(sampling)
        self.prompts.check(request)

    @property
    def sees(self) -> bool:
        """Whether the model reads images."""
        capabilities = self._supervisor.capabilities
        takes = self.may_see if capabilities is None else CANONICAL_TYPE in capabilities.takes
        return takes and self.prompts.chat_facts.shows_images

    def _takes(self, record: Record) -> bool:
        """Return whether the engine takes the prompts of a stream."""
        return not self._not_taken(prompt.segments for prompt in record.prompts)

    def _not_taken(self, prompts: Iterable[tuple[Segment, ...]]) -> list[str]:
        """Return the kinds of segments in prompts that the engine does not take."""
        capabilities = self._supervisor.capabilities
        if capabilities is None:
            return []
        return sorted({kind_of(one) for segments in prompts for one in segments} - capabilities.takes)

    def unsupported(self, sampling: Sampling) -> list[str]:
        """Return the names of the parameters in use that the engine does not have."""
        if self._supervisor.capabilities is None:
            return []
        absent, values = _absent(self.parameters)
        if values(sampling) == values(_DEFAULTS):
            return []
        return [name for name in absent if getattr(sampling, name) != getattr(_DEFAULTS, name)]

    def count_tokens(self, request: GenerateRequest) -> int:
        """Return how many tokens the prompts of a request have, also beyond the context window. May take long: call it
        in a thread.

        Raises: RequestError; as `create` for images.
        """
        self._check(request)
        if images_of(request) and (loop := self._supervisor.loop) is not None:
            request = asyncio.run_coroutine_threadsafe(self._with_sights(request), loop).result()
        return self.prompts.count(request)

    async def _with_sights(self, request: GenerateRequest) -> GenerateRequest:
        """As `_with_images`, for a request that does not run."""
        with contextlib.ExitStack() as held:
            return await self._with_images(request, held)

    def _fill_in(
        self, request: GenerateRequest, longest: int, num_prompt_tokens: int, num_choices: int, allowance: Allowance
    ) -> Sampling:
        """Fill in max_tokens and seed. `longest` is the number of tokens of the longest prompt. max_tokens is reduced
        to the room that the prompt leaves, and to the limits of the key. Raises: RequestError."""
        sampling = request.sampling
        limit_tokens = self.limit_tokens(num_choices)
        if limit_tokens < 1:
            text = f"The engine's memory has no room for {num_choices} answers at once. Ask for fewer."
            raise RequestError(text, param="n" if sampling.n > 1 else "prompt")
        room = limit_tokens - longest
        wanted = sampling.max_tokens
        max_tokens = self.limits.default_max_tokens if wanted is None else wanted
        if wanted is None or wanted == NO_LIMIT or request.may_shorten:
            max_tokens = min(max_tokens, room)
            if allowance.all_tokens is not None:
                max_tokens = min(max_tokens, (allowance.all_tokens - num_prompt_tokens) // num_choices)
            max_tokens = max(1, max_tokens)
        if max_tokens > room:
            raise ContextLengthExceeded(longest, limit_tokens, max_tokens=max_tokens if room >= 1 else 0)
        if allowance.answer_tokens is not None:
            max_tokens = min(max_tokens, allowance.answer_tokens)
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(32)
        most = sampling.max_reasoning_tokens
        most = self.limits.max_reasoning_tokens if most is None else most
        return replace(sampling, max_tokens=max_tokens, max_reasoning_tokens=most, seed=seed)

    def limit_tokens(self, num_choices: int = 1) -> int:
        """Return the largest sum of prompt and answer tokens: the model's window, or what fits in the engine's memory
        if that is less."""
        capabilities = self._supervisor.capabilities
        if capabilities is None:
            return self.prompts.context_tokens
        memory_tokens = capabilities.kv_tokens // num_choices - 2 * capabilities.block_tokens
        return min(self.prompts.context_tokens, capabilities.context_tokens, memory_tokens)

    def _make_run(self, lease: Lease, arrived_s: float) -> Run:
        record = lease.log.record
        asked = record.sampling.grammar
        grammar = Grammar(asked.kind, asked.source) if asked is not None and not asked.is_free else None
        adapter = record.model if record.model != self.model else ""
        choices = []
        for index in range(record.num_choices):
            number, nth = divmod(index, record.sampling.n)
            sampling = replace(record.sampling, seed=(record.seed + nth) % SEEDS, grammar=grammar)
            prompt = record.prompts[number]
            sequence = Sequence(
                self.new_sequence_id(),
                prompt.segments,
                sampling,
                adapter=adapter,
                attachments=record.attachments,
                is_background=record.is_background,
            )
            choices.append(Choice(index, sequence, self.prompts.tokenizer, prompt.reasoning, prompt.calls))
        run = Run(
            lease=lease,
            choices=choices,
            times=Times(arrived_s),
            store=self.store,
            gate=self.gate,
            answer_check=self._answer_check,
            engine=self._supervisor,
            new_sequence_id=self.new_sequence_id,
            rescuer=self.recovery,
            observers=self.observers,
            on_end=self.on_end,
        )
        lease.log.producer = run
        self.live[run] = None
        return run
