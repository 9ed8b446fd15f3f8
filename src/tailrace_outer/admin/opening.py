"""Adds the routes of keys, owners and usage to a server that has a database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tailrace.server import Opened, Options, Server
from tailrace_outer.admin.admin_paths import PATHS
from tailrace_outer.admin.key_routes import KeyRoutes
from tailrace_outer.admin.owner_deletion import OwnerDeletion
from tailrace_outer.admin.usage_routes import UsageRoutes

__all__ = ["open_admin"]


@asynccontextmanager
async def open_admin(server: Server, options: Options) -> AsyncIterator[Opened]:
    if server.records is None:
        yield Opened()
        return
    keys = KeyRoutes(server.records, server.bodies, OwnerDeletion(server, server.records))
    usage = UsageRoutes(server.records)
    yield Opened([*keys.table(), *usage.table()], paths=PATHS)
