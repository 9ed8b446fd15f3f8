"""A small agent over each wire, through the wire's official client.

It does what the agents of packages do: it sends the conversation, runs the calls of the answer, adds their results, and
goes on until an answer has no call. It keeps what it ran, so that tests see a call that ran twice. A broken connection
makes it repeat the request; an answer that was cut off and a prompt that is too long are handled as agents do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import httpx
import httpx2
import ollama
from anthropic import Anthropic, BadRequestError
from anthropic import APIConnectionError as AnthropicConnectionError
from openai import APIConnectionError, APIError, OpenAI
from tests.waiting import LONG_S

__all__ = ["WIRES", "Agent", "Answer", "Call", "ConnectionLost", "Overflow", "Step"]

Json: TypeAlias = dict[str, Any]  # Any: JSON

_PARAMETERS: dict[str, Json] = {
    "list_folder": {},
    "write_file": {"path": {"type": "string"}, "content": {"type": "string"}},
    "read_file": {"path": {"type": "string"}},
}
_SCHEMAS = {name: {"type": "object", "properties": fields} for name, fields in _PARAMETERS.items()}


@dataclass(frozen=True, slots=True)
class Call:
    call_id: str
    name: str
    arguments: str  # JSON, or its beginning


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    calls: tuple[Call, ...] = ()
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a conversation: what the user says, an answer, or the result of a call."""

    text: str = ""
    answer: Answer | None = None
    call: Call | None = None  # whose result `text` is


class ConnectionLost(Exception):
    """The answer broke off."""


class Overflow(Exception):
    """The prompt is too long, in the words or with the code by which agents know it."""


class Wire(Protocol):
    def __init__(self, url: str) -> None: ...

    def ask(self, steps: list[Step], *, most: int, on_text: Callable[[], None]) -> Answer:
        """Send a conversation, and read its answer. Calls `on_text` for each piece of text.

        Raises: ConnectionLost, Overflow.
        """

    def close(self) -> None: ...


class Chats:
    def __init__(self, url: str) -> None:
        self._client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LONG_S)

    def close(self) -> None:
        self._client.close()

    def ask(self, steps: list[Step], *, most: int, on_text: Callable[[], None]) -> Answer:
        tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in _SCHEMAS.items()]
        body: Json = {"model": "coder", "messages": [self._message(step) for step in steps], "tools": tools}
        text, finish = "", ""
        calls: list[list[str]] = []
        try:
            for chunk in self._client.chat.completions.create(**body, max_tokens=most, stream=True):
                delta = chunk.choices[0].delta
                finish = chunk.choices[0].finish_reason or finish
                text += delta.content or ""
                for part in delta.tool_calls or ():
                    assert part.function is not None
                    if part.id:
                        assert part.index == len(calls)
                        calls.append([part.id, part.function.name or "", ""])
                    calls[part.index][2] += part.function.arguments or ""
                if delta.content:
                    on_text()
        except (APIConnectionError, httpx2.TransportError) as error:
            raise ConnectionLost from error
        except APIError as error:
            raise (Overflow if error.code == "context_length_exceeded" else ConnectionLost) from error
        return Answer(text, tuple(Call(*call) for call in calls), finish == "length")

    def _message(self, step: Step) -> Json:
        if step.answer is not None:
            calls = [
                {"id": one.call_id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for one in step.answer.calls
            ]
            said: Json = {"role": "assistant", "content": step.answer.text or None}
            return said | ({"tool_calls": calls} if calls else {})
        if step.call is not None:
            return {"role": "tool", "tool_call_id": step.call.call_id, "content": step.text}
        return {"role": "user", "content": step.text}


class Responses:
    """Like Codex, it sends the whole conversation, and has nothing stored."""

    def __init__(self, url: str) -> None:
        self._client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LONG_S)

    def close(self) -> None:
        self._client.close()

    def ask(self, steps: list[Step], *, most: int, on_text: Callable[[], None]) -> Answer:
        tools = [{"type": "function", "name": name, "parameters": schema} for name, schema in _SCHEMAS.items()]
        items = [item for step in steps for item in self._items(step)]
        body: Json = {"model": "coder", "input": items, "tools": tools, "max_output_tokens": most, "store": False}
        text, calls, last = "", [], ""
        try:
            for event in self._client.responses.create(**body, stream=True):
                last = event.type
                if event.type == "response.failed":
                    code = event.response.error and str(event.response.error.code)
                    raise Overflow if code == "context_length_exceeded" else ConnectionLost
                if event.type == "response.output_text.delta":
                    text += event.delta
                    on_text()
                if event.type == "response.output_item.done" and event.item.type == "function_call":
                    calls.append(Call(event.item.call_id, event.item.name, event.item.arguments))
        except (APIError, httpx2.TransportError) as error:
            raise ConnectionLost from error
        if last not in ("response.completed", "response.incomplete"):
            raise ConnectionLost
        return Answer(text, tuple(calls), last == "response.incomplete")

    def _items(self, step: Step) -> list[Json]:
        if step.answer is not None:
            said = [{"type": "message", "role": "assistant", "content": step.answer.text}] if step.answer.text else []
            return said + [
                {"type": "function_call", "call_id": one.call_id, "name": one.name, "arguments": one.arguments}
                for one in step.answer.calls
            ]
        if step.call is not None:
            return [{"type": "function_call_output", "call_id": step.call.call_id, "output": step.text}]
        return [{"type": "message", "role": "user", "content": step.text}]


