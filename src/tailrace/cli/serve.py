"""`tailrace serve`: fetch the model if need be, load it, listen."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tailrace.cli.options import setting_options
from tailrace.server.settings import Settings, settings_table

__all__ = ["serve"]

_DESCRIPTORS = 65_536
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@click.command()
@click.argument("model", default="smollm2", envvar="TAILRACE_MODEL")
@setting_options(*(row.name for row in settings_table()))
def serve(model: str, **values: Any) -> None:  # Any: click hands over what the table describes
    """Serve MODEL over HTTP.

    MODEL is a name (smollm2), a GGUF file, an OpenVINO directory, or hf:org/name[:file]. It is fetched if it is not
    here. Every option can also be given in the environment: --max-step-tokens as TAILRACE_MAX_STEP_TOKENS.

    \b
    tailrace serve
    tailrace serve ./model.gguf --port 9000
    tailrace serve hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:qwen2.5-0.5b-instruct-q4_k_m.gguf
    """
    try:
        settings = Settings(**values)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="tailrace: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    raise SystemExit(_run(model, settings))


def _say(text: str) -> None:
    click.echo(text, err=True)


def _run(source: str, settings: Settings) -> int:
    from tailrace.errors import ModelError
    from tailrace.server.lifecycle import bind

    try:
        sock = bind(settings)
    except OSError as error:
        other = "--host" if isinstance(error, socket.gaierror) else "--port"
        _say(f"tailrace: cannot listen on {settings.host}:{settings.port} ({error.strerror}). Choose another {other}.")
        return 1
    _raise_descriptor_limit()
    # Until the loop takes them over, a signal simply ends us, without a traceback.
    for number in _SIGNALS:
        signal.signal(number, _leave)
    try:
        with sock:
            return _serve(source, settings, sock)
    except* ModelError as group:
        _say(f"tailrace: {_first(group)}")
    return 1


def _raise_descriptor_limit() -> None:
    """A connection is a descriptor, and systems often start programs with few, of many that they may have."""
    with contextlib.suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def _leave(*_: object) -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # another one would only interrupt the leaving
    sys.exit(130)


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


@contextlib.contextmanager
def _data_path(settings: Settings, port: int) -> Iterator[Path]:
    """Where the journal is. A port that is another one each time has no next process to leave anything to."""
    from tailrace.models.places import data_path

    if settings.data_dir:
        yield Path(settings.data_dir).expanduser()
    elif settings.port:
        yield data_path() / f"port-{port}"
    else:
        with tempfile.TemporaryDirectory(prefix="tailrace-") as directory:
            yield Path(directory)


def _serve(source: str, settings: Settings, sock: Any) -> int:  # Any: a socket, which click's imports need not know
    from tailrace.cli.pull import TerminalProgress
    from tailrace.models.places import cache_path
    from tailrace.server.lifecycle import Service
    from tailrace.server.lifecycle import serve as serve_model
    from tailrace.server.source import find_source

    found = find_source(source, TerminalProgress())
    started = time.monotonic()
    _say(f"Loading {found.card.name} into {found.engine} …")
    host, port = sock.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def on_ready(service: Service) -> None:
        capabilities = service.supervisor.capabilities
        assert capabilities is not None
        loaded_s = time.monotonic() - started
        if service.num_recovered:
            streams = "1 stream goes" if service.num_recovered == 1 else f"{service.num_recovered} streams go"
            _say(f"{streams} on where the last server left off.")
        _say(f"Loaded in {loaded_s:.1f} s: {capabilities.engine}, {capabilities.context_tokens} tokens of context.")
        if service.replay is not None:
            _say(f"Replays were certified on this machine: {service.replay}.")
        _say(f"Listening on {url}. Try it:\n")
        _say(f"    curl -N -X POST '{url}/?prompt=Tell%20me%20a%20story%20about%20a%20river.'\n")

    def on_drain(num_streams: int) -> None:
        if num_streams:
            streams = "1 stream has" if num_streams == 1 else f"{num_streams} streams have"
            _say(f"Stopping; {streams} {settings.drain_s:g} s to finish.")

    async def main() -> None:
        prepared = str(cache_path() / "prepared")
        try:
            with _data_path(settings, port) as data:
                await serve_model(
                    found, settings, sock, data_path=data, cache_path=prepared, on_ready=on_ready, on_drain=on_drain
                )
        finally:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # the last steps are quick

    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        uvloop.run(main())
    _say("Stopped.")
    return 0
