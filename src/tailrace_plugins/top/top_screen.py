"""One screen of `tailrace top`."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tailrace.cli.commands import printable_text
from tailrace_plugins.top.looks import Look

__all__ = ["screen"]

_OWNERS = 5


def screen(look: Look, height: int) -> RenderableType:
    """Return what to show in so many lines. The streams that fit are those that run longest."""
    models, owners = _models(look.models), _owners(look.streams)
    used = 5 + len(look.models) + min(_OWNERS, len(owners)) + 6
    fitting = look.streams[: max(1, height - used)]
    parts: list[RenderableType] = [_head(look), models]
    if owners:
        parts.append(_owner_table(owners))
    parts.append(_streams(fitting, look.stream_rates))
    if len(fitting) < look.num_streams:
        parts.append(Text(f"and {look.num_streams - len(fitting)} more"))
    return Group(*parts)


def _head(look: Look) -> Text:
    rate = f"{_number(look.tokens_per_s)} tokens/s" if look.num_tokens is not None else "no metrics"
    running = sum(model["num_running"] for model in look.models)
    waiting = sum(model["num_waiting"] for model in look.models)
    counts = f"{look.num_streams} streams, {running} running, {waiting} waiting, {rate}"
    return Text.assemble((look.url, "bold"), "  ", counts, "  ", (time.strftime("%H:%M:%S"), "dim"))


def _models(models: list[dict[str, Any]]) -> Table:  # Any: of JSON
    table = _table("MODEL", "ENGINE", "STATE", ">RUN", ">WAIT", ">KV", ">MEMORY", ">LOST")
    for one in models:
        table.add_row(
            _text(one["id"]), _text(one["engine"]), _text(one["state"]), str(one["num_running"]),
            str(one["num_waiting"]), f"{one['kv_usage']:.0%}", f"{one['memory_bytes'] / 2**20:.0f} MB",
            str(one["num_restarts"]),
        )  # fmt: skip
    return table


def _owners(streams: list[dict[str, Any]]) -> Counter[str]:
    return Counter(one["owner"] for one in streams)


def _owner_table(owners: Counter[str]) -> Table:
    table = _table("OWNER", ">STREAMS")
    for owner, count in owners.most_common(_OWNERS):
        table.add_row(_text(owner), str(count))
    return table


def _streams(streams: list[dict[str, Any]], rates: dict[str, float]) -> Table:
    table = _table("STREAM", "OWNER", "MODEL", "WIRE", "STATE", ">AGE", ">READ BY", ">TOKENS", ">/S")
    for one in streams:
        state = "suspended" if one["is_suspended"] else one["status"]
        table.add_row(
            _text(one["id"][:10]), _text(one["owner"]), _text(one["model"]), _text(one["wire"]), state,
            f"{max(0.0, time.time() - one['created']):.0f} s", str(one["num_readers"]),
            str(one["completion_tokens"]), _number(rates.get(one["id"])),
        )  # fmt: skip
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold dim")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column[0] == ">" else "left", no_wrap=True)
    return table


def _text(text: str) -> Text:
    """Return a text of the server, which may have any characters."""
    return Text(printable_text(text).replace("\n", " "))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
