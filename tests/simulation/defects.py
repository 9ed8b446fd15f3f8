"""Defects to plant: each changes a line of the product. The simulation finds those of `DEFECTS`.

`python -m tests.simulation.defects NAME` plants one, and prints the first seed that finds it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

__all__ = [
    "DEFECTS", "EVERY_BATCH", "EVERY_LATE", "EVERY_OUTLIVED", "EVERY_TOOLS", "FIRST_LATE", "FIRST_OUTLIVED",
    "FIRST_WITH_BATCH", "FIRST_WITH_TOOLS", "HIDDEN", "Defect", "plant",
]  # fmt: skip


@dataclass(frozen=True)
class Defect:
    """A text of a module, and what takes its place. One of `seeds` seeds finds it: `first`, `first + step`, …"""

    name: str
    module: str
    old: str
    new: str
    seeds: int = 400
    first: int = 0
    step: int = 1


FIRST_WITH_BATCH, EVERY_BATCH = 10_009, 16  # seeds whose schedules have a batch
FIRST_WITH_TOOLS, EVERY_TOOLS = 20_017, 16  # those with a tool loop
FIRST_LATE, EVERY_LATE = 20_005, 16  # seeds in whose schedules many commands are late
FIRST_OUTLIVED, EVERY_OUTLIVED = 30_013, 16  # and those in which such commands arrive after the death of their server

_STORE = "tailrace_outer.redis."
_SCRIPTS = _STORE + "_scripts"
_LOOPS = "tailrace_plugins.tool_loop."

_FIRST_DEAD = '        await self._command("set", keys.lease(epoch), "dead", px=DAY_MS)\n'
_THEN_UNLISTED = """\
        await self._command("srem", keys.servers, str(epoch))
        await self._command("hdel", keys.models, str(epoch))
        for shard in range(keys.num_shards):
            await self._connection.run(UNLIST, [keys.owned(shard, epoch), keys.writers(shard)], epoch)
            await self._command("delete", keys.inbox(shard, epoch))
