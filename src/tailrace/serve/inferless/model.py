"""An app's class at work: `initialize` once, `infer` for each request in its turn, `finalize` at the end."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tailrace.errors import AdmissionError, QueueFull, TailraceError
from tailrace.serve.inferless.errors import InferFailed, OutputError, StreamCancelled
from tailrace.serve.inferless.leftovers import Marks, unwatch, watch
from tailrace.serve.inferless.loading import Loaded, positional
from tailrace.serve.inferless.output import Events, StreamOutputHandler
from tailrace.serve.inferless.runners import AppLoop, Workers, until_done
from tailrace.serve.inferless.wire import values_of

__all__ = ["INCOMPLETE", "InferlessAnswer", "InferlessModel"]

logger = logging.getLogger("tailrace.serve")

_MAX_WAITING = 100
_GRACE_S = 5.0  # for calls that run when the app is to stop
_QUEUE_S = 60.0  # that a request waits for its turn, where nobody says otherwise
_OURS = str(Path(__file__).parent)
INCOMPLETE = {"finish": "incomplete"}  # the last event of a stream that the app has not finalised


class InferlessModel:
    """Runs an instance of an app's class. At most `concurrency` calls of `infer` run at once, the others wait in order.

    `infer` of a streaming app sends, any other one returns its output; a batching one gets and gives lists. To whoever
    asks they are all the same: an `InferlessAnswer`, of one item or more.
    """

    def __init__(self, loaded: Loaded, concurrency: int, queue_s: float | None = None) -> None:
        self._app = loaded.instance
        self._settings = loaded.settings
        self._infer: Callable[..., Any] = loaded.instance.infer  # Any: the app's
        self._takes_handler = positional(self._infer) > 1
        self._is_async = inspect.iscoroutinefunction(inspect.unwrap(self._infer))
        self._concurrency = concurrency
        self._turns = asyncio.Semaphore(concurrency)
        self._queue_s = _QUEUE_S if queue_s is None else queue_s
        self.max_pending = concurrency * (loaded.settings.batch_size or 1) + _MAX_WAITING
        self._pending: set[InferlessAnswer] = set()
        self._workers: Workers | None = None
        self._loop: AppLoop | None = None
        self._fault = ""  # for which there is no remedy in this process
        self._batched: Callable[[InferlessAnswer], Awaitable[object]] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests: not before `initialize`, nor while something is wrong."""
        return self._workers is not None and not self.fault

    @property
    def fault(self) -> str:
        """Why this process should be replaced; empty if all is well."""
        lost = next((answer.lost for answer in self._pending if answer.lost), "")
        return (lost and f"infer has not returned, and a thread that it started has failed ({lost})") or self._fault

    async def start(self) -> None:
        """Raises: whatever `initialize` raises."""
        self._workers = Workers(self._concurrency, "infer")
        self._loop = AppLoop("infer-loop")
        watch()
        size = self._settings.batch_size
        if size is not None:
            from tailrace.serve.batching import batch

            self._batched = batch(
                max_batch_size=size,
                batch_wait_timeout_s=self._settings.batch_window_s,
                max_concurrent_batches=self._concurrency,
                max_queued=self.max_pending,
            )(self._infer_all)
        try:
            await self._run(getattr(self._app, "initialize", None))
        except BaseException:
            self._close()
            raise

    async def stop(self) -> None:
        """Have the calls that still run end, as far as they can be made to, and call `finalize`."""
        tasks = {answer.task for answer in self._pending if answer.task is not None}
        for answer in tuple(self._pending):
            answer.leave(InferFailed("The app is shutting down."))
        late = (await asyncio.wait(tasks, timeout=_GRACE_S))[1] if tasks else set()
        try:
            finalize = getattr(self._app, "finalize", None)
            if late:
                logger.warning("infer has not come back, so that finalize is not called")
            elif finalize is not None:
                await self._run(finalize, *((None,) if positional(finalize) else ()))
        except (Exception, SystemExit) as error:
            _report("finalize failed", error)
        finally:
            self._close()

    def ask(self, inputs: object) -> InferlessAnswer:
        """Inputs are as the app gets them. Nothing happens until the answer's first item is waited for."""
        return InferlessAnswer(self, inputs, is_stream=self._settings.is_streaming)

    def begin(self, answer: InferlessAnswer) -> None:
        """Raises: QueueFull."""
        if len(self._pending) >= self.max_pending:
            raise QueueFull("Too many requests are waiting for this app.", retry_after_s=1.0)
        self._pending.add(answer)
        answer.task = asyncio.get_running_loop().create_task(self._answer(answer))
        answer.task.add_done_callback(lambda task: self._pending.discard(answer))

    def can_cancel(self, answer: InferlessAnswer) -> bool:
        """Whether its task may be cancelled: not while a thread runs for it, whose turn would be given to the next."""
        if not answer.is_running:
            return True
        return self._is_async and not answer.handler.threads.others(alive=True)

    async def _answer(self, answer: InferlessAnswer) -> None:
        with _ending(answer.events):
            if self._batched is not None:
                answer.finish(await self._in_batch(self._batched, answer))
                return
            async with self._queue_timeout():
                await self._turns.acquire()
            try:
                await self._call_alone(answer)
            finally:
                self._turns.release()

    async def _in_batch(
        self, batched: Callable[[InferlessAnswer], Awaitable[object]], answer: InferlessAnswer
    ) -> object:
        """What `infer` returns for one request of its batch. Raises: AdmissionError if its batch does not begin in
        time."""
        async with self._queue_timeout() as timeout:

            def begun() -> None:
                with contextlib.suppress(RuntimeError):  # it has just expired, or nobody waits any more
                    timeout.reschedule(None)

            answer.on_begin = begun
            return await batched(answer)

    @contextlib.asynccontextmanager
    async def _queue_timeout(self) -> AsyncIterator[asyncio.Timeout]:
        """Bounds a request's wait for its turn. Raises: AdmissionError."""
        try:
            async with asyncio.timeout(self._queue_s) as timeout:
                yield timeout
        except TimeoutError:
            logger.warning("a request was refused after %g s: infer has not returned from another", self._queue_s)
            error = AdmissionError(f"The app was not free within {self._queue_s:g} s.", retry_after_s=5.0)
            error.status, error.code = 503, "queue_timeout"
            raise error from None

    async def _call_alone(self, answer: InferlessAnswer) -> None:
        """`infer` for one request. What it leaves behind where it fails is cleared before the next one begins."""
        holders = (getattr(self._app, "__dict__", {}), getattr(inspect.unwrap(self._infer), "__globals__", {}))
        marks = Marks(*holders if self._concurrency == 1 else ())  # else nobody knows whose it is
        handler = (answer.handler,) if self._takes_handler else ()
        try:
            with _ending(answer.events):
                answer.finish(await self._call([answer], answer.inputs, *handler))
        finally:
            if not answer.is_whole:
                await self._clear(marks, answer)

    async def _clear(self, marks: Marks, answer: InferlessAnswer) -> None:
        assert self._loop is not None
        restored = marks.restore(answer.handler.threads)
        clearing = asyncio.ensure_future(self._loop.run(lambda: restored) if self._is_async else restored)
        await until_done(clearing)
        if not clearing.result():
            self._fault = "threads of a failed request go on, and would write into the answers of the next ones"

    async def _infer_all(self, answers: list[InferlessAnswer]) -> list[object]:
        """A batch; those who wait for one that runs do not leave it, so that it keeps its turn."""
        results: object = await self._call(answers, [answer.inputs for answer in answers])
        if not isinstance(results, list) or len(results) != len(answers):
            given = f"a list of {len(results)}" if isinstance(results, list) else type(results).__name__
            raise OutputError(f"infer got a batch of {len(answers)} and must return a list as long, not {given}.")
        return results

    async def _call(self, answers: list[InferlessAnswer], *args: object) -> object:
        """One run of the app's `infer`. Raises: AppFailed, StreamCancelled."""

        threads = answers[0].handler.threads
        threads.on_death = partial(self._thread_died, answers)
        threads.begin()
        for answer in answers:
            answer.is_running = True
            answer.on_begin()
        try:
            return await self._run(self._infer, *args)
        except OutputError as error:
            _report("infer gave what cannot be sent", error)
            raise
        except (Exception, SystemExit) as error:
            _report("infer failed", error)
            raise InferFailed(f"{type(error).__name__} in infer; the app's log has more.") from None
        finally:
            for answer in answers:
                answer.is_running, answer.lost = False, ""

    async def _run(self, function: Any, *args: object) -> Any:  # Any: the app's own
        """A method of the app: in a worker; on the app's own event loop if it is async. An app whose `infer` is async
        runs there as a whole."""
        if function is None:
            return None
        assert self._loop is not None
        assert self._workers is not None
        call = partial(function, *args)
        if self._is_async or inspect.iscoroutinefunction(inspect.unwrap(function)):
            return await self._loop.run(call)
        result = await self._workers.run(call)
        return await self._loop.run(lambda: result) if inspect.isawaitable(result) else result

    def _thread_died(self, answers: list[InferlessAnswer], error: BaseException) -> None:
        """What waits for the results of a thread that `infer` has started may do so for ever."""
        _report("a thread that infer has started failed", error)
        for answer in answers:
            answer.lost = type(error).__name__ if answer.is_running else ""
            answer.events.end(
                InferFailed(f"{type(error).__name__} in a thread that infer has started; the app's log has more.")
            )

    def _close(self) -> None:
        assert self._loop is not None
        assert self._workers is not None
        self._loop.close()
        self._workers.close()
        self._loop = self._workers = None
        unwatch()


