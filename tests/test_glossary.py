"""The words of docs/glossary.md are the words of the code."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "glossary.md"

# Former names of things in the glossary, and their names now.
_REPLACED = {
    "fell": "on_lost",
    "strand": "suspend",
    "is_stranded": "is_suspended",
    "lose": "fail_unpersisted",
    "cut_at": "_retried_at",
    "go_on": "continue_from",
    "renew": "rename",
    "num_heard": "num_generated",
    "strikes": "num_engines",
    "on_trouble": "on_give_up",
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
    "World": "Harness",
    "lack": "skip_missing",
    "wait_gone": "wait_ended",
    "Leaver": "DisconnectingClient",
    "ForeignServer": "OpenAIServer",
    "nobody_held_up": "unaffected_stream",
    "place_of": "branch_point_of",
    "NoAnswer": "NoReply",
    "DurableRecord": "DurableChange",
    "records_use": "keeps_use",
    "AnswerFacts": "AnswerRow",
    "ToolFacts": "DescribedTool",
    "VectorFacts": "VectorCard",
    "read_fact": "read_property",
    "write_fact": "write_property",
    "read_key": "read_journal_key",
    "ApprovalAnswer": "ApprovalResponseItem",
}

# Words with one meaning: such names, the modules that may not have them, and the words for what they would mean there.
_OTHER_MEANINGS = (
    (
        r"(?!_?in_)(\w+_|_)?places?",
        r"(?!.*(cli/(commands|places|serve)|apps/ray_place)\.py)",
        "index, position, offset",
    ),
    (
        r"\w*answers?",
        r".*(outer/redis/|compat/psycopg|streams/shared_durable|serve/(handles|_calls)\.py)",
        "reply, result",
    ),
    (r"\w*records?", r".*plugins/durable_streams/", "change"),
    (r"(?!_|chat|generator|prompt|server|stream)\w+facts", r".*", "card, row, properties"),
)


# A name in JavaScript, and not a word in a text: `function lose()`, `lose(`, `lose:`, `lose =`, `stream.lose`.
_IN_JAVASCRIPT = re.compile(r"(?:function|class|const|let)\s+(\w+)|\.(\w+)|(\w+)\s*(?:[(:]|=(?!=))")
# In Python, where all names of a file are found, which takes longer.
_REPLACED_ANYWHERE = re.compile(rf"\b({'|'.join(_REPLACED)})\b")


def _sources() -> Iterator[Path]:
    return (ROOT / "src").rglob("*.py")


def _names(path: Path) -> set[str]:
    """Return the names in a file, those of JavaScript as Python writes them."""
    if path.suffix == ".py":
        with path.open("rb") as source:
            return {token.string for token in tokenize.tokenize(source.readline) if token.type == tokenize.NAME}
    names = {name for found in _IN_JAVASCRIPT.findall(path.read_text("utf-8")) for name in found}
    return names | {re.sub(r"(?<=[a-z])[A-Z]", lambda letter: f"_{letter[0]}", name).lower() for name in names}


def test_replaced_names_do_not_come_back() -> None:
    paths = [path for folder in ("bench", "scripts", "src", "tests") for path in (ROOT / folder).rglob("*.*")]
    ours = [path for path in paths if path.suffix in (".py", ".js", ".mjs") and "lib" not in path.parts]
    ours = [path for path in ours if path.suffix != ".py" or _REPLACED_ANYWHERE.search(path.read_text("utf-8"))]
    found = [
        f"{path.relative_to(ROOT)}: {name}, now {_REPLACED[name]}"
        for path in ours
        for name in _names(path) & set(_REPLACED)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("names", "modules", "words"), _OTHER_MEANINGS)
def test_a_word_has_one_meaning(names: str, modules: str, words: str) -> None:
    name_of_it = re.compile(rf"\b({names})\b", re.IGNORECASE)
    ours = [path for path in _sources() if re.match(modules, path.as_posix())]
    ours = [path for path in ours if name_of_it.search(path.read_text("utf-8"))]
    found = [
        f"{path.relative_to(ROOT)}: {name}, not one of {words}"
        for path in ours
        for name in _names(path)
        if name_of_it.fullmatch(name)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("source", ["function goOn() {", "x = { goOn: 1 }", "let goOn", "stream.go_on", "goOn = 1"])
def test_names_in_javascript_are_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "a.js").write_text(f"{source}\n// strand `lose the network` if (a == fell)", "utf-8")
    assert _names(tmp_path / "a.js") & set(_REPLACED) == {"go_on"}


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
