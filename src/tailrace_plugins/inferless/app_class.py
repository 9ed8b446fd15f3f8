"""Runs an app's class: `initialize` once, `infer` for each request, `finalize` at the end."""

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
from tailrace_plugins.inferless.inferless_errors import InferFailed, OutputError, StreamCancelled
from tailrace_plugins.inferless.inferless_wire import values_of
from tailrace_plugins.inferless.leftovers import Marks, unwatch, watch
from tailrace_plugins.inferless.loading import Loaded, positional
from tailrace_plugins.inferless.output import Events, StreamOutputHandler
from tailrace_plugins.inferless.runners import AppLoop, Workers, until_done

__all__ = ["INCOMPLETE", "InferlessAnswer", "InferlessModel"]

logger = logging.getLogger("tailrace.serve")

_MAX_WAITING = 100
_GRACE_S = 5.0  # for calls that still run when the app stops
_QUEUE_S = 60.0  # default limit of a request's wait
_THIS_DIRECTORY = str(Path(__file__).parent)
INCOMPLETE = {"finish": "incomplete"}  # the last event of a stream that the app did not finalise


class InferlessModel:
    """Runs an instance of an app's class. At most `concurrency` calls of `infer` run at once; the others wait in order.

    `infer` of a streaming app sends its output; other apps return it; batching apps take and return lists. In each case
    the caller gets an `InferlessAnswer` with one or more items.
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
        self._fault = ""  # an error that only a new process repairs
        self._batched: Callable[[InferlessAnswer], Awaitable[object]] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it accepts requests: after `initialize`, and without a fault."""
        return self._workers is not None and not self.fault

    @property
    def fault(self) -> str:
        """Why this process has to be replaced, or ""."""
        lost = next((answer.lost for answer in self._pending if answer.lost), "")
        return (lost and f"infer has not returned, and a thread that it started has failed ({lost})") or self._fault

    async def start(self) -> None:
        """Start the app. Raises: the exceptions of `initialize`."""
        self._workers = Workers(self._concurrency, "infer")
        self._loop = AppLoop("infer-loop")
        watch()
        size = self._settings.batch_size
        if size is not None:
            from tailrace.serve import batch

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
        """Cancel running calls as far as possible, then call `finalize`."""
        tasks = {answer.task for answer in self._pending if answer.task is not None}
        for answer in tuple(self._pending):
            answer.leave(InferFailed("The app is shutting down."))
        late = (await asyncio.wait(tasks, timeout=_GRACE_S))[1] if tasks else set()
        try:
            finalize = getattr(self._app, "finalize", None)
            if late:
                logger.warning("infer has not returned, so finalize is not called")
            elif finalize is not None:
                await self._run(finalize, *((None,) if positional(finalize) else ()))
        except (Exception, SystemExit) as error:
            _report("finalize failed", error)
        finally:
            self._close()

    def ask(self, inputs: object) -> InferlessAnswer:
        """Make an answer for inputs in the app's form. It begins when its first item is awaited."""
        return InferlessAnswer(self, inputs, is_stream=self._settings.is_streaming)

    def begin(self, answer: InferlessAnswer) -> None:
        """Queue an answer. Raises: QueueFull."""
        if len(self._pending) >= self.max_pending:
            raise QueueFull("Too many requests are waiting for this app.", retry_after_s=1.0)
        self._pending.add(answer)
        answer.task = asyncio.get_running_loop().create_task(self._answer(answer))
        answer.task.add_done_callback(lambda task: self._pending.discard(answer))

    def can_cancel(self, answer: InferlessAnswer) -> bool:
        """Return whether the answer's task may be cancelled: not while a thread runs for it, which would lose its
        slot."""
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
                await self._call_single(answer)
            finally:
                self._turns.release()

    async def _in_batch(
        self, batched: Callable[[InferlessAnswer], Awaitable[object]], answer: InferlessAnswer
    ) -> object:
        """Return the result of `infer` for one request of a batch. Raises: AdmissionError if the batch does not begin
        in time."""
        async with self._queue_timeout() as timeout:

            def begun() -> None:
                with contextlib.suppress(RuntimeError):  # the timeout has just expired, or the caller has left
                    timeout.reschedule(None)

            answer.on_begin = begun
            return await batched(answer)

    @contextlib.asynccontextmanager
    async def _queue_timeout(self) -> AsyncIterator[asyncio.Timeout]:
        """Limit how long a request waits for its call. Raises: AdmissionError."""
        try:
            async with asyncio.timeout(self._queue_s) as timeout:
                yield timeout
        except TimeoutError:
            logger.warning("a request was refused after %g s: infer still runs for other requests", self._queue_s)
            error = AdmissionError(f"The app was not free within {self._queue_s:g} s.", retry_after_s=5.0)
            error.status, error.code = 503, "queue_timeout"
            raise error from None

    async def _call_single(self, answer: InferlessAnswer) -> None:
        """Call `infer` for one request. After a failure, clean up before the next call begins."""
        holders = (getattr(self._app, "__dict__", {}), getattr(inspect.unwrap(self._infer), "__globals__", {}))
        marks = Marks(
            *holders if self._concurrency == 1 else ()
        )  # with more, a queue's items cannot be assigned to a call
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
            self._fault = "threads of a failed request still run, and would write into later answers"

    async def _infer_all(self, answers: list[InferlessAnswer]) -> list[object]:
        """Call `infer` for a batch. Callers do not leave a running batch, so that it keeps its slot."""
        results: object = await self._call(answers, [answer.inputs for answer in answers])
        if not isinstance(results, list) or len(results) != len(answers):
            given = f"a list of {len(results)}" if isinstance(results, list) else type(results).__name__
            raise OutputError(
                f"infer got a batch of {len(answers)} and must return a list of that length, not {given}."
            )
        return results

    async def _call(self, answers: list[InferlessAnswer], *args: object) -> object:
        """Run the app's `infer` once. Raises: AppFailed, StreamCancelled."""

        threads = answers[0].handler.threads
        threads.on_death = partial(self._thread_died, answers)
        threads.begin()
        for answer in answers:
            answer.is_running = True
            answer.on_begin()
        try:
            return await self._run(self._infer, *args)
        except OutputError as error:
            _report("the output of infer cannot be sent", error)
            raise
        except (Exception, SystemExit) as error:
            _report("infer failed", error)
            raise InferFailed(f"{type(error).__name__} in infer; the app's log has details.") from None
        finally:
            for answer in answers:
                answer.is_running, answer.lost = False, ""

    async def _run(self, function: Any, *args: object) -> Any:  # Any: the app's own
        """Run a method of the app: in a worker thread, or on the app's own event loop if it is async. If `infer` is
        async, all methods run on that loop."""
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
        """End the answers of a call whose thread died: `infer` may wait for the thread for ever."""
        _report("a thread that infer has started failed", error)
        for answer in answers:
            answer.lost = type(error).__name__ if answer.is_running else ""
            answer.events.end(
                InferFailed(f"{type(error).__name__} in a thread that infer has started; the app's log has details.")
            )

    def _close(self) -> None:
        assert self._loop is not None
        assert self._workers is not None
        self._loop.close()
        self._workers.close()
        self._loop = self._workers = None
        unwatch()