class InferlessAnswer:
    """What a request is answered with, in the order that the app gives it. To be iterated once, and closed.

    Before the first item come QueueFull, and AppFailed for an app that failed before it gave anything.
    """

    def __init__(self, model: InferlessModel, inputs: object, *, is_stream: bool) -> None:
        self._model = model
        self._is_stream = is_stream
        self.inputs = inputs
        self.events = Events()
        self.handler = StreamOutputHandler(self.events)
        self.task: asyncio.Task[None] | None = None
        self.is_running = False  # `infer` has it now
        self.on_begin: Callable[[], None] = lambda: None  # called when `infer` gets it
        self.is_whole = False  # `infer` has given all of it
        self.lost = ""  # what a thread has died of on which `infer` may wait for ever

    def __aiter__(self) -> InferlessAnswer:
        return self

    async def __anext__(self) -> Any:  # Any: as the app gave it; from a streaming app as JSON has it
        if self.task is None and not self.events.is_cancelled:
            self._model.begin(self)
        return await self.events.take()

    async def aclose(self) -> None:
        """Nobody wants the rest. Does not wait for the app to notice."""
        self.leave()

    def leave(self, error: BaseException | None = None) -> None:
        """As `aclose`. With an error, whoever still reads gets it."""
        if not self.events.is_ended:
            self.events.cancel(error)
            if self.task is not None and self._model.can_cancel(self):
                self.task.cancel()

    def finish(self, result: object) -> None:
        """`infer` has come back with this. Ends the answer. Raises: OutputError."""
        events, warn = self.events, self.handler.warn
        self.is_whole = True
        if not self._is_stream:
            if result is None:
                raise OutputError("infer returned nothing; it should return a dict of outputs.")
            events.put_last(result)
        elif result is not None and not (events.num_put or events.is_ended):
            warn("infer returned its output instead of sending it, which makes one event")
            events.put_last(values_of(result))
        else:
            self.is_whole = events.is_ended and not events.has_failed
            if result is not None:
                warn("infer returned something besides what it sent, which is ignored")
            if self.is_whole and not events.num_put:
                warn("infer has sent nothing")
            if not (events.is_ended or events.is_cancelled):
                warn(
                    "infer returned without finalise_streamed_output; the client is told that the stream is incomplete"
                )
                events.put_last(INCOMPLETE)
        events.end()


@contextlib.contextmanager
def _ending(events: Events) -> Iterator[None]:
    """Ends an answer with what goes wrong."""
    try:
        yield
    except StreamCancelled:
        events.end()
    except TailraceError as error:
        events.end(error)
    except asyncio.CancelledError:
        events.end(InferFailed("The app was stopped before its answer was complete."))
        raise
    except Exception as error:  # a defect of ours must not leave anybody waiting
        _report("an answer could not be given", error)
        events.end(InferFailed("The server failed; the app's log has more."))


def _report(what: str, error: BaseException) -> None:
    """In the log, with the app's traceback and none of ours."""
    cause: BaseException | None = error
    while cause is not None:
        trace = cause.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
            trace = trace.tb_next
        cause.__traceback__ = trace
        cause = cause.__cause__
    logger.error(what, exc_info=error)
