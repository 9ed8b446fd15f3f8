"""Runs the built-in server and users' apps on Ray Serve, across several machines. Only this package knows Ray.

Ray's proxies, replicas and routing replace the sockets of `tailrace serve` and the front and pools of `tailrace run`.
Each replica of the built-in server is a whole server over the Redis in --journal, so a stream survives its replica.
Replicas of apps write their streams to such a Redis, too; a generator ends with its replica.

Ray is imported by the modules of this package, but not by this one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tailrace.packages.requirements import install_command
from tailrace_outer.apps.on_ray.spec import RayError

if TYPE_CHECKING:
    from tailrace.settings import Settings
    from tailrace_outer.apps.on_ray.spec import ServerSpec
    from tailrace_outer.apps.targets import Plan

__all__ = ["run_on_ray", "serve_on_ray", "server"]


def serve_on_ray(spec: ServerSpec) -> int:
    """Deploy the built-in server, and wait for a signal. Returns the exit status."""

    def serve() -> None:
        from tailrace_outer.apps.on_ray.ray_deployment import serve_models

        serve_models(spec)

    return _status_of(serve)


def run_on_ray(plan: Plan, settings: Settings) -> int:
    """Deploy the apps of a plan, and wait for a signal. Returns the exit status."""

    def run() -> None:
        from tailrace_outer.apps.on_ray.apps import run_apps

        run_apps(plan, settings)

    return _status_of(run)


def _status_of(run: Callable[[], None]) -> int:
    """Run, and print an error in one line. Returns the exit status."""
    try:
        run()
        return 0
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        reason = f"Ray is not installed. Try: {install_command(extra='ray')}"
    except RayError as error:
        reason = str(error)
    sys.stderr.write(f"tailrace: {reason}\n")
    return 1


def server(args: Mapping[str, Any]) -> Any:  # Any: of a YAML file; Ray's application
    """Build the application of the built-in server, for the `import_path` of a Serve config file. `args` are described
    at `ServerSpec.of_args`.

    Raises: ValueError for invalid arguments.
    """
    from tailrace_outer.apps.on_ray.ray_deployment import server_application
    from tailrace_outer.apps.on_ray.spec import ServerSpec

    return server_application(ServerSpec.of_args(args))
