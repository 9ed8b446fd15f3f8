"""Regular expressions as deterministic automata, so that what a library does with one takes a bounded time.

xgrammar, which OpenVINO GenAI has built in, parses an answer in all ways in which a nested repetition can be read:
`(\\w+\\s?)+\\.` took 0.2 s for every token, and `([^,]*,?)*;` longer with every token (openvino-genai 2026.4.1, two
cores). An automaton with one state at a time can be read in one way only: 0.5 ms a token for every pattern. What grows
instead is the number of states (`.*a.{10}` has 2,048), and that is known, and bounded, before an engine sees it.

The syntax is what `dialects.grammars` lets through: no look-around, no back-references, anchors at the ends alone.
`.` is any character but a newline; `\\d`, `\\w` and `\\s` are sets of ASCII. A pattern is for the whole text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

__all__ = ["MAX_STATES", "Automaton", "GrammarError", "Ranges", "of_choices", "of_regex"]

MAX_STATES = 2_048
_MAX_POSITIONS = 8_192  # characters and sets of a pattern, with its counts written out
_MAX_WORK = 200_000  # members of all sets of positions that states are made of, which is what time goes into

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # of code points, first and last, in order and apart

_FIRST, _LAST = 1, 0x10FFFF  # no pattern allows NUL
_SURROGATES = (0xD800, 0xDFFF)
_NAMED = {"n": 10, "r": 13, "t": 9}


class GrammarError(ValueError):
    """A grammar that cannot be used. Its message is the reason, and repeats nothing of the grammar."""


class Automaton(NamedTuple):
    """State 0 is where it starts. `moves[state]` are the characters that may come there, and the states they lead to:
    at most one for each character."""

    moves: list[list[tuple[Ranges, int]]]
    accepting: list[bool]


def of_regex(pattern: str) -> Automaton:
    """Raises: GrammarError if it is not a pattern of the syntax above, has too many states, or matches nothing."""
    text = pattern.removeprefix("^")
    if re.search(r"(?<!\\)(\\\\)*\$\Z", text):
        text = text[:-1]
    nfa = _Nfa()
    start, end = _Parser(text, nfa).parse()
    return _determinise(nfa, start, end)


def of_choices(texts: Iterable[str]) -> Automaton:
    """Exactly these texts. Raises: GrammarError as above."""
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
    """States with moves on sets of characters, and on nothing."""

    def __init__(self) -> None:
        self.moves: list[list[tuple[Ranges, int]]] = []
        self.skips: list[list[int]] = []
        self.num_positions = 0

    def state(self) -> int:
        self.moves.append([])
        self.skips.append([])
        return len(self.moves) - 1

    def move(self, source: int, ranges: Ranges, target: int) -> None:
        self.num_positions += 1
        if self.num_positions > _MAX_POSITIONS:
            raise GrammarError("its counts written out, it is too long")
        self.moves[source].append((ranges, target))

    def skip(self, source: int, target: int) -> None:
        self.skips[source].append(target)


class _Parser:
    """Thompson's construction, straight from the text. A counted part is parsed again for each of its copies."""

    def __init__(self, text: str, nfa: _Nfa) -> None:
        self._text = text
        self._nfa = nfa
        self._at = 0

    def parse(self) -> tuple[int, int]:
        part = self._alternatives()
        if self._at < len(self._text):
            raise GrammarError("a parenthesis is not opened")
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
        """How often the part before may come. A ? behind a count asks for the shortest, which changes no language."""
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
            raise GrammarError("a count's end is below its start")
        if most == 0:
            raise GrammarError("a part may come 0 times at most")
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
            raise GrammarError("a sign stands where it means nothing")
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
            raise GrammarError("an escape is not known")
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
                    raise GrammarError("a range in a set has no two ends")
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
        raise GrammarError("it has a character that no text has")
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
    """All characters but these."""
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
    """The subset construction, over groups of characters that no move tells apart."""
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
    for members in sets:  # which grows meanwhile
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
    """Groups of characters such that each set is a union of some: the groups, and which of them each set is."""
    distinct = list(dict.fromkeys(sets))
    bounds = sorted({bound for ranges in distinct for low, high in ranges for bound in (low, high + 1)})
    holders: list[list[int]] = [[] for _ in bounds]
    for number, ranges in enumerate(distinct):
        for low, high in ranges:
            for place in range(bisect_right(bounds, low) - 1, bisect_right(bounds, high)):
                holders[place].append(number)
    groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for place, held in enumerate(holders):
        if held:
            groups.setdefault(tuple(held), []).append((bounds[place], bounds[place + 1] - 1))
    of_set: dict[Ranges, list[int]] = {ranges: [] for ranges in distinct}
    for symbol, members in enumerate(groups):
        for number in members:
            of_set[distinct[number]].append(symbol)
    return list(groups.values()), {ranges: tuple(found) for ranges, found in of_set.items()}


def _pruned(automaton: Automaton) -> Automaton:
    """Without the moves behind which no text can end. Raises: GrammarError if there is no text at all."""
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
        raise GrammarError("no answer could conform to it")
    kept = [[(ranges, target) for ranges, target in moves if target in alive] for moves in automaton.moves]
    return Automaton(kept, automaton.accepting)
