"""Record the picture in the README: a server is killed during an answer and started again; the text continues.

    .venv/bin/python -m scripts.record_demo docs/demo.svg

Three terminals run the real thing on the real model: bash, `tailrace serve`, `tailrace chat`, `kill -9`. What they
print is kept with its times, and written as an SVG whose letters appear when they came. At the end the same is asked
once more with nobody killed; if another answer comes, or anything else is not as the picture claims, nothing is
written.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

import psutil

COLUMNS = 112
KEY_S = 0.045  # between two keys
READ_S = 1.2  # for people who look, between two things
PATIENCE_S = 120.0
STEP_S = 0.05  # what comes so close together appears together
LAST_S = 5.0  # of the last picture
QUESTION = "Tell me a story about a river."
ASK = f'tailrace chat --plain --seed 5 --max-tokens 130 smollm2 "{QUESTION}"'


@dataclass(frozen=True, slots=True)
class Shown:
    """Text that came at a time (seconds from the beginning), and where it stands (in characters)."""

    at_s: float
    row: int
    column: int
    text: str


@dataclass(slots=True)
class Terminal:
    """A bash in a pseudo-terminal, and all that it has printed."""

    name: str
    num_rows: int
    descriptor: int
    pid: int
    shown: list[Shown] = field(default_factory=list)
    text: str = ""
    row: int = 0
    column: int = 0

    def take(self, text: str, at_s: float) -> None:
        """Put text where a terminal would; rows count from the first one, also when that is out of sight.

        Raises: ValueError for control characters that this does not know.
        """
        self.text += text.replace("\r", "")
        for piece in re.findall(r"\r|\n|\x08|[^\r\n\x08]+", text):
            if piece == "\r":
                self.column = 0
            elif piece == "\n":
                self.row += 1
            elif not piece.isprintable():
                raise ValueError(f"{self.name}: {piece!r} is no plain text")
            while piece.isprintable() and piece:
                if self.column == COLUMNS:
                    self.row, self.column = self.row + 1, 0
                part, piece = piece[: COLUMNS - self.column], piece[COLUMNS - self.column :]
                self.shown.append(Shown(at_s, self.row, self.column, part))
                self.column += len(part)


class Stage:
    """Terminals side by side, recorded on one clock."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.terminals: list[Terminal] = []
        self._environment = environment
        self._began_s = time.monotonic()

    def open(self, name: str, num_rows: int) -> Terminal:
        pid, descriptor = pty.fork()
        if pid == 0:
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"], self._environment)
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", num_rows, COLUMNS, 0, 0))
        terminal = Terminal(name, num_rows, descriptor, pid)
        self.terminals.append(terminal)
        self.until(lambda: terminal.text.endswith("$ "))
        return terminal

    def until(self, condition: Callable[[], bool], *, within_s: float = PATIENCE_S) -> bool:
        """Record until something is so; returns whether it came to that."""
        deadline_s = time.monotonic() + within_s
        while not condition():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            ready, _, _ = select.select([terminal.descriptor for terminal in self.terminals], [], [], min(left_s, 0.05))
            at_s = time.monotonic() - self._began_s
            for terminal in self.terminals:
                if terminal.descriptor in ready:
                    terminal.take(os.read(terminal.descriptor, 65536).decode("utf-8", "replace"), at_s)
        return True

    def pause(self, seconds: float) -> None:
        self.until(lambda: False, within_s=seconds)

    def enter(self, terminal: Terminal, command: str) -> None:
        """Type a command, as a person does."""
        for key in command:
            os.write(terminal.descriptor, key.encode())
            self.pause(KEY_S)
        os.write(terminal.descriptor, b"\n")

    def require(self, condition: Callable[[], bool], what: str) -> None:
        if not self.until(condition):
            raise SystemExit(f"It did not come to this: {what}.\n" + "\n".join(each.text for each in self.terminals))

    def close(self, terminal: Terminal) -> None:
        """End its bash, and all that this has started."""
        self.terminals.remove(terminal)
        bash = psutil.Process(terminal.pid)
        for process in [*bash.children(recursive=True), bash]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os.close(terminal.descriptor)
        os.waitpid(terminal.pid, 0)


def perform(stage: Stage) -> None:
    """What happens. Exits with a message where it goes another way."""
    server = stage.open("server", 10)
    killer = stage.open("another terminal", 2)
    client = stage.open("client", 11)
    stage.pause(READ_S / 2)
    stage.enter(server, "tailrace serve")
    stage.require(lambda: "Try it" in server.text, "the server listens")
    stage.pause(READ_S)
    stage.enter(client, ASK)
    begun = len(client.text) + len("\n")
    stage.require(lambda: len(client.text) - begun > 220, "an answer")

    (process,) = psutil.Process(server.pid).children()
    stage.enter(killer, f"kill -9 {process.pid}")
    stage.require(lambda: "Killed" in server.text, "the server is killed")
    stage.require(lambda: "trying to reconnect" in client.text, "the client notices")
    stage.pause(READ_S)
    stage.enter(server, "tailrace serve")
    stage.require(lambda: "1 stream goes on" in server.text, "the next server takes the stream up")
    stage.require(lambda: client.text.endswith("\n$ "), "the end of the answer")
    stage.pause(READ_S)

    answer = _answer_in(client.text)
    again = stage.open("comparison", 10)
    stage.enter(again, ASK)
    stage.require(lambda: again.text.count("\n$ ") > 0 and again.text.endswith("\n$ "), "the same again")
    if _answer_in(again.text) != answer:
        raise SystemExit(f"Another answer came when nobody was killed:\n{answer}\n---\n{_answer_in(again.text)}")
    stage.close(again)


