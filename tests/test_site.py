"""scripts/site.py: the pages of the site of the docs, and their links. `make check` builds all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.site import missing_pages, prepare, with_links


def test_each_page_is_in_the_menu() -> None:
    assert not missing_pages()


@pytest.mark.parametrize(
    ("path", "link", "expected"),
    [
        ("README.md", "[a](docs/start.md)", "[a](start.md)"),
        ("README.md", "![a](docs/demo.svg)", "![a](demo.svg)"),
        ("README.md", "[Contributing](CONTRIBUTING.md#release)", "[Contributing](contributing.md#release)"),
        ("docs/files.md", "[a](../README.md#start)", "[a](index.md#start)"),
        ("docs/wires/tgi.md", "[a](README.md)", "[a](README.md)"),
        ("docs/wires/tgi.md", "[a](../files.md)", "[a](../files.md)"),
        ("docs/files.md", "[a](wires/README.md)", "[a](wires/README.md)"),
        ("docs/files.md", "[a recipe](../Dockerfile)", "a recipe (`Dockerfile`)"),
        ("docs/files.md", "[`Dockerfile`](../Dockerfile)", "`Dockerfile`"),
        ("docs/files.md", "[a](https://example.com/README.md)", "[a](https://example.com/README.md)"),
        ("docs/files.md", "[a](#where-files-go)", "[a](#where-files-go)"),
        ("docs/files.md", "```\n[a](../Dockerfile)\n```", "```\n[a](../Dockerfile)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site(path: str, link: str, expected: str) -> None:
    assert with_links(f"{link}\n", path) == f"{expected}\n"


def test_the_first_page_is_the_readme(tmp_path: Path) -> None:
    prepare(tmp_path)
    assert (tmp_path / "index.md").read_text().startswith("# tailrace\n")
    assert (tmp_path / "demo.svg").exists()
    assert not list(tmp_path.rglob("*.py"))
