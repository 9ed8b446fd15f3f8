"""Converts regular expressions to deterministic automata, so that matching takes bounded time.

xgrammar, which is part of OpenVINO GenAI, follows all parses of an ambiguous repetition at once: `(\\w+\\s?)+\\.` took
0.2 s for every token, and `([^,]*,?)*;` took longer with every token (openvino-genai 2026.4.1, two cores). A
deterministic automaton has only one parse: 0.5 ms per token for every pattern. The cost is the number of states
(`.*a.{10}` has 2,048), which is known and limited before an engine gets the grammar.

The syntax is what `dialects.grammars` accepts: no look-around, no back-references, anchors only at the ends. `.` is any
character except a newline; `\\d`, `\\w` and `\\s` are ASCII sets. A pattern has to match the whole text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

__all__ = [
    "MAX_STATES",
    "NOT_COMPILED",
    "NO_ANSWER",
    "TOO_MUCH",
    "Automaton",
    "GrammarError",
    "Ranges",
    "of_choices",
    "of_regex",
]

MAX_STATES = 2_048
_MAX_POSITIONS = 8_192  # characters and sets of a pattern, with its repetitions expanded
_MAX_NFA_STATES = 16 * _MAX_POSITIONS  # groups and repetitions have states of their own
_MAX_WORK = 200_000  # total size of all state sets, which decides the time

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # (first, last) code points; sorted and disjoint

_FIRST, _LAST = 1, 0x10FFFF  # no pattern allows NUL
_SURROGATES = (0xD800, 0xDFFF)
_NAMED = {"n": 10, "r": 13, "t": 9}
_TOO_LONG = "it is too long when its repetitions are expanded"


# Reasons why a grammar cannot be used.
NO_ANSWER = "no answer could conform to it"
NOT_COMPILED = "it cannot be compiled"
TOO_MUCH = "compiling it takes too much time or memory"


class GrammarError(ValueError):
    """The grammar cannot be used. The message is the reason, and does not quote the grammar."""


class Automaton(NamedTuple):
    """A deterministic automaton. State 0 is the start. `moves[state]` lists character ranges and the next state; each
    character has at most one next state."""

    moves: list[list[tuple[Ranges, int]]]
    accepting: list[bool]


def of_regex(pattern: str) -> Automaton:
    """Convert a pattern. Raises: GrammarError if its syntax is invalid, it has too many states, or it matches
    nothing."""
    text = pattern.removeprefix("^")
    if re.search(r"(?<!\\)(\\\\)*\$\Z", text):
        text = text[:-1]
    nfa = _Nfa()
    start, end = _Parser(text, nfa).parse()
    return _determinise(nfa, start, end)


def of_choices(texts: Iterable[str]) -> Automaton:
    """Make an automaton that matches exactly these texts. Raises: GrammarError."""
    nfa = _Nfa()
    start, end = nfa.state(), nfa.state()
    for text in texts:
        last = start
        for character in text:
            following = nfa.state()
            nfa.move(last, ((ord(character), ord(character)),), following)
            last = following
        nfa.skip(last, end)
    return _determinise(nfa, start, end)


class _Nfa:
    """A nondeterministic automaton with moves on character sets and empty moves (`skips`)."""

    def __init__(self) -> None:
        self.moves: list[list[tuple[Ranges, int]]] = []
        self.skips: list[list[int]] = []
        self.num_positions = 0

    def state(self) -> int:
        if len(self.moves) == _MAX_NFA_STATES:
            raise GrammarError(_TOO_LONG)
        self.moves.append([])
        self.skips.append([])
        return len(self.moves) - 1

    def move(self, source: int, ranges: Ranges, target: int) -> None:
        self.num_positions += 1
        if self.num_positions > _MAX_POSITIONS:
            raise GrammarError(_TOO_LONG)
        self.moves[source].append((ranges, target))

    def skip(self, source: int, target: int) -> None:
        self.skips[source].append(target)


class _Parser:
    """Thompson's construction while parsing. A counted part is parsed again for each repetition."""

    def __init__(self, text: str, nfa: _Nfa) -> None:
        self._text = text
        self._nfa = nfa
        self._at = 0

    def parse(self) -> tuple[int, int]:
        part = self._alternatives()
        if self._at < len(self._text):
            raise GrammarError("a closing parenthesis has no opening one")
        return part

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _alternatives(self) -> tuple[int, int]:
        start, end = self._nfa.state(), self._nfa.state()
        while True:
            first, last = self._sequence()
            self._nfa.skip(start, first)
            self._nfa.skip(last, end)
            if self._peek() != "|":
                return start, end
            self._at += 1

    def _sequence(self) -> tuple[int, int]:
        start = last = self._nfa.state()
        while self._peek() not in ("", "|", ")"):
            first, end = self._repeated()
            self._nfa.skip(last, first)
            last = end
        return start, last

    def _repeated(self) -> tuple[int, int]:
        begin = self._at
        part = self._atom()
        behind_atom = self._at
        least, most = self._count()
        behind = self._at
        if (least, most) == (1, 1):
            return part
        start = last = self._nfa.state()
        end = self._nfa.state()
        for number in range(most if most is not None else max(least, 1)):
            if number:
                self._at = begin
                part = self._atom()
                assert self._at == behind_atom
            if number >= least:
                self._nfa.skip(last, end)
            self._nfa.skip(last, part[0])
            last = part[1]
        if most is None:
            self._nfa.skip(last, part[0])
        self._nfa.skip(last, end)
        self._at = behind
        return start, end

    def _count(self) -> tuple[int, int | None]:
        """Parse a quantifier; returns (least, most). A lazy `?` after it is ignored: it matches the same texts."""
        match = re.compile(r"([*+?]|\{([0-9]+)(,([0-9]*))?\})\??").match(self._text, self._at)
        if match is None:
            return 1, 1
        self._at = match.end()
        sign = match[1]
        if sign in ("*", "+", "?"):
            return int(sign == "+"), 1 if sign == "?" else None
        least = int(match[2])
        most = least if match[3] is None else int(match[4]) if match[4] else None
        if most is not None and most < least:
            raise GrammarError("a repetition count has its maximum below its minimum")
        if most == 0:
            raise GrammarError("a repetition count has the maximum 0")
        return least, most

    def _atom(self) -> tuple[int, int]:
        character = self._peek()
        self._at += 1
        if character == "(":
            if self._text.startswith("?:", self._at):
                self._at += 2
            part = self._alternatives()
            if self._peek() != ")":
                raise GrammarError("a parenthesis is not closed")
            self._at += 1
            return part
        if character in "*+?{$^" or character == "":
            raise GrammarError("a special character is at an invalid position")
        start, end = self._nfa.state(), self._nfa.state()
        self._nfa.move(start, self._set_of(character), end)
        return start, end

    def _set_of(self, character: str) -> Ranges:
        if character == ".":
            return _without(((10, 10),))
        if character == "[":
            return self._class()
        return self._escape() if character == "\\" else _one(ord(character))

    def _escape(self) -> Ranges:
        character = self._peek()
        self._at += 1
        if character in _SETS:
            return _SETS[character]
        if not character or (character.isalnum() and character not in _NAMED):
            raise GrammarError("an escape is unknown")
        return _one(_NAMED.get(character, ord(character)))

    def _class(self) -> Ranges:
        is_negated = self._peek() == "^"
        self._at += is_negated
        found: list[tuple[int, int]] = []
        is_first = True
        while is_first or self._peek() != "]":
            is_first = False
            low = self._member()
            if self._text.startswith("-", self._at) and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member()
                if not (_is_one(low) and _is_one(high)) or low[0][0] > high[0][0]:
                    raise GrammarError("a range in a set is invalid")
                low = ((low[0][0], high[0][0]),)
            found += low
        self._at += 1
        return _without(_joined(found)) if is_negated else _joined(found)

    def _member(self) -> Ranges:
        character = self._peek()
        if not character:
            raise GrammarError("a set is not closed")
        self._at += 1
        return self._escape() if character == "\\" else _one(ord(character))


