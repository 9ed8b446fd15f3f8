"""The words of docs/glossary.md are the words of the code."""

from __future__ import annotations

import ast
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "glossary.md"

# Former names of things in the glossary, and their names now.
_REPLACED = {
    "fell": "on_engine_lost",
    "strand": "suspend",
    "is_stranded": "is_suspended",
    "lose": "fail_unpersisted",
    "cut_at": "_retried_at",
    "go_on": "continue_from",
    "renew": "rename",
    "num_heard": "num_generated",
    "strikes": "num_losses",
    "on_trouble": "on_write_failure",
    "at_hand": "cached",
    "Told": "StderrProgress",
    "Asked": "Arrival",
    "on_asked": "on_arrival",
    "asked_by": "arrival_of",
    "is_asleep": "is_unloaded",
    "is_taking": "is_accepting",
    "hopeless": "is_broken",
    "in_the_wires_words": "with_wire_names",
    "is_particular": "is_conditional",
    "farewell": "reconnect_notice",
    "pick_first": "first_model",
    "pick_named": "named_model",
    "is_resting": "is_paused",
    "reasoning_behind": "reasoning_after",
    "park": "release",
    "is_parked": "is_released",
}
_REPLACED_IN_TESTS = {
    "World": "Harness",
    "lack": "skip_missing",
    "wait_gone": "wait_ended",
    "Leaver": "DisconnectingClient",
    "ForeignServer": "OpenAIServer",
    "nobody_held_up": "unaffected_stream",
}


def _sources() -> Iterator[Path]:
    return (ROOT / "src" / "tailrace").rglob("*.py")


@pytest.mark.parametrize(("folder", "replaced"), [("src/tailrace", _REPLACED), ("tests", _REPLACED_IN_TESTS)])
def test_replaced_names_do_not_come_back(folder: str, replaced: dict[str, str]) -> None:
    found = []
    for path in (ROOT / folder).rglob("*.py"):
        with path.open("rb") as source:
            names = {token.string for token in tokenize.tokenize(source.readline) if token.type == tokenize.NAME}
        found += [f"{path.relative_to(ROOT)}: {name}, now {replaced[name]}" for name in names & set(replaced)]
    assert not found, "\n".join(found)


def test_no_two_public_classes_have_the_same_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in _sources():
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def test_each_term_is_explained_once() -> None:
    rows = [line.split("|")[1:3] for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    terms = [term.strip() for row, _ in rows[1:] for term in row.split(",")]
    assert len(terms) == len(set(terms))
    assert all(text.strip() for _, text in rows)
