"""The situations in which a worker is killed: which sequences run, how they begin, and their sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeAlias

from msgspec.structs import replace

from tailrace.engines.interface import Capabilities
from tailrace.types import Grammar, Sampling
from tailrace_outer.measure.certify.prompt_maker import PromptMaker

__all__ = ["Company", "Situation", "situations"]

Company: TypeAlias = Literal["alone", "visited", "batch", "changing"]
Prompt: TypeAlias = tuple[int, ...]

_SCHEMA = (
    '{"type":"object","properties":{"words":{"type":"array","items":{"type":"string","minLength":3},"minItems":12}},'
    '"required":["words"],"additionalProperties":false}'
)


@dataclass(frozen=True, slots=True)
class Situation:
    """A row of the table. `company`: other sequences begin and are aborted meanwhile beside a single sequence
    ("visited") or a batch ("changing")."""

    name: str
    company: Company
    samplings: tuple[Sampling, ...]  # used alternately; each sequence gets its own seed
    prompts: Callable[[PromptMaker, Random, int], list[Prompt]]
    needs: frozenset[str] = frozenset()  # among the engine's parameters
    has_first_turn: bool = False  # the prompt is a follow-up to a first answer
    share: int = 4  # of the runs


def situations(capabilities: Capabilities, max_tokens: int) -> list[Situation]:
    """Return the situations that an engine supports. One that runs a single sequence at a time has no batches. Answers
    have `max_tokens` if the engine supports `ignore_eos`."""
    greedy = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos="ignore_eos" in capabilities.parameters)
    seeded = replace(greedy, temperature=0.8)
    both = (greedy, seeded)
    logprobs = tuple(replace(each, logprobs=True) for each in both)
    repetition = tuple(replace(each, repetition_penalty=1.2) for each in both)
    others = tuple(replace(each, presence_penalty=0.5, frequency_penalty=0.5) for each in both)
    grammars = tuple(
        replace(each, grammar=grammar, ignore_eos=False)
        for each in both
        for grammar in (Grammar("regex", "([a-z]{2,8} ){40}"), Grammar("json_schema", _SCHEMA))
    )
    rows = [
        Situation("alone, greedy", "alone", (greedy,), _questions, share=1),
        Situation("alone, seeded", "alone", (seeded,), _questions, share=1),
        Situation("alone and in a batch by turns", "visited", (*both, *repetition), _questions),
        Situation("alone and in a batch by turns, grammar", "visited", grammars, _questions, frozenset({"grammar"})),
        Situation(
            "alone and in a batch by turns, follow-up turn", "visited", both, _questions, has_first_turn=True, share=2
        ),
        Situation("in a batch, greedy", "batch", (greedy,), _questions),
        Situation("in a batch, seeded", "batch", (seeded,), _questions),
        Situation("neighbours come and go, greedy", "changing", (greedy,), _questions),
        Situation("neighbours come and go, seeded", "changing", (seeded,), _questions),
        Situation("shared prefix", "changing", both, _shared_prefix),
        Situation("same prompt, several seeds", "changing", (seeded,), _twins),
        Situation("prompts of several steps", "changing", both, _long),
        Situation("follow-up turn", "changing", both, _questions, has_first_turn=True),
        Situation("logprobs", "batch", logprobs, _questions, frozenset({"logprobs"})),
        Situation(
            "presence and frequency penalty", "batch", others, _questions,
            frozenset({"presence_penalty", "frequency_penalty"}),
        ),
        Situation("repetition penalty", "batch", repetition, _questions, frozenset({"repetition_penalty"})),
        Situation(
            "repetition penalty, follow-up turn", "changing", repetition, _questions, frozenset({"repetition_penalty"}),
            has_first_turn=True,
        ),
        Situation("grammar", "batch", grammars, _questions, frozenset({"grammar"})),
    ]  # fmt: skip
    has_batches = capabilities.max_sequences > 1
    return [row for row in rows if row.needs <= capabilities.parameters and (has_batches or row.company == "alone")]


def _questions(prompts: PromptMaker, draw: Random, count: int) -> list[Prompt]:
    return [prompts.ids(prompts.question(draw)) for _ in range(count)]


def _shared_prefix(prompts: PromptMaker, draw: Random, count: int) -> list[Prompt]:
    system = prompts.text(draw, 6)
    return [prompts.ids(prompts.question(draw), system=system) for _ in range(count)]


def _twins(prompts: PromptMaker, draw: Random, count: int) -> list[Prompt]:
    return [prompts.ids(prompts.question(draw))] * count


def _long(prompts: PromptMaker, draw: Random, count: int) -> list[Prompt]:
    """Return prompts of which every fourth has several hundred tokens."""
    return [prompts.ids(prompts.text(draw, draw.randint(20, 40) if index % 4 == 0 else 1)) for index in range(count)]
