"""docs/api.md lists exactly the public names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_PUBLIC = ("tailrace", "tailrace_kit")
PAGE = (ROOT / "docs" / "api.md").read_text("utf-8")
_SECTION = re.compile(r"^## `([\w.]+)`\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
WHOLE = {module: re.findall(r"^\| `(\w+)` \| \S", text, re.MULTILINE) for module, text in _SECTION.findall(PAGE)}
PARTS = {
    module: re.findall(r"`(\w+)`", names)
    for module, names in re.findall(r"^\| `(tailrace[\w.]+)` \| (`.*) \|$", PAGE, re.MULTILINE)
}


def test_the_page_has_its_sections() -> None:
    assert list(WHOLE) == [
        "tailrace", "tailrace.serve", "tailrace.serve.exceptions", "tailrace.serve.folders",
        "tailrace.serve.huggingface", "tailrace.testing",
    ]  # fmt: skip
    assert list(PARTS) == [
        "tailrace.engines", "tailrace_kit.adapters", "tailrace_kit.constraints",
        "tailrace.engines.grammars.guidance", "tailrace_kit.inner_loop", "tailrace_kit.sampler",
        "tailrace_kit.vectors", "tailrace_kit.scratch", "tailrace_kit.pictures", "tailrace.models",
        "tailrace.models.gguf_header",
        "tailrace.models.safetensors", "tailrace.models.shards",
        "tailrace.system.processors", "tailrace.text", "tailrace.text.reasoning", "tailrace.dialects",
        "tailrace.cli.commands", "tailrace.client", "tailrace.extensions",
        "tailrace.server", "tailrace.conversations", "tailrace.types", "tailrace.errors",
    ]  # fmt: skip


@pytest.mark.parametrize("module", WHOLE)
def test_every_public_name_is_listed(module: str) -> None:
    public = import_module(module).__all__
    assert sorted(WHOLE[module]) == sorted(public)
    assert all(hasattr(import_module(module), name) for name in public)


@pytest.mark.parametrize("module", PARTS)
def test_names_for_plugins_exist(module: str) -> None:
    assert set(PARTS[module]) <= set(import_module(module).__all__)


def _imported(source: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of every import from tailrace and its kit."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _PUBLIC:
            yield from ((node.module or "", one.name) for one in node.names)


def _sources() -> dict[str, str]:
    """Return the Python sources of the plugins, the examples, the docs and the README."""
    folders = (ROOT / "examples", ROOT / "src" / "tailrace_plugins")
    found = {str(path.relative_to(ROOT)): path.read_text() for folder in folders for path in folder.rglob("*.py")}
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for number, block in enumerate(
            re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        ):
            found[f"{page.relative_to(ROOT)} {number}"] = block
    return found


def test_plugins_examples_and_docs_import_public_names_only() -> None:
    listed = {(module, name) for module, names in {**WHOLE, **PARTS}.items() for name in names}
    modules = {tuple(module.rpartition(".")[::2]) for module in {**WHOLE, **PARTS}}
    used = {pair for source in _sources().values() for pair in _imported(source)}
    assert ("tailrace.testing", "check_engine") in used
    assert used - listed - modules == set()
