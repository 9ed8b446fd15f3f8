"""The built-in engine, for use inside a user's deployment."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from tailrace.assembly.service import start_service
from tailrace.assembly.source import find_source
from tailrace.dialects.bodies import JsonBody, printable
from tailrace.dialects.fields import SamplingFields, sampling_of
from tailrace.dialects.messages import ChatMessage, read_messages
from tailrace.dialects.shapes import read_fields, refused, require_nothing_left_out, without_unused
from tailrace.dialects.wire import failure_of
from tailrace.errors import ModelError, RequestError, TailraceError, UnsupportedParameter
from tailrace.generation import Generator as Generation
from tailrace.models.directories import prepared_path
from tailrace.settings import Settings
from tailrace.streams import Reader, StreamLog
from tailrace.types import End, GenerateRequest
from tailrace.wording import did_you_mean

__all__ = ["Model", "TextStream", "close_models", "models_loaded"]

Chat = str | Sequence[Mapping[str, Any]]  # Any: a message as on the wires

_loading: list[Model] = []


class _Parameters(SamplingFields):
    """The parameters of `stream` and `chat`, with the types and ranges of `POST /v1/streams`."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None


# Parameters of the wire that make no sense for a single text.
_UNUSED = {"n": refused(1), "logprobs": refused(False)}


async def models_loaded() -> None:
    """Wait until all models that this process has created are loaded.

    Raises: ModelError if one cannot be loaded, with the traceback of the line that created it.
    """
    for model in _loading:
        try:
            await model.loaded()
        except ModelError as error:
            raise error.with_traceback(model.created_at) from None


async def close_models() -> None:
    """Stop the engines of all models that this process has created."""
    for model in _loading:
        await model.aclose()


class _StderrProgress:
    """Writes progress to stderr, without progress bars."""

    def start(self, label: str, total_bytes: int | None) -> None:
        size = f" ({total_bytes / 1e6:.0f} MB)" if total_bytes else ""
        sys.stderr.write(f"tailrace: {label}{size} …\n")

    def advance(self, num_bytes: int) -> None: ...

    def done(self) -> None: ...

    def message(self, text: str) -> None:
        sys.stderr.write(f"tailrace: {text}\n")


class Model:
    """A model in an engine of this process. Made by `tailrace.engine`; `await` it to wait until it is loaded.

    Requests are batched continuously: each joins the running batch at the next step.
    """

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:  # Any: of each setting's type
        known = {row.name for row in fields(Settings) if row.metadata}
        for setting in settings:
            if setting not in known:
                raise TypeError(f"There is no setting {setting}.{did_you_mean(setting, known)}")
        self.created_at = _caller_traceback(sys._getframe())
        self._settings = Settings(**{"journal": "memory", **settings})
        self._name = name
        loop = asyncio.get_running_loop()
        self._generation: asyncio.Future[Generation] = loop.create_future()
        self._leaving = asyncio.Event()
        self._task = loop.create_task(self._run())
        _loading.append(self)

    def stream(self, prompt: str, **sampling: Any) -> TextStream:  # Any: of each parameter's type
        """Continue a prompt; returns the text in pieces. `sampling` are the parameters of `POST /v1/streams`, with the
        same types and ranges: max_tokens, temperature, top_p, seed, stop …

        Raises: RequestError that names the invalid parameter; UnsupportedParameter for an unknown one.
        """
        return TextStream(self, _request({"prompt": prompt}, sampling))

    def chat(self, messages: Chat, **sampling: Any) -> TextStream:  # Any: of each parameter's type
        """Answer a chat; returns the text in pieces. `messages` is the text of one user message, or
        `[{"role": "user", "content": …}, …]`. Raises: RequestError as `stream`."""
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return TextStream(self, _request({"messages": given}, sampling))

    async def loaded(self) -> None:
        """Wait until the model is loaded. Raises: ModelError if it cannot be loaded."""
        await asyncio.shield(self._generation)

    async def begin(self, request: GenerateRequest) -> StreamLog:
        """Begin a request; returns its stream. Raises: TailraceError."""
        generation = await asyncio.shield(self._generation)
        return (await generation.create(request)).log

    async def aclose(self) -> None:
        """Stop the engine."""
        self._leaving.set()
        await asyncio.wait([self._task])

    def __await__(self) -> Generator[Any, None, Model]:  # Any: as in the protocol
        yield from self.loaded().__await__()
        return self

    async def _run(self) -> None:
        try:
            source = await asyncio.to_thread(find_source, self._name, _StderrProgress(), self._settings)
            with tempfile.TemporaryDirectory(prefix="tailrace-") as directory:
                prepared = prepared_path()
                async with start_service(
                    source, self._settings, data_path=Path(directory), cache_path=prepared
                ) as service:
                    self._generation.set_result(service.generator)
                    await self._leaving.wait()
        except BaseException as error:
            if self._generation.done():
                raise
            failure = _first_error(error)
            if isinstance(failure, TailraceError):
                failure = failure.with_traceback(None)  # the message is enough; the frames are tailrace's
            self._generation.set_exception(failure)
            self._generation.exception()  # marks it as retrieved: without a waiter, asyncio would log it


