"""`tailrace doctor`: the installed engines, whether they can run a model, and how fast this machine should be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import click

from tailrace import DEFAULT_MODEL
from tailrace.cli.console import say
from tailrace.cli.setting_options import setting_options

if TYPE_CHECKING:
    from pathlib import Path

    from tailrace.assembly.source import Source
    from tailrace.engines import Kind
    from tailrace.models import ModelCard
    from tailrace.streams.old_journals import KeptJournal
    from tailrace_outer.measure.bench import Machine
    from tailrace_outer.measure.bench.machine import MeasurePlan

__all__ = ["chat_lines", "doctor"]

_LOADS = (1, 16)
_MAX_TOKENS = 64
_NUM_JOURNALS = 5  # shown at most


@dataclass(frozen=True, slots=True)
class _Engine:
    """One row of the table."""

    name: str
    version: str  # "" if it is not installed
    remedy: str
    why_not: str  # why it cannot run the model, or ""


@dataclass(frozen=True, slots=True)
class _Speed:
    """Tokens per second with so many streams: the machine's limit (0 if unknown), and the measured speed."""

    streams: int
    limit: float
    by: str  # what sets the limit
    spread: float  # of the limit: the difference of its two measurements, relative to the larger one
    reached: float


@click.command()
@click.argument("model", required=False, envvar="TAILRACE_MODEL")
@click.option(
    "--engine", default="auto", show_default=True, envvar="TAILRACE_ENGINE", help="The engine whose speed is measured."
)
@setting_options("for_", "draft")
@click.option("--quick", is_flag=True, help="Skip all measurements; with a URL, those that wait.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--key", envvar="TAILRACE_KEY", default="", metavar="KEY", help="With a URL: the server's key, or TAILRACE_KEY."
)
@click.option(
    "--idle-s",
    type=click.FloatRange(1, 50),
    default=25.0,
    show_default=True,
    help="With a URL: how long nothing is written.",
)
def doctor(
    model: str | None, engine: str, for_: str, draft: str, quick: bool, as_json: bool, key: str, idle_s: float
) -> None:
    """Check this machine, its installed engines, and which of them can run MODEL. Without MODEL, nothing is downloaded:
    smollm2 is measured if it is on this machine.

    Measures the speed of memory and of arithmetic, which limit how fast MODEL can be: one stream is limited by reading
    all weights, many streams by computing in the engine's precision. Then it measures the actual speed. The limits are
    measured before and after; the larger value counts, and the difference is shown. This takes half a minute, during
    which nothing else should run.

    With the address of a running server instead of MODEL, measure what lies between: whether proxies hold back or
    compress streams, cut idle ones, refuse large requests, break WebSockets or resuming; and name the settings to
    change in nginx, Caddy, HAProxy, Envoy, Traefik and cloud balancers. The server needs durable streams.

    \b
    tailrace doctor
    tailrace doctor qwen3-4b
    tailrace doctor https://chat.example
    """
    if model is not None and model.startswith(("http://", "https://")):
        from tailrace_outer.measure.doctor_path import show_path

        show_path(model, key, idle_s=0.0 if quick else idle_s, as_json=as_json)
        return
    from tailrace.assembly.source import find_source
    from tailrace.cli.pull import terminal_progress
    from tailrace.errors import ModelError
    from tailrace.models.directories import data_path
    from tailrace.settings import Settings
    from tailrace.streams.old_journals import find_journals
    from tailrace_outer.measure.bench import look_at_machine, measure_machine
    from tailrace_outer.measure.on_disk import find_stored

    failure = ""
    source: Source | None = None
    if model is None and find_stored(DEFAULT_MODEL) is None:
        say(f"No model is measured. `tailrace doctor {DEFAULT_MODEL}` downloads one and measures it.")
    else:
        try:
            settings = Settings(engine=engine, for_=for_, draft=draft)
            source = find_source(model or DEFAULT_MODEL, terminal_progress(), settings)
        except ModelError as error:
            failure = error.message
    quick = quick or source is None
    machine = look_at_machine()
    if source is not None and not quick:
        try:
            with _waiting("Measuring the machine"):
                machine = measure_machine(_measure_plan(source))
        except RuntimeError as error:
            failure, quick = f"The machine cannot be measured: {error}.", True
    engines = _engines(source.card if source is not None else None)
    speeds: list[_Speed] = []
    if source is not None and not source.address and source.card.task == "generate" and not quick:
        try:
            with _waiting(f"Running {source.card.name} with {source.engine}"):
                reached = _reached(source)
            with _waiting("Measuring the machine once more"):
                speeds = _speeds(source, reached, machine, measure_machine(_measure_plan(source)))
        except (RuntimeError, ModelError) as error:
            failure = f"{source.card.name} with {source.engine} cannot be measured: {error}."
    journals = find_journals(data_path())
    if as_json:
        click.echo(json.dumps(_plain(machine, engines, source, speeds, journals, failure), indent=2))
    else:
        parts = (
            _machine_lines(machine),
            [*_engine_lines(engines, source), *chat_lines(source)],
            _speed_lines(source, speeds),
        )
        for line in [*(line for part in parts for line in (*part, "")), *_journal_lines(journals)]:
            click.echo(line)
    if failure:
        raise click.ClickException(failure)