class Messages:
    def __init__(self, url: str) -> None:
        self._client = Anthropic(base_url=url, api_key="none", max_retries=0, timeout=LONG_S)

    def close(self) -> None:
        self._client.close()

    def ask(self, steps: list[Step], *, most: int, on_text: Callable[[], None]) -> Answer:
        tools: Any = [{"name": name, "input_schema": schema} for name, schema in _SCHEMAS.items()]
        turns: list[Any] = []
        for step in steps:
            role, blocks = self._blocks(step)
            if turns and turns[-1]["role"] == role:
                turns[-1]["content"] += blocks
            else:
                turns.append({"role": role, "content": blocks})
        try:
            with self._client.messages.stream(model="coder", messages=turns, tools=tools, max_tokens=most) as stream:
                for _ in stream.text_stream:
                    on_text()
                message = stream.get_final_message()
        except BadRequestError as error:
            raise (Overflow if "prompt is too long" in error.message else ConnectionLost) from error
        except (AnthropicConnectionError, httpx2.TransportError) as error:
            raise ConnectionLost from error
        if message.stop_reason is None:
            raise ConnectionLost
        text = "".join(block.text for block in message.content if block.type == "text")
        calls = [Call(one.id, one.name, json.dumps(one.input)) for one in message.content if one.type == "tool_use"]
        return Answer(text, tuple(calls), message.stop_reason == "max_tokens")

    def _blocks(self, step: Step) -> tuple[str, list[Json]]:
        if step.answer is not None:
            said: list[Json] = [{"type": "text", "text": step.answer.text}] if step.answer.text else []
            calls = [
                {"type": "tool_use", "id": one.call_id, "name": one.name, "input": json.loads(one.arguments)}
                for one in step.answer.calls
            ]
            return "assistant", said + calls
        if step.call is not None:
            return "user", [{"type": "tool_result", "tool_use_id": step.call.call_id, "content": step.text}]
        return "user", [{"type": "text", "text": step.text}]


class Ollama:
    def __init__(self, url: str) -> None:
        self._client = ollama.Client(url, timeout=LONG_S)

    def close(self) -> None:
        self._client.close()  # type: ignore[no-untyped-call]

    def ask(self, steps: list[Step], *, most: int, on_text: Callable[[], None]) -> Answer:
        tools: Any = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in _SCHEMAS.items()]
        messages = [self._message(step) for step in steps]
        text, reason = "", None
        calls: list[Call] = []
        try:
            chunks = self._client.chat("coder", messages, tools=tools, options={"num_predict": most}, stream=True)
            for chunk in chunks:
                reason = chunk.done_reason
                text += chunk.message.content or ""
                for one in chunk.message.tool_calls or ():
                    calls.append(
                        Call(f"{len(steps)}.{len(calls)}", one.function.name, json.dumps(one.function.arguments))
                    )
                if chunk.message.content:
                    on_text()
        except ollama.ResponseError as error:
            is_overflow = "exceed" in error.error and "context" in error.error
            raise (Overflow if is_overflow else ConnectionLost) from error
        except (httpx.TransportError, ConnectionError) as error:
            raise ConnectionLost from error
        if reason is None:
            raise ConnectionLost
        return Answer(text, tuple(calls), reason == "length")

    def _message(self, step: Step) -> Json:
        if step.answer is not None:
            calls = [{"function": {"name": o.name, "arguments": json.loads(o.arguments)}} for o in step.answer.calls]
            return {"role": "assistant", "content": step.answer.text, "tool_calls": calls}
        if step.call is not None:
            return {"role": "tool", "tool_name": step.call.name, "content": step.text}
        return {"role": "user", "content": step.text}


WIRES: Mapping[str, type[Wire]] = {
    "chats": Chats,
    "responses": Responses,
    "messages": Messages,
    "ollama": Ollama,
}


@dataclass
class Agent:
    """Works in a folder. `on_text` is called once, at the first piece of text; `revive` after a broken answer."""

    wire: Wire
    folder: Path
    most: int = 4096  # tokens of an answer
    on_text: Callable[[], None] | None = None
    revive: Callable[[], None] | None = None
    ran: list[Call] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    num_repeated: int = 0
    num_compacted: int = 0

    def work(self, task: str, *, most_turns: int = 60) -> str:
        """Return the text of the answer without a call."""
        steps = [Step(task)]
        for _ in range(most_turns):
            try:
                answer = self.wire.ask(steps, most=self.most, on_text=self._once)
            except ConnectionLost:
                assert self.revive is not None
                self.num_repeated += 1
                self.revive()
                continue
            except Overflow:
                steps = self._compacted(steps)
                continue
            self.answers.append(answer)
            if answer.is_cut and any(step.call for step in steps):
                steps = self._compacted(steps)  # the room is nearly used up
                continue
            steps.append(Step(answer=answer))
            if answer.is_cut:
                steps += [Step("The call was cut off and did not run.", call=call) for call in answer.calls]
                steps.append(Step("Your answer was cut off. Write less."))
            elif answer.calls:
                steps += [Step(self._run(call), call=call) for call in answer.calls]
            else:
                return answer.text
        raise AssertionError("it does not end")

    def _compacted(self, steps: list[Step]) -> list[Step]:
        self.num_compacted += 1
        last = next(step.text for step in reversed(steps) if step.call)
        return [Step(f"The earlier conversation was shortened. Its last result: {last}")]

    def _once(self) -> None:
        if self.on_text is not None:
            hook, self.on_text = self.on_text, None
            hook()

    def _run(self, call: Call) -> str:
        self.ran.append(call)
        given: dict[str, str] = json.loads(call.arguments)
        if call.name == "list_folder":
            return "\n".join(sorted(path.name for path in self.folder.iterdir()))
        path = self.folder / given["path"]
        if call.name == "read_file":
            return path.read_text()
        path.write_text(given["content"])
        return f"Wrote {path.name}."
