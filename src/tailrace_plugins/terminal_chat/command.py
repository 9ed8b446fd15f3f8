"""`tailrace chat`: chat with a model in the terminal or in a pipe."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace import DEFAULT_MODEL
from tailrace.cli.commands import (
    INTERRUPTED,
    data_path,
    default_url,
    printable_text,
    say,
    say_error,
    server_failures,
    server_options,
)

if TYPE_CHECKING:
    from tailrace.client import Client

__all__ = ["chat"]

_PIPE_CLOSED = 141  # as after SIGPIPE
_TEMPERATURE = 0.6  # small models ramble at 1, the API's default


def _check_temperature(
    ctx: click.Context, param: click.Parameter, value: float | None
) -> float | None:  # click's range lets NaN through
    if value is not None and math.isnan(value):
        raise click.BadParameter("it is not a number from 0 to 2.", ctx, param)
    return value


@click.command(short_help="Chat with a model in the terminal or in a pipe.")
@click.argument("model", default="")
@click.argument("prompt", nargs=-1)
@click.option("--system", default="", help="The system message.")
@click.option(
    "--temperature", type=click.FloatRange(0, 2), callback=_check_temperature,
    help=f"0 always takes the most likely token. Default: {_TEMPERATURE} with tailrace; other servers decide.",
)  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(1), help="Longest answer, in tokens. By default, the server decides.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Repeats an answer, as far as the engine can.")
@click.option(
    "--tools", "tool_servers", multiple=True, metavar="NAME",
    help="Let the model use the tools of this MCP server, which the server knows. Repeatable.",
)  # fmt: skip
@click.option("--plain", is_flag=True, help="Print the text as it is, without rendering Markdown.")
@server_options
def chat(
    model: str,
    prompt: tuple[str, ...],
    system: str,
    temperature: float | None,
    max_tokens: int | None,
    seed: int | None,
    tool_servers: tuple[str, ...],
    plain: bool,
    url: str | None,
    key: str,
) -> None:
    """Chat with MODEL, by default the server's first model.

    It uses the server on this machine, or any OpenAI-compatible server at --url. If no server runs on this machine, or
    it does not have MODEL, a server for this chat is started, like `tailrace serve MODEL --for one`. When the
    connection to tailrace breaks, the answer continues after a reconnect.

    With a PROMPT, it prints one answer to stdout. `-` reads the prompt from stdin.

    Ctrl-C stops an answer. In a conversation, /help lists the commands.

    \b
    tailrace chat
    tailrace chat smollm2 "Why do rivers bend?"
    git diff | tailrace chat - > review.txt
    git diff | tailrace chat smollm2 "What is wrong here?" -
    tailrace chat --url https://api.example.com/v1 some-model
    """
    import asyncio  # imported late, as all that `tailrace --help` does not need

    words = [model, *prompt] if model == "-" else list(prompt)
    if not words and not sys.stdin.isatty():
        words = ["-"]
    question = _question(words) if words else ""
    if words and not question.strip():
        hint = " Give the model before the prompt." if _is_prompt(model) else ""
        raise click.UsageError(f"The prompt is empty.{hint}")
    given = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    sampling = {name: value for name, value in given.items() if value is not None}
    name = "" if model == "-" else model
    raise SystemExit(asyncio.run(_chat(name, question, system, sampling, tool_servers, plain=plain, url=url, key=key)))


def _question(words: list[str]) -> str:
    """Return the prompt: its words, followed by the text from stdin if `-` is among them."""
    typed = " ".join(word for word in words if word != "-")
    if "-" not in words:
        return typed
    read = sys.stdin.buffer.read().decode("utf-8", "replace")
    return f"{typed}\n\n{read}" if typed else read


async def _chat(
    model: str,
    question: str,
    system: str,
    sampling: dict[str, Any],  # Any: numbers
    tool_servers: tuple[str, ...],
    *,
    plain: bool,
    url: str | None,
    key: str,
) -> int:
    from tailrace_plugins.terminal_chat.mcp_answer import Tools
    from tailrace_plugins.terminal_chat.session import Chat, ask_at_terminal, converse, new_screen

    with server_failures():
        try:
            async with _server(model, url, key) as (client, name):
                # On a terminal, the cursor may be in the middle of a line of the answer.
                is_in_line = plain and sys.stdout.isatty() and sys.stderr.isatty()
                client.on_wait = lambda reason: say_error(f"{reason}; trying to reconnect …", in_line=is_in_line)
                if client.is_tailrace:
                    sampling.setdefault("temperature", _TEMPERATURE)
                chat = Chat(client, name, say, say_error, system, sampling)
                if tool_servers:
                    client.require_tailrace()
                    chat.tools = Tools(list(tool_servers), say)
                    if sys.stdin.isatty() and sys.stdout.isatty():
                        chat.tools.allow = ask_at_terminal
                if not question:
                    await converse(chat, history=data_path() / "chat_history", is_plain=plain)
                    return 0
                if chat.tools is not None:
                    is_whole = await chat.ask_with_tools(question, chat.tools, lambda: new_screen(is_plain=plain))
                else:
                    is_whole = await chat.ask(question, new_screen(is_plain=plain))
                return 0 if is_whole else INTERRUPTED
        except BrokenPipeError:
            with contextlib.suppress(OSError):
                os.dup2(
                    os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
                )  # otherwise Python prints an error at exit
            return _PIPE_CLOSED


@contextlib.asynccontextmanager
async def _server(model: str, url: str | None, key: str) -> AsyncIterator[tuple[Client, str]]:
    """Connect to the given server, to the server on this machine if it has the model, or to a new one. Yields the
    client and the model's name on that server.

    Raises: AnswerFailed, ValueError; click.UsageError if the server does not have the model.
    """
    from tailrace.client import NoServer, connect
    from tailrace_plugins.terminal_chat.own_server import own_server

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
            raise click.UsageError(f'Give the model before the prompt: tailrace chat {DEFAULT_MODEL} "…"')
        own_url = await stack.enter_async_context(own_server(model or DEFAULT_MODEL, say))
        client = await stack.enter_async_context(connect(own_url))
        yield client, client.models[0]


def _is_prompt(model: str) -> bool:
    return " " in model and not Path(os.path.expanduser(model)).exists()


def _name_of(model: str, client: Client) -> str:
    """Return the model's name on the server. A model of the hub has no `hf:` there."""
    if not model:
        return next(iter(client.models), "")
    of_hub = model.removeprefix("hf:").partition(":")[0]
    return of_hub if model.startswith("hf:") and of_hub in client.models else model


def _no_model(client: Client, model: str) -> str:
    if not model:
        return "This server does not list its models. Give a MODEL."
    hint = ' Give the model before the prompt: tailrace chat MODEL "…"' if " " in model else ""
    return f"This server has no such model. It has {printable_text(', '.join(client.models))}.{hint}"
