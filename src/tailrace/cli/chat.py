"""`tailrace chat`: ask a model at the terminal, or in a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli.console import say, say_error

if TYPE_CHECKING:
    from tailrace.terminal.client import Client

__all__ = ["DEFAULT_URL", "chat", "server_options"]

DEFAULT_URL = "http://127.0.0.1:8000"
_INTERRUPTED = 130
_PIPE_CLOSED = 141  # as a program that SIGPIPE has ended
_TEMPERATURE = 0.6  # at 1, the default of the API, small models ramble

Command = Callable[..., None]


def server_options(command: Command) -> Command:
    """A decorator that adds --url and --key."""
    for option in (
        click.option(
            "--key", envvar="TAILRACE_KEY", show_envvar=True, default="", metavar="KEY",
            help="The key for that server. In the environment other users of this machine do not see it.",
        ),
        click.option(
            "--url", envvar="TAILRACE_URL", show_envvar=True, default=DEFAULT_URL, show_default=True,
            help="A server that runs.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


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
    url: str,
    key: str,
) -> None:
    """Chat with MODEL, one of those that a server has; without it, with its first one.

    With a PROMPT there is one answer, on stdout. `-` is what comes on stdin. Any OpenAI-compatible server will do. When
    the connection to tailrace is cut, the answer goes on where it was.

    Ctrl-C stops an answer; in a conversation, /help says what else there is.

    \b
    tailrace chat
    tailrace chat smollm2 "Why do rivers bend?"
    git diff | tailrace chat - > review.txt
    git diff | tailrace chat smollm2 "What is wrong here?" -
    tailrace chat --url https://api.example.com/v1 --key KEY some-model
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
    model: str, question: str, system: str, sampling: dict[str, Any], *, plain: bool, url: str, key: str
) -> int:  # Any: numbers
    from tailrace.models.places import data_path
    from tailrace.terminal.client import AnswerFailed, NoServer, ServerRefused, connect
    from tailrace.terminal.session import Chat, converse, new_screen

    try:
        async with connect(url, key) as client:
            client.on_wait = lambda reason: say_error(f"{reason}; trying to go on …")
            if client.is_tailrace:
                sampling.setdefault("temperature", _TEMPERATURE)
            chat = Chat(client, _choose(client, model), say, say_error, system, sampling)
            if not question:
                await converse(chat, history=data_path() / "chat_history", is_plain=plain)
                return 0
            return 0 if await chat.ask(question, new_screen(is_plain=plain)) else _INTERRUPTED
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would complain at its end
        return _PIPE_CLOSED
    except NoServer as error:
        raise click.ClickException(f"{error}. `tailrace serve` starts one; --url takes another address.") from None
    except ServerRefused as error:
        hint = " --key or TAILRACE_KEY takes a key." if error.status == 401 else ""
        raise click.ClickException(f"{str(error).rstrip('.')}.{hint}") from None
    except AnswerFailed as error:
        raise click.ClickException(f"{str(error).rstrip('.')}.") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _choose(client: Client, model: str) -> str:
    """Raises: click.UsageError for a model that the server does not have."""
    from tailrace.terminal.text import printable_text

    if not model and not client.models:
        raise click.UsageError("This server does not say which models it has. Name one.")
    if model and client.models and model not in client.models:
        names = printable_text(", ".join(client.models))
        hint = f' A prompt comes behind the model: tailrace chat {client.models[0]} "…"' if " " in model else ""
        raise click.UsageError(f"This server has no such model. It has {names}.{hint}")
    return model or client.models[0]
