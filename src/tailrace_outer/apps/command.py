"""`tailrace run`: serve user code."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli.console import say, say_error, show_log
from tailrace.cli.serve import data_directory, run_on_socket, url_of
from tailrace.cli.setting_options import setting_options, warn_of_unknown_variables
from tailrace.settings import Settings
from tailrace.system import eventloop

if TYPE_CHECKING:
    from tailrace_outer.apps.front import Front
    from tailrace_outer.apps.host import AppSpec
    from tailrace_outer.apps.process import BootError
    from tailrace_outer.apps.targets import Plan

__all__ = ["run"]

_SETTINGS = (
    "host", "port", "queue_s", "linger_s", "retention_s", "retention_bytes", "journal", "lease_s", "data_dir",
    "journal_sync_s", "journal_wait_s", "journal_key_file", "keep_finished", "heartbeat_s", "body_bytes", "body_gap_s",
    "header_s", "keep_alive_s", "write_s", "max_connections", "client_connections", "load_s", "shutdown_delay_s",
    "drain_s", "ws_message_bytes", "ws_message_s", "ws_ping_s", "allowed_hosts", "allowed_origins", "tls_cert",
    "tls_key", "tls_client_ca", "database", "insecure", "log_level", "log_format", "access_log", "audit_log",
)  # fmt: skip


@click.command()
@click.argument("target")
@click.argument("arguments", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--app-dir", "-d", default=".", show_default=True, help="Directory that modules are imported from.")
@click.option("--route-prefix", default="/", show_default=True, help="Path prefix of the app.")
@click.option("--name", default="default", show_default=True, help="Name of the app.")
@click.option("--reload", "-r", is_flag=True, help="Restart the app when a file in its directory changes.")
@click.option(
    "--python", default="", metavar="PATH",
    help="Run the app under this Python interpreter, or that of this environment, with its packages.",
)  # fmt: skip
@click.option(
    "--resumable", is_flag=True,
    help="Record every streamed text answer, so that it can be read again at /v1/streams/ID/events.",
)  # fmt: skip
@click.option(
    "--concurrency", type=click.IntRange(1), default=1, show_default=True,
    help="Requests that a folder's app handles at the same time.",
)  # fmt: skip
@click.option(
    "--on", type=click.Choice(["here", "ray"]), default="here", show_default=True, help="Where the app's processes run."
)
@setting_options(*_SETTINGS)
def run(
    target: str,
    arguments: Sequence[str],
    app_dir: str,
    route_prefix: str,
    name: str,
    reload: bool,
    python: str,
    resumable: bool,
    concurrency: int,
    on: str,
    **values: Any,  # Any: click hands over what the table describes
) -> None:
    """Serve your own code: TARGET is a module with an attribute, a folder, or a YAML file.

    \b
    tailrace run textbot:app           textbot.py, in which app = Textbot.bind("smollm2")
    tailrace run main:api --reload     any ASGI app, or a function that returns one
    tailrace run ./folder              app.py with an InferlessPythonModel
    tailrace run apps.yaml             several apps, in Ray Serve's file format

    KEY=VALUE arguments go to the function that builds the app. The app's code runs in separate processes.
    """
    from tailrace_outer.apps.targets import PlanError, plan_of

    if on == "ray":
        for option, is_given in (("--resumable", resumable), ("--python", python)):
            if is_given:
                raise click.UsageError(f"{option} cannot be used with --on ray.")
    show_log(values["log_level"], as_json=values["log_format"] == "json")
    try:
        read = partial(
            plan_of, target, arguments, directory=app_dir, route_prefix=route_prefix, name=name,
            concurrency=concurrency, log_level=values["log_level"], queue_s=values["queue_s"],
            resumable=resumable, python=python, on_ray=on == "ray",
        )  # fmt: skip
        plan = read()
        settings = Settings(**values)
    except (PlanError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    warn_of_unknown_variables()
    context = click.get_current_context()
    for setting, value in plan.settings.items():  # the command line has priority
        if context.get_parameter_source(setting) is click.core.ParameterSource.DEFAULT:
            settings = replace(settings, **{setting: value})
    for note in plan.notes:
        say_error(note)
    if on == "ray":
        raise SystemExit(_run_on_ray(plan, settings))
    raise SystemExit(_run(plan, read, settings, watched=_directories(plan, target) if reload else ()))


def _run_on_ray(plan: Plan, settings: Settings) -> int:
    from tailrace.transport.addresses import listens_on_loopback
    from tailrace_outer.apps.on_ray import run_on_ray
    from tailrace_outer.apps.on_ray.spec import check_app_settings

    try:
        check_app_settings(settings)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not (listens_on_loopback(settings.host) or settings.insecure):
        say_error(
            f"on Ray, no keys are checked for your own code, so everybody who can reach {settings.host} could use it. "
            "If that is right, start it with --insecure."
        )
        return 1
    return run_on_ray(plan, settings)


def _run(plan: Plan, read: Callable[[], Plan], settings: Settings, *, watched: Sequence[str]) -> int:
    """Run `plan`. After a change of a file, `read` returns the next plan. Returns the exit status."""
    from tailrace_outer.apps.host import host
    from tailrace_outer.apps.process import BootError
    from tailrace_outer.apps.targets import PlanError
    from tailrace_outer.serve.boot import Failed

    started_s = 0.0
    first: Plan | None = plan
    is_ready = False

    def get_apps() -> Sequence[AppSpec]:
        """Return the apps to start. Raises: BootError if a changed file is not a valid plan."""
        nonlocal started_s, first
        started_s = time.monotonic()
        known, first = first, None
        say(f"Starting {Path(plan.source).name} …")
        try:
            return (known or read()).apps
        except PlanError as error:
            raise BootError(Failed(str(error))) from None

    def on_drain(num_requests: int) -> None:
        if num_requests:
            say(f"Stopping; {num_requests} request{'s' if num_requests > 1 else ''} may finish.")

    def on_boot_error(error: BootError) -> None:
        _report(error)
        say_error("waiting for a file to change.")

    async def main(sock: socket.socket) -> bool:
        def on_ready(front: Front, notes: tuple[str, ...]) -> None:
            nonlocal is_ready
            is_ready = True
            for note in notes:
                say_error(note)
            url = url_of(sock, settings)
            for app in front.apps:
                parts = ", ".join(
                    name if pool.options.num_replicas == 1 else f"{name} x {pool.options.num_replicas}"
                    for name, pool in app.pools.items()
                )
                say(f"{app.name} runs at {url}{app.route_prefix or '/'} ({parts}).")
            say(f"Started in {time.monotonic() - started_s:.1f} s. Ctrl-C stops it.")

        with data_directory(settings, sock.getsockname()[1], _journal_prefix(plan)) as data:
            await host(
                get_apps, settings, sock, data_path=data, on_ready=on_ready, on_drain=on_drain,
                on_boot_error=on_boot_error, changes=_changes(watched) if watched else None,
            )  # fmt: skip
        return is_ready

    status = 1
    try:
        status = run_on_socket(settings, main)
    except* BootError as group:
        _report(eventloop.first_error(group))
    return status


def _journal_prefix(plan: Plan) -> str:
    """Return the journal's directory prefix. It depends on port and target, so that apps on the same port do not share
    it."""
    name = re.sub(r"[^\w.-]+", "-", Path(plan.source).name)[:40]
    return f"app-{name}-{sha256(plan.source.encode()).hexdigest()[:8]}-port"


def _directories(plan: Plan, target: str) -> list[str]:
    """Return the directories to watch for changes."""
    own = {str(Path(target).resolve().parent)} if Path(target).is_file() else set()
    return sorted(own | {spec.target.directory for spec in plan.apps})


def _changes(directories: Sequence[str]) -> Callable[[], AsyncIterator[object]]:
    """Return a function that watches code files in these directories, but not other files, which the app may write."""
    from watchfiles import PythonFilter, awatch

    def changes() -> AsyncIterator[object]:
        return awatch(*directories, watch_filter=PythonFilter(extra_extensions=(".yaml", ".yml")), step=100)

    return changes


def _report(error: Any) -> None:  # Any: a BootError, whose module is imported late
    if error.traceback:
        say(error.traceback.rstrip())
    say_error(error.message)
