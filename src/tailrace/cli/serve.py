"""`tailrace serve`: download the model if it is missing, load it, and serve it."""

from __future__ import annotations

import contextlib
import errno
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace import DEFAULT_MODEL
from tailrace.cli.config_file import config_option
from tailrace.cli.console import say, say_error, show_log
from tailrace.cli.places import HERE, ModelArguments, place_options, serve_at, take_place_options
from tailrace.cli.setting_options import (
    is_given,
    model_options,
    setting_options,
    settings_in,
    warn_of_unknown_variables,
)
from tailrace.settings import Settings, settings_of, settings_table
from tailrace.system import eventloop

if TYPE_CHECKING:
    from tailrace.api.reload import Given
    from tailrace.assembly.source import Source

__all__ = [
    "bound_socket",
    "data_directory",
    "run_on_socket",
    "serve",
    "url_of",
]

_DESCRIPTORS = 65_536
_EXAMPLES = {
    "generate": "curl -N -X POST '{}/?prompt=Tell%20me%20a%20story%20about%20a%20river.'",
    "embed": "curl {}/v1/embeddings -H 'content-type: application/json' -d '{{\"input\": \"A river.\"}}'",
    "rank": (
        "curl {}/v1/rerank -H 'content-type: application/json' "
        '-d \'{{"query": "Where is it wet?", "documents": ["A river.", "A mill."]}}\''
    ),
}
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WORDS = f"{__name__}.words"  # in the meta of its context
_STOPPED_LOADING = 130  # exit status after a signal that came before the server was ready


class _Serve(click.Command):
    """Keeps its words, with which it is read again at SIGHUP."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)


@click.command(cls=_Serve, params=place_options())
@config_option
@model_options
@setting_options(*(row.name for row in settings_table()))
@click.pass_context
def serve(
    ctx: click.Context,
    /,
    model: str,
    named: tuple[str, ...],
    own: dict[str, dict[str, Any]],
    on: str,
    **values: Any,
) -> None:  # Any: click hands over what the table describes
    """Serve MODEL over HTTP.

    MODEL is a name (smollm2, qwen3-4b; `tailrace ls --available` lists them), a GGUF file, a directory of a Hugging
    Face model or an OpenVINO export, or hf:org/name[:file], which is downloaded if it is missing. It can also be a
    running server: openai:URL, tgi:URL. `tailrace doctor MODEL` shows how this machine can run it.

    With --model, it serves several models by name. MODEL is then the first of them, or is omitted.

    Every option but --on, --replicas and --target-requests can also be given in the environment: --max-step-tokens
    as TAILRACE_MAX_STEP_TOKENS.

    \b
    tailrace serve
    tailrace serve qwen3-4b
    tailrace serve ./model.gguf --port 9000
    tailrace serve hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:qwen2.5-0.5b-instruct-q4_k_m.gguf
    tailrace serve openai:http://10.0.0.5:8000/v1
    tailrace serve --model chat=smollm2 --model big=./model.gguf --set big.engine=llamacpp
    """
    place = take_place_options(ctx, on, values)
    try:
        settings = settings_of(values)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    warn_of_unknown_variables()
    _show_log(settings)
    models = _models_in(ctx)
    if on != HERE:
        raise SystemExit(serve_at(on, models, settings, place) if _may_listen(settings) else 1)
    read_again = partial(_read_again, ctx) if ctx.default_map is not None else None  # else nothing can have changed
    raise SystemExit(run_on_socket(settings, partial(_serve, models, settings, read_again)))


def _show_log(settings: Settings) -> None:
    show_log(settings.log_level, as_json=settings.log_format == "json")


def bound_socket(settings: Settings) -> socket.socket | None:
    """Bind the socket to listen on. Returns None, after an error message, if that is impossible or not allowed."""
    from tailrace.errors import ModelError
    from tailrace.transport.addresses import bind

    if not _may_listen(settings):
        return None
    try:
        if settings.tls_cert:
            from tailrace.transport.tls import Tls

            Tls(settings)  # fail before the slow steps
        return bind(settings)
    except ModelError as error:
        say_error(error.message)
        return None
    except OSError as error:
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        other = "--host" if is_host else "--port"
        say_error(f"cannot listen on {settings.host}:{settings.port} ({error.strerror}). Choose another {other}.")
        return None


def _may_listen(settings: Settings) -> bool:
    """Return whether a server may listen on this address; if not, after an error message."""
    from tailrace.transport.addresses import listens_on_loopback

    if listens_on_loopback(settings.host):
        return True
    if not (settings.insecure or _has_keys(settings)):
        say_error(
            f"there are no keys, so everybody who can reach {settings.host} could use this server. Create a key "
            "with `tailrace keys create NAME`, or start the server with --insecure."
        )
        return False
    if settings.insecure:
        say_error("--insecure: while there are no keys, everybody who can reach this port can use the server.")
    return True


def run_on_socket(settings: Settings, start: Callable[[socket.socket], Coroutine[Any, Any, bool]]) -> int:
    """Bind the socket, run the server on it, and return the exit status, after a message if it is an error.

    `start` takes the socket. Its coroutine runs the server until it has stopped, and returns whether it was ever ready;
    `start` itself may load a model: until the event loop handles signals, they end the process without a traceback.
    """
    from tailrace.errors import ModelError

    sock = bound_socket(settings)
    if sock is None:
        return 1
    _raise_descriptor_limit()
    for number in _SIGNALS:
        signal.signal(number, _leave_quietly)
    eventloop.outlive_hangup()

    async def run(server: Coroutine[Any, Any, bool]) -> bool:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            return await server
        finally:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # the rest of the shutdown is fast

    try:
        with sock:
            server = start(sock)
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # an exit inside the event loop's start would break it
            is_ready = eventloop.run(run(server))
    except* ModelError as group:
        say_error(str(eventloop.first_error(group)))
        status = 1
    else:
        say("Stopped.")
        status = 0 if is_ready else _STOPPED_LOADING
    return status


def url_of(sock: socket.socket, settings: Settings) -> str:
    """Return the base URL of a server on this socket."""
    host, port = sock.getsockname()[:2]
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _models_to_try() -> str:
    """Return the next models that fit this machine, "" if there are none."""
    from tailrace.cli.console import size_text
    from tailrace.models.advice import models_to_try
    from tailrace.system.memory import machine_memory

    found = models_to_try(machine_memory().available_bytes)
    return " or ".join(f"tailrace serve {model.name} ({size_text(model.num_bytes)} to fetch)" for model in found)


def _has_keys(settings: Settings) -> bool:
    """Return whether the server has keys. Raises: click.ClickException if the database cannot be read."""
    from tailrace.errors import ModelError
    from tailrace.records.records_service import has_keys

    try:
        return has_keys(settings)
    except ModelError as error:
        raise click.ClickException(error.message) from None


def _raise_descriptor_limit() -> None:
    """Raise the soft limit of file descriptors: each connection needs one, and the default is often low."""
    with contextlib.suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def _leave_quietly(*_: object) -> None:
    """A signal handler: exit without a traceback."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a second signal would interrupt the exit
    say("Stopped.")
    sys.exit(_STOPPED_LOADING)


