"""`tailrace ls`: the models on this machine."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli.console import print_json, print_table, say, size_text

if TYPE_CHECKING:
    from tailrace_outer.measure.bench import Machine

__all__ = ["ls"]


@click.command()
@click.option("--available", is_flag=True, help="List the models that have a name, and which fit this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(available: bool, as_json: bool) -> None:
    """List the downloaded models, and their size including the files that engines have made of them.

    Models of the Hugging Face hub are in the hub's own cache, which other programs also use.

    With --available, list the models that `tailrace serve` knows by name: what is fetched, whether it fits the memory
    that is free now, and the most tokens a second that the memory's speed allows one stream. This speed is measured for
    some seconds. `tailrace doctor MODEL` measures a downloaded model itself.
    """
    from tailrace_outer.measure.on_disk import stored_models

    if available:
        _list_available(as_json)
        return

    models = stored_models()
    if as_json:
        print_json([{"name": one.name, "bytes": one.num_bytes, "changed_s": one.changed_s} for one in models])
        return
    if not models:
        say("There are no models on this machine. `tailrace pull` downloads one.")
        return
    print_table(
        ["model", "size", "changed"],
        [[_with_known_name(model.name), size_text(model.num_bytes), _time_text(model.changed_s)] for model in models],
    )


def _list_available(as_json: bool) -> None:
    from tailrace_outer.measure.bench import look_at_machine, measure_machine
    from tailrace_outer.measure.bench.machine import MeasurePlan

    try:
        machine = measure_machine(MeasurePlan())
    except RuntimeError as error:
        say(f"The speed of the memory is not known: {error}.")
        machine = look_at_machine()
    rows = _available(machine)
    if as_json:
        print_json(rows)
        return
    print_table(
        ["model", "to fetch", "fits", "tokens/s", "window", "can", "licence", "here"],
        [
            [
                row["name"],
                size_text(row["bytes"]),
                "yes" if row["fits"] else "no",
                f"{row['tokens_per_s']:.2g}" if row["tokens_per_s"] else "",
                f"{row['context_tokens']:,}",
                ", ".join(row["can"]),
                row["license"],
                "yes" if row["is_here"] else "",
            ]
            for row in rows
        ],
    )
    speed = f", read at {machine.read_bytes_per_s / 1e9:.1f} GB/s" if machine.read_bytes_per_s else ""
    say(
        f"{machine.available_bytes / 1e9:.1f} GB of memory are free{speed}. tokens/s is the most that one stream can "
        "have on the processor."
    )


def _available(machine: Machine) -> list[dict[str, Any]]:  # Any: JSON
    from tailrace.models.advice import fits, known_models, tokens_per_s
    from tailrace_outer.measure.on_disk import is_here

    return [
        {
            "name": model.name,
            "bytes": model.num_bytes,
            "fits": fits(model, machine.available_bytes),
            "tokens_per_s": round(tokens_per_s(model, machine.read_bytes_per_s), 2)
            if not {"embeddings", "ranking"} & set(model.can)
            else 0.0,
            "context_tokens": model.context_tokens,
            "can": list(model.can),
            "license": model.license,
            "is_here": is_here(model),
        }
        for model in known_models()
    ]


def _time_text(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).astimezone().strftime("%Y-%m-%d %H:%M")


def _with_known_name(name: str) -> str:
    from tailrace.models.catalogue import hub_models

    known = [model.name for model in hub_models().values() if name == f"hf:{model.repo}"]
    return f"{name} ({', '.join(known)})" if known else name
