"""The built-in engine as a part of somebody's deployment."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from tailrace.dialects.bodies import JsonBody, printable, read_fields, refuse
from tailrace.dialects.fields import ChatMessage, SamplingFields, read_messages, sampling_of
from tailrace.errors import ModelError, RequestError, TailraceError, UnsupportedParameter
from tailrace.generation import Generator as Generation
from tailrace.generation.service import start_service
from tailrace.generation.source import find_source
from tailrace.models.places import prepared_path
from tailrace.settings import Settings
from tailrace.spelling import did_you_mean
from tailrace.streams import Reader, StreamLog
from tailrace.types import End, GenerateRequest, TextDelta

__all__ = ["Model", "TextStream", "close_models", "models_loaded"]

Chat = str | Sequence[Mapping[str, Any]]  # Any: what the wires take, text in most of them

_loading: list[Model] = []


class _Asked(SamplingFields):
    """What `stream` and `chat` take, held against the types and ranges of `POST /v1/streams`."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None


# Known on the wire, and of no use to who gets one text.
_REFUSED: dict[str, tuple[object, ...]] = {"n": (1,), "logprobs": (False,)}


async def models_loaded() -> None:
    """Wait for all models that this process has asked for.

    Raises: ModelError if one cannot be loaded, as if from the line that has asked for it.
    """
    for model in _loading:
        try:
            await model.loaded()
        except ModelError as error:
            raise error.with_traceback(model.asked_at) from None


async def close_models() -> None:
    """End all engines that this process has asked for."""
    for model in _loading:
        await model.aclose()


class _Told:
    """Tells the terminal what takes long; the bars are the front's."""

    def start(self, label: str, total_bytes: int | None) -> None:
        size = f" ({total_bytes / 1e6:.0f} MB)" if total_bytes else ""
        sys.stderr.write(f"tailrace: {label}{size} …\n")

    def advance(self, num_bytes: int) -> None: ...

    def done(self) -> None: ...

    def message(self, text: str) -> None:
        sys.stderr.write(f"tailrace: {text}\n")


class Model:
    """A model in an engine of this process's own. Made by `tailrace.engine`; `await` it to wait until it is loaded.

    Requests are batched continuously: each joins what is running at the next step.
    """

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:  # Any: of each setting's type
        known = {row.name for row in fields(Settings)}
        for setting in settings:
            if setting not in known:
                raise TypeError(f"There is no setting {setting}.{did_you_mean(setting, known)}")
        self.asked_at = _asked_at(sys._getframe())
        self._settings = Settings(**{"journal": "memory", **settings})
        self._name = name
        loop = asyncio.get_running_loop()
        self._generation: asyncio.Future[Generation] = loop.create_future()
        self._leaving = asyncio.Event()
        self._task = loop.create_task(self._run())
        _loading.append(self)

    def stream(self, prompt: str, **sampling: Any) -> TextStream:  # Any: of each parameter's type
        """What the model writes behind a prompt, in pieces. `sampling` are the parameters of `POST /v1/streams`, in the
        same types and ranges: max_tokens, temperature, top_p, seed, stop …

        Raises: RequestError that names the parameter which cannot be; UnsupportedParameter for one that there is not.
        """
        return TextStream(self, _request({"prompt": prompt}, sampling))

    def chat(self, messages: Chat, **sampling: Any) -> TextStream:  # Any: of each parameter's type
        """The model's answer in a chat, in pieces: to one message of a user's, or to
        `[{"role": "user", "content": …}, …]`. Raises: RequestError as `stream`."""
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return TextStream(self, _request({"messages": said}, sampling))

    async def loaded(self) -> None:
        """Raises: ModelError if it cannot be loaded."""
        await asyncio.shield(self._generation)

    async def begin(self, request: GenerateRequest) -> StreamLog:
        """Raises: TailraceError in the kind that says why it cannot be done, or not now."""
        generation = await asyncio.shield(self._generation)
        return (await generation.create(request)).log

    async def aclose(self) -> None:
        """End the engine."""
        self._leaving.set()
        await asyncio.wait([self._task])

    def __await__(self) -> Generator[Any, None, Model]:  # Any: as in the protocol
        yield from self.loaded().__await__()
        return self

    async def _run(self) -> None:
        try:
            source = await asyncio.to_thread(find_source, self._name, _Told(), self._settings.engine)
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
            failure = _first(error)
            if isinstance(failure, TailraceError):
                failure = failure.with_traceback(None)  # its words say what is wrong, and where it was found is ours
            self._generation.set_exception(failure)
            self._generation.exception()  # it is told to who asks, and to nobody otherwise


