"""SIGHUP: the settings are read again. Those that may change while the server runs (`Setting.reloads`) are in use at
once, and the server gets the new models and gives up the removed ones. All else is named."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tailrace.assembly.served import Served
from tailrace.assembly.service import Service, settings_of_model
from tailrace.assembly.source import Source, check_owners
from tailrace.errors import ModelError
from tailrace.records.threads import DatabaseThreads
from tailrace.server import Server
from tailrace.settings import Settings, settings_table

__all__ = ["Given", "Reread"]

logger = logging.getLogger("tailrace.server.reload")
logger.setLevel(logging.WARNING)  # whoever sent SIGHUP looks for its lines, also at --log-level error


@dataclass(frozen=True, slots=True)
class Given:
    """What a server is started with. `own` are the settings of single models, by name, and `sources` the models, by
    their names in the file: `model` is the first one, if it has no table."""

    settings: Settings
    own: Mapping[str, Mapping[str, Any]]  # Any: of each setting's type
    sources: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """The names of the models that have tables."""
        return [name.removeprefix("models.") for name in self.sources if name != "model"]

    @property
    def first(self) -> str:
        """The first model, by its name in the file."""
        return next((name for name, source in self.sources.items() if source), "model")


class Reread:
    """Reads what is given to a server again. `read` gets the names of its models, and also returns the others, which it
    finds or fetches. It blocks, and raises ModelError, or ValueError, which says what is wrong."""

    def __init__(self, given: Given, read: Callable[[Collection[str]], tuple[Given, Sequence[Source]]]) -> None:
        self._given = given  # what is in use
        self._read = read
        self._thread = DatabaseThreads(1)  # a download must not hold up the end of the process
        self.requested = asyncio.Event()

    async def run(self, server: Server, service: Service) -> None:
        """Read it whenever that is requested. Never returns."""
        while True:
            await self.requested.wait()
            self.requested.clear()
            try:
                wanted, found = await self._thread.run(partial(self._read, self._given.names), within_s=None)
                check_owners(sorted(wanted.own), sorted({*wanted.names, service.models.first.model}))
                used = self._use(wanted, await service.prepare(found, wanted.settings), server, service)
            except (ModelError, ValueError) as error:
                logger.error("The settings were not read again, and nothing has changed: %s", error)
            except Exception:  # a defect must not end the server
                logger.exception("The settings were not read again.")
            else:
                words = "; ".join(f"{name}: {', '.join(names)}" for name, names in used.items() if names)
                logger.warning("The settings were read again; %s.", words or "nothing has changed")

    def _use(self, wanted: Given, new: Sequence[Served], server: Server, service: Service) -> dict[str, list[str]]:
        """Use what may change. Returns the names of what is in use now, and of what is not."""
        given, models, rows = self._given, service.models, settings_table()
        now = given.settings.taking(wanted.settings)
        changed = [row for row in rows if given.settings.value_of(row) != wanted.settings.value_of(row)]
        names = [(row.flag[2:], row.reloads) for row in changed]
        removed, kept, shares = [], [], sum(map(bool, wanted.sources.values())) > 1
        for served in [named.served for named in models.names if not named.parent]:
            where = f"models.{served.model}"
            if where in given.sources.keys() - wanted.sources.keys() and served is not models.first:
                removed.append(served)
                continue
            own = wanted.own.get(served.model, {})
            wants = settings_of_model(served.card, wanted.settings, own, shares=shares)
            differs = [row for row in rows if row.of_model and served.settings.value_of(row) != wants.value_of(row)]
            names += [(f"{where}.{row.flag[2:]}", row.reloads) for row in differs if row not in changed]
            kept.append((served, served.settings.taking(wants)))
        for served in removed:
            models.give_up(served)
        for served, settings in kept:
            served.use(settings)
        added = [f"models.{served.model}" for served in new if models.add(served)]
        later = [f"models.{served.model}" for served in new if f"models.{served.model}" not in added]
        for served in new if wanted.settings.load == "all" else ():
            if models[served.model] is served:
                models.preload(served)
        server.use(now)
        gone = [f"models.{served.model}" for served in removed]
        there = {name: source for name, source in given.sources.items() if name not in gone}
        names += [(name, False) for name, source in sorted(there.items()) if wanted.sources.get(name) != source]
        if wanted.first != given.first and wanted.sources.get(given.first):
            names.append((f"{wanted.first} as the first model", False))
        self._given = Given(now, wanted.own, {**there, **{name: wanted.sources[name] for name in added}})
        return {
            "in use": [name for name, is_used in names if is_used],
            "added": added,
            "removed": gone,
            "still in use, so try again later": later,
            "restart to use": [name for name, is_used in names if not is_used],
        }
