"""A conversation in the terminal: reads lines and shows answers. Ctrl-C stops an answer, not the program."""

from __future__ import annotations

import asyncio
import contextlib
import mimetypes
import os
import sys
import termios
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.cli.commands import PlainScreen, printable_text, until_interrupted
from tailrace.client import AnswerFailed, Client, Turn
from tailrace_plugins.terminal_chat.mcp_answer import Tools
from tailrace_plugins.terminal_chat.screen import MarkdownScreen, Screen

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

__all__ = ["Chat", "ask_at_terminal", "converse", "new_screen"]

_HELP = """\
/model [NAME]    show the models, or switch to another one
/image PATH      send an image with the next question
/system [TEXT]   show or set the system message; "" removes it
/tools [NAMES]   show the MCP servers of the server, or use those with these names; "" uses none
/new             begin a new conversation
/help            show this
/exit            exit, like Ctrl-D

Ctrl-C stops an answer. Alt-Enter begins a new line."""
_COMMANDS = ["/exit", "/help", "/image", "/model", "/new", "/system", "/tools"]


@dataclass(slots=True)
class Chat:
    """A conversation with a model of a server."""

    client: Client
    model: str
    say: Callable[[str], None]  # to the person
    say_error: Callable[[str], None]
    system: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # of the next question, as data URLs
    tools: Tools | None = None

    async def ask_with_tools(self, question: str, tools: Tools, new_screen: Callable[[], Screen]) -> bool:
        """As `ask`, with the tools of MCP servers."""
        question_turn = self._turn_of(question)
        pieces: list[str] = []
        items = [_item_of(turn) for turn in (*(() if tools.response_id else self.turns), question_turn)]
        names = {"max_tokens": "max_output_tokens"}
        body = {"model": self.model, **{names.get(name, name): value for name, value in self.sampling.items()}}
        if self.system:
            body["instructions"] = self.system
        try:
            return await tools.answer(self.client, body, items, new_screen, pieces.append)
        finally:
            if text := "".join(pieces):
                self.turns += [question_turn, {"role": "assistant", "content": text}]

    async def ask(self, question: str, screen: Screen) -> bool:
        """Send a message and show its answer. A stopped answer stays part of the conversation. If an answer fails
        before its first piece, its question is removed too. Returns whether the answer is complete.

        Raises: AnswerFailed.
        """
        question_turn = self._turn_of(question)
        system: list[Turn] = [{"role": "system", "content": self.system}] if self.system else []
        pieces: list[str] = []

        async def show() -> None:
            messages = [*system, *self.turns, question_turn]
            self.client.on_reasoning = screen.think
            self.client.on_progress = screen.read
            async with contextlib.aclosing(self.client.answer(self.model, messages, self.sampling)) as answer:
                async for piece in answer:
                    pieces.append(piece)
                    screen.show(piece)

        try:
            with contextlib.closing(screen):
                return await until_interrupted(asyncio.ensure_future(show()))
        finally:
            if text := "".join(pieces):
                self.turns += [question_turn, {"role": "assistant", "content": text}]

    def attach(self, name: str) -> None:
        """Send the image in a file with the next question. Raises: OSError if it cannot be read."""
        path = Path(os.path.expanduser(name))  # `Path.expanduser` raises RuntimeError if there is no such user
        kind, _ = mimetypes.guess_type(path.name)
        self.images.append(f"data:{kind or 'image/png'};base64,{b64encode(path.read_bytes()).decode()}")

    def _turn_of(self, question: str) -> Turn:
        """Return a question with the images that go with it."""
        if not self.images:
            return {"role": "user", "content": question}
        shown = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        self.images.clear()  # also if the server refuses them: the next question can do without
        return {"role": "user", "content": [*shown, {"type": "text", "text": question}]}


def _item_of(turn: Turn) -> Turn:
    """Return a turn as an item of Responses, where parts of a message have other names."""
    if isinstance(turn["content"], str):
        return turn
    parts = [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"]}
        for part in turn["content"]
    ]
    return {**turn, "content": parts}


def new_screen(*, is_plain: bool) -> Screen:
    """Return a Markdown screen if stdout is a suitable terminal and `is_plain` is false, else a plain one."""
    if is_plain or not sys.stdout.isatty() or os.environ.get("TERM", "") in ("", "dumb"):
        return PlainScreen(sys.stdout)
    from rich.console import Console

    return MarkdownScreen(Console(highlight=False))


async def converse(chat: Chat, *, history: Path, is_plain: bool) -> None:
    """Run a conversation until the user exits."""
    with _without_echo():
        await _converse(chat, _prompt(chat, history), is_plain=is_plain)


