"""Build the site of the docs into `site/html` (`make site`): mkdocs.yml has its menu, Zensical makes the pages.

README.md is the first page; CHANGELOG.md and CONTRIBUTING.md are pages, too. A link to any other file of the repository
becomes the name of this file. A broken link, or a page that is in no menu, ends it with an error.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

__all__ = ["missing_pages", "prepare", "with_links"]

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "site" / "pages"
_AT_THE_TOP = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(\s*([^)#\s]*)(#[^)\s]*)?\s*\)")
_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def with_links(text: str, path: str) -> str:
    """Return a page with links for the site. `path` is that of the page in the repository."""
    here = _place(path) or ""

    def moved(found: re.Match[str]) -> str:
        mark, words, target, anchor = found[1], found[2], found[3], found[4] or ""
        if not target or re.match(r"[a-z]+:", target):
            return found[0]
        named = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        place = _place(f"{named}/README.md" if (ROOT / named / "README.md").exists() else named)
        if place is None:
            return words if named in words else f"{words} (`{named}`)"
        return f"{mark}[{words}]({posixpath.relpath(place, posixpath.dirname(here))}{anchor})"

    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [_LINK.sub(moved, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _LINK.sub(moved, text[end:])])


def _place(path: str) -> str | None:
    """Return where a file of the repository is on the site; None: it is not there."""
    if path in _AT_THE_TOP:
        return _AT_THE_TOP[path]
    return path.removeprefix("docs/") if path.startswith("docs/") and (ROOT / path).exists() else None


def prepare(folder: Path) -> None:
    """Write the pages of the site, and their pictures, into an empty folder."""
    for source in [*(ROOT / "docs").rglob("*"), *(ROOT / name for name in _AT_THE_TOP)]:
        path = source.relative_to(ROOT).as_posix()
        place = _place(path)
        if place is None or not source.is_file():
            continue
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(with_links(source.read_text("utf-8"), path), "utf-8")
        else:
            shutil.copy(source, target)


def missing_pages() -> list[str]:
    """Return the pages that are in no menu, and the entries of menus without a page."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    text = re.sub(r"!!python\S+.*", "", text)

    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        entries = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else []
        return [page for one in entries for page in pages(one)]

    listed = pages(yaml.safe_load(text)["nav"])
    there = [place for path in (ROOT / "docs").rglob("*.md") if (place := _place(path.relative_to(ROOT).as_posix()))]
    return sorted({*listed} ^ {*there, *_AT_THE_TOP.values()})


def main() -> None:
    if missing := missing_pages():
        sys.exit(f"mkdocs.yml and docs differ: {', '.join(missing)}")
    shutil.rmtree(ROOT / "site", ignore_errors=True)
    prepare(PAGES)
    program = Path(sys.executable).with_name("zensical")
    sys.exit(subprocess.run([program, "build", "--strict"], cwd=ROOT).returncode)


if __name__ == "__main__":
    main()