def _answer_in(text: str) -> str:
    """What the model said, without the command, what the client says of the connection, and where lines broke."""
    said = text.partition(f"{ASK}\n")[2].removesuffix("$ ")
    return " ".join(re.sub(r"\n?tailrace: [^\n]*…\n", "", said).split())


# The picture. Sizes are in its own pixels.

LETTER, LINE, SIZE = 8.4, 19, 14  # width of a letter, distance of lines, height of letters
MARGIN, BAR, GAP = 18, 26, 10
_STYLE = """
svg{background:#0e1516;border-radius:10px}
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#dbe6e5;white-space:pre}
.bar{fill:#7f9492;font-size:12px}
.typed{fill:#fff;font-weight:700}
.bad{fill:#ff9d76}
.good{fill:#66d9c9}
@media(prefers-reduced-motion:reduce){*{animation:none!important}}
"""
_COLOURS = (
    (re.compile(r"^\$ "), "typed"),
    (re.compile(r"^Killed|the connection was lost|closed the connection"), "bad"),
    (re.compile(r"stream goes on"), "good"),
)


def draw(terminals: Sequence[Terminal]) -> str:
    """An SVG of all that came, each at its time, again and again. Where motion is unwanted, it is the last picture."""
    whole_s = max(shown.at_s for terminal in terminals for shown in terminal.shown) + LAST_S
    width = 2 * MARGIN + COLUMNS * LETTER
    top, parts, rules = 0.0, list[str](), dict[int, str]()

    def at(step: int, state: str) -> str:
        return f"{100 * step * STEP_S / whole_s:.2f}%{{{state}}}"

    for number, terminal in enumerate(terminals):
        height = 2 * GAP + terminal.num_rows * LINE
        parts.append(f'<rect y="{top:g}" width="{width:g}" height="{BAR}" fill="#182224"/>')
        parts.append(f'<text class="bar" x="{MARGIN}" y="{top + 17:g}">{escape(terminal.name)}</text>')
        inner = f'y="{top + BAR + GAP:g}" width="{width:g}" height="{terminal.num_rows * LINE}"'
        parts.append(f'<svg {inner}><g class="s{number}">')
        scrolled: dict[int, int] = {}  # rows that are out of sight, from a step on
        for step, shown, colour in _merged(terminal.shown):
            rules.setdefault(step, f"a{step}")
            scrolled[step] = max(0, shown.row + 1 - terminal.num_rows, *scrolled.values())
            x, y, length = MARGIN + shown.column * LETTER, shown.row * LINE + SIZE, len(shown.text) * LETTER
            parts.append(
                f'<text class="{rules[step]} {colour}" x="{x:.5g}" y="{y:g}" textLength="{length:.5g}">'
                f"{escape(shown.text)}</text>"
            )
        parts.append("</g></svg>")
        moves = "".join(at(step, f"transform:translateY({-rows * LINE}px)") for step, rows in scrolled.items())
        last = -max(scrolled.values(), default=0) * LINE
        parts.append(
            f"<style>@keyframes s{number}{{0%{{transform:none}}{moves}}}"
            f".s{number}{{transform:translateY({last}px);animation:s{number} {whole_s:.1f}s step-end infinite}}</style>"
        )
        top += BAR + height
    appear = "".join(
        f"@keyframes {name}{{0%{{opacity:0}}{at(step, 'opacity:1')}}}"
        f".{name}{{animation:{name} {whole_s:.1f}s step-end infinite}}"
        for step, name in rules.items()
    )
    size = f'width="{width:g}" height="{top:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {top:g}" {size}>'
    about = "<title>A server is killed in the middle of an answer and started again; the text goes on.</title>"
    ground = f'<rect {size} rx="10" fill="#0e1516"/>'
    return "\n".join([head, about, f"<style>{_STYLE}{appear}</style>", ground, *parts, "</svg>\n"])


def _merged(shown: Sequence[Shown]) -> Iterator[tuple[int, Shown, str]]:
    """Neighbours that came together, with the number of their step and the colour of their row."""
    rows: dict[int, str] = {}
    for each in shown:
        rows[each.row] = rows.get(each.row, "") + each.text
    colours = {row: next((name for form, name in _COLOURS if form.search(text)), "") for row, text in rows.items()}
    last: Shown | None = None
    for each in shown:
        if (
            last is not None
            and round(last.at_s / STEP_S) == round(each.at_s / STEP_S)
            and (last.row, last.column + len(last.text)) == (each.row, each.column)
        ):
            last = Shown(last.at_s, last.row, last.column, last.text + each.text)
            continue
        if last is not None:
            yield round(last.at_s / STEP_S), last, colours[last.row]
        last = each
    if last is not None:
        yield round(last.at_s / STEP_S), last, colours[last.row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("target", type=Path, help="the SVG to write")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as directory:
        environment = {
            name: value for name, value in os.environ.items() if not re.match("TAILRACE_(?!HOME$)", name)
        } | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TAILRACE_PORT": str(arguments.port),
            "TAILRACE_DATA_DIR": directory,
            "XDG_DATA_HOME": directory,  # where nothing ran before
            "PS1": "$ ",
            "TERM": "dumb",
            "BASH_SILENCE_DEPRECATION_WARNING": "1",
        }
        stage = Stage(environment)
        try:
            perform(stage)
        finally:
            terminals = list(stage.terminals)
            for terminal in terminals:
                stage.close(terminal)
    arguments.target.write_text(draw(terminals), "utf-8")
    print(f"{arguments.target}: {arguments.target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
