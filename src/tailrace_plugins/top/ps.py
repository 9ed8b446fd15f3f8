"""`tailrace ps`: the models and the running streams of a server."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import click

from tailrace.cli.commands import default_url, print_json, print_table, say, server_failures, server_options

__all__ = ["ps"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@server_options
def ps(as_json: bool, url: str | None, key: str) -> None:
    """Show the models and the running streams of a server.

    If the server has keys, it shows the streams of the key's owner.
    """
    with server_failures():
        models, streams = asyncio.run(_fetch(url or default_url(), key))
    if as_json:
        print_json({"models": models, "streams": streams})
        return
    print_table(["model", "state"], [[model["name"], model["state"]] for model in models])
    if not streams:
        say("No streams are running.")
        return
    click.echo()
    print_table(["stream", "model", "state", "events", "age"], map(_row, streams))


def _row(stream: dict[str, Any]) -> list[str]:  # Any: what JSON can be
    num_events = str(stream["last_event_id"]).rpartition("-")[2]
    age = f"{max(0, time.time() - stream['created']):.0f} s"
    return [stream["id"], stream["model"], stream["status"], num_events, age]


async def _fetch(url: str, key: str) -> tuple[list[dict[str, str]], list[dict[str, Any]]]:  # Any: what JSON can be
    """Return the models and the streams. Raises: AnswerFailed."""
    from tailrace.client import connect

    async with connect(url, key) as client:
        client.require_tailrace()
        found = await client.get("/api/ps")
        loaded = {str(model["name"]).removesuffix(":latest") for model in found["models"]}
        streams = await client.get("/v1/streams")
        models = [
            {"name": name, "state": "loaded" if name.removesuffix(":latest") in loaded else "not loaded"}
            for name in client.models
        ]
        return models, streams["data"]