"""

DEFECTS = (
    # What random deaths of real servers have found.
    Defect(
        "an opening without an answer stays, and nobody writes it",
        _STORE + "redis_store",
        "                await self._openings.settle()\n                if self._streams.of(Recalled):\n",
        "                if self._streams.of(Recalled):\n",
        seeds=1000,
    ),
    Defect(
        "a stream that another server has given to a client is deleted",
        _SCRIPTS,
        "  if has[2] then return has[2] end\n",
        "",
        seeds=1000,
    ),
    Defect(
        "a take-over is removed before it was had",
        _STORE + "_orphans",
        "                orphans, settled = await self._take_some(epoch, stream_ids)\n",
        "                for one in stream_ids:\n"
        "                    await ask(client.zrem(self._keys.of_owned(one, epoch)[3], one))\n"
        "                orphans, settled = await self._take_some(epoch, stream_ids)\n",
        seeds=4000,
    ),
    # Writing.
    Defect(
        "readers see events before they are kept",
        _STORE + "_writer",
        "        failed = await self._append(shard, [(log, log.last_seq + 1, events) for log, events in group])\n",
        "        rows = [(log, log.last_seq + 1, events) for log, events in group]\n"
        "        for log, events in group:\n"
        "            log.extend(events)\n"
        "        failed = await self._append(shard, rows)\n",
        seeds=5,
    ),
    Defect(
        "the epoch of a writer is not checked",
        _SCRIPTS,
        "  elseif has[1] ~= ARGV[1] then\n    found = -1\n",
        "",
        seeds=400,
    ),
    Defect(
        "the number of the first event is not checked",
        _SCRIPTS,
        "  elseif tonumber(has[2]) ~= row[2] - 1 then\n    found = tonumber(has[2])\n",
        "",
        seeds=400,
    ),
    Defect(
        "a commit whose answer was lost is not read",
        _STORE + "_writer",
        "                await self._read_committed(log, events)\n",
        "                self._committed(log, events)\n",
        seeds=400,
    ),
    Defect(
        "what Redis has lost is written again one event too late",
        _STORE + "_writer",
        "[(log, last + 1, log.events[last:])]",
        "[(log, last + 1, log.events[last + 1:])]",
        seeds=100,
    ),
    Defect(
        "an end does not count the tokens that are found",
        _STORE + "_writer",
        "            queue[0] = msgspec.structs.replace(queue[0], usage=usage)\n",
        "            pass\n",
        seeds=4000,
    ),
    Defect(
        "a server that lost its lease goes on",
        _STORE + "redis_store",
        "        if self._streams.stop_owning(log, goes_on=goes_on) and log.producer is not None:\n"
        "            log.producer.lease_lost()\n",
        "        self._streams.stop_owning(log, goes_on=goes_on)\n",
        seeds=100,
    ),
    # Opening, deleting, keys.
    Defect(
        "an opening overwrites what is there",
        _SCRIPTS,
        "if epoch then\n  if epoch ~= ARGV[1] then return 0 end\n",
        "if false then\n",
        seeds=4000,
    ),
    Defect(
        "two servers begin a stream with one key",
        _SCRIPTS,
        "if has and has ~= ARGV[1] and has ~= ARGV[2] and has ~= ARGV[4] then return has end\n",
        "",
        seeds=5,
    ),
    Defect(
        "a deleted stream is shown from memory",
        _STORE + "_finished",
        "        if is_kept and self._keeps:\n",
        "        if False:\n",
        seeds=20,
    ),
    Defect(
        "the idempotency key of an ended stream is kept forever",
        _STORE + "_finished",
        "        await self.end(log.record)  # first",
        "        # first",
        seeds=5,
    ),
    Defect(
        "a late command takes away the end of an idempotency key",
        _SCRIPTS,
        "  if has == ARGV[row] then return false end\n",
        "  if has == ARGV[row] then has = ARGV[1] end\n",
        seeds=4000,
    ),
    Defect(
        "a server that is behind shows a deleted stream",
        _STORE + "_mirrors",
        "        is_deleted = await self._is_deleted(stream_id)\n",
        "        is_deleted = False\n",
        seeds=4000,
    ),
    # Taking over.
    Defect(
        "a stream is taken from a server that lives",
        _SCRIPTS,
        "if has[8] or (has[1] ~= ARGV[1] and has[1] ~= ARGV[2]) then return false end\n",
        "if has[8] then return false end\n",
        seeds=400,
    ),
    Defect(
        "readers of a mirror do not get the log of the server that takes it over",
        _STORE + "_mirrors",
        "        mirror.extend(1, log.events)\n        self._unfollow(mirror)\n        return mirror.log\n",
        "        self._unfollow(mirror)\n        return log\n",
        seeds=20,
    ),
    Defect(
        "an ended stream of a dead server is not tidied up",
        _SCRIPTS,
        "if has[8] or (has[1]",
        "if has[2] or (has[1]",
        seeds=100,
    ),
    # Reading.
    Defect(
        "a reader begins one event too late",
        "tailrace.streams.log",
        "        super().__init__(after)\n",
        "        super().__init__(after + 1 if after else 0)\n",
        seeds=20,
    ),
    Defect(
        "a mirror is not looked after",
        _STORE + "redis_store",
        "                await self._mirrors.check()\n",
        "                pass\n",
        seeds=1000,
    ),
    Defect(
        "a server that is behind refuses a reader",
        _STORE + "_lookup",
        "            if last is not None and int(last) >= after:\n",
        "            if False:\n",
        seeds=4000,
    ),
    # Generating.
    Defect(
        "the end of a stream is observed twice",
        "tailrace.generation.run",
        "        self.observers.on_end(self.record, self.log, self.times)\n",
        "        self.observers.on_end(self.record, self.log, self.times)\n"
        "        self.observers.on_end(self.record, self.log, self.times)\n",
        seeds=5,
    ),
    Defect(
        "a stream that goes on after a death is taken for a new one",
        "tailrace.generation.run",
        "        elif self._has_begun or self.log.events:  # from an earlier process\n",
        "        elif self._has_begun:\n",
        seeds=20,
    ),
    # Late commands.
    Defect(
        "an opening that comes too late makes a deleted stream again",
        _SCRIPTS,
        "if gone and not (deleted and deleted < tonumber(ARGV[6])) then return 0 end\n",
        "",
        seeds=200,
        first=FIRST_LATE,
        step=EVERY_LATE,
    ),
    Defect(
        "streams that began before a server knew of its death are forgotten",
        _SCRIPTS,
        "redis.call('SADD', KEYS[5], ARGV[1])\n",
        "",
        seeds=200,
        first=FIRST_OUTLIVED,
        step=EVERY_OUTLIVED,
    ),
    # Of batches.
    Defect(
        "results of a server that has lost its batch are kept",
        _STORE + "shared_table",
        "if ARGV[2] ~= '' and redis.call('HGET', KEYS[4], ARGV[2]) ~= ARGV[3] then return 0 end\n",
        "",
        seeds=400,
        first=FIRST_WITH_BATCH,
        step=EVERY_BATCH,
    ),
    Defect(
        "a late deletion takes a stream that was opened once more",
        _SCRIPTS,
        "if at and tonumber(at) > tonumber(ARGV[3]) then return false end\n",
        "",
        seeds=20,
        first=2_910_000_087,
    ),
    Defect(
        "an idempotency key is replaced although its stream was stored meanwhile",
        _STORE + "_claims",
        "_RUNNING_MS, _STORED) is None",
        "_RUNNING_MS, _TAKEN) is None",
        seeds=20,
        first=2_900_003_575,
    ),
    Defect(
        "a server takes what another writer has added for its own",
        _STORE + "_writer",
        "        if stored.epoch != self._members.epoch:  #",
        "        if False:  #",
        seeds=20,
        first=2_900_006_292,
    ),
    Defect(
        "a server that leaves gives its lease back last",
        _STORE + "_members",
        _FIRST_DEAD + _THEN_UNLISTED,
        _THEN_UNLISTED + _FIRST_DEAD,
        seeds=20,
        first=2_900_008_785,
    ),
    Defect(
        "nobody takes the batches of a dead server",
        "tailrace_plugins.batches.batches",
        "                others.append(key.removeprefix(OPEN))\n",
        "                continue\n",
        seeds=100,
        first=FIRST_WITH_BATCH,
        step=EVERY_BATCH,
    ),
    Defect(
        "a row that has a result is run again",
        "tailrace_plugins.batches.results",
        "                self.done.add(int(key[len(prefix) : -1], 16))\n",
        "",
        seeds=100,
        first=FIRST_WITH_BATCH,
        step=EVERY_BATCH,
    ),
    # Of tool loops.
    Defect(
        "a call goes out before it is kept",
        _LOOPS + "call_maker",
        "                await self._kept.announce(call.item_id, is_synced=not tool.may_repeat)\n",
        "",
        seeds=400,
        first=FIRST_WITH_TOOLS,
        step=EVERY_TOOLS,
    ),
    Defect(
        "a call of which nobody knows what came of it is made again",
        _LOOPS + "call_maker",
        "        if num_tries and (tool is None or not tool.may_repeat or num_tries >= _MOST_TRIES):\n",
        "        if num_tries >= _MOST_TRIES:\n",
        seeds=400,
        first=FIRST_WITH_TOOLS,
        step=EVERY_TOOLS,
    ),
    Defect(
        "the epoch of a server that makes a call is not checked",
        _LOOPS + "kept",
        "await self._gone() if has_ended else (), lease=self.lease)",
        "await self._gone() if has_ended else (), lease=None)",
        seeds=400,
        first=FIRST_WITH_TOOLS,
        step=EVERY_TOOLS,
    ),
    Defect(
        "a server that was frozen before a call does not look at its clock",
        _LOOPS + "kept",
        "        while not self._is_certain():\n",
        "        while False:\n",
        seeds=400,
        first=FIRST_WITH_TOOLS,
        step=EVERY_TOOLS,
    ),
    Defect(
        "two servers begin a response with one key",
        _LOOPS + "journal",
        "lease=lease, absent=used)",
        "lease=lease)",
        seeds=400,
        first=FIRST_WITH_TOOLS,
        step=EVERY_TOOLS,
    ),
    Defect(
        "a server that looks for a response while it ends says that there is none",
        _LOOPS + "loops",
        "        needs = await self._journal.needs_of(owner, loop_id) if self._journal.is_shared else None\n"
        "        kept = await self._journal.load(owner, loop_id)  # after that: it may end meanwhile\n",
        "        kept = await self._journal.load(owner, loop_id)\n"
        "        needs = await self._journal.needs_of(owner, loop_id) if self._journal.is_shared else None\n",
        seeds=400,
        first=FIRST_WITH_TOOLS,
        step=EVERY_TOOLS,
    ),
    Defect(
        "nobody takes the tool loops of a dead server",
        _LOOPS + "loops",
        "                await self._take(loop_id, needs, is_cancelled=loop_id in cancelled)\n",
        "                pass\n",
        seeds=400,
        first=FIRST_WITH_TOOLS,
        step=EVERY_TOOLS,
    ),
)

# Some that no seed below 400 has found.
HIDDEN = (
    Defect(
        "a server gets back a stream that it has lost under the same epoch",
        _SCRIPTS,
        "  if redis.call('HGET', KEYS[1], 'lost:' .. ARGV[2]) then return 0 end\n",
        "",
    ),
    Defect(
        "a stream without its idempotency key goes on",
        _STORE + "redis_store",
        "        if not has_claim:  #",
        "        if False:  #",
    ),
    Defect(
        "an end that is found does not drop the one that waits",
        _STORE + "_writer",
        "            self.drop(log)\n        elif new[same:]",
        "            pass\n        elif new[same:]",
    ),
    Defect(
        "a stopped server says that nothing of it is left",
        _STORE + "_members",
        "        if await self.num_streams(self.epoch):\n",
        "        if False:\n",
    ),
    Defect(
        "Redis is never compared with what a server has",
        _STORE + "redis_store",
        "                    await self._inventory.take()\n",
        "                    pass\n",
    ),
    Defect(
        "a mirror takes events behind a gap",
        _STORE + "_mirror",
        "        if first > self.log.last_seq + 1:\n            return\n",
        "        first = min(first, self.log.last_seq + 1)\n",
    ),
    Defect(
        "a replay does not know of events that wait",
        "tailrace.generation.run",
        "(*self.log.events, *self.log.queued)",
        "self.log.events",
    ),
    Defect(
        "a lost stream keeps its slot",
        "tailrace.generation.run",
        "        self._complete_all()\n        if not self._on_engine:\n"
        "            self._release()\n        self.on_end(self)\n",
        "        self._complete_all()\n        self.on_end(self)\n",
    ),
    Defect(
        "the number of a step whose writer was cancelled is given to another one",
        _LOOPS + "kept",
        "            self._pending += steps  #",
        "            self._pending[:] = steps  #",
    ),
)


class _Loader(SourceFileLoader):
    def __init__(self, defect: Defect, path: str) -> None:
        super().__init__(defect.module, path)
        self._defect = defect

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        assert source.count(self._defect.old) == 1, f"{self.path} has changed: {self._defect.name}"
        return compile(source.replace(self._defect.old, self._defect.new), self.path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, defect: Defect) -> None:
        self._defect = defect

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._defect.module:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(self._defect, spec.origin)
        return spec


def plant(defect: Defect) -> None:
    """Let this interpreter import the module with the defect. It must not have imported tailrace."""
    assert "tailrace" not in sys.modules
    sys.meta_path.insert(0, _Finder(defect))


def main(name: str) -> int:
    (defect,) = (one for one in (*DEFECTS, *HIDDEN) if one.name == name)
    plant(defect)
    from tests.simulation.schedule import run

    for number in range(defect.seeds):
        seed = defect.first + defect.step * number
        outcome = run(seed)
        if outcome.violation:
            sys.stdout.write(f"{seed}\t{outcome.violation}\n")
            return 0
    sys.stdout.write("not found\n")
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
