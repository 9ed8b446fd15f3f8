"""`tailrace chat`: ask a model at the terminal, or in a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli.console import INTERRUPTED, say, say_error
from tailrace.cli.servers import default_url, server_failures, server_options

if TYPE_CHECKING:
    from tailrace.terminal.client import Client

__all__ = ["chat"]

_DEFAULT_MODEL = "smollm2"
_PIPE_CLOSED = 141  # as a program that SIGPIPE has ended
_TEMPERATURE = 0.6  # at 1, the default of the API, small models ramble


@click.command()
@click.argument("model", default="")
@click.argument("prompt", nargs=-1)
@click.option("--system", default="", help="What the model is told first.")
@click.option(
    "--temperature", type=click.FloatRange(0, 2),
    help=f"0 takes the likeliest words. Without it {_TEMPERATURE} with tailrace; other servers decide.",
)  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(1), help="Length of an answer. Without it the server decides.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="The same seed gives the same answer.")
@click.option("--plain", is_flag=True, help="Show the text as it is, and not as Markdown.")
@server_options
def chat(
    model: str,
    prompt: tuple[str, ...],
    system: str,
    temperature: float | None,
    max_tokens: int | None,
    seed: int | None,
    plain: bool,
    url: str | None,
    key: str,
) -> None:
    """Chat with MODEL; without it, with the first one that the server has.

    It asks the server that runs on this machine, or at --url, which may be any that is OpenAI-compatible. Where none
    runs on this machine, or MODEL is not one of its own, a server for this chat alone is started with MODEL, as
    `tailrace serve MODEL` would. When the connection to tailrace is cut, the answer goes on where it was.

    With a PROMPT there is one answer, on stdout. `-` is what comes on stdin.

    Ctrl-C stops an answer; in a conversation, /help says what else there is.

    \b
    tailrace chat
    tailrace chat smollm2 "Why do rivers bend?"
    git diff | tailrace chat - > review.txt
    git diff | tailrace chat smollm2 "What is wrong here?" -
    tailrace chat --url https://api.example.com/v1 some-model
    """
    words = [model, *prompt] if model == "-" else list(prompt)
    if not words and not sys.stdin.isatty():
        words = ["-"]
    question = _question(words) if words else ""
    if words and not question.strip():
        raise click.UsageError("The prompt is empty.")
    given = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    sampling = {name: value for name, value in given.items() if value is not None}
    raise SystemExit(
        asyncio.run(_chat("" if model == "-" else model, question, system, sampling, plain=plain, url=url, key=key))
    )


def _question(words: list[str]) -> str:
    """The prompt: its words, and below them what comes on stdin where `-` stands for it."""
    typed = " ".join(word for word in words if word != "-")
    if "-" not in words:
        return typed
    read = sys.stdin.buffer.read().decode("utf-8", "replace")
    return f"{typed}\n\n{read}" if typed else read


async def _chat(
    model: str, question: str, system: str, sampling: dict[str, Any], *, plain: bool, url: str | None, key: str
) -> int:  # Any: numbers
    from tailrace.models.places import data_path
    from tailrace.terminal.session import Chat, converse, new_screen

    with server_failures():
        try:
            async with _server(model, url, key) as (client, name):
                # A message has a line of its own, also on a terminal where the answer stands in the middle of one.
                is_in_line = plain and sys.stdout.isatty() and sys.stderr.isatty()
                client.on_wait = lambda reason: say_error(f"{reason}; trying to go on …", in_line=is_in_line)
                if client.is_tailrace:
                    sampling.setdefault("temperature", _TEMPERATURE)
                chat = Chat(client, name, say, say_error, system, sampling)
                if not question:
                    await converse(chat, history=data_path() / "chat_history", is_plain=plain)
                    return 0
                return 0 if await chat.ask(question, new_screen(is_plain=plain)) else INTERRUPTED
        except BrokenPipeError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would complain at its end
            return _PIPE_CLOSED


@contextlib.asynccontextmanager
async def _server(model: str, url: str | None, key: str) -> AsyncIterator[tuple[Client, str]]:
    """The server that is named, or the one on this machine if it has the model, or one of our own; and what the model
    is called there.

    Raises: AnswerFailed, ValueError; click.UsageError for a model that the server does not have.
    """
    from tailrace.terminal.client import NoServer, connect
    from tailrace.terminal.own_server import own_server

    async with contextlib.AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(connect(url or default_url(), key))
        except NoServer:
            if url:
                raise
        else:
            name = _name_of(model, client)
            if name and (name in client.models or not client.models):
                yield client, name
                return
            if url:
                raise click.UsageError(_no_model(client, model))
        if _is_prompt(model):
            raise click.UsageError(f'A prompt comes behind the model: tailrace chat {_DEFAULT_MODEL} "…"')
        own_url = await stack.enter_async_context(own_server(model or _DEFAULT_MODEL, say))
        client = await stack.enter_async_context(connect(own_url))
        yield client, client.models[0]


def _is_prompt(model: str) -> bool:
    return " " in model and not Path(model).expanduser().exists()


def _name_of(model: str, client: Client) -> str:
    """What the server calls the model. One of the hub has other words in front when a server is started with it."""
    if not model:
        return next(iter(client.models), "")
    of_hub = model.removeprefix("hf:").partition(":")[0]
    return of_hub if model.startswith("hf:") and of_hub in client.models else model


def _no_model(client: Client, model: str) -> str:
    from tailrace.terminal.text import printable_text

    if not model:
        return "This server does not say which models it has. Name one."
    hint = ' A prompt comes behind the model: tailrace chat MODEL "…"' if " " in model else ""
    return f"This server has no such model. It has {printable_text(', '.join(client.models))}.{hint}"