class TextStream:
    """What a model writes, to be iterated once: `async for piece in …`. `await` it to begin, and to hear of a refusal
    before there is an answer to write to. Whoever stops iterating stops the model."""

    def __init__(self, model: Model, request: GenerateRequest) -> None:
        self._model = model
        self._request = request
        self._log: StreamLog | None = None
        self._pieces: AsyncIterator[str] | None = None

    def __await__(self) -> Generator[Any, None, TextStream]:  # Any: as in the protocol
        yield from self._begin().__await__()
        return self

    def __aiter__(self) -> AsyncIterator[str]:
        if self._pieces is None:
            self._pieces = self._iterate()
        return self._pieces

    async def text(self) -> str:
        """All of it, when it is there."""
        return "".join([piece async for piece in self])

    @property
    def end(self) -> End | None:
        """How it ended, with exact counts of tokens; None before."""
        return self._log.end if self._log is not None else None

    async def aclose(self) -> None:
        """Stop the model, if it has not ended."""
        if self._log is not None:
            self._log.cancel()

    async def _begin(self) -> StreamLog:
        if self._log is None:
            self._log = await self._model.begin(self._request)
        return self._log

    async def _iterate(self) -> AsyncIterator[str]:
        log = await self._begin()
        with Reader(log) as reader:
            while not reader.is_finished:
                for event in reader.take():
                    if isinstance(event, TextDelta) and event.text:
                        yield event.text
                await reader.wait()
        if log.end is not None and log.end.failure is not None:
            error = TailraceError(log.end.failure.message)
            error.code = log.end.failure.code
            raise error


def _request(asked: JsonBody, sampling: JsonBody) -> GenerateRequest:
    """Raises: RequestError."""
    known = SamplingFields.__struct_fields__
    refuse(sampling, _REFUSED)
    for name in sampling.keys() - {*known, *_REFUSED}:
        what = f"There is no sampling parameter {printable(name)}.{did_you_mean(name, known)}"
        raise UnsupportedParameter(what, param=printable(name))
    read, _ = read_fields({name: sampling[name] for name in known if name in sampling} | asked, _Asked)
    if read.prompt is None and read.messages is None:
        raise RequestError("There is nothing to answer.", param=next(iter(asked)))
    request = GenerateRequest(
        prompts=(read.prompt,) if read.prompt is not None else (),
        messages=read_messages(read.messages) if read.messages is not None else (),
        sampling=sampling_of(read),
        split_reasoning=False,
    )
    try:
        "".join([read.prompt or "", *(message.content for message in request.messages)]).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which `json.loads` lets through and no tokenizer takes
        raise RequestError("The text is not valid Unicode.", param=next(iter(asked))) from None
    return request


def _asked_at(frame: FrameType | None) -> TracebackType | None:
    """The line of the user's that is being run, as a traceback."""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "tailrace":
        frame = frame.f_back
    return TracebackType(None, frame, frame.f_lasti, frame.f_lineno) if frame is not None else None


def _first(error: BaseException) -> BaseException:
    if isinstance(error, BaseExceptionGroup):
        return _first(error.exceptions[0])
    return error if isinstance(error, Exception) else ModelError("The engine was stopped before it was loaded.")
