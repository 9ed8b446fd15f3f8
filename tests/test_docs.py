"""The documentation agrees with the code. TAILRACE_REGENERATE=1 generates docs/reference.md."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path

from tests.generated import REGENERATE

import tailrace.errors
from tailrace.cli import main
from tailrace.errors import TailraceError
from tailrace.models.catalogue import CATALOGUE
from tailrace.settings import settings_table

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference.md"


def error_rows() -> dict[str, tuple[int, bool, str]]:
    """Return status, whether it is retryable, and meaning of each code."""
    rows: dict[str, tuple[int, bool, str]] = {}
    for _, kind in inspect.getmembers(tailrace.errors, inspect.isclass):
        if issubclass(kind, TailraceError) and kind.code not in ("stream_error", "model_error"):
            meaning = (kind.__doc__ or "").strip().partition("\n")[0].rstrip(".") if "__doc__" in vars(kind) else ""
            if kind.code not in rows or len(meaning) > len(rows[kind.code][-1]):
                rows[kind.code] = (kind.status, kind.is_retryable, meaning)
    return rows


_SETTINGS = (
    "## Settings",
    "",
    "Flags of `tailrace serve`; each is also an environment variable, and a name in the file of `--config`:",
    "",
    "```toml",
    'model = "smollm2"',
    "port = 8000",
    "max-concurrent-requests = 64",
    "",
    "[models.embed]              # another model, with settings of its own",
    'source = "minilm"',
    "idle-unload-s = 600",
    "```",
    "",
    "A flag goes before a variable, and both before the file. `tailrace config --example` prints a file with all",
    "settings as comments, `tailrace config --config tailrace.toml` checks a file and shows what is in force. After",
    "SIGHUP (`systemctl reload`), the settings with a `yes` in the column reload are in use at once; the others need a",
    "restart, during which streams continue ([as a service](service.md)). Keys, their limits and TLS certificates are",
    "read again while the server runs; they are no settings.",
    "",
)

_OTHER_VARIABLES = (
    "`--on`, `--replicas` and `--target-requests` have no variable. Variables that are not settings:",
    "",
    "| variable | |",
    "|---|---|",
    "| `TAILRACE_CONFIG` | the file of `--config`, also for `keys`, `usage`, `backup` and `restore` |",
    "| `TAILRACE_MODEL`, `TAILRACE_MODELS`, `TAILRACE_SET` | `MODEL`; values of `--model` and `--set`, with spaces |",
    "| `TAILRACE_URL`, `TAILRACE_KEY` | server and key for `chat`, `ps`, `logs` and `keys forget` |",
    "| `TAILRACE_UPSTREAM_KEY` | key for an upstream server; for api.openai.com the default is `OPENAI_API_KEY` |",
    "| `TAILRACE_HOME` | directory of everything that tailrace keeps: models, and in its folder `data` journals, "
    "`records.sqlite`, certificates and the chat history |",
    "| `HF_HOME`, `HF_TOKEN` | cache and token of the Hugging Face hub |",
    "| `RAY_ADDRESS` | Ray cluster for `--on ray` |",
    "| `GOMP_SPINCOUNT` | how long llamacpp's threads spin before they sleep; the default is 1000 |",
)


def render() -> str:
    lines = ["# Reference", "", "Made from the code by `TAILRACE_REGENERATE=1 pytest tests/test_docs.py`.", ""]
    lines += [*_SETTINGS]
    lines += ["| flag | variable | default | reload | |", "|---|---|---|---|---|"]
    for row in settings_table():
        default = str(row.default).lower() if row.kind is bool else str(row.default)
        if row.default in ("", None):
            default = "by engine" if row.default is None else "none"
        lines.append(f"| `{row.flag}` | `{row.variable}` | {default} | {'yes' if row.reloads else ''} | {row.text} |")
    of_model = ", ".join(f"`{row.key}`" for row in settings_table() if row.of_model)
    lines += ["", f"Of several models each may have its own of these, by `--set NAME.SETTING=VALUE`: {of_model}."]
    lines += ["", *_OTHER_VARIABLES, ""]
    lines += [
        "## Error codes",
        "",
        "`error.code` on `/v1` routes and in terminal events. After a retryable error, the same request may be",
        "answered if it is sent again ([a stream that is cut off](wires/README.md#a-stream-that-is-cut-off)).",
        "",
    ]
    lines += ["| code | status | retryable | |", "|---|---|---|---|"]
    lines += [
        f"| `{code}` | {status} | {'yes' if is_retryable else 'no'} | {text} |"
        for code, (status, is_retryable, text) in sorted(error_rows().items())
    ]
    lines += [
        "",
        "On text-generation-inference's routes they are `validation` (422), `overloaded` (429) and",
        "`generation` (424).",
        "",
    ]
    return "\n".join(lines)


def test_reference_is_current() -> None:
    if os.environ.get("TAILRACE_REGENERATE"):
        REFERENCE.write_text(render())
    assert REFERENCE.read_text() == render(), REGENERATE.format(test="test_docs.py")


def test_every_code_in_the_source_is_documented() -> None:
    ours = tuple(ROOT / "src" / name for name in ("tailrace", "tailrace_kit", "tailrace_outer"))
    sources = "\n".join(path.read_text() for folder in ours for path in folder.rglob("*.py"))
    used = set(re.findall(r'(?:fail\(|code = |Failure\()"([a-z_]+)"', sources)) - {"stream_error", "model_error"}
    assert used <= set(error_rows()), used - set(error_rows())


def test_the_page_of_commands_names_every_command() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    for verb in main.commands if hasattr(main, "commands") and main.commands else ["bench", "pull", "serve"]:
        assert f"tailrace {verb}" in page


def test_the_size_of_an_installation_is_the_same_on_all_pages() -> None:
    explained = (ROOT / "docs" / "dependencies.md").read_text()
    (weight,) = re.findall(r"installation for serving is (\d+ MB) on disk", explained)
    assert f"to download, {weight} on disk" in (ROOT / "Makefile").read_text()
    assert f"`.venv` ({weight})" in (ROOT / "README.md").read_text()
    assert f"the packages ({weight};" in (ROOT / "docs" / "files.md").read_text()


def test_the_size_of_the_default_model_is_the_same_on_all_pages() -> None:
    model = CATALOGUE["smollm2"]
    to_fetch, unpacked = (f"{num_bytes / 1e6:.0f} MB" for num_bytes in (model.wheel_bytes, model.file_bytes))
    assert f"(SmolLM2-135M, {to_fetch})" in (ROOT / "README.md").read_text()
    assert f"(smollm2: {to_fetch} to fetch, {unpacked} unpacked)" in (ROOT / "docs" / "files.md").read_text()


def test_dependencies_are_explained() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    explained = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in project["dependencies"]:
        name = re.split(r"[<>=;\[ ]", requirement)[0]
        assert name in explained, name


_LINK = re.compile(r"\]\(\s*([^)#\s]+)?(?:#([^)\s]+))?\s*\)")


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_have_targets() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken = []
    for page in pages:
        for place, anchor in _LINK.findall(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)):
            if place.startswith(("http:", "https:", "mailto:")):
                continue
            target = page.parent / place if place else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {place}#{anchor}")
    assert not broken


def test_every_decision_is_named_on_the_architecture_page() -> None:
    named = re.findall(r"\]\(decisions/([\w-]+)\.md\)", (ROOT / "docs" / "architecture.md").read_text())
    pages = {page.stem: page.read_text() for page in (ROOT / "docs" / "decisions").glob("*.md")}
    assert sorted(named) == sorted(pages)
    assert all("\n## Why\n" in text and text.count("\n") <= 30 for text in pages.values())


def test_files_that_pages_name_exist() -> None:
    """Check paths with a folder: `tailrace_kit/sampler.py` in the source, `text/stops.py` in the core, `tests/golden`
    in the checkout."""
    pages = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md", *(ROOT / "docs" / "decisions").glob("*.md")]
    named = {(page.name, name) for page in pages for name in re.findall(r"`([a-z_.]+/[\w/.-]*\w)`", page.read_text())}
    there = (ROOT, *(ROOT / "src" / name for name in ("", "tailrace")))
    assert ("CONTRIBUTING.md", "tailrace_kit/sampler.py") in named
    assert not [
        pair for pair in named if "NAME" not in pair[1] and not any((base / pair[1]).exists() for base in there)
    ]


def test_tests_that_pages_name_exist() -> None:
    """A name without a folder may be in any folder of tests: a page says in which one it means."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    pattern = re.compile(r"`(tests/[\w/.-]*\w|test_\w+\.py)`")
    named = {(page.name, name) for page in pages for name in pattern.findall(page.read_text()) if "NAME" not in name}
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert ("reliability.md", "test_disk.py") in named
    assert not [(page, name) for page, name in named if not (ROOT / name).exists() and name not in files]