@contextmanager
def _waiting(text: str) -> Iterator[None]:
    """Show a spinner on stderr if it is a terminal."""
    from rich.console import Console

    with Console(stderr=True).status(f"{text} …"):
        yield


def _engines(card: ModelCard | None) -> list[_Engine]:
    from tailrace.engines import all_kinds, own_kinds

    kinds = [
        kind for kind in all_kinds().values() if kind.packages or kind.name not in own_kinds()
    ]  # the others need no packages
    return [_Engine(kind.name, _version(kind), kind.remedy, kind.why_not(card) if card else "") for kind in kinds]


def _version(kind: Kind) -> str:
    if kind.missing:
        return ""
    try:
        return version(kind.packages[-1] if kind.packages else kind.cls.partition(".")[0])
    except PackageNotFoundError:
        return "installed"


def _measure_plan(source: Source) -> MeasurePlan:
    """Return what to measure on the machine for a model."""
    from tailrace.assembly.service import engine_spec
    from tailrace.engines import all_kinds
    from tailrace.settings import Settings
    from tailrace_outer.measure.bench.machine import MeasurePlan

    if not all_kinds()[source.engine].operations_per_s:
        return MeasurePlan(0 if source.address else source.weight_bytes())
    return MeasurePlan(source.weight_bytes(), engine_spec(source, Settings(), cache_path=""), _in_eight_bits(source))


def _in_eight_bits(source: Source) -> bool:
    return bool(source.card.num_parameters) and source.weight_bytes() < 1.5 * source.card.num_parameters


def _reached(source: Source) -> list[tuple[int, float]]:
    """Measure the engine; returns pairs of the number of streams and tokens per second. Raises: RuntimeError if the
    engine fails."""
    from tailrace.assembly.service import engine_spec
    from tailrace.models.directories import prepared_path
    from tailrace.settings import Settings
    from tailrace.text import Tokenizer
    from tailrace_outer.measure.bench import Round, engine_alone

    spec = engine_spec(source, Settings(), cache_path=prepared_path())
    tokenizer = Tokenizer.from_json(source.card.tokenizer_json)
    found = []
    with engine_alone(spec) as run:
        number = 0
        for streams in (1, *_LOADS):  # the first warms up
            prompts = [tuple(tokenizer.encode(f"{number + index}. A story:", special=True)) for index in range(streams)]
            number += streams
            found.append((streams, run(Round(prompts, _MAX_TOKENS)).events_per_s))
    return found[1:]


