"""Adds the routes of operators, and those of sessions, keys, owners and usage, which need a database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tailrace.server import Opened, Options, Server
from tailrace_outer.admin.admin_paths import PATHS
from tailrace_outer.admin.admin_routes import AdminRoutes, RecentErrors
from tailrace_outer.admin.key_routes import KeyRoutes
from tailrace_outer.admin.owner_deletion import OwnerDeletion
from tailrace_outer.admin.session_routes import SessionRoutes
from tailrace_outer.admin.usage_routes import UsageRoutes

__all__ = ["open_admin"]


@asynccontextmanager
async def open_admin(server: Server, options: Options) -> AsyncIterator[Opened]:
    if server.records is None or server.models is None:
        yield Opened()
        return
    errors = RecentErrors()
    server.observe(errors)
    running = AdminRoutes(server.models, server.bodies, errors)
    sessions = SessionRoutes(server.records, server.settings.root_path)
    keys = KeyRoutes(server.records, server.bodies, OwnerDeletion(server, server.records))
    usage = UsageRoutes(server.records)
    routes = [*running.table(), *sessions.table(), *keys.table(), *usage.table()]
    yield Opened(routes, paths=PATHS, forget=errors.forget)