class InferlessAnswer:
    """The answer to a request, as an iterator over the app's items. To be iterated once, and closed.

    Before the first item, it raises QueueFull, or AppFailed if the app fails before its first item.
    """

    def __init__(self, model: InferlessModel, inputs: object, *, is_stream: bool) -> None:
        self._model = model
        self._is_stream = is_stream
        self.inputs = inputs
        self.events = Events()
        self.handler = StreamOutputHandler(self.events)
        self.task: asyncio.Task[None] | None = None
        self.is_running = False  # `infer` runs for it
        self.on_begin: Callable[[], None] = lambda: None  # called when `infer` begins
        self.is_whole = False  # `infer` has delivered all of it
        self.lost = ""  # why a thread died for which `infer` may wait for ever

    def __aiter__(self) -> InferlessAnswer:
        return self

    async def __anext__(self) -> Any:  # Any: the app's output; of a streaming app as JSON
        if self.task is None and not self.events.is_cancelled:
            self._model.begin(self)
        return await self.events.take()

    async def aclose(self) -> None:
        """Cancel the rest. Does not wait for the app to notice."""
        self.leave()

    def leave(self, error: BaseException | None = None) -> None:
        """Like `aclose`; a reader gets `error` if there is one."""
        if not self.events.is_ended:
            self.events.cancel(error)
            if self.task is not None and self._model.can_cancel(self):
                self.task.cancel()

    def finish(self, result: object) -> None:
        """End the answer with the result of `infer`. Raises: OutputError."""
        events, warn = self.events, self.handler.warn
        self.is_whole = True
        if not self._is_stream:
            if result is None:
                raise OutputError("infer returned None; it should return a dict of outputs.")
            events.put_last(result)
        elif result is not None and not (events.num_put or events.is_ended):
            warn("infer returned its output instead of sending it: the stream has one event")
            events.put_last(values_of(result))
        else:
            self.is_whole = events.is_ended and not events.has_failed
            if result is not None:
                warn("infer returned a value after sending events: the value is ignored")
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
    """End an answer with the error of the block."""
    try:
        yield
    except StreamCancelled:
        events.end()
    except TailraceError as error:
        events.end(error)
    except asyncio.CancelledError:
        events.end(InferFailed("The app was stopped before its answer was complete."))
        raise
    except Exception as error:  # a bug in tailrace must not leave a client waiting
        _report("an answer failed in the server", error)
        events.end(InferFailed("The server failed; the app's log has details."))


def _report(what: str, error: BaseException) -> None:
    """Log an error with the app's traceback, without tailrace's frames."""
    cause: BaseException | None = error
    while cause is not None:
        trace = cause.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_THIS_DIRECTORY):
            trace = trace.tb_next
        cause.__traceback__ = trace
        cause = cause.__cause__
    logger.error(what, exc_info=error)