def _one(code: int) -> Ranges:
    if code < _FIRST or _SURROGATES[0] <= code <= _SURROGATES[1]:
        raise GrammarError("it contains a NUL or a surrogate")
    return ((code, code),)


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def _without(ranges: Ranges) -> Ranges:
    """Return all characters except these."""
    found = []
    low = _FIRST
    for first, last in _joined([*ranges, _SURROGATES]):
        if first > low:
            found.append((low, first - 1))
        low = last + 1
    if low <= _LAST:
        found.append((low, _LAST))
    return tuple(found)


_DIGITS: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: Ranges = ((9, 13), (32, 32))
_SETS = {
    "d": _DIGITS, "D": _without(_DIGITS), "w": _WORD, "W": _without(_WORD), "s": _SPACE, "S": _without(_SPACE)
}  # fmt: skip


def _determinise(nfa: _Nfa, start: int, end: int) -> Automaton:
    """Subset construction. Its symbols are groups of characters that have the same moves everywhere."""
    symbols, of_move = _symbols([ranges for moves in nfa.moves for ranges, _ in moves])
    work = 0

    def closure(states: Iterable[int]) -> frozenset[int]:
        nonlocal work
        found = set(states)
        waiting = list(found)
        while waiting:
            for target in nfa.skips[waiting.pop()]:
                if target not in found:
                    found.add(target)
                    waiting.append(target)
        work += len(found)
        if work > _MAX_WORK:
            raise GrammarError("it takes too much time or memory")
        return frozenset(state for state in found if nfa.moves[state] or state == end)

    first = closure((start,))
    numbers = {first: 0}
    sets = [first]
    moves: list[list[tuple[Ranges, int]]] = []
    for members in sets:  # grows during the loop
        targets: dict[int, set[int]] = {}
        for state in members:
            for ranges, target in nfa.moves[state]:
                for symbol in of_move[ranges]:
                    targets.setdefault(symbol, set()).add(target)
        by_target: dict[int, list[tuple[int, int]]] = {}
        seen: dict[frozenset[int], int] = {}
        for symbol, reached in targets.items():
            raw = frozenset(reached)
            if raw not in seen:
                group = closure(raw)
                if group not in numbers:
                    if len(sets) >= MAX_STATES:
                        raise GrammarError(f"its automaton has more than {MAX_STATES} states")
                    numbers[group] = len(sets)
                    sets.append(group)
                seen[raw] = numbers[group]
            by_target.setdefault(seen[raw], []).extend(symbols[symbol])
        moves.append([(_joined(ranges), number) for number, ranges in by_target.items()])
    return _pruned(Automaton(moves, [end in members for members in sets]))


