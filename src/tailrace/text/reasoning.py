"""Tells what a model thinks before its answer from the answer.

Models that think aloud write their reasoning first, between two markers: `<think>` and `</think>` in most. A model's
chat template shows which it uses: it writes them, or looks for them in earlier turns. Else the vocabulary does, where
each is a token. Some templates end the prompt with the first marker, so that the answer begins inside.

Reasoning is at the beginning of an answer or nowhere: a marker that comes later is text. White space around the markers
is part of neither.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tailrace.types import ReasoningFormat

__all__ = ["SWITCHES", "THINK", "ReasoningSplitter", "find_format", "is_opened", "split_beginning"]

SWITCHES = ("enable_thinking", "thinking")  # what templates call the value that says whether to think

_HARMONY = "<|channel|>final<|message|>"  # gpt-oss names the channel of each message
THINK = ReasoningFormat(("<think>",), ("</think>",))
_FORMATS = (
    THINK,
    ReasoningFormat(("[THINK]",), ("[/THINK]",)),
    ReasoningFormat(("<seed:think>",), ("</seed:think>",)),
    ReasoningFormat(("<|START_THINKING|>",), ("<|END_THINKING|>",)),
    ReasoningFormat(("<|channel|>analysis<|message|>",), (f"<|end|><|start|>assistant{_HARMONY}", _HARMONY)),
)
_FIRST_CHARACTERS = 64  # of white space, behind which no marker is looked for


def find_format(template: str, pieces: Collection[bytes]) -> ReasoningFormat | None:
    """The markers of the model with this chat template and these tokens; None for a model that has none."""
    for known in _FORMATS:
        markers = (*known.opens, *known.closes)
        if known.closes[-1] in template or all(marker.encode() in pieces for marker in markers):
            return known
    return None


def is_opened(known: ReasoningFormat, prompt: str) -> bool:
    """Whether a prompt ends with the marker behind which reasoning begins."""
    return prompt.rstrip().endswith(known.opens)


def split_beginning(known: ReasoningFormat, text: str) -> tuple[str, str, bool]:
    """The reasoning in the beginning of an answer, the text in it, and whether it ends inside of the reasoning."""
    splitter = ReasoningSplitter(known, {})
    parts = [splitter.push(text)]
    is_inside = splitter.is_reasoning
    parts.append(splitter.flush())
    reasoning, shown = ("".join(part) for part in zip(*parts, strict=True))
    return reasoning, shown, is_inside


class ReasoningSplitter:
    """Splits the text of one answer into reasoning and text. However it is cut into pieces, what comes out is the same
    when it is put together. `spellings` are the control tokens of the markers by id: they show no text otherwise."""

    __slots__ = ("_held", "_markers", "_state", "spellings")

    def __init__(self, known: ReasoningFormat, control_tokens: Mapping[str, int]) -> None:
        self._markers = known
        self._state = {"before": "before", "opened": "opened", "inside": "reasoning"}[known.begins]
        self._held = ""  # what cannot be told yet
        markers = "".join((*known.opens, *known.closes))
        self.spellings = {token_id: spelled for spelled, token_id in control_tokens.items() if spelled in markers}

    @property
    def is_reasoning(self) -> bool:
        """The reasoning has begun and not ended."""
        return self._state in ("opened", "reasoning")

    @property
    def is_over(self) -> bool:
        """All that comes is text."""
        return self._state == "text" and not self._held

    def push(self, text: str) -> tuple[str, str]:
        """The reasoning and the text that it adds."""
        self._held += text
        reasoning = ""
        if self._state == "before":
            self._look_for_opening()
        if self._state == "opened":
            self._skip_space("reasoning")
        if self._state == "reasoning":
            reasoning = self._look_for_close()
        if self._state == "closed":
            self._skip_space("text")
        if self._state != "text":
            return reasoning, ""
        shown, self._held = self._held, ""
        return reasoning, shown

    def flush(self) -> tuple[str, str]:
        """What is left when the answer has ended."""
        held, self._held = self._held, ""
        return (held, "") if self.is_reasoning else ("", held)

    def _look_for_opening(self) -> None:
        begun = self._held.lstrip()
        opens, closes = self._markers.opens, self._markers.closes
        marker = next((marker for marker in (*opens, *closes) if begun.startswith(marker)), None)
        if len(self._held) - len(begun) > _FIRST_CHARACTERS:
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
        """The reasoning up to its end, or up to what could become that."""
        held = self._held
        found = [(start, marker) for marker in self._markers.closes if (start := held.find(marker)) >= 0]
        if found:
            start, marker = min(found)
            self._held, self._state = held[start + len(marker) :], "closed"
            return held[:start].rstrip()
        size = max(_overlap(held, marker) for marker in self._markers.closes)
        shown = held[: len(held) - size].rstrip()
        self._held = held[len(shown) :]
        return shown


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of a text could be the beginning of the marker."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-size:])), 0)
