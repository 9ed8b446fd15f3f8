"""Shows a streamed answer on a terminal as rendered Markdown."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from tailrace.cli.commands import printable_text

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

__all__ = ["MarkdownScreen", "Screen"]


_SHOWN_THOUGHTS = 4000  # characters
_PATIENCE_MS = 1000  # of people, before they want to know how long it takes


class Screen(Protocol):
    """Shows one answer."""

    def show(self, piece: str) -> None:
        """Show the next piece of the answer."""

    def think(self, piece: str) -> None:
        """Show the next piece of the reasoning."""

    def read(self, progress: Mapping[str, Any]) -> None:
        """Show how much of the prompt is read, until the answer begins. `progress` is that of the native wire."""

    def close(self) -> None:
        """End the answer. Its text stays on the screen, and the cursor is on a new line."""


class MarkdownScreen:
    """Renders Markdown while the text arrives. Complete blocks are printed once. The last block is redrawn as it grows;
    if it is too long for the terminal, only its end is shown. Reasoning is shown until the answer begins,
    and before that how much of a long prompt is read."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._parser = _parser()
        self._text = ""  # of the incomplete block
        self._thoughts = ""  # the end of them
        self._has_printed = False
        self._live = Live(
            console=console, transient=True, refresh_per_second=12, vertical_overflow="visible",
            redirect_stdout=False, redirect_stderr=sys.stderr.isatty(),  # messages appear above the live block
        )  # fmt: skip
        self._live.start()

    def show(self, piece: str) -> None:
        self._text += printable_text(piece)
        if "\n" in piece:
            self._print_complete_blocks()
        self._live.update(_LastLines(self._rendered(self._text), has_line_above=self._has_printed))

    def think(self, piece: str) -> None:
        from rich.text import Text

        self._thoughts = (self._thoughts + printable_text(piece))[-_SHOWN_THOUGHTS:]
        self._live.update(_LastLines(Text(self._thoughts, style="dim italic"), has_line_above=False))

    def read(self, progress: Mapping[str, Any]) -> None:
        from rich.text import Text

        total, processed = int(progress.get("total", 0)), int(progress.get("processed", 0))
        if total and int(progress.get("time_ms", 0)) >= _PATIENCE_MS:
            text = f"reading the prompt: {100 * processed // total} % of {total:,} tokens"
            self._live.update(Text(text, style="dim"))

    def close(self) -> None:
        self._live.update("")
        self._live.stop()
        self._print(self._text)

    def _print_complete_blocks(self) -> None:
        """Print all blocks except the last, which is the only one that more text can change."""
        tops = [token.map[0] for token in self._parser.parse(self._text) if token.level == 0 and token.map]
        if len(tops) > 1 and tops[-1] > 0:
            lines = self._text.splitlines(keepends=True)
            self._text = "".join(lines[tops[-1] :])
            self._print("".join(lines[: tops[-1]]))

    def _print(self, text: str) -> None:
        if text.strip():
            if self._has_printed:
                self._console.print()
            self._console.print(self._rendered(text))
            self._has_printed = True

    def _rendered(self, text: str) -> RenderableType:
        from rich.markdown import Markdown

        # Print link addresses as text: terminal hyperlinks would hide them.
        shown = Markdown("", code_theme="ansi_dark", hyperlinks=False)
        shown.parsed = self._parser.parse(text)
        for token in shown.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"  # line ends of models are intended
        return _Printable(shown)


def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    # Shows HTML as text instead of dropping it.
    return MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


class _Printable:
    """Removes control characters that rendering produces, such as percent-encoded ones in addresses."""

    def __init__(self, inner: RenderableType) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        for segment in console.render(self._inner, options):
            yield segment if segment.control else Segment(printable_text(segment.text), segment.style)


class _LastLines:
    """Shows the last lines that fit on the terminal."""

    def __init__(self, inner: RenderableType, *, has_line_above: bool) -> None:
        self._inner = inner
        self._has_line_above = has_line_above

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        lines = console.render_lines(self._inner, options, pad=False)
        if self._has_line_above:
            lines = [[], *lines]
        for line in lines[-max(1, console.height - 1) :]:
            yield from line
            yield Segment.line()
