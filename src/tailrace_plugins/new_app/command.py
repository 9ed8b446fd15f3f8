"""`tailrace new`: create a folder with a working app to start from, or with the files of a service."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import sys
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import click

from tailrace.cli.commands import say_error

__all__ = ["new"]

# A link to examples/ in the repository; a directory in a wheel.
_TEMPLATES = Path(__file__).parent / "templates"

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
# The unit's User= takes 31 characters, and the name is in a comment of XML, which may not contain "--".
_SERVICE_NAME = re.compile(r"(?!.*--)[A-Za-z][A-Za-z0-9_-]{0,30}")
_PLACEHOLDER = re.compile(r"\b(NAME|COMMAND|EXECUTABLE|HOMES)\b")


class _Kind(NamedTuple):
    sources: dict[str, str]  # templates, by the name of the new file
    command: str  # to run it
    attempt: str  # a command to try it


_ASK_V2 = 'curl -N http://127.0.0.1:8000/v2/models/{name}/generate_stream -d \'{{"prompt": "To the sea"}}\''
_ASK = "curl -N -X POST 'http://127.0.0.1:8000/?prompt=Tell%20me%20a%20story%20about%20a%20river.'"
_KINDS = {
    "textbot": _Kind({"app.py": "textbot.py"}, "tailrace run {name}/app.py:app", _ASK),
    "chatbot": _Kind(
        {"app.py": "chatbot.py"}, "tailrace run {name}/app.py:app", "python -m websockets ws://127.0.0.1:8000/"
    ),
    "batchbot": _Kind({"app.py": "batchbot.py"}, "tailrace run {name}/app.py:app", _ASK),
    "inferless": _Kind(
        {"app.py": "inferless/app.py", "input_schema.py": "inferless/input_schema.py"}, "tailrace run ./{name}", _ASK_V2
    ),
    "ray": _Kind(
        {"serve.yaml": "ray/serve.yaml", "rayservice.yaml": "ray/rayservice.yaml"}, "serve run {name}/serve.yaml", _ASK
    ),
    "service": _Kind(
        {
            "{name}.service": "service/tailrace.service",
            "{name}.plist": "service/tailrace.plist",
            "tailrace.toml": "service/tailrace.toml",
        },
        "see the first lines of {name}/{name}.service (Linux) or {name}/{name}.plist (macOS)",
        "tailrace ps",
    ),
}


@click.command(short_help="Create a folder with a working app.")
@click.argument("kind", type=click.Choice(list(_KINDS)))
@click.argument("name")
def new(kind: str, name: str) -> None:
    """Create a folder NAME with a working app.

    \b
    tailrace new textbot mybot     text in, text out, streamed
    tailrace new chatbot mybot     a conversation over a WebSocket
    tailrace new batchbot mybot    many requests in one batch; each answer can be resumed
    tailrace new inferless myapp   app.py and input_schema.py, as for Inferless
    tailrace new ray mycluster     the server on Ray Serve: a config file, and a RayService for KubeRay
    tailrace new service tailrace  the server as a service of systemd or launchd, with few rights
    """
    if not _NAME.fullmatch(name):
        raise click.BadParameter(
            f"{name!r} should begin with a letter and contain only letters, digits, - and _.", param_hint="NAME"
        )
    if kind == "service" and not _SERVICE_NAME.fullmatch(name):
        raise click.BadParameter(
            "The name of a service should have at most 31 characters, and no -- in it.", param_hint="NAME"
        )
    made = _KINDS[kind]
    folder = Path(name)
    texts = {file.format(name=name): _filled(_TEMPLATES / source, kind, name) for file, source in made.sources.items()}
    try:
        folder.mkdir()
        for file, text in texts.items():
            (folder / file).write_text(text)
    except FileExistsError:
        raise click.ClickException(f"{name} exists already. Nothing was changed.") from None
    except OSError as error:
        raise click.ClickException(f"{name} cannot be created: {error.strerror}.") from None
    click.echo(f"Made {' and '.join(str(folder / file) for file in texts)}.")
    if kind == "service" and sys.platform == "linux" and (closed := _closed_directory()) is not None:
        say_error(
            f"systemd could not start it: other users may not enter {closed}, where this tailrace or its Python is. "
            "Install both elsewhere, for example in /opt (docs/service.md)."
        )
    click.echo(f"Run it:  {made.command.format(name=name)}")
    port = os.environ.get("TAILRACE_PORT", "8000")
    click.echo(f"Try it:  {made.attempt.format(name=name).replace(':8000/', f':{port}/')}")


def _filled(template: Path, kind: str, name: str) -> str:
    """Return a template of a service with the name, and this installation's command; other templates as they are.

    Raises: ClickException if systemd cannot run the command.
    """
    text = template.read_text()
    if kind != "service":
        return text
    path = str(_command())
    if re.search(r"[\"'\\\x00-\x1f\x7f]", path):  # systemd takes none of them
        raise click.ClickException(
            "The path of this tailrace contains a quote, a backslash or a control character. Install it elsewhere."
        )
    values = {
        "NAME": name,
        "COMMAND": shlex.quote(path),
        "EXECUTABLE": path.replace("%", "%%"),  # in quotes
        "HOMES": "read-only" if any(str(one).startswith(("/home/", "/root/")) for one in _programs()) else "yes",
    }
    if template.suffix == ".plist":
        values = {placeholder: escape(value) for placeholder, value in values.items()}
    return _PLACEHOLDER.sub(lambda found: values[found[0]], text)


def _command() -> Path:
    return Path(shutil.which(sys.argv[0]) or Path(sys.executable).parent / "tailrace").absolute()


def _programs() -> tuple[Path, ...]:
    """Return the command of this installation, and the Python that runs it. Each may be a link."""
    command = _command()
    return command, command.resolve(), Path(sys.executable).resolve()


def _closed_directory() -> Path | None:
    """Return a directory that the unit's user cannot enter on its way to the command or its Python."""
    above = (directory for program in _programs() for directory in reversed(program.parents))
    return next((one for one in above if not one.stat().st_mode & stat.S_IXOTH), None)
