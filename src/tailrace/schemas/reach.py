"""What the grammars of an engine keep of a JSON schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

__all__ = ["GUIDANCE", "PASSED_ON", "PORTABLE", "Reach", "looser"]


@dataclass(frozen=True, slots=True)
class Reach:
    """The constraints that a grammar keeps. Others are left open, and the whole answer is checked."""

    is_portable: bool = False  # within the limits of `portable`
    is_passed_on: bool = False  # another server gets the schema as it is; what it keeps is not known
    is_last: bool = False  # nothing looser follows: the arguments of tools may be any objects, if need be
    formats: frozenset[str] = frozenset()
    has_patterns: bool = False
    has_sized_texts: bool = False  # lengths of texts that also have a pattern or a format
    has_fractions: bool = False  # bounds of numbers that are not integers, and `multipleOf`
    has_values: bool = False  # objects and lists in an enum
    has_parts: bool = False  # llguidance's language: tool calls in the form of the model, structural tags, Lark
    max_number: int = 0  # absolute value of a bound of a number
    max_length: int = 0  # of minLength and maxLength
    max_items: int = 0  # of minItems and maxItems
    max_values: int = 0  # of one enum


_COMMON_FORMATS = frozenset({"date", "date-time", "email", "ipv4", "ipv6", "time", "uuid"})

# For libraries that are not known: an engine of another package, unless it says more; a forced call of another server.
PORTABLE = Reach(
    is_portable=True,
    formats=_COMMON_FORMATS,
    has_patterns=True,
    max_number=10**12,
    max_length=48,
    max_items=64,
    max_values=200,
)

# For another server. It may show the schema to its model, so its descriptions matter.
PASSED_ON = replace(PORTABLE, is_passed_on=True)

# What llguidance keeps, also the one in llama.cpp, which is older and has no `uri`.
GUIDANCE = Reach(
    formats=_COMMON_FORMATS | {"duration", "hostname"},
    has_patterns=True,
    has_sized_texts=True,
    has_fractions=True,
    has_values=True,
    has_parts=True,
    max_number=2**53,
    max_length=4_096,
    max_items=1_024,
    max_values=5_000,
)


def looser(reach: Reach) -> Iterator[Reach]:
    """Yield this reach, and others that keep less and less, for schemas that are too much for the library."""
    yield reach
    shorter = replace(reach, has_patterns=False, has_sized_texts=False, max_length=0, max_items=min(reach.max_items, 8))
    yield shorter
    yield replace(shorter, formats=frozenset(), max_number=0, max_items=0, max_values=50, is_last=True)
