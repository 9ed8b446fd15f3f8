"""Options for the limits of keys and owners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from tailrace.access.quota import NO_LIMITS, Quota

__all__ = ["describe_quota", "quota_options", "quota_with"]

Command = Callable[..., None]

_HELP = {
    "requests_per_minute": "Requests that may begin per clock minute.",
    "tokens_per_minute": "Tokens of prompts and answers per clock minute.",
    "requests_per_month": "Requests that may begin per month (UTC).",
    "tokens_per_month": "Tokens of prompts and answers per month (UTC).",
    "streams_at_once": "Streams that run or are queued at the same time.",
    "answer_tokens": "Longest answer, in tokens.",
}
_MOST = 10**15


class _Limit(click.ParamType[int | str]):
    """A number from 1, or none."""

    name = "number|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        # Any: click's
        if value == "none":
            return "none"
        text = str(value)
        is_number = text.isascii() and text.isdigit() and len(text) < 20  # int() refuses thousands of digits
        if not is_number or not 1 <= int(text) <= _MOST:
            self.fail(f"should be a number from 1 to {_MOST}, or none.", param, ctx)
        return int(value)


def quota_options(command: Command) -> Command:
    """Decorator that adds an option for each limit."""
    for name in reversed(Quota.__struct_fields__):
        flag = f"--{name.replace('_', '-')}"
        command = click.option(flag, name, type=_Limit(), help=f"{_HELP[name]} `none` removes the limit.")(command)
    return command


def quota_with(given: Mapping[str, int | str | None], before: Quota = NO_LIMITS) -> Quota:
    """Return a quota with the given limits changed. Ignores other names."""
    values = {name: getattr(before, name) for name in Quota.__struct_fields__}
    for name in values:
        if given.get(name) is not None:
            values[name] = None if given[name] == "none" else given[name]
    return Quota(**values)


def describe_quota(quota: Quota) -> str:
    """Describe the limits in one line."""
    limits = ((name, getattr(quota, name)) for name in Quota.__struct_fields__)
    return ", ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in limits if limit is not None) or "no limits"
