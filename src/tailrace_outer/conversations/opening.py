"""Adds the routes of conversations to a server that has a database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tailrace.images.image_fetch import ImageFetcher
from tailrace.images.reader import ImageReader
from tailrace.server import Opened, Options, Server
from tailrace_outer.conversations.conversation_files import ConversationFileRoutes
from tailrace_outer.conversations.conversation_images import ConversationImageRoutes, ImageIntake
from tailrace_outer.conversations.conversation_paths import PATHS
from tailrace_outer.conversations.conversation_routes import ConversationRoutes
from tailrace_outer.conversations.share_routes import SHARE_PATHS, ShareRoutes

__all__ = ["open_conversations"]


@asynccontextmanager
async def open_conversations(server: Server, options: Options) -> AsyncIterator[Opened]:
    if server.records is None:
        yield Opened()
        return
    conversations, bodies = server.records.conversations, server.bodies
    reader = ImageReader(ImageFetcher(server.settings.fetch_images))
    models = server.models
    intake = ImageIntake(server.records, reader, lambda: models is not None and models.read_images)
    files = ConversationFileRoutes(conversations, bodies, intake)
    images = ConversationImageRoutes(conversations, bodies, intake)
    routes = ConversationRoutes(server, conversations, intake)
    shares = ShareRoutes(server, server.records)
    # `export` must not match as a conversation's id
    yield Opened([*files.table(), *images.table(), *routes.table(), *shares.table()], paths={**PATHS, **SHARE_PATHS})