@contextlib.contextmanager
def data_directory(settings: Settings, port: int, kind: str = "port") -> Iterator[Path]:
    """Yield the journal's directory. It is temporary for a random port, which no later process uses. Removes journals
    of other ports if all their streams have expired, and at the end the own journal if it has no streams."""
    from tailrace.models.directories import data_path, expanded
    from tailrace.streams.old_journals import lifetime_s, remove_expired_journals, remove_unused_journal

    if settings.data_dir:
        yield expanded(settings.data_dir)
    elif settings.port:
        own = data_path() / f"{kind}-{port}"
        own_lifetime_s = lifetime_s(linger_s=settings.linger_s, retention_s=settings.retention_s)
        if removed := remove_expired_journals(data_path(), lifetime_s=own_lifetime_s, keep=own):
            say(f"Removed old journals, in which every stream has expired: {', '.join(path.name for path in removed)}.")
        try:
            yield own
        finally:
            remove_unused_journal(own)
    else:
        with tempfile.TemporaryDirectory(prefix="tailrace-") as directory:
            yield Path(directory)


def _models_in(ctx: click.Context) -> ModelArguments:
    given = ctx.params
    is_first = not given["named"] or is_given(ctx, "model")
    return ModelArguments(given["model"] if is_first else None, given["named"], given["own"])


def _given(settings: Settings, models: ModelArguments) -> Given:
    from tailrace.api.reload import Given

    named = [text.partition("=") for text in models.named]
    sources = {"model": models.first or ""} | {f"models.{name}": source for name, _, source in named}
    return Given(settings, models.own, sources)