def _speeds(source: Source, reached: list[tuple[int, float]], before: Machine, after: Machine) -> list[_Speed]:
    """Compare the measured speeds with the limits. Disturbances only make a measured limit too low, so that the larger
    of two measurements counts."""
    found = []
    for streams, tokens_per_s in reached:
        both = [_limits(source, machine, streams) for machine in (before, after)]
        limits = {
            by: (max(ones), 1 - min(ones) / max(ones)) for by in both[0] if all(ones := [one[by] for one in both])
        }
        by = min(limits, key=lambda name: limits[name][0], default="")
        limit, spread = limits.get(by, (0.0, 0.0))
        found.append(_Speed(streams, round(limit, 1), by, round(spread, 3), round(tokens_per_s, 1)))
    return found


def _limits(source: Source, machine: Machine, streams: int) -> dict[str, float]:
    """Return the limits of memory and arithmetic in tokens per second, by name; 0 if unknown."""
    card = source.card
    limits = {"memory": streams * machine.read_bytes_per_s / source.weight_bytes() if source.weight_bytes() else 0.0}
    if card.num_parameters and machine.engine_ops_per_s:
        name = "arithmetic in eight bits" if _in_eight_bits(source) else "float32 arithmetic"
        limits[name] = machine.engine_ops_per_s / (2 * card.num_parameters)
    elif (
        card.num_parameters and source.weight_bytes() >= 4 * card.num_parameters
    ):  # with smaller weights, engines compute in a lower precision
        limits["float32 arithmetic"] = machine.flops_per_s / (2 * card.num_parameters)
    return limits


def _machine_lines(machine: Machine) -> Iterator[str]:
    cores = "1 core" if machine.cores == 1 else f"{machine.cores} cores"
    yield f"Machine      {machine.processor}, {cores}" + (
        f" ({', '.join(machine.features)})" if machine.features else ""
    )
    free = f"{machine.available_bytes / 1e9:.1f} of {machine.memory_bytes / 1e9:.1f} GB free"
    yield f"  memory     {free}" + (
        f", read at {machine.read_bytes_per_s / 1e9:.1f} GB/s" if machine.read_bytes_per_s else ""
    )
    if machine.flops_per_s:
        yield f"  arithmetic {machine.flops_per_s / 1e9:,.0f} billion float32 operations per second" + (
            f", {machine.engine_ops_per_s / 1e9:,.0f} billion with the engine's kernels"
            if machine.engine_ops_per_s
            else ""
        )
    yield f"  GPU        {', '.join(machine.gpus) or 'none seen'}"


def _engine_lines(engines: list[_Engine], source: Source | None) -> Iterator[str]:
    from tailrace.assembly.service import engine_spec
    from tailrace.engines import all_kinds
    from tailrace.settings import Settings

    name = source.card.name if source is not None else "the model"
    yield "Engines"
    for row in engines:
        runs = "runs" if row.version else "would run"
        able = f"no: {row.why_not}" if row.why_not else f"{runs} {name}" if source is not None else ""
        yield f"  {row.name:12} {row.version or 'missing':28} {able}".rstrip()
        if not row.version:
            yield f"               {row.remedy}"
    if source is not None:
        yield f"{name} would run with {source.engine}: {source.why}."
        if (forms := all_kinds()[source.engine].forms) is not None:
            spec = engine_spec(source, Settings(), cache_path="")
            yield f"  forms      {forms(source.card, spec)}"


def chat_lines(source: Source | None) -> Iterator[str]:
    """What clients can do with the model."""
    from tailrace.assembly.service import load_text
    from tailrace.engines import all_kinds
    from tailrace.settings import Settings

    if source is None:
        return
    card = source.card
    if card.task == "embed":
        yield f"  embeds     texts of up to {card.context_tokens} tokens, in {card.num_dimensions} dimensions"
    if card.task == "rank":
        yield f"  ranks      documents, with the query up to {card.context_tokens} tokens"
    if card.task != "generate":
        return
    _, chat = load_text(source, Settings())
    if chat is None:
        yield "  chats      no: it has no chat template that can be used"
        return
    tools = "no: its chat template takes no tools"
    if chat.calls is not None:
        tools = f"yes, with calls in the format {chat.calls.name}"
    elif chat.facts.describes_tools:
        tools = "no: the format of its calls is not known; choose one with --tool-format"
    yield f"  tools      {tools}"
    can_see = all_kinds()[source.engine].sees(source.card) and chat.facts.shows_images
    yield f"  images     {'yes' if can_see else 'no'}"
    reasoning = "not separated" if chat.reasoning is None else f"separated at {chat.reasoning.closes[0]}"
    yield f"  reasoning  {reasoning}"
    advice = ", ".join(f"{name} {value:.3g}" for name, value in source.card.sampling.items())
    yield f"  sampling   {advice or 'no advice from the model'}; what a request says comes first"


