"""A server: tailrace's own store and generator, with the scripted engine, in one simulated process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias, assert_never

from tests.generation.harness import HandStepped, tokenizer
from tests.simulation.network import Line, RedisHost, SimulatedClient
from tests.simulation.simulated_time import Process, Simulation

from tailrace.admission import Gate
from tailrace.engines import EngineSpec
from tailrace.engines.interface import Sequence
from tailrace.engines.worker_process import Receiver
from tailrace.errors import ClaimTaken, Draining, EngineLost, StorageError, TailraceError
from tailrace.generation import Generator, Limits, PromptEncoder
from tailrace.generation.observers import Observer, Times
from tailrace.streams import Reader, StreamLog
from tailrace.streams.tables import Table
from tailrace.types import ANONYMOUS, Claim, End, Event, GenerateRequest, Record, Released
from tailrace_outer.redis.redis_store import RedisLogStore, open_redis
from tailrace_plugins.batches.batches import RowBatches
from tailrace_plugins.tool_loop.loops import Loops

__all__ = ["MODEL", "Answer", "Message", "OpenBatches", "OpenTools", "Server"]

MODEL = "scripted"
Message = str | Event | Released | TailraceError | None
_SPEC = EngineSpec("scripted", context_tokens=1_000, kv_tokens=10_000, max_sequences=8)


# Made here, since a tokenizer draws random numbers, which a simulation counts.
_PROMPTS = PromptEncoder(tokenizer=tokenizer(), chat=None, context_tokens=1_000, add_bos=False)


OpenBatches: TypeAlias = Callable[["Server", Table, asyncio.TaskGroup], Awaitable[RowBatches]]
OpenTools: TypeAlias = Callable[["Server", Table, asyncio.TaskGroup], Awaitable[Loops]]


class _Engine(HandStepped):
    """The scripted engine, which says when there is something to step."""

    def __init__(self, spec: EngineSpec, on_change: Callable[[], None]) -> None:
        super().__init__(spec, on_change)
        self.has_work = asyncio.Event()

    def submit(self, sequence: Sequence, receiver: Receiver) -> None:
        super().submit(sequence, receiver)
        self.has_work.set()


class Answer:
    """What a server sends to a client over one connection, in order: the stream's id, its events, and how it ends for
    this connection. `None` means that the connection broke."""

    def __init__(self, server: Server, client: Process) -> None:
        self._server = server
        self._client = client
        self._arrives_s = 0.0
        self._came: list[Message] = []
        self._waiting: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None  # of the server
        self.is_cut = False
        self.is_begun = False
        self.is_left = False  # as the server knows

    # Of the server

    def send(self, message: Message) -> None:
        simulation = self._server.simulation
        self._arrives_s = max(self._arrives_s, simulation.now_s + simulation.random.expovariate(1000.0))
        simulation.at(self._arrives_s, self._arrive, message)

    def _arrive(self, message: Message) -> None:
        if self.is_cut:
            return
        self._came.append(message)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # Of the client

    async def take(self) -> Message:
        while not self._came:
            self._waiting = self._client.create_future()
            await self._waiting
        return self._came.pop(0)

    def cut(self) -> None:
        """The client leaves. The server learns of it soon."""
        if not self.is_cut:
            self.is_cut = True
            simulation = self._server.simulation
            simulation.after(simulation.random.expovariate(100.0), self._leave)

    def _leave(self) -> None:
        """A server that waits for its store goes on, or is cancelled."""
        self.is_left = True
        if self.task is not None and (self.is_begun or self._server.simulation.random.random() < 0.5):
            self._server.process.call_soon(self.task.cancel)


class Server(Observer):
    """One life of a server, from its start to its death or its stop."""

    def __init__(
        self,
        simulation: Simulation,
        host: RedisHost,
        process: Process,
        line: Line,
        *,
        lease_s: float,
        token_s: float,
        open_batches: OpenBatches | None = None,
        open_tools: OpenTools | None = None,
    ) -> None:
        self.simulation = simulation
        self.host = host
        self.process = process
        self.line = line
        self.epochs: set[int] = set()
        self.is_open = False  # for requests
        self.is_over = False
        self.ended: list[str] = []  # streams of which it observed the end
        self.begun: list[str] = []
        self.error: BaseException | None = None
        self._lease_s = lease_s
        self._token_s = token_s
        self._open_batches = open_batches
        self._open_tools = open_tools
        self._answers: set[int] = set()
        self._open_answers: dict[int, Answer] = {}
        self._keys_in_use: dict[str, asyncio.Lock] = {}
        self._stopping: asyncio.Future[None] = process.create_future()
        self.batches: RowBatches
        self.loops: Loops
        self.store: RedisLogStore
        self.generator: Generator
        self.engine: _Engine
        process.call_soon(lambda: process.create_task(self._run()))

    # What it does

    async def _run(self) -> None:
        client = SimulatedClient(self.host, self.process, self.line)
        try:
            async with open_redis("", lease_s=self._lease_s, client=client) as store:
                self.store = store
                self._make_generator(store)
                leases = await store.take_over({MODEL})
                self.generator.recover(leases)
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._take_over()), group.create_task(self._step())]
                    if self._open_batches is not None:
                        self.batches = await self._open_batches(self, await store.table_of("batches"), group)
                    if self._open_tools is not None:
                        self.loops = await self._open_tools(self, await store.table_of("mcp"), group)
                    self.is_open = True
                    await self._stopping
                    self.is_open = False
                    if self._open_batches is not None:
                        self.batches.close()
                    if self._open_tools is not None:
                        await self.loops.close()
                    await self._drain()
                    for task in tasks:
                        task.cancel()
        except* TailraceError as errors:  # it could not start, and is started again
            self.error = errors
        except* Exception as errors:
            self.simulation.failures.append(f"{self.process.name} dies: {errors.exceptions!r}")
        finally:
            self.is_open, self.is_over = False, True
            self._break_answers()

    def _make_generator(self, store: RedisLogStore) -> None:
        self.engine = _Engine(_SPEC, lambda: self.generator.on_engine_change())
        self.generator = Generator(
            model=MODEL,
            prompts=_PROMPTS,
            supervisor=self.engine,
            gate=Gate(max_requests=64),
            store=store,
            limits=Limits(),
        )
        store.write_errors.on_give_up.append(self.generator.fail_all)
        self.generator.observers.add(self)
        self.generator.on_engine_change()

    async def _take_over(self) -> None:
        while True:
            with contextlib.suppress(StorageError):
                self.generator.recover(await self.store.take_over({MODEL}, waits=True))

    async def _step(self) -> None:
        while True:
            await self.engine.has_work.wait()
            await asyncio.sleep(self._token_s)
            if self.engine.is_ready and self.engine.receivers:
                self.engine.step()
            else:
                self.engine.has_work.clear()

    async def _drain(self) -> None:
        """Do what `RunningServer.drain` does."""
        self.generator.gate.drain(5.0)
        for run in list(self.generator.live):
            if run.log.record.linger_s:
                run.hand_over(Draining("The server is shutting down. The next one continues this stream."))
            else:
                run.interrupt()

    def on_begun(self, record: Record) -> None:
        self.begun.append(record.stream_id)

    def on_end(self, record: Record, log: StreamLog, times: Times) -> None:
        self.ended.append(log.stream_id)

    # What happens to it

    def stop(self) -> None:
        """SIGTERM."""
        if not self._stopping.done():
            self.process.call_soon(self._end_of_waiting)

    def _end_of_waiting(self) -> None:
        if not self._stopping.done():
            self._stopping.set_result(None)

    def kill(self) -> None:
        if not self.is_over:
            self.process.die()
            self.is_open, self.is_over = False, True
            self._break_answers()

    def kill_engine(self, restart_s: float) -> None:
        """Its engine is killed from outside. Another one is ready after this time."""
        if self.is_open and self.engine.is_ready:
            self.process.call_soon(self.engine.fail, EngineLost("The engine was killed."))
            self.simulation.after(restart_s, self._restart_engine)

    def _restart_engine(self) -> None:
        if not self.process.is_dead and not self.is_over:
            self.process.call_soon(self.engine.restart)

    def _break_answers(self) -> None:
        for answer in self._open_answers.values():
            answer.send(None)
        self._open_answers.clear()

    # Requests

    def _serve(self, client: Process, work: Callable[[Answer], Coroutine[Any, Any, None]]) -> Answer:
        """Begin a request, whose answer comes over a connection."""
        answer = Answer(self, client)

        async def serve() -> None:
            try:
                await work(answer)
            except TailraceError as error:
                answer.send(error)
            except asyncio.CancelledError:
                answer.send(None)
                raise
            except Exception as error:
                self.simulation.failures.append(f"{self.process.name} cannot answer: {error!r}")
            finally:
                self._open_answers.pop(id(answer), None)

        def begin() -> None:
            if not self.is_open:
                answer.send(None)
                return
            self._open_answers[id(answer)] = answer
            self.process.call_soon(start)

        def start() -> None:
            answer.task = self.process.create_task(serve())

        self.simulation.after(self.simulation.random.expovariate(1000.0), begin)
        return answer

    def create(self, client: Process, request: GenerateRequest, claim: Claim | None) -> Answer:
        async def work(answer: Answer) -> None:
            log = await self.recall_or_create(request, claim)
            answer.send(log.stream_id)
            await self._write(answer, log, 0)

        return self._serve(client, work)

    def follow(self, client: Process, stream_id: str, after: int) -> Answer:
        """Sends the stream's id, and then what is read. If nothing is left to read, the terminal event alone: HTTP
        answers 204 then."""

        async def work(answer: Answer) -> None:
            log = await self.store.read(ANONYMOUS, stream_id, after)
            if log.end is not None and after == log.last_seq:
                answer.send(log.end)
                return
            answer.send(stream_id)
            await self._write(answer, log, after)

        return self._serve(client, work)

    def cancel(self, client: Process, stream_id: str) -> Answer:
        """Sends the terminal event."""

        async def work(answer: Answer) -> None:
            log = await self.store.stop(ANONYMOUS, stream_id)
            assert log.end is not None, "a stream that was stopped has no end"
            answer.send(log.end)

        return self._serve(client, work)

    def delete(self, client: Process, stream_id: str) -> Answer:
        """Sends the stream's id when it is deleted. Does what the routes do."""

        async def work(answer: Answer) -> None:
            if (await self.store.read(ANONYMOUS, stream_id)).end is None:
                await self.store.stop(ANONYMOUS, stream_id)
            await self.store.delete(ANONYMOUS, stream_id)
            answer.send(stream_id)

        return self._serve(client, work)

    def ask_batches(self, client: Process, work: Callable[[RowBatches], Coroutine[Any, Any, str]]) -> Answer:
        """Sends what the work returns."""

        async def ask(answer: Answer) -> None:
            answer.send(await work(self.batches))

        return self._serve(client, ask)

    def ask_tools(self, client: Process, work: Callable[[Loops], Coroutine[Any, Any, str]]) -> Answer:
        """Sends what the work returns."""

        async def ask(answer: Answer) -> None:
            answer.send(await work(self.loops))

        return self._serve(client, ask)

    async def recall_or_create(self, request: GenerateRequest, claim: Claim | None) -> StreamLog:
        """Do what the routes do (`api/routes.py`)."""
        if claim is None:
            return (await self.generator.create(request)).log
        async with self._keys_in_use.setdefault(claim.key, asyncio.Lock()):
            log = await self.store.recall(ANONYMOUS, claim)
            while log is None:
                try:
                    log = (await self.generator.create(request, claim)).log
                except ClaimTaken:
                    log = await self.store.recall(ANONYMOUS, claim)
            return log

    async def _write(self, answer: Answer, log: StreamLog, after: int) -> None:
        answer.is_begun = True
        with Reader(log, after) as reader:
            while not answer.is_left:
                match await reader.next():
                    case list() as deltas:
                        for event in deltas:
                            answer.send(event)
                    case End() | Released() as ending:
                        answer.send(ending)
                        answer.send(None)
                        return
                    case never:
                        assert_never(never)
