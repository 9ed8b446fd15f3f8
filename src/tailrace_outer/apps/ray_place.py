"""`tailrace serve --on ray`: its options, and the function that serves there.

Rule: it imports little, since `tailrace serve` imports it everywhere.
"""

from __future__ import annotations

import click

from tailrace.cli.places import ModelArguments, ServePlace
from tailrace.settings import Settings

__all__ = ["PLACE", "serve"]


def _read_replicas(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, int]:
    from tailrace_outer.apps.on_ray.spec import read_replicas

    try:
        return read_replicas(text)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


PLACE = ServePlace(
    "ray",
    "as replicas on Ray Serve",
    f"{__name__}:serve",
    (
        click.Option(
            ["--replicas"], default="1", show_default=True, callback=_read_replicas, metavar="N|MIN-MAX",
            help="Number of replicas on Ray. With a range, Ray starts and stops them as needed.",
        ),
        click.Option(
            ["--target-requests"], type=click.IntRange(1), show_default="32",
            help="With a range of --replicas: running and waiting requests per replica that Ray aims at.",
        ),
    ),
)  # fmt: skip


def serve(models: ModelArguments, settings: Settings, *, replicas: tuple[int, int], target_requests: int | None) -> int:
    """Deploy the built-in server, and wait for a signal. Returns the exit status. Raises: ValueError."""
    from tailrace_outer.apps.on_ray import serve_on_ray
    from tailrace_outer.apps.on_ray.spec import DEFAULT_TARGET, ServerSpec

    if target_requests is not None and replicas[0] == replicas[1]:
        raise ValueError("--target-requests needs a range in --replicas, such as 2-8.")
    target = target_requests or DEFAULT_TARGET
    return serve_on_ray(ServerSpec(models.first, settings, models.named, models.own, replicas, target))
