"""Separates a model's reasoning from its answer.

Reasoning models write their reasoning first, between two markers, which are usually `<think>` and `</think>`. The chat
template of a model contains its markers, or they are tokens of its vocabulary. Some templates end the prompt with the
opening marker, so the model's output begins inside the reasoning.

Reasoning is only at the beginning of an answer: a later marker is text. White space around the markers is dropped.

The answers of gpt-oss are a row of messages, each with a channel. Its format has `drops`: the heads and ends of
messages that are shown. They are left out, and after one of them the model may reason again. Heads of tool calls stay,
since they are part of the call (`calls`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tailrace.text.stops import overlap
from tailrace.types import ReasoningFormat

__all__ = [
    "SWITCHES",
    "THINK",
    "ReasoningSplitter",
    "end_of_reasoning",
    "find_format",
    "is_opened",
    "split_beginning",
]

SWITCHES = ("enable_thinking", "thinking")  # templates' names of the variable that switches reasoning on

_ANALYSIS, _FINAL, _PREAMBLE = (f"<|channel|>{name}<|message|>" for name in ("analysis", "final", "commentary"))
_NEXT = "<|start|>assistant"
THINK = ReasoningFormat(("<think>",), ("</think>",))
_FORMATS = (
    THINK,
    ReasoningFormat(("[THINK]",), ("[/THINK]",)),
    ReasoningFormat(("<seed:think>",), ("</seed:think>",)),
    ReasoningFormat(("<|START_THINKING|>",), ("<|END_THINKING|>",)),
    ReasoningFormat(
        (_ANALYSIS, _NEXT + _ANALYSIS),
        ("<|end|>",),
        drops=(_FINAL, _NEXT + _FINAL, _PREAMBLE, _NEXT + _PREAMBLE, "<|end|>"),
        then=_NEXT + _FINAL,
    ),
    ReasoningFormat(
        ("<|think|>", "<|begin|>assistant<|think|>"),
        ("<|end|>",),
        drops=("<|content|>", "<|begin|>assistant<|content|>", "<|begin|>assistant", "<|end|>"),
        then="<|begin|>assistant<|content|>",
    ),
    ReasoningFormat(("<|channel>thought",), ("<channel|>",)),
    ReasoningFormat(("<think:opensource>",), ("</think:opensource>",)),
    ReasoningFormat(("<mm:think>",), ("</mm:think>",)),
    ReasoningFormat(
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>",),
        drops=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
        then="<|open|>response<|sep|>",
    ),
    ReasoningFormat(("Here are my reasoning steps:",), ("[BEGIN FINAL RESPONSE]",)),
)
_MAX_SPACE = 64  # characters of white space before an opening marker


def find_format(template: str, pieces: Collection[bytes]) -> ReasoningFormat | None:
    """Return the reasoning markers of the model with this chat template and these tokens; None if it has none."""
    for known in _FORMATS:
        markers = (*known.opens, *known.closes)
        sign = known.drops[0] if known.drops else known.closes[-1]
        if sign in template or all(marker.encode() in pieces for marker in markers):
            return known
    return None


def is_opened(known: ReasoningFormat, prompt: str) -> bool:
    """Return whether a prompt ends with an opening marker."""
    return prompt.rstrip().endswith(known.opens)


def end_of_reasoning(known: ReasoningFormat) -> str:
    """Return the text that ends reasoning and begins the answer."""
    return f"{'' if known.drops else chr(10)}{known.closes[0]}{known.then}"


def split_beginning(known: ReasoningFormat, text: str) -> tuple[str, str, bool]:
    """Split the beginning of an answer into reasoning and text. Also returns whether it ends inside the reasoning."""
    splitter = ReasoningSplitter(known, {})
    parts = [splitter.push(text)]
    is_inside = splitter.is_reasoning
    parts.append(splitter.flush())
    reasoning, shown = ("".join(part) for part in zip(*parts, strict=True))
    return reasoning, shown, is_inside


class ReasoningSplitter:
    """Splits the output of one answer into reasoning and text. The result does not depend on how the output is divided
    into pieces. `spellings` has the text of the markers that are control tokens, by id; otherwise they would be
    invisible."""

    __slots__ = ("_heads", "_held", "_markers", "_state", "spellings")

    def __init__(self, known: ReasoningFormat, control_tokens: Mapping[str, int]) -> None:
        self._markers = known
        self._state = {"before": "before", "opened": "opened", "inside": "reasoning"}[known.begins]
        self._held = ""  # output that may still be part of a marker
        self._heads = (*known.opens, *known.drops) if known.drops else ()
        markers = "".join((*known.opens, *known.closes, *known.drops))
        self.spellings = {token_id: spelled for spelled, token_id in control_tokens.items() if spelled in markers}

    @property
    def is_reasoning(self) -> bool:
        """Whether the reasoning has begun and not ended."""
        return self._state in ("opened", "reasoning")

    @property
    def is_over(self) -> bool:
        """Whether all further output is text."""
        return self._state == "text" and not self._held and not self._heads

    def push(self, text: str) -> tuple[str, str]:
        """Add output. Returns the new reasoning and the new text."""
        self._held += text
        reasoning = shown = ""
        while True:
            state = self._state
            if state == "before":
                self._look_for_opening()
            elif state == "opened":
                self._skip_space("reasoning")
            elif state == "reasoning":
                reasoning += self._look_for_close()
            elif state == "closed":
                self._skip_space("text")
            else:
                shown += self._look_for_head()
            if self._state == state:
                return reasoning, shown

    def flush(self) -> tuple[str, str]:
        """Return the remaining reasoning and text after the end of the answer."""
        held, self._held = self._held, ""
        return (held, "") if self.is_reasoning else ("", held)

    def _look_for_opening(self) -> None:
        begun = self._held.lstrip()
        opens, closes = self._markers.opens, self._markers.closes
        marker = next((marker for marker in (*opens, *closes) if begun.startswith(marker)), None)
        if len(self._held) - len(begun) > _MAX_SPACE:
            self._state = "text"
        elif marker is not None:
            self._held = begun[len(marker) :]
            self._state = "opened" if marker in opens else "closed"
        elif not any(marker.startswith(begun) for marker in (*opens, *closes)):
            self._state = "text"

    def _skip_space(self, state: str) -> None:
        self._held = self._held.lstrip()
        if self._held:
            self._state = state

    def _look_for_close(self) -> str:
        """Return the reasoning before its closing marker, or before the possible beginning of one."""
        held = self._held
        found = [(start, marker) for marker in self._markers.closes if (start := held.find(marker)) >= 0]
        if found:
            start, marker = min(found)
            self._held, self._state = held[start + len(marker) :], "closed"
            return held[:start].rstrip()
        size = max(overlap(held, marker) for marker in self._markers.closes)
        shown = held[: len(held) - size].rstrip()
        self._held = held[len(shown) :]
        return shown

    def _look_for_head(self) -> str:
        """Return text without the markers that are left out, up to the possible beginning of one, or up to the next
        reasoning."""
        shown, markers = "", self._heads
        while found := [(start, -len(one), one) for one in markers if (start := self._held.find(one)) >= 0]:
            start, _, marker = min(found)
            rest = self._held[start:]
            if any(one.startswith(rest) and len(one) > len(rest) for one in markers):  # a longer one may be arriving
                break
            shown += self._held[:start]
            self._held = self._held[start + len(marker) :]
            if marker in self._markers.opens:
                self._state = "opened"
                return shown
        size = max((overlap(self._held, one) for one in markers), default=0)
        stop = len(self._held) - size
        shown, self._held = shown + self._held[:stop], self._held[stop:]
        return shown
