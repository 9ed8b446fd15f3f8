"""OpenAI's answers: chunks, and whole answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from tailrace.dialects.answers import EventStreamView, ToolsView, finite, logprobs_json, tokens_of
from tailrace.dialects.bodies import JsonBody, quote, to_json
from tailrace.dialects.completion_tokens import by_name, prompt_json, token_name, token_starts
from tailrace.dialects.facts import StreamFacts
from tailrace.dialects.wire import (
    Encoder,
    conformity_json,
    deltas_by_choice,
    failure_of,
    finished_end,
    progress_json,
    usage_json,
)
from tailrace.text.calls import CallPart, ToolCallReader
from tailrace.text.custom_calls import CustomCallReader
from tailrace.types import End, Event, FinishReason, PromptLogprob, PromptProgress, Released, TextDelta

__all__ = ["ChatChunkEncoder", "ChatView", "TextEncoder", "TextView"]

UsageShown: TypeAlias = Literal["never", "at_end", "always"]  # always: also in each chunk

_DONE = b"data: [DONE]\n\n"
_FINGERPRINT = "fp_tailrace"  # a text, since `text-generation` and other clients take no null
_OPENING = '{"role":"assistant","content":""}'


@dataclass(frozen=True, slots=True)
class ChatView(ToolsView):
    usage: UsageShown = "never"
    logprobs: bool = False
    shows_reasoning: bool = True
    has_older_calls: bool = False  # a call is a `function_call`
    prompt_logprobs: bool = False  # in whole answers
    shows_progress: bool = False
    has_content: bool = False  # also in a delta without text, as Tabby needs it in an infill

    @property
    def empty_delta(self) -> str:
        return '{"content":""}' if self.has_content else "{}"

    def open(self, facts: StreamFacts) -> Encoder:
        return ChatChunkEncoder(facts, self)


@dataclass(frozen=True, slots=True)
class TextView(EventStreamView):
    usage: UsageShown = "never"
    logprobs: bool = False
    echo: bool = False
    is_only_prompt: bool = False  # echo without an answer
    prompt_logprobs: bool = False  # in whole answers, besides those of echo
    shows_progress: bool = False

    def open(self, facts: StreamFacts) -> Encoder:
        return TextEncoder(facts, self)


class _Encoder(Encoder):
    """The common part of chat chunks and text chunks."""

    object_name: str
    id_prefix: str

    def __init__(self, facts: StreamFacts, view: ChatView | TextView) -> None:
        self.shows_progress = view.shows_progress
        self._facts = facts
        self._usage = view.usage
        self._logprobs = view.logprobs
        self._num_tokens = 0
        self._running = list(range(facts.record.num_choices))  # the choices without a finish_reason
        self._head = (
            f'data: {{"id":{quote(self.id_prefix + facts.record.stream_id)},"object":"{self.object_name}",'
            f'"created":{facts.created_s},"model":{quote(facts.record.model)},'
            f'"system_fingerprint":{quote(_FINGERPRINT)},"choices":['
        )
        self._tail = "}\n\n" if view.usage == "never" else ',"usage":null}\n\n'

    def _count(self, num_tokens: int) -> None:
        """Add tokens to the usage in the next chunks, if each chunk has it."""
        if self._usage == "always":
            self._num_tokens += num_tokens
            prompt, answer = self._facts.record.num_prompt_tokens, self._num_tokens
            self._tail = (
                f',"usage":{{"prompt_tokens":{prompt},"completion_tokens":{answer},'
                f'"total_tokens":{prompt + answer}}}}}\n\n'
            )

    def beat(self, usual: bytes) -> bytes:
        """Return a chunk without text: Qwen Code gives up after four minutes without a chunk, and a comment is none."""
        if not self._running:
            return usual
        self._count(0)
        return self._empty_chunk(self._running[0]).encode("ascii")

    def progress(self, progress: PromptProgress) -> bytes:
        """Return a chunk without text, as llama.cpp sends it."""
        self._count(0)
        shown = to_json(progress_json(progress)).decode()
        return self._empty_chunk(0, f',"prompt_progress":{shown}').encode("ascii")

    def _empty_chunk(self, choice: int, more: str = "") -> str:
        """Return a chunk without text; `more` are further fields of it."""
        raise NotImplementedError

    def _end(self, end: End | Released) -> bytes:
        if not isinstance(end, End) or end.status != "done":
            return _error_frame(end) + _DONE
        more = conformity_json(end) if end.schema_mismatches or self._usage != "never" else {}
        more |= {"usage": usage_json(end)} if self._usage != "never" else {}
        if not more:
            return _DONE
        return f"{self._head}],{to_json(more).decode()[1:]}\n\n".encode("ascii") + _DONE

    def _whole(self, end: End, choices: list[JsonBody], more: Mapping[str, object] = MappingProxyType({})) -> bytes:
        facts = self._facts
        return to_json(
            {
                "id": self.id_prefix + facts.record.stream_id,
                "object": self.object_name.removesuffix(".chunk"),
                "created": facts.created_s,
                "model": facts.record.model,
                "choices": choices,
                "usage": usage_json(end),
                **conformity_json(end),
                **more,
                "system_fingerprint": _FINGERPRINT,
            }
        )


class ChatChunkEncoder(_Encoder):
    """`chat.completion.chunk`s: the role first, then reasoning, content and tool calls, then the finish_reason
    alone."""

    object_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, facts: StreamFacts, view: ChatView) -> None:
        super().__init__(facts, view)
        self._opened: set[int] = set()
        self._pending: dict[int, list[TextDelta]] = {}  # by choice: deltas whose logprobs wait for the next chunk
        self._readers = [view.reader() for _ in range(facts.record.num_choices)]
        self._view = view
        self._custom: dict[tuple[int, int], CustomCallReader] = {}  # by choice and index of the call

    def encode(self, seq: int, event: Event | Released) -> bytes:
        if not isinstance(event, TextDelta):
            return self._end(event)
        choice, chunks = event.choice, ""
        if choice not in self._opened:
            self._count(0)
            chunks = self._empty_chunk(choice)
        self._count(len(event.token_ids))
        finish: str | None = event.finish_reason
        reader = self._readers[choice]
        if event.reasoning and self._view.shows_reasoning:
            logprobs = to_json(self._logprobs_json([event])).decode() if self._logprobs else "null"
            reasoning = quote(event.reasoning)
            chunks += self._chunk(
                choice, f'{{"reasoning_content":{reasoning},"reasoning":{reasoning}}}', logprobs, "null"
            )
        elif reader is not None:
            parts = reader.push(event.text) + (reader.flush(is_cut=finish == "length") if finish else [])
            self._pending.setdefault(choice, []).append(event)
            for delta in self._tool_deltas(choice, parts, is_over=finish is not None):
                chunks += self._chunk(choice, delta, self._pending_logprobs(choice), "null")
            finish = self._finish_of(finish, reader)
        elif event.text or self._logprobs:
            logprobs = to_json(self._logprobs_json([event])).decode() if self._logprobs else "null"
            chunks += self._chunk(choice, f'{{"content":{quote(event.text)}}}', logprobs, "null")
        if finish is not None:
            self._running.remove(choice)
            chunks += self._chunk(choice, self._view.empty_delta, self._pending_logprobs(choice), f'"{finish}"')
        return chunks.encode("ascii")

    def _empty_chunk(self, choice: int, more: str = "") -> str:
        is_new = choice not in self._opened
        self._opened.add(choice)
        return self._chunk(choice, _OPENING if is_new else self._view.empty_delta, "null", "null", more)

    def _pending_logprobs(self, choice: int) -> str:
        """Those of tokens whose text was held back until it was clear that it is no call, or is one."""
        deltas = self._pending.pop(choice, [])
        return to_json(self._logprobs_json(deltas)).decode() if self._logprobs and deltas else "null"

    def whole(self, events: Sequence[Event]) -> bytes:
        end = finished_end(events)
        choices = deltas_by_choice(events, self._facts.record.num_choices)
        more = {}
        if self._view.prompt_logprobs:
            more["prompt_logprobs"] = prompt_json(self._facts, 0, choices[0][0].prompt_logprobs)
        return self._whole(end, [self._whole_choice(*one) for one in enumerate(choices)], more)

    def _whole_choice(self, index: int, deltas: Sequence[TextDelta]) -> JsonBody:
        finish: str | None = deltas[-1].finish_reason
        message: JsonBody = {"role": "assistant", "content": "".join(delta.text for delta in deltas), "refusal": None}
        reasoning = "".join(delta.reasoning for delta in deltas)
        if reasoning and self._view.shows_reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        reader = self._readers[index]
        if reader is not None:
            parts = reader.push(message["content"]) + reader.flush(is_cut=finish == "length")
            finish = self._finish_of(finish, reader)
            message["content"] = "".join(part for part in parts if isinstance(part, str)) or None
            message |= self._whole_calls(index, [part for part in parts if isinstance(part, CallPart)])
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs_json(deltas) if self._logprobs else None,
            "finish_reason": finish,
        }

    def _whole_calls(self, choice: int, parts: Sequence[CallPart]) -> JsonBody:
        """Return the fields of a message with calls."""
        names = [part.name for part in parts if part.name]
        pieces: list[list[str]] = [[] for _ in names]
        for part in parts:
            pieces[part.index].append(part.arguments)
        calls: list[JsonBody] = []
        for index, (name, text) in enumerate(zip(names, map("".join, pieces), strict=True)):
            call: JsonBody = {"type": "function", "function": {"name": name, "arguments": text}}
            if name in self._view.custom_tools:
                custom = CustomCallReader()
                call = {"type": "custom", "custom": {"name": name, "input": custom.push(text) + custom.flush()}}
            calls.append({"id": self._call_id(choice, index), **call})
        if not calls:
            return {}
        return {"function_call": calls[0]["function"]} if self._view.has_older_calls else {"tool_calls": calls}

    def _call_id(self, choice: int, index: int) -> str:
        return f"call_{self._facts.record.stream_id}_{choice}_{index}"

    def _tool_deltas(self, choice: int, parts: Sequence[str | CallPart], *, is_over: bool) -> Iterator[str]:
        """Yield the deltas of an answer with tools, as JSON. `is_over` says that no more parts follow."""
        for part in parts:
            if isinstance(part, str):
                yield f'{{"content":{quote(part)}}}'
            elif part.name in self._view.custom_tools:
                self._custom[choice, part.index] = CustomCallReader()
                yield self._call(choice, part.index, "custom", {"name": part.name, "input": ""}, is_first=True)
            elif (choice, part.index) in self._custom:
                text = self._custom[choice, part.index].push(part.arguments)
                if text:
                    yield self._call(choice, part.index, "custom", {"input": text})
            elif part.name:
                yield self._call(choice, part.index, "function", {"name": part.name, "arguments": ""}, is_first=True)
            else:
                yield self._call(choice, part.index, "function", {"arguments": part.arguments})
        if is_over:
            for (of, index), custom in self._custom.items():
                if of == choice and (rest := custom.flush()):
                    yield self._call(choice, index, "custom", {"input": rest})

    def _call(self, choice: int, index: int, kind: str, part: JsonBody, *, is_first: bool = False) -> str:
        if self._view.has_older_calls:
            return to_json({"function_call": part}).decode()
        call: JsonBody = {"index": index, kind: part}
        if is_first:
            call = {"index": index, "id": self._call_id(choice, index), "type": kind, kind: part}
        return to_json({"tool_calls": [call]}).decode()

    def _finish_of(self, finish: str | None, reader: ToolCallReader) -> str | None:
        """Return the finish_reason of an answer with tools. With "length" a single call may still be complete: after a
        forced call only the closing brace can be missing."""
        has_called = reader.num_calls and finish == "stop"
        if not has_called and not (finish == "length" and reader.is_over):
            return finish
        return "function_call" if self._view.has_older_calls else "tool_calls"

    def _chunk(self, choice: int, delta: str, logprobs: str, finish: str, more: str = "") -> str:
        return (
            f'{self._head}{{"index":{choice},"delta":{delta},"logprobs":{logprobs},"finish_reason":{finish}}}]'
            f"{more}{self._tail}"
        )

    def _logprobs_json(self, deltas: Sequence[TextDelta]) -> JsonBody:
        content = [one for delta in deltas for one in logprobs_json(self._facts.vocabulary, delta)]
        return {"content": content, "refusal": None}


class TextEncoder(_Encoder):
    """`text_completion`s."""

    object_name = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, facts: StreamFacts, view: TextView) -> None:
        super().__init__(facts, view)
        self._view = view
        self._each = facts.record.num_choices // max(len(facts.record.prompts), 1)  # answers to each prompt
        self._offsets = [0] * facts.record.num_choices
        self._begun: set[int] = set()  # choices whose prompt was shown

    def encode(self, seq: int, event: Event | Released) -> bytes:
        if not isinstance(event, TextDelta):
            return self._end(event)
        self._count(len(event.token_ids))
        choice, is_first = event.choice, event.choice not in self._begun
        self._begun.add(choice)
        event = self._shown(event)
        text = (self._echo(choice) if is_first else "") + event.text
        if not text and not self._logprobs and event.finish_reason is None:
            return b""
        finish = "null"
        if event.finish_reason is not None:
            self._running.remove(choice)
            finish = f'"{event.finish_reason}"'
        logprobs = "null"
        if self._logprobs:
            prompt = self._prompt_tokens(choice, event) if is_first else []
            logprobs = to_json(self._logprobs_json(prompt, [event], self._offsets[choice] + len(text))).decode()
            self._offsets[choice] += len(text)
        return self._chunk(choice, text, logprobs, finish).encode("ascii")

    def _empty_chunk(self, choice: int, more: str = "") -> str:
        return self._chunk(choice, "", "null", "null", more)

    def _chunk(self, choice: int, text: str, logprobs: str, finish: str, more: str = "") -> str:
        return (
            f'{self._head}{{"text":{quote(text)},"index":{choice},"logprobs":{logprobs},"finish_reason":{finish}}}]'
            f"{more}{self._tail}"
        )

    def whole(self, events: Sequence[Event]) -> bytes:
        end = finished_end(events)
        choices = deltas_by_choice(events, self._facts.record.num_choices)
        return self._whole(end, [self._whole_choice(*one) for one in enumerate(choices)])

    def _whole_choice(self, index: int, deltas: Sequence[TextDelta]) -> JsonBody:
        deltas = [self._shown(delta) for delta in deltas]
        text = self._echo(index) + "".join(delta.text for delta in deltas)
        choice: JsonBody = {"text": text, "index": index, "logprobs": None, "finish_reason": deltas[-1].finish_reason}
        if self._logprobs:
            choice["logprobs"] = self._logprobs_json(self._prompt_tokens(index, deltas[0]), deltas, len(text))
        if self._view.prompt_logprobs:
            choice["prompt_logprobs"] = prompt_json(self._facts, index // self._each, deltas[0].prompt_logprobs)
        return choice

    def _shown(self, delta: TextDelta) -> TextDelta:
        """Return an event without what is not shown of it."""
        if not self._view.is_only_prompt:
            return delta
        finish: FinishReason | None = "length" if delta.finish_reason is not None else None
        return TextDelta("", (), delta.choice, finish_reason=finish, prompt_logprobs=delta.prompt_logprobs)

    def _echo(self, choice: int) -> str:
        return self._facts.record.prompts[choice // self._each].text if self._view.echo else ""

    def _prompt_tokens(self, choice: int, first: TextDelta) -> list[tuple[int, PromptLogprob | None]]:
        """Return the tokens of an echo, each with its logprob. The first one has none."""
        if not self._view.echo:
            return []
        ids = self._facts.record.prompts[choice // self._each].ids
        return list(zip(ids, (None, *first.prompt_logprobs), strict=True))

    def _logprobs_json(
        self, prompt: Sequence[tuple[int, PromptLogprob | None]], deltas: Sequence[TextDelta], stop: int
    ) -> JsonBody:
        """Return the tokens of an echo and of the answer. `stop` is the end of their text."""
        tokens, logprobs, offsets, alternatives, vocabulary = [], [], [], [], self._facts.vocabulary
        offset = stop - sum(len(delta.text) for delta in deltas)
        for (token_id, known), start in zip(
            prompt, token_starts(vocabulary, [one for one, _ in prompt], offset), strict=True
        ):
            tokens.append(token_name(vocabulary, token_id))
            offsets.append(start)
            logprobs.append(None if known is None else finite(known.logprob))
            alternatives.append(
                None if known is None else by_name(vocabulary, dict((*known.top, (token_id, known.logprob))))
            )
        for delta in deltas:
            for token_id, logprob, top in tokens_of(delta):
                tokens.append(token_name(vocabulary, token_id))
                logprobs.append(finite(logprob))
                offsets.append(offset)
                alternatives.append(by_name(vocabulary, dict((*top, (token_id, logprob)))))
            offset += len(delta.text)
        has_alternatives = any(delta.top_logprobs for delta in deltas) or any(one and one.top for _, one in prompt)
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": alternatives if has_alternatives else None,
            "text_offset": offsets,
        }


def _error_frame(end: End | Released) -> bytes:
    """Return a failure after the headers, in the form that OpenAI's and Hugging Face's clients raise."""
    error = failure_of(end)
    body = {"message": error.message, "type": "server_error", "code": error.code, "param": None, **error.cut_fields}
    return b"data: " + to_json({"error": body, "error_type": "generation"}) + b"\n\n"
