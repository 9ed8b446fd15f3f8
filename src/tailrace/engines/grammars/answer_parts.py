"""Converts the parts of an answer (`text.calls.written`) to llguidance's language."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from tailrace.text.calls.written import AnswerParts, Part

__all__ = ["rules_of"]

_ANY_TEXT = "/(?s:.*)/"


def rules_of(
    answer: AnswerParts, write_schema: Callable[[Any], str], write_regex: Callable[[str], str], *, as_text: bool
) -> str:
    """Return the rules of an answer. The functions return a schema and a regular expression as rules. With `as_text`,
    control tokens are the characters of their names: for vocabularies that do not have them."""
    return _Rules({} if as_text else answer.tokens, write_schema, write_regex).of(answer)


class _Rules:
    def __init__(
        self, tokens: dict[str, int], write_schema: Callable[[Any], str], write_regex: Callable[[str], str]
    ) -> None:
        self._tokens = tokens
        self._by_token = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")
        self._write_schema = write_schema
        self._write_regex = write_regex
        self._rules: list[str] = []

    def of(self, answer: AnswerParts) -> str:
        calls = [self._rule(self._sequence(parts)) for parts in answer.calls]
        call = self._rule(" | ".join(calls))
        more = "" if answer.between is None else f"({self._text(answer.between)} {call})*"
        start = f"{self._text(answer.before)} {call} {more} {self._text(answer.after)}"
        if answer.answer is not None:
            start += f" | {self._rule(self._write_schema(answer.answer))}"
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _rule(self, body: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _sequence(self, parts: Sequence[Part]) -> str:
        return " ".join(self._part(part) for part in parts if part) or '""'

    def _part(self, part: Part) -> str:
        if isinstance(part, str):
            return self._text(part)
        if "json" in part:
            return self._rule(self._write_schema(part["json"]))
        if "any" in part:
            return self._rule(" | ".join(map(self._text, part["any"])))
        if "maybe" in part:
            return f"({self._sequence(part['maybe'])})?"
        if "listed" in part:
            return self._listed(part["listed"])
        if "regex" in part:
            return self._rule(self._write_regex(part["regex"]))
        if "either" in part:
            return self._rule(" | ".join(map(self._sequence, part["either"])))
        if "repeat" in part:
            return f"({self._sequence(part['repeat'])})*"
        if "free" in part:
            return self._rule(_ANY_TEXT)
        return self._until(part["until"])

    def _until(self, text: str) -> str:
        """A control token is no text, so any text ends before it."""
        if self._by_token.match(text):
            return f"{self._rule(_ANY_TEXT)} {self._text(text)}"
        self._rules.append(f"r{len(self._rules)}[suffix={json.dumps(text)}]: {_ANY_TEXT}")
        return f"r{len(self._rules) - 1}"

    def _listed(self, members: Sequence[tuple[bool, Sequence[Part]]]) -> str:
        behind = first = '""'  # what may follow a member, and what may come first
        for is_required, parts in reversed(members):
            member = self._rule(f"{self._sequence(parts)} {behind}")
            first = member if is_required else self._rule(f"{member} | {first}")
            following = self._rule(f'", " {member}')
            behind = following if is_required else self._rule(f"{following} | {behind}")
        return first

    def _text(self, text: str) -> str:
        found, start = [], 0
        for match in self._by_token.finditer(text):
            found += [text[start : match.start()], match]
            start = match.end()
        return " ".join(
            f"<[{self._tokens[part[0]]}]>" if isinstance(part, re.Match) else json.dumps(part)
            for part in (*found, text[start:])
            if part
        )
