"""`tailrace bench`: what the server adds to the engine, in one run."""

from __future__ import annotations

import asyncio
import json
import platform
import signal
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from tailrace import DEFAULT_MODEL
from tailrace.cli.setting_options import setting_options
from tailrace.system.processors import usable_processors

if TYPE_CHECKING:
    from tailrace.assembly.source import Source
    from tailrace.engines import EngineSpec
    from tailrace_outer.measure.bench import Pair

__all__ = ["bench"]

_MAX_STREAMS = 10_000


@click.command()
@click.argument("model", default=DEFAULT_MODEL, envvar="TAILRACE_MODEL")
@click.option("--streams", default="1,8,32", show_default=True, help="Loads to measure: numbers of concurrent streams.")
@click.option(
    "--max-tokens", default=128, type=click.IntRange(min=2), show_default=True, help="Length of each stream, in tokens."
)
@click.option(
    "--rounds", default=3, type=click.IntRange(min=1), show_default=True, help="Rounds of each load; medians are shown."
)
@click.option(
    "--server-streams", default=64, type=click.IntRange(0, _MAX_STREAMS), show_default=True,
    help="Streams of the server benchmark; 0 skips it.",
)  # fmt: skip
@click.option(
    "--server-tokens", default=4000, type=click.IntRange(min=2), show_default=True,
    help="Length of each of these streams, in tokens.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@setting_options("engine", "for_")
def bench(
    model: str,
    streams: str,
    max_tokens: int,
    rounds: int,
    server_streams: int,
    server_tokens: int,
    as_json: bool,
    engine: str,
    for_: str,
) -> None:
    """Measure MODEL over HTTP and in process under the same load, and the server alone against a raw asyncio writer.

    Nothing else should run on the machine. Figures are medians over the rounds. Only the ratios are comparable between
    machines.
    """
    from tailrace.errors import ModelError
    from tailrace.settings import Settings
    from tailrace_outer.measure.found_model import found_model

    try:
        loads = tuple(int(part) for part in streams.split(",") if part.strip())
    except ValueError:
        loads = (0,)
    if any(not 1 <= load <= _MAX_STREAMS for load in loads):
        raise click.BadParameter(
            f"should be numbers from 1 to {_MAX_STREAMS}, separated by commas.", param_hint="--streams"
        )
    try:
        found = found_model(model, Settings(engine=engine, for_=for_)) if loads else None
        flags = ("--engine", engine, "--for", for_)
        pairs = asyncio.run(_measure(model, found, flags, loads, max_tokens, rounds, server_streams, server_tokens))
    except (ModelError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    except asyncio.CancelledError:
        raise click.Abort from None
    if as_json:
        click.echo(
            json.dumps({"machine": _machine(), "model": model, "pairs": [asdict(pair) for pair in pairs]}, indent=2)
        )
        return
    click.echo(f"{_machine()['cpu']}, {usable_processors()} cores, Python {platform.python_version()}, {model}\n")
    click.echo(f"{'':28}{'streams':>8}{'tokens/s':>11}{'ratio':>7}{'TTFT p50/p99 ms':>20}{'ITL p50/p99 ms':>18}")
    for pair in pairs:
        for line, shown in ((pair.ours, f"{pair.ratio:.3f}"), (pair.theirs, "")):
            ttft = f"{line.ttft_p50_ms:.1f} / {line.ttft_p99_ms:.1f}"
            itl = f"{line.itl_p50_ms:.2f} / {line.itl_p99_ms:.2f}"
            click.echo(f"{line.what:28}{line.streams:8}{line.tokens_per_s:11.1f}{shown:>7}{ttft:>20}{itl:>18}")


async def _measure(
    model: str,
    found: tuple[Source, EngineSpec] | None,
    flags: tuple[str, ...],
    loads: tuple[int, ...],
    max_tokens: int,
    rounds: int,
    server_streams: int,
    server_tokens: int,
) -> list[Pair]:
    from tailrace.text import Tokenizer
    from tailrace_outer.measure.bench import compare_engine, compare_server

    def report(text: str) -> None:
        click.echo(text, err=True)

    task = asyncio.current_task()
    assert task is not None
    for number in (
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # like Ctrl-C: otherwise the servers, in their own sessions, would keep running
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    pairs = []
    if found is not None:
        source, spec = found
        tokenizer = Tokenizer.from_json(source.card.tokenizer_json)
        pairs += await compare_engine(
            model, spec, tokenizer, flags=flags, streams=loads, max_tokens=max_tokens, rounds=rounds, on_progress=report
        )
    if server_streams:
        pairs += await compare_server(
            streams=server_streams, max_tokens=server_tokens, rounds=rounds, on_progress=report
        )
    return pairs


def _machine() -> dict[str, Any]:  # Any: JSON
    from tailrace.system.processors import processor

    return {
        "cpu": processor(),
        "cores": usable_processors(),
        "python": platform.python_version(),
        "system": platform.system(),
    }