def _read_again(ctx: click.Context, known: Collection[str]) -> tuple[Given, list[Source]]:
    """Return what the words of a command, the environment and the file say now, with the models that have other names
    than the known ones. Raises: ModelError, or ValueError, which says what is wrong."""
    from tailrace.assembly.source import checked_names, find_named
    from tailrace.cli.pull import terminal_progress

    try:
        now = ctx.command.make_context(ctx.info_name, list(ctx.meta[_WORDS]), parent=ctx.parent)
        settings, models = settings_in(now), _models_in(now)
        names = [name for name, _ in checked_names(models.named, settings, models.own) if name not in known]
        texts = [text for text in models.named if text.partition("=")[0] in names]
        own = {name: its for name, its in models.own.items() if name in names}
        return _given(settings, models), find_named(texts, terminal_progress(), settings, own=own)
    except click.ClickException as error:
        raise ValueError(error.format_message()) from None


def _serve(
    models: ModelArguments,
    settings: Settings,
    read_again: Callable[[Collection[str]], tuple[Given, list[Source]]] | None,
    sock: socket.socket,
) -> Coroutine[Any, Any, bool]:
    """Download the models if they are missing, and return the server's coroutine for `run_on_socket`."""
    from tailrace.api.lifecycle import RunningServer
    from tailrace.api.lifecycle import serve as serve_model
    from tailrace.api.pages import NO_LIBRARIES, has_libraries
    from tailrace.api.reload import Reread
    from tailrace.assembly.source import find_named
    from tailrace.cli.pull import terminal_progress
    from tailrace.cli.windows import small_window
    from tailrace.models.directories import prepared_path

    found, *more = find_named(models.named, terminal_progress(), settings, first=models.first, own=models.own)
    started = time.monotonic()
    is_ready = False
    draft = f" with the draft model {found.draft.name}" if found.draft is not None else ""
    say(f"Loading {found.card.name}{draft} into {found.engine} ({found.why}) …")
    url = url_of(sock, settings)
    outlives_hangup = settings.audit_log or settings.tls_cert or signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
    reread = Reread(_given(settings, models), read_again) if read_again is not None and outlives_hangup else None
    local = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")  # the URL on this machine

    def on_ready(running: RunningServer) -> None:
        nonlocal is_ready
        is_ready = True
        service = running.service
        running.server.on_reload(_show_log)
        capabilities = service.models.first.supervisor.capabilities
        assert capabilities is not None
        loaded_s = time.monotonic() - started
        if service.num_recovered:
            streams = "1 stream goes" if service.num_recovered == 1 else f"{service.num_recovered} streams go"
            say(f"{streams} on from the previous server.")
        say(f"Loaded in {loaded_s:.1f} s: {capabilities.engine}, {capabilities.context_tokens} tokens of context.")
        if (replay := service.models.first.replay) is not None:
            say(f"According to `tailrace certify` on this machine, repeated answers are {replay}.")
        for one in more:
            when = "is loaded" if service.models[one.card.name].is_loaded else "will be loaded for its first request"
            say(f"{one.card.name} {when}: {one.engine} ({one.why}).")
        say(f"Listening on {url}")
        say(f"  Page to chat on:  {local}/" if has_libraries() else f"  No page to chat on. {NO_LIBRARIES}")
        say(f"  OpenAI base URL:  {local}/v1")
        first = service.models.first
        small = small_window(first.generator.limit_tokens(), found.card.context_tokens, first.settings)
        if small and first.generator.task == "generate":
            say(f"  Coding agents:    {small}")
        key = "" if running.records.keyring.is_empty else " -H 'Authorization: Bearer tr_…'"
        say(f"  Try it:           {_EXAMPLES[first.generator.task].format(local)}{key}")
        if found.card.name == DEFAULT_MODEL and (larger := _models_to_try()):
            say(f"  Larger models:    {larger}")
        say("")

    def on_drain(num_streams: int, within_s: float) -> None:
        if num_streams:
            streams = "1 stream has" if num_streams == 1 else f"{num_streams} streams have"
            say(f"Stopping; {streams} {within_s:g} s to finish.")

    async def main() -> bool:
        with data_directory(settings, sock.getsockname()[1]) as data:
            await serve_model(
                found, settings, sock, data_path=data, cache_path=prepared_path(), more=more, on_ready=on_ready,
                on_drain=on_drain, reread=reread,
            )  # fmt: skip
        return is_ready

    return main()
