"""SIGHUP: the settings are read again. Those that may change while the server runs (`Setting.reloads`) are in use at
once, the others are named."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tailrace.assembly.models import Models
from tailrace.server import Server
from tailrace.settings import Settings, settings_table

__all__ = ["Given", "Reread"]

logger = logging.getLogger("tailrace.server.reload")
logger.setLevel(logging.WARNING)  # whoever sent SIGHUP looks for its lines, also at --log-level error


@dataclass(frozen=True, slots=True)
class Given:
    """What a server is started with. `own` are the settings of single models, by name, and `sources` the models, by
    their names in the file."""

    settings: Settings
    own: Mapping[str, Mapping[str, Any]]  # Any: of each setting's type
    sources: Mapping[str, str]


class Reread:
    """Reads what is given to a server again. `read` blocks, and raises ValueError, which says what is wrong."""

    def __init__(self, given: Given, read: Callable[[], Given]) -> None:
        self._given = given  # what is in use
        self._read = read
        self.requested = asyncio.Event()

    async def run(self, server: Server, models: Models) -> None:
        """Read it whenever that is requested. Never returns."""
        while True:
            await self.requested.wait()
            self.requested.clear()
            try:
                used, left = self._use(await asyncio.to_thread(self._read), server, models)
            except ValueError as error:
                logger.error("The settings were not read again, and nothing has changed: %s", error)
            except Exception:  # a defect must not end the server
                logger.exception("The settings were not read again.")
            else:
                what = {"in use": used, "restart to use": left}
                found = "; ".join(f"{name}: {', '.join(names)}" for name, names in what.items() if names)
                logger.warning("The settings were read again; %s.", found or "nothing has changed")

    def _use(self, wanted: Given, server: Server, models: Models) -> tuple[list[str], list[str]]:
        """Use what may change. Returns the names of the settings that are in use now, and of those that are not."""
        given, rows = self._given, settings_table()
        now = given.settings.taking(wanted.settings)
        changed = [row for row in rows if given.settings.value_of(row) != wanted.settings.value_of(row)]
        names = [(row.flag[2:], row.reloads) for row in changed]
        own, reloads = dict(given.own), {row.name for row in rows if row.reloads}
        of_models = []
        for served in models:
            model, where = served.model, f"models.{served.model}"
            is_gone = where in given.sources.keys() - wanted.sources.keys()
            before = given.own.get(model, {})
            base, after = (now, before) if is_gone else (wanted.settings, wanted.own.get(model, {}))
            had, wants = given.settings.of_model(before), base.of_model(after)
            differs = [row for row in rows if row.of_model and had.value_of(row) != wants.value_of(row)]
            names += [(f"{where}.{row.flag[2:]}", row.reloads) for row in differs if row not in changed]
            kept = {name: value for name, value in before.items() if name not in reloads}
            own[model] = kept | {name: value for name, value in after.items() if name in reloads}
            of_models.append((served, served.settings.taking(wants)))
        sources = sorted(given.sources.keys() | wanted.sources.keys())
        names += [(name, False) for name in sources if given.sources.get(name) != wanted.sources.get(name)]
        self._given = replace(given, settings=now, own=own)
        for served, settings in of_models:
            served.use(settings)
        server.use(now)
        return [name for name, is_used in names if is_used], [name for name, is_used in names if not is_used]
