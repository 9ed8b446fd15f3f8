"""`tailrace doctor URL`: what lies between a client and a server, and the settings to change."""

from __future__ import annotations

from dataclasses import asdict

import click

from tailrace.cli.console import print_json, say

__all__ = ["show_path"]


def show_path(url: str, key: str, *, idle_s: float, as_json: bool) -> None:
    """Measure the path to a server and print what was found. Raises: click.ClickException if it cannot be measured, or
    something is wrong."""
    from tailrace_outer.measure.path import PathFailed, measure_path, settings_for

    try:
        found = measure_path(url, key, idle_s=idle_s, report=lambda text: say(f"{text} …"))
    except PathFailed as error:
        raise click.ClickException(str(error)) from None
    between = next((one.text for one in found if one.name == "between"), "")
    if as_json:
        print_json([asdict(one) | {"settings": dict(settings_for(one, between))} for one in found])
    else:
        for one in found:
            click.echo(f"{'  ' if one.problem is None else '! '}{one.name:12} {one.text}")
            for proxy, setting in settings_for(one, between):
                click.echo(f"    {proxy}: {setting}")
    if problems := sum(one.problem is not None for one in found):
        things = "1 thing is" if problems == 1 else f"{problems} things are"
        raise click.ClickException(f"{things} not as streams need it.")
