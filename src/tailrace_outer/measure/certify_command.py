"""`tailrace certify`: how exactly the engine repeats itself after its worker was killed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace import DEFAULT_MODEL
from tailrace.cli.setting_options import setting_options

if TYPE_CHECKING:
    from tailrace.assembly.source import Source
    from tailrace.engines import EngineSpec
    from tailrace.engines.certificate import Certificate

__all__ = ["certify"]

_SETTINGS = (  # of engines
    "engine", "for_", "adapter", "adapter_scale", "device", "dtype", "kv_precision", "threads", "exact",
    "prefix_cache", "context_tokens", "kv_tokens", "max_step_tokens", "max_sequences", "prompt_lookup_tokens", "draft",
    "draft_tokens",
)  # fmt: skip


@click.command()
@click.argument("model", default=DEFAULT_MODEL, envvar="TAILRACE_MODEL")
@click.option("--runs", default=200, type=click.IntRange(min=1), show_default=True, help="Total number of replays.")
@click.option(
    "--seed",
    default=1,
    type=click.IntRange(min=0),
    show_default=True,
    help="Seed for the choice of prompts and kill points.",
)
@click.option(
    "--max-tokens",
    default=64,
    type=click.IntRange(min=2),
    show_default=True,
    help="Length of the longest answers, in tokens.",
)
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Also write the result to this file."
)
@setting_options(*_SETTINGS)
def certify(model: str, runs: int, seed: int, max_tokens: int, json_path: Path | None, **values: Any) -> None:
    """Kill the engine of MODEL repeatedly, and count how often a repeated request gives another answer.

    A replay runs a request again from its prompt, like the server after its engine has died. A re-prefill continues
    from the prompt and the delivered tokens, like the server after a replay that differs. The result is stored as a
    certificate for this model, machine and settings.
    """
    from tailrace.engines.certificate import write_certificate
    from tailrace.errors import ModelError
    from tailrace.models.directories import data_path
    from tailrace.settings import Settings
    from tailrace_outer.measure.found_model import found_model

    if json_path is not None and not json_path.parent.is_dir():  # otherwise the measurement would be lost
        raise click.BadParameter("its directory does not exist.", param_hint="--json")
    try:
        source, spec = found_model(model, Settings(**values))
        certificate = asyncio.run(_measure(source, spec, runs, seed, max_tokens))
        kept = write_certificate(data_path(), certificate)
        if json_path is not None:
            json_path.write_bytes(kept.read_bytes())
    except ModelError as error:
        raise click.ClickException(error.message) from error
    except OSError as error:
        raise click.ClickException(f"The certificate cannot be written: {error}.") from error
    for line in _table(certificate):
        click.echo(line)
    click.echo(f"Written to {kept}.", err=True)


async def _measure(source: Source, spec: EngineSpec, runs: int, seed: int, max_tokens: int) -> Certificate:
    from tailrace.engines.certificate import Certificate, subject
    from tailrace_outer.measure.certify import PromptMaker
    from tailrace_outer.measure.certify import certify as measure

    logging.getLogger("tailrace.engine").setLevel(logging.CRITICAL)  # it would log every kill
    with _bar(runs) as advance:
        engine, findings = await measure(
            spec, PromptMaker(source.card), runs=runs, seed=seed, max_tokens=max_tokens, on_progress=advance
        )
    return Certificate(subject(engine, spec), datetime.now(UTC).date().isoformat(), seed, findings)


@contextmanager
def _bar(total: int) -> Iterator[Callable[[str, int], None]]:
    """A progress bar on stderr. Shows nothing if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("Killing and comparing", total=total)

        def advance(name: str, num_runs: int) -> None:
            bars.update(task, advance=num_runs, description=name)

        yield advance


def _table(certificate: Certificate) -> Iterator[str]:
    about = certificate.subject
    settings = ", ".join(
        f"{name} {value}" if isinstance(value, str) else f"{name} {value:g}" for name, value in about.settings.items()
    )
    yield f"{about.engine}, {about.model or 'no model'}, {about.processor}, {certificate.date}"
    yield f"{settings}\n"
    yield f"{'':36}{'replays':>9}{'differ':>8}{'re-prefills':>13}{'differ':>8}"
    for row in certificate.findings:
        refills = f"{row.refill_runs:13}{row.refill_differences:8}" if row.refill_runs else f"{'-':>13}{'-':>8}"
        yield f"{row.name:36}{row.runs:9}{row.differences:8}{refills}"
    runs = sum(row.runs for row in certificate.findings)
    what = f"none of {runs} replays differs" if certificate.verdict == "exact" else "replays differ"
    yield f"\n{certificate.verdict} ({what})"
