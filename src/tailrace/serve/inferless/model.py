"""An app's class at work: `initialize` once, `infer` for each request in its turn, `finalize` at the end."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from tailrace.errors import QueueFull
from tailrace.serve.inferless.errors import AppFailed, OutputError, StreamCancelled
from tailrace.serve.inferless.events import Events
from tailrace.serve.inferless.handler import StreamOutputHandler
from tailrace.serve.inferless.loading import Loaded, positional
from tailrace.serve.inferless.threads import unwatch, watch
from tailrace.serve.inferless.workers import Workers

__all__ = ["Answer", "Model"]

logger = logging.getLogger("tailrace.serve")

_MAX_WAITING = 100
_GRACE_S = 5.0  # for calls that run when the app is to stop
_OURS = str(Path(__file__).parent)


class Model:
    """Runs an instance of an app's class. At most `concurrency` calls of `infer` run at once, the others wait in order.

    `infer` of a streaming app sends, any other one returns its output; a batching one gets and gives lists. To whoever
    asks they are all the same: an `Answer`, of one item or more.
    """

    def __init__(self, loaded: Loaded, concurrency: int) -> None:
        self._app = loaded.instance
        self._settings = loaded.settings
        self._infer: Callable[..., Any] = loaded.instance.infer  # Any: the app's
        self._takes_handler = positional(self._infer) > 1
        self._is_async = inspect.iscoroutinefunction(inspect.unwrap(self._infer))
        self._concurrency = concurrency
        self._turns = asyncio.Semaphore(concurrency)
        self.max_pending = concurrency * (loaded.settings.batch_size or 1) + _MAX_WAITING
        self._pending: set[Answer] = set()
        self._workers: Workers | None = None
        self._batched: Callable[[Answer], Awaitable[object]] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests: not before `initialize`, nor while `infer` waits for a thread that has died."""
        return self._workers is not None and not any(answer.is_lost for answer in self._pending)

    async def start(self) -> None:
        """Raises: whatever `initialize` raises."""
        self._workers = Workers(self._concurrency, "infer")
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
            answer.leave(AppFailed("The app is shutting down."))
        late = (await asyncio.wait(tasks, timeout=_GRACE_S))[1] if tasks else set()
        try:
            finalize = getattr(self._app, "finalize", None)
            if late and not self._is_async:
                logger.warning("infer has not come back, so that finalize is not called")
            elif finalize is not None:
                await self._run(finalize, *((None,) if positional(finalize) else ()))
        except (Exception, SystemExit) as error:
            _report("finalize failed", error)
        finally:
            self._close()

    def ask(self, inputs: object) -> Answer:
        """Inputs are as the app gets them. Nothing happens until the answer's first item is waited for."""
        return Answer(self, inputs, is_stream=self._settings.is_streaming)

    def begin(self, answer: Answer) -> None:
        """Raises: QueueFull."""
        if len(self._pending) >= self.max_pending:
            raise QueueFull("Too many requests are waiting for this app.", retry_after_s=1.0)
        self._pending.add(answer)
        answer.task = asyncio.get_running_loop().create_task(self._answer(answer))
        answer.task.add_done_callback(lambda task: self._pending.discard(answer))

    def can_cancel(self, answer: Answer) -> bool:
        """Whether its task may be cancelled: not while a thread runs for it, whose turn would be given to the next."""
        if not answer.is_running:
            return True
        return self._is_async and not answer.handler.threads.others(alive=True)

    async def _answer(self, answer: Answer) -> None:
        events = answer.events
        try:
            if self._batched is not None:
                result = await self._batched(answer)
            else:
                async with self._turns:
                    handler = (answer.handler,) if self._takes_handler else ()
                    result = await self._call([answer], answer.inputs, *handler)
            answer.finish(result)
            events.end()
        except StreamCancelled:
            events.end()
        except AppFailed as error:
            events.end(error)
        except asyncio.CancelledError:
            events.end(AppFailed("The app was stopped before its answer was complete."))
            raise
        except Exception as error:  # a defect of ours must not leave anybody waiting
            _report("an answer could not be given", error)
            events.end(AppFailed("The server failed; the app's log has more."))

    async def _infer_all(self, answers: list[Answer]) -> list[object]:
        """A batch; those who wait for one that runs do not leave it, so that it keeps its turn."""
        results: object = await self._call(answers, [answer.inputs for answer in answers])
        if not isinstance(results, list) or len(results) != len(answers):
            given = f"a list of {len(results)}" if isinstance(results, list) else type(results).__name__
            raise OutputError(f"infer got a batch of {len(answers)} and must return a list as long, not {given}.")
        return results

    async def _call(self, answers: list[Answer], *args: object) -> object:
        """One run of the app's `infer`. Raises: AppFailed, StreamCancelled."""

        threads = answers[0].handler.threads
        threads.on_death = partial(self._thread_died, answers)
        threads.begin()
        for answer in answers:
            answer.is_running = True
        try:
            return await self._run(self._infer, *args)
        except OutputError as error:
            _report("infer gave what cannot be sent", error)
            raise
        except (Exception, SystemExit) as error:
            _report("infer failed", error)
            raise AppFailed(f"{type(error).__name__} in infer; the app's log has more.") from None
        finally:
            for answer in answers:
                answer.is_running = False

    async def _run(self, function: Any, *args: object) -> Any:  # Any: the app's own
        """A method of the app: on the event loop if it is async, else in a worker."""
        if function is None:
            return None
        if inspect.iscoroutinefunction(inspect.unwrap(function)):
            result = function(*args)
        else:
            assert self._workers is not None
            result = await self._workers.run(partial(function, *args))
        return await result if inspect.isawaitable(result) else result

    def _thread_died(self, answers: list[Answer], error: BaseException) -> None:
        """What waits for the results of a thread that `infer` has started may do so for ever."""
        _report("a thread that infer has started failed", error)
        for answer in answers:
            answer.is_lost = answer.is_running
            answer.events.end(
                AppFailed(f"{type(error).__name__} in a thread that infer has started; the app's log has more.")
            )

    def _close(self) -> None:
        assert self._workers is not None
        self._workers.close()
        self._workers = None
        unwatch()


class Answer:
    """What a request is answered with, in the order that the app gives it. To be iterated once, and closed.

    Before the first item come QueueFull, and AppFailed for an app that failed before it gave anything.
    """

    def __init__(self, model: Model, inputs: object, *, is_stream: bool) -> None:
        self._model = model
        self._is_stream = is_stream
        self.inputs = inputs
        self.events = Events(asyncio.get_running_loop())
        self.handler = StreamOutputHandler(self.events)
        self.task: asyncio.Task[None] | None = None
        self.is_running = False  # `infer` has it now
        self.is_lost = False  # a thread of the app has died under it

    def __aiter__(self) -> Answer:
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
        """`infer` has come back with this. Raises: OutputError."""
        events, warn = self.events, self.handler.warn
        if not self._is_stream:
            if result is None:
                raise OutputError("infer returned nothing; it should return a dict of outputs.")
            events.put(result)
        elif result is None:
            if not (events.num_put or events.has_failed or events.is_cancelled):
                warn("infer has sent nothing")
        elif events.num_put or events.is_ended:
            warn("infer returned something besides what it sent, which is ignored")
        else:
            warn("infer returned its output instead of sending it, which makes one event")
            self.handler.send_streamed_output(result)


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
