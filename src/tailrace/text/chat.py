"""Encodes chats, so that text in a message never becomes a control token.

The template renders its own control tokens and the users' text into one string. To distinguish them afterwards, control
tokens in messages are escaped before rendering: their first character is replaced with a private-use character that
does not occur in the chat. In the rendered string, the remaining control tokens belong to the template. All other text
is unescaped and encoded as plain text. Escaping keeps lengths, and other text stays unchanged, so templates that
inspect messages work as expected.

Templates that build control tokens from the role (`<|{{ role }}|>`) also work; the dialects refuse invalid roles.

Most templates omit the reasoning of earlier turns, and cannot render an answer that ends inside its reasoning. So if an
answer that is to be continued begins with reasoning, the template renders the chat before it, and the answer is
appended.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.text.calls import FORMATS, CallFormat
from tailrace.text.reasoning import end_of_reasoning, is_opened, split_beginning
from tailrace.text.template_forms import adapt, probe, strictest, turn_in
from tailrace.text.templates import ChatTemplate, TemplateError, Turn
from tailrace.text.tokenizer import Tokenizer
from tailrace.text.tool_prompt import has_tool_turns, write_results, write_tools
from tailrace.types import Attachment, Image, Message, ReasoningFormat, Segment, TemplateValue, ids_of

__all__ = ["ChatEncoder", "ChatFacts"]

_ANY_SYSTEM = Message("system", "You can call functions.")  # for templates that describe tools only below one
_TAIL_TOKENS = 64  # end of the prompt that is searched for a reasoning marker
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


@dataclass(frozen=True, slots=True)
class ChatFacts:
    """What a model's chat template can do. The defaults are those of a model without one."""

    can_chat: bool = False
    call_format: str = ""  # of tool calls, a name of `calls.FORMATS` or "any"; "": no tools, or an unknown format
    describes_tools: bool = False  # to the model
    splits_reasoning: bool = False  # reasoning is separated from the text
    takes_reasoning: bool = False  # of earlier answers
    value_names: frozenset[str] = frozenset()  # the variables that it uses
    shows_images: bool = False  # it marks where they are


class _Begun(NamedTuple):
    """The beginning of an answer."""

    reasoning: str
    text: str
    is_inside: bool  # it ends inside of the reasoning


