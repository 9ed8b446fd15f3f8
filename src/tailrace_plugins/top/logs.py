"""`tailrace logs`: the text of a stream."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import click

from tailrace.cli.commands import (
    INTERRUPTED,
    PlainScreen,
    default_url,
    say_error,
    server_failures,
    server_options,
    until_interrupted,
)

__all__ = ["logs"]


@click.command(short_help="Show the text of a stream.")
@click.argument("stream_id")
@click.option(
    "--follow", "-f", is_flag=True, help="Continue until the stream ends. Ctrl-C stops this command, not the stream."
)
@click.option("--choice", type=click.IntRange(1), default=1, show_default=True, help="Which of several answers.")
@server_options
def logs(stream_id: str, follow: bool, choice: int, url: str | None, key: str) -> None:
    """Show the text of a stream so far. `tailrace ps` lists the running streams.

    A server keeps a stream for a while after its end (--retention-s of `tailrace serve`). The server's own log goes to
    stderr and is not stored.
    """
    with server_failures():
        raise SystemExit(asyncio.run(_show(stream_id, url or default_url(), key, follow=follow, choice=choice - 1)))


async def _show(stream_id: str, url: str, key: str, *, follow: bool, choice: int) -> int:
    """Print the text. Returns the exit status. Raises: AnswerFailed."""
    from urllib.parse import quote

    from tailrace.client import connect

    stream_id = quote(stream_id, safe="")
    async with connect(url, key) as client:
        client.require_tailrace()
        client.on_wait = lambda reason: say_error(f"{reason}; trying to reconnect …")
        state = await client.get(f"/v1/streams/{stream_id}")
        texts = state.get("choices", [state["text"]])
        if choice >= len(texts):
            raise click.UsageError(f"This stream has only {len(texts)} {'answer' if len(texts) == 1 else 'answers'}.")
        with contextlib.closing(PlainScreen(sys.stdout)) as screen:
            if not follow:
                screen.show(texts[choice])
                return 0

            async def show() -> None:
                async with contextlib.aclosing(client.follow(stream_id, choice)) as pieces:
                    async for piece in pieces:
                        screen.show(piece)

            return 0 if await until_interrupted(asyncio.ensure_future(show())) else INTERRUPTED
