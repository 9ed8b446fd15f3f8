"""The documentation says what the code does. TAILRACE_REGENERATE=1 writes docs/reference.md anew."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path

import tailrace.errors
from tailrace.cli import main
from tailrace.errors import TailraceError
from tailrace.server.settings import settings_table

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference.md"

# Codes that are made where they arise, not by a class of their own.
CODES = {
    "app_output": (500, "an app of the user's sent a value that JSON cannot hold"),
    "cancelled": (499, "somebody cancelled the stream while an answer in one piece was awaited"),
    "interrupted": (503, "the server was shut down"),
    "method_not_allowed": (405, "the path is there, the method is not"),
    "not_found": (404, "nothing is at this path"),
    "queue_timeout": (429, "the request waited for its turn longer than `--queue-s`"),
    "request_refused": (400, "the engine, or the server behind it, does not run such a request"),
    "template_error": (400, "the model's chat template refuses these messages"),
    "upgrade_required": (426, "`/v1/ws` was asked for without WebSocket's handshake"),
}


def error_rows() -> dict[str, tuple[int, str]]:
    rows = dict(CODES)
    for _, kind in inspect.getmembers(tailrace.errors, inspect.isclass):
        if issubclass(kind, TailraceError) and kind.code not in ("stream_error", "model_error"):
            meaning = (kind.__doc__ or "").strip().partition("\n")[0].rstrip(".") if "__doc__" in vars(kind) else ""
            if kind.code not in rows or len(meaning) > len(rows[kind.code][1]):
                rows[kind.code] = (kind.status, meaning)
    return rows


def render() -> str:
    lines = ["# Reference", "", "Made from the code by `TAILRACE_REGENERATE=1 pytest tests/test_docs.py`.", ""]
    lines += ["## Settings", "", "Flags of `tailrace serve`; each is also an environment variable.", ""]
    lines += ["| flag | variable | default | |", "|---|---|---|---|"]
    for row in settings_table():
        default = str(row.default).lower() if row.kind is bool else str(row.default)
        if row.default in ("", None):
            default = "by engine" if row.default is None else "none"
        lines.append(f"| `{row.flag}` | `{row.variable}` | {default} | {row.text} |")
    of_model = ", ".join(f"`{row.name}`" for row in settings_table() if row.of_model)
    lines += ["", f"Of several models each may have its own of these, by `--set NAME.SETTING=VALUE`: {of_model}."]
    lines += ["", "`TAILRACE_HOME` moves all that is fetched; `TAILRACE_MODEL` is the default of `MODEL`.", ""]
    lines += ["## Error codes", "", "`error.code` on `/v1` routes and in terminal events.", ""]
    lines += ["| code | status | |", "|---|---|---|"]
    lines += [f"| `{code}` | {status} | {text} |" for code, (status, text) in sorted(error_rows().items())]
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
    assert REFERENCE.read_text() == render()


def test_every_code_in_the_source_is_documented() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    used = set(re.findall(r'(?:fail\(|code = |Failure\()"([a-z_]+)"', sources)) - {"stream_error", "model_error"}
    assert used <= set(error_rows()), used - set(error_rows())


def test_readme_names_every_verb() -> None:
    readme = (ROOT / "README.md").read_text()
    for verb in main.commands if hasattr(main, "commands") and main.commands else ["bench", "pull", "serve"]:
        assert f"tailrace {verb}" in readme


def test_dependencies_are_explained() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    explained = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in project["dependencies"]:
        name = re.split(r"[<>=;\[ ]", requirement)[0]
        assert name in explained, name