def _speed_lines(source: Source | None, speeds: list[_Speed]) -> Iterator[str]:
    if source is None:
        return
    card = source.card
    parameters = f"{card.num_parameters / 1e6:,.1f} million parameters in " if card.num_parameters else ""
    if card.weight_bytes:
        kept = source.weight_bytes()
        converted = "" if kept == card.weight_bytes else f", {kept / 1e6:,.1f} MB in {source.engine}"
        on_disk = f"{_bytes_on_disk(card.path) / 1e6:,.1f} MB on disk"
        yield f"{card.name}: {on_disk}; {parameters}{card.weight_bytes / 1e6:,.1f} MB of weights{converted}"
    if source.draft is not None:
        of_draft = f"{source.draft_bytes / 1e6:,.1f} MB of weights in {source.engine}"
        yield f"with the draft model {source.draft.name}: {of_draft}"
    for row in speeds:
        streams = "1 stream" if row.streams == 1 else f"{row.streams} streams"
        limit = ""
        if row.limit:
            limit = (
                f", of {row.limit:,.0f} that {row.by} allows ({row.reached / row.limit:.0%}; limit ±{row.spread:.0%})"
            )
        yield f"  {streams:10} {row.reached:8,.1f} tokens/s{limit}"


def _bytes_on_disk(path: Path) -> int:
    """Return the size of a model's file, or of all files in its directory. Follows links."""
    from tailrace.models.shards import parts_of

    files = path.iterdir() if path.is_dir() else parts_of(path)
    return sum(file.stat().st_size for file in files if file.is_file())


def _journal_lines(journals: list[KeptJournal]) -> Iterator[str]:
    if not journals:
        yield "Journals of servers: none"
        return
    total = sum(row.num_bytes for row in journals) / 1e6
    largest = sorted(journals, key=lambda row: -row.num_bytes)[:_NUM_JOURNALS]
    yield f"Journals of servers: {len(journals)}, {total:,.1f} MB" + (
        f"; the largest {len(largest)}:" if len(largest) < len(journals) else ""
    )
    for row in largest:
        state = "in use" if row.is_held else f"last written {_age(row.idle_s)} ago"
        yield f"  {row.num_bytes / 1e6:8,.1f} MB  {state:28} {row.path}"
    yield "  A server removes expired journals at its start. You may delete any journal that is not in use."


def _age(seconds: float) -> str:
    for unit, length_s in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


# Any: JSON
def _plain(
    machine: Machine,
    engines: list[_Engine],
    source: Source | None,
    speeds: list[_Speed],
    journals: list[KeptJournal],
    failure: str,
) -> dict[str, Any]:
    import msgspec

    chosen = None
    if source is not None:
        card = source.card
        chosen = {
            "name": card.name,
            "format": card.format,
            "architecture": card.architecture,
            "num_parameters": card.num_parameters,
            "bytes_on_disk": _bytes_on_disk(card.path) if card.weight_bytes else 0,
            "weight_bytes": card.weight_bytes,
            "engine": source.engine,
            "why": source.why,
        }
    return {
        "machine": msgspec.to_builtins(machine),
        "engines": [asdict(row) for row in engines],
        "model": chosen,
        "speeds": [asdict(row) for row in speeds],
        "journals": [asdict(row) | {"path": str(row.path)} for row in journals],
        "failure": failure,
    }