class ChatEncoder:
    """Renders chats with one model's template and encodes them. Threads may share it.

    `reasoning` is how the model marks its reasoning; None if reasoning is not separated from the text. `calls` is how
    the model writes tool calls; without it, the template tells. The attribute `calls` is None if the model takes no
    tools, or its calls cannot be read. `encode` describes tools in plain text if the template does not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        reasoning: ReasoningFormat | None = None,
        calls: CallFormat | None = None,
    ) -> None:
        self.reasoning = reasoning
        self._tokenizer = tokenizer
        self._template = template
        self._forms = probe(template, tokenizer.control_tokens)
        self._describes_tools = template.takes_tools and self._forms.tools != "never"
        self.calls = calls or (self._forms.calls if self._describes_tools else None)
        self.facts = ChatFacts(
            can_chat=True,
            call_format=self.calls.name if self.calls is not None else "",
            describes_tools=self._describes_tools,
            splits_reasoning=reasoning is not None,
            takes_reasoning=bool(template.reasoning_name),
            value_names=frozenset(template.names),
            shows_images=self._forms.images,
        )
        spellings = set(tokenizer.control_tokens)
        self._control = re.compile(_any_of(spellings) if spellings else r"(?!)")
        self._control_starts = re.compile(f"(?={self._control.pattern}).", re.DOTALL)
        # The end of one text and the beginning of the next could also form a control token.
        self._beginnings = frozenset(text[:i] for text in spellings for i in range(1, len(text)))
        self._endings = frozenset(text[i:] for text in spellings for i in range(1, len(text)))
        self._longest = max(map(len, spellings), default=0)

    @property
    def shows_messages(self) -> bool:
        """Whether the template shows messages at all."""
        return self._forms.content != "none"

    def knows(self, name: str) -> bool:
        """Return whether the template uses a variable of this name."""
        return name in self._template.names

    def reasoning_after(
        self,
        messages: Sequence[Message],
        prompt: tuple[Segment, ...],
        *,
        continue_final: bool,
        without_reasoning: bool = False,
    ) -> ReasoningFormat | None:
        """Return how the reasoning of the answer is marked; None if no reasoning can follow. `prompt` is the result of
        `encode` for the same messages."""
        known = self.reasoning
        if known is None:
            return None
        if not continue_final:
            tail = b"".join(self._tokenizer.pieces[token_id] for token_id in ids_of(prompt)[-_TAIL_TOKENS:])
            return known._replace(begins="opened" if is_opened(known, tail.decode("utf-8", "replace")) else "before")
        begun = self._begun(messages[-1])
        if begun is not None:
            is_inside = begun.is_inside and not without_reasoning
            return known._replace(begins="inside" if begun.reasoning else "opened") if is_inside else None
        return None if messages[-1].content else known

    def _begun(self, message: Message) -> _Begun | None:
        """Return the parts of an answer that begins with reasoning, in its own field or in the text; otherwise None."""
        if self.reasoning is None:
            return None
        if message.reasoning:
            return _Begun(message.reasoning, message.content, not message.content)
        begun = _Begun(*split_beginning(self.reasoning, message.content))
        return begun if begun.reasoning or begun.is_inside else None

    def _plain(self, messages: Sequence[Message], tools: Sequence[Turn]) -> Sequence[Message]:
        """Return the messages with what the template does not show of tools as plain text."""
        if not (tools or has_tool_turns(messages)):
            return messages
        if not self._describes_tools:
            has_system = bool(tools) and self._forms.system != "none"
            return write_tools(messages, tools, self.calls or FORMATS["hermes"], has_system=has_system)
        if tools and self._forms.tools == "with system":
            adapted = adapt(messages, self._forms)  # which may make a question of the only system message
            if all(message.role != "system" for message in adapted):
                messages = [_ANY_SYSTEM, *adapted]
        return messages if self._forms.results else write_results(messages)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Turn] = (),
        values: Mapping[str, TemplateValue] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        without_reasoning: bool = False,
    ) -> tuple[Segment, ...]:
        """Return the prompt for these messages. With `continue_final`, the last message has no end. With
        `without_reasoning`, the prompt closes the reasoning that it would otherwise leave open.

        Equal to encoding the rendered text with special tokens, if no message contains the text of a special token.

        Raises: TemplateError from the template; RequestError for text with lone surrogates.
        """
        parts = self._render(messages, tools, values, add_generation_prompt, continue_final, without_reasoning)
        images = tuple(image for message in messages for image in message.images)
        if not images:
            return (tuple(self._tokenizer.encode_parts(parts)),)
        return self._with_images(parts, images)

    def _with_images(self, parts: Iterable[str | int], images: Sequence[Image]) -> tuple[Segment, ...]:
        """Encode a prompt with each placeholder replaced by the expansion of its image. The text of an expansion before
        its first and behind its last control token is encoded with the text around it.

        Raises: UnsupportedParameter if the template does not show each image, or the model has no such token.
        """
        written: list[str | int] = []
        spans: list[slice] = []  # of the images in `written`, from control token to control token
        rest = iter(images)
        placeholders = {self._tokenizer.control_tokens.get(image.placeholder) for image in images}
        for part in parts:
            image = next(rest, None) if part in placeholders else None
            if image is None:
                written.append(part)
                continue
            start = len(written)
            written += self._parts(image.expansion, {})
            marks = [at for at in range(start, len(written)) if isinstance(written[at], int)]
            if marks:
                spans.append(slice(marks[0], marks[-1] + 1))
        if len(spans) < len(images):
            raise UnsupportedParameter("The model's chat template does not show each image.", param="messages")
        tokens = {part for span in spans for part in written[span] if isinstance(part, int)}
        # The same control tokens are in the ids, in the same order.
        order = [at for at, part in enumerate(written) if part in tokens]
        ids = tuple(self._tokenizer.encode_parts(written))
        found = dict(zip(order, (at for at, token_id in enumerate(ids) if token_id in tokens), strict=True))
        segments: list[Segment] = []
        done = 0
        for image, span in zip(images, spans, strict=True):
            start, stop = found[span.start], found[span.stop - 1] + 1
            own = ids[start:stop]
            segments += [ids[done:start], Attachment(image.digest, image.media_type, len(own), own)]
            done = stop
        return tuple(segment for segment in (*segments, ids[done:]) if segment)

    def offsets(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int, int]]]:
        """Return the prompt as text, and the ids of `encode`, each with its range of characters in the text. Raises: as
        `encode`."""
        return self._tokenizer.offsets_of_parts(list(self._render(messages, (), None, True, False, False)))

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Turn],
        values: Mapping[str, TemplateValue] | None,
        add_generation_prompt: bool,
        continue_final: bool,
        without_reasoning: bool,
    ) -> Iterator[str | int]:
        """Return the prompt as a sequence of plain texts and ids of control tokens. Raises: TemplateError if the
        template refuses the messages, also in the strictest form."""
        rest = (tools, values, add_generation_prompt, continue_final, without_reasoning)
        plain = self._plain(messages, tools)
        last = [messages[-1]] if continue_final and self._begun(messages[-1]) is not None else []
        plain = plain[: len(plain) - len(last)]
        adapted = [*adapt(plain, self._forms), *last]
        try:
            return self._render_as(adapted, *rest)
        except TemplateError:
            strict = [*strictest(plain, self._forms), *last]
            if strict == adapted:
                raise
            with contextlib.suppress(TemplateError):
                return self._render_as(strict, *rest)
            raise

    def _render_as(
        self,
        messages: Sequence[Message],
        tools: Sequence[Turn],
        values: Mapping[str, TemplateValue] | None,
        add_generation_prompt: bool,
        continue_final: bool,
        without_reasoning: bool,
    ) -> Iterator[str | int]:
        """As `_render`, for messages in a form that this template should take. Raises: TemplateError."""
        turns = [turn_in(self._forms, message, self._template.reasoning_name) for message in messages]
        tools = tools if self._describes_tools else ()
        begun = self._begun(messages[-1]) if continue_final else None
        if begun is not None:
            turns[-1] = {"reasoning": begun.reasoning, "content": begun.text}
        texts = set(_texts_in(turns)).union(_texts_in(list(tools)))
        risks = {text: starts for text in texts if (starts := self._risks(text))}
        chars = {text[i] for text, starts in risks.items() for i in starts}
        disguise = self._choose_disguise(texts, chars) if chars else {}
        if disguise:
            swapped = {text: _swap(text, starts, disguise) for text, starts in risks.items()}
            turns, tools = _replace_texts(turns, swapped), _replace_texts(list(tools), swapped)
        if self._forms.arguments == "none":
            turns = [self._with_calls(turn) for turn in turns]
        rendered = self._template.render_turns(
            turns if begun is None else turns[:-1],
            tools=tools,
            values=values,
            add_generation_prompt=begun is not None or (add_generation_prompt and not continue_final),
        )
        if begun is not None:
            rendered = self._with_reasoning(rendered, turns[-1]["reasoning"])
            rendered += "" if begun.is_inside else self._close + turns[-1]["content"]
        elif continue_final:
            rendered = _open_end(rendered, "".join(_contents(turns[-1])))
        if without_reasoning and self._is_left_open(rendered, begun):
            rendered += self._close
        undo = {ord(private): char for char, private in disguise.items()}
        return self._parts(rendered, undo)

    def _with_calls(self, turn: Turn) -> Turn:
        """Return a message with its calls as the model writes them, for a template that leaves them out. Texts are
        already escaped, so only the markers become control tokens."""
        if self.calls is None or not turn.get("tool_calls"):
            return turn
        written = "".join(
            self.calls.write(call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False))
            for call in turn["tool_calls"]
        )
        if self._forms.content == "parts":
            return turn | {"content": [*turn["content"], {"type": "text", "text": written}]}
        return turn | {"content": turn["content"] + written}

    @property
    def _close(self) -> str:
        """The text between reasoning and answer."""
        assert self.reasoning is not None
        return end_of_reasoning(self.reasoning)

    def _with_reasoning(self, rendered: str, reasoning: str) -> str:
        """Return the prompt, which ends where the answer begins, with the answer's reasoning."""
        assert self.reasoning is not None
        opening = "" if is_opened(self.reasoning, rendered) else f"{self.reasoning.opens[0]}\n"
        return rendered + opening + reasoning

    def _is_left_open(self, rendered: str, begun: _Begun | None) -> bool:
        if begun is not None:
            return begun.is_inside
        return self.reasoning is not None and is_opened(self.reasoning, rendered)

    def _risks(self, text: str) -> set[int]:
        """Return the positions of the characters to escape: the first characters of all control tokens, also
        overlapping ones, and of possible parts of a control token at both ends."""
        starts: set[int] = set()
        if self._control.search(text):  # much faster than searching for overlapping ones
            starts.update(match.start() for match in self._control_starts.finditer(text))
        tail = max(0, len(text) - self._longest + 1)
        starts.update(i for i in range(tail, len(text)) if text[i:] in self._beginnings)
        if any(text[:i] in self._endings for i in range(1, min(self._longest, len(text) + 1))):
            starts.add(0)
        return starts

    def _choose_disguise(self, texts: Iterable[str], chars: set[str]) -> dict[str, str]:
        """Choose a private-use character for each of `chars` that is not in the chat, the template or the control
        tokens."""
        used = set(self._template.source).union(*self._tokenizer.control_tokens)
        used.update(*texts)
        unused = (chr(code) for code in chain(*_PRIVATE_USE) if chr(code) not in used)
        chosen = dict(zip(sorted(chars), unused, strict=False))
        if len(chosen) < len(chars):
            raise RequestError("The messages use every private-use character of Unicode.", param="messages")
        return chosen

    def _parts(self, rendered: str, undo: dict[int, str]) -> Iterator[str | int]:
        done = 0
        for match in self._control.finditer(rendered):
            yield rendered[done : match.start()].translate(undo)
            yield self._tokenizer.control_tokens[match[0]]
            done = match.end()
        yield rendered[done:].translate(undo)


