"""The law of grammars. What ids mean is not known here, so it goes by what any vocabulary must do with them."""

from __future__ import annotations

from dataclasses import replace

from tailrace.testing._law import Law
from tailrace.testing._trial import Trial, hold
from tailrace.types import Grammar

__all__ = ["grammar_laws"]

_NUM_CHARACTERS = 4  # a token is one of them at least
_MAX_TOKENS = 16


def _grammars(trial: Trial) -> None:
    """Answers of four characters, digits in the one and letters in the other, beside one that is free."""
    prompt = trial.prompts(1, "grammar")[0]
    free = trial.submit(prompt, trial.sampling(_MAX_TOKENS)) if trial.width > 2 else None
    firsts = []
    for characters in ("0-9", "a-z"):
        grammar = Grammar("regex", f"[{characters}]{{{_NUM_CHARACTERS}}}")
        held = trial.submit(prompt, replace(trial.sampling(_MAX_TOKENS), grammar=grammar, ignore_eos=False))
        if trial.width == 1:
            trial.finish()
        firsts.append(held)
    trial.finish()
    for held in firsts:
        ids, reason = trial.ids(held), trial.end(held).finish_reason
        seen = f"{ids} with {_NUM_CHARACTERS} characters to say, and finish_reason {reason!r}"
        hold(reason == "stop" and len(ids) <= _NUM_CHARACTERS + 1, held, seen)  # with an end of text
    digits, letters = (trial.ids(held)[:1] for held in firsts)
    hold(digits != letters, firsts[1], f"a digit and a letter were both the token {digits}")
    if free is not None and trial.engine.capabilities.exact:
        alone = trial.alone(prompt, trial.sampling(_MAX_TOKENS))
        hold(trial.ids(free) == alone, free, f"beside grammars it gave {trial.ids(free)}, but alone {alone}")


grammar_laws = (Law("grammar_holds", "a grammar bounds its answer, and no other", _grammars, frozenset({"grammar"})),)