async def _converse(chat: Chat, prompt: PromptSession[str], *, is_plain: bool) -> None:
    chat.say(f"{printable_text(chat.model)} at {chat.client.root}. /help lists the commands. Ctrl-D exits.")
    while True:
        try:
            line = (await prompt.prompt_async(">>> ")).strip()
        except KeyboardInterrupt:
            chat.say("To exit, press Ctrl-D or type /exit.")
            continue
        except EOFError:
            return
        if line.startswith("/"):
            if await _run_command(chat, line) == "exit":
                return
        elif line:
            try:
                if not await _ask(chat, line, is_plain=is_plain):
                    chat.say("Stopped.")
            except AnswerFailed as error:
                chat.say_error(f"{error}.".replace("..", "."))


async def _ask(chat: Chat, question: str, *, is_plain: bool) -> bool:
    if chat.tools is None:
        return await chat.ask(question, new_screen(is_plain=is_plain))
    return await chat.ask_with_tools(question, chat.tools, lambda: new_screen(is_plain=is_plain))


async def ask_at_terminal(call: str) -> bool:
    """Ask whether a call may be made. What was typed before the question is no answer."""
    import click
    from prompt_toolkit import PromptSession
    from prompt_toolkit.input.typeahead import clear_typeahead

    click.echo(f"The model wants to call {call}", err=True)
    session = PromptSession[str]()
    clear_typeahead(session.app.input)
    with contextlib.suppress(termios.error, ValueError):
        termios.tcflush(sys.stdin, termios.TCIFLUSH)
    try:
        answer = await session.prompt_async("Allow this call? [y/N] ")
    except (EOFError, KeyboardInterrupt):
        return False
    return answer.strip().lower() in ("y", "yes")


async def _use_tools(chat: Chat, names: str) -> None:
    try:
        listed = await chat.client.get("/v1/mcp/servers") if chat.client.is_tailrace else {}
    except AnswerFailed as error:
        chat.say_error(f"{error}.".replace("..", "."))
        return
    known = [str(one.get("label")) for one in listed.get("data", ())]
    wanted = names.replace(",", " ").split()
    if not wanted:
        used = ", ".join(chat.tools.labels) if chat.tools is not None else "none"
        chat.say(f"MCP servers: {printable_text(', '.join(known)) or 'none'}. In use: {used}.")
    elif wanted in (['""'], ["''"]):
        chat.tools = None
        chat.say("No tools are used now.")
    elif unknown := [name for name in wanted if name not in known]:
        chat.say_error(f"there is no MCP server {unknown[0]}. There are: {printable_text(', '.join(known)) or 'none'}.")
    else:
        chat.tools = Tools(wanted, chat.say, ask_at_terminal)
        chat.say(f"The model may use the tools of {', '.join(wanted)}. Those that change something are asked for.")


async def _run_command(chat: Chat, line: str) -> str:
    """Run a command. Returns its name."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    match name:
        case "/model" if rest:
            if chat.client.models and rest not in chat.client.models:
                chat.say_error(f"this server has no such model. {_models(chat)}")
            else:
                chat.model = rest
                chat.say(f"The model is now {rest}.")
        case "/model":
            chat.say(f"{_models(chat)} The current one is {printable_text(chat.model)}.")
        case "/image" if rest:
            try:
                chat.attach(rest)
            except OSError as error:
                chat.say_error(f"the image cannot be read: {error.strerror}.")
            else:
                chat.say("The image goes with the next question.")
        case "/system" if rest:
            chat.system = "" if rest in ('""', "''") else rest
            chat.say("The system message is set." if chat.system else "There is no system message now.")
        case "/system":
            chat.say(chat.system or "There is no system message.")
        case "/tools":
            await _use_tools(chat, rest)
        case "/new":
            chat.turns.clear()
            if chat.tools is not None:
                chat.tools.response_id = ""
            chat.images.clear()
            chat.say("Started a new conversation.")
        case "/help":
            chat.say(_HELP)
        case "/exit" | "/quit" | "/bye":
            return "exit"
        case _:
            chat.say_error("there is no such command. /help lists them.")
    return name


def _models(chat: Chat) -> str:
    return f"The server's models: {', '.join(map(printable_text, chat.client.models)) or 'unknown'}."


def _prompt(chat: Chat, history: Path) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import NestedCompleter
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    keys.add("escape", "enter")(begin_line)
    history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(history, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))  # questions are private
    commands = dict.fromkeys(_COMMANDS) | {"/model": dict.fromkeys(chat.client.models)}
    return PromptSession(
        history=FileHistory(str(history)),
        completer=NestedCompleter.from_nested_dict(commands),
        complete_while_typing=False,
        key_bindings=keys,
    )


@contextlib.contextmanager
def _without_echo() -> Iterator[None]:
    """Turn the terminal's echo off while an answer is shown. Typed input, including Ctrl-D, goes to the next prompt."""
    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, ValueError):
        yield
        return
    silent = [*before[:3], before[3] & ~(termios.ECHO | termios.ICANON), *before[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