def _texts_in(value: object) -> Iterator[str]:
    """Yield all strings in nested lists and dicts, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts_in(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _texts_in(item)


def _contents(turn: Turn) -> list[str]:
    """Return the text of a message, or the texts of its parts."""
    content = turn["content"]
    return [part.get("text", "") for part in content] if isinstance(content, list) else [content]


def _replace_texts(value: Any, swapped: dict[str, str]) -> Any:  # Any: gives back what it was given
    if isinstance(value, str):
        return swapped.get(value, value)
    if isinstance(value, list):
        return [_replace_texts(item, swapped) for item in value]
    if isinstance(value, dict):
        return {swapped.get(name, name): _replace_texts(item, swapped) for name, item in value.items()}
    return value


def _open_end(rendered: str, final: str) -> str:
    """Cut the rendered text at the end of the last message's text. Raises: TemplateError."""
    final = final.strip()  # templates may strip it
    start = rendered.rfind(final)
    if start < 0:
        raise TemplateError("The model's chat template cannot continue a message.", param="messages")
    return rendered[: start + len(final)]


def _swap(text: str, positions: set[int], disguise: dict[str, str]) -> str:
    if not positions:
        return text
    chars = list(text)
    for i in positions:
        chars[i] = disguise[chars[i]]
    return "".join(chars)


def _any_of(words: set[str]) -> str:
    """Return a pattern that matches the longest of `words`, as a trie. Some models have a thousand control tokens with
    the same prefix, and a plain alternation would try each of them at every occurrence of this prefix."""
    by_first: dict[str, set[str]] = {}
    for word in words - {""}:
        by_first.setdefault(word[0], set()).add(word[1:])
    branches = [re.escape(char) + _any_of(rests) for char, rests in sorted(by_first.items())]
    if not branches:
        return ""
    if len(branches) == 1 and "" not in words:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if '' in words else ''}"