def _symbols(sets: Sequence[Ranges]) -> tuple[list[list[tuple[int, int]]], dict[Ranges, tuple[int, ...]]]:
    """Split the sets into disjoint groups of characters. Returns the groups, and the groups of each set."""
    distinct = list(dict.fromkeys(sets))
    bounds = sorted({bound for ranges in distinct for low, high in ranges for bound in (low, high + 1)})
    holders: list[list[int]] = [[] for _ in bounds]
    for number, ranges in enumerate(distinct):
        for low, high in ranges:
            for index in range(bisect_right(bounds, low) - 1, bisect_right(bounds, high)):
                holders[index].append(number)
    groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for index, held in enumerate(holders):
        if held:
            groups.setdefault(tuple(held), []).append((bounds[index], bounds[index + 1] - 1))
    of_set: dict[Ranges, list[int]] = {ranges: [] for ranges in distinct}
    for symbol, members in enumerate(groups):
        for number in members:
            of_set[distinct[number]].append(symbol)
    return list(groups.values()), {ranges: tuple(found) for ranges, found in of_set.items()}


def _pruned(automaton: Automaton) -> Automaton:
    """Remove moves from which no accepting state is reachable. Raises: GrammarError if no text matches."""
    sources: list[list[int]] = [[] for _ in automaton.moves]
    for state, moves in enumerate(automaton.moves):
        for _, target in moves:
            sources[target].append(state)
    alive = {state for state, accepts in enumerate(automaton.accepting) if accepts}
    waiting = list(alive)
    while waiting:
        for source in sources[waiting.pop()]:
            if source not in alive:
                alive.add(source)
                waiting.append(source)
    if 0 not in alive:
        raise GrammarError(NO_ANSWER)
    kept = [[(ranges, target) for ranges, target in moves if target in alive] for moves in automaton.moves]
    return Automaton(kept, automaton.accepting)