class TextStream:
    """The text that a model writes, to be iterated once: `async for piece in …`. `await` it to begin: errors are raised
    there, before the answer has started. When the iteration stops, the model stops."""

    def __init__(self, model: Model, request: GenerateRequest) -> None:
        self._model = model
        self._request = request
        self._log: StreamLog | None = None
        self._pieces: AsyncIterator[str] | None = None
        self._is_closed = False

    def __await__(self) -> Generator[Any, None, TextStream]:  # Any: as in the protocol
        yield from self._begin().__await__()
        return self

    def __aiter__(self) -> AsyncIterator[str]:
        if self._pieces is None:
            self._pieces = self._iterate()
        return self._pieces

    async def text(self) -> str:
        """Wait for the end; returns the whole text."""
        return "".join([piece async for piece in self])

    @property
    def end(self) -> End | None:
        """How the answer ended, with its token counts; None before."""
        return self._log.end if self._log is not None else None

    async def aclose(self) -> None:
        """Stop the model if it still writes. An iteration in progress ends without an error."""
        self._is_closed = True
        if self._log is not None:
            self._log.cancel()

    async def _begin(self) -> StreamLog:
        if self._log is None:
            self._log = await self._model.begin(self._request)
        return self._log

    async def _iterate(self) -> AsyncIterator[str]:
        log = await self._begin()
        with Reader(log) as reader:
            while isinstance(taken := await reader.next(), list):
                for event in taken:
                    if event.text:
                        yield event.text
        if taken.status != "done" and not self._is_closed:
            raise failure_of(taken)


def _request(inputs: JsonBody, sampling: JsonBody) -> GenerateRequest:
    """Raises: RequestError."""
    known = set(SamplingFields.__struct_fields__)
    sampling, _ = without_unused(sampling, _UNUSED)
    for name in sampling.keys() - known:
        what = f"There is no sampling parameter {printable(name)}.{did_you_mean(name, known)}"
        raise UnsupportedParameter(what, param=printable(name))
    read, _ = read_fields({name: sampling[name] for name in known if name in sampling} | inputs, _Parameters)
    if read.prompt is None and read.messages is None:
        raise RequestError("The prompt is empty.", param=next(iter(inputs)))
    notes: list[str] = []
    messages = read_messages(read.messages, notes) if read.messages is not None else ()
    require_nothing_left_out(notes)
    request = GenerateRequest(
        prompts=(read.prompt,) if read.prompt is not None else (),
        messages=messages,
        sampling=sampling_of(read, {}),
        split_reasoning=False,
    )
    try:
        "".join([read.prompt or "", *(message.content for message in request.messages)]).encode()
    except UnicodeEncodeError:  # a lone surrogate: `json.loads` accepts it, tokenizers do not
        raise RequestError("The text is not valid Unicode.", param=next(iter(inputs))) from None
    return request


def _caller_traceback(frame: FrameType | None) -> TracebackType | None:
    """Return a traceback of the user's current line."""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("tailrace", "tailrace_outer"):
        frame = frame.f_back
    return TracebackType(None, frame, frame.f_lasti, frame.f_lineno) if frame is not None else None


def _first_error(error: BaseException) -> BaseException:
    if isinstance(error, BaseExceptionGroup):
        return _first_error(error.exceptions[0])
    return error if isinstance(error, Exception) else ModelError("The engine was stopped before it was loaded.")
