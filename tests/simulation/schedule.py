"""One schedule: some servers, some clients, and what goes wrong, all of it from one seed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from tests.simulation.batches import BatchClient, open_batches
from tests.simulation.clients import Client, Wish
from tests.simulation.defects import (
    EVERY_BATCH,
    EVERY_LATE,
    EVERY_OUTLIVED,
    EVERY_TOOLS,
    FIRST_LATE,
    FIRST_OUTLIVED,
    FIRST_WITH_BATCH,
    FIRST_WITH_TOOLS,
)
from tests.simulation.laws import Ledger
from tests.simulation.network import PARTS, Line, RedisHost
from tests.simulation.servers import Server
from tests.simulation.simulated_time import Process, Simulation, Violation
from tests.simulation.tools import ToolClient, ToolWorld

from tailrace_plugins.batches.batch_keys import OPEN

__all__ = ["Outcome", "Schedule", "has_batch", "has_tools", "is_late", "is_outlived", "run"]


_FAULTS_S = 15.0  # how long things go wrong
_PATIENCE_S = 240.0  # how long clients may take from then on
_IDLE_S = 150.0  # until nothing is left of streams that nobody reads
_CROWDED = 8  # one of so many schedules has many clients, faults and a slow network: they meet what is rare
_AFTER_LATE = 0.1  # of the commands that are late are outlived by a server
_AT_STEPS = 0.05  # of the steps of a tool loop are followed by a fault
_HOUR_MS = 3_600_000
_ENDED_MS = 12 * _HOUR_MS  # more than the retention of a stream, and all hours by which clocks are set back
_RUNNING_MS = 36 * _HOUR_MS  # the same for a day


@dataclass(frozen=True)
class Outcome:
    """What came of a schedule. `violation` says which law was broken, and is empty if none was."""

    seed: int
    violation: str
    digest: int  # the same each time that this seed runs
    num_steps: int
    num_commands: int
    simulated_s: float
    faults: Sequence[str]
    may_lose: bool


def has_batch(seed: int) -> bool:
    """Return whether a schedule has a batch."""
    return seed >= FIRST_WITH_BATCH and (seed - FIRST_WITH_BATCH) % EVERY_BATCH == 0


def has_tools(seed: int) -> bool:
    """Return whether a schedule has a tool loop."""
    return seed >= FIRST_WITH_TOOLS and (seed - FIRST_WITH_TOOLS) % EVERY_TOOLS == 0


def is_late(seed: int) -> bool:
    """Return whether commands of a schedule often arrive when their servers have given them up. Its streams are short,
    and their clients delete them: a stream may be gone before the last command that was sent about it arrives."""
    return is_outlived(seed) or (seed >= FIRST_LATE and (seed - FIRST_LATE) % EVERY_LATE == 0)


def is_outlived(seed: int) -> bool:
    """Return whether servers of a schedule die while a late command of theirs is on its way. The others may be done
    with such a server before the command arrives."""
    return seed >= FIRST_OUTLIVED and (seed - FIRST_OUTLIVED) % EVERY_OUTLIVED == 0


def run(seed: int) -> Outcome:
    """Run the schedule of a seed."""
    return Schedule(seed).outcome()


@contextmanager
def _errors_of(simulation: Simulation) -> Iterator[None]:
    """Let a logged exception be a failure of the simulation: it is a defect that somebody has caught."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                simulation.failures.append(f"{record.getMessage()}: {record.exc_info[1]!r}")

    logger, listener = logging.getLogger("tailrace"), Listener(logging.ERROR)
    before, propagates = logger.level, logger.propagate
    logger.addHandler(listener)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before)
        logger.propagate = propagates


class Schedule:
    """Servers, clients and faults of a seed. `may_lose` is whether Redis loses what it has confirmed; None: as the seed
    says."""

    def __init__(self, seed: int, *, may_lose: bool | None = None) -> None:
        self._seed = seed
        self.simulation = Simulation(seed)
        self.simulation.on_death = self._on_death
        random = self.simulation.random
        self.host = RedisHost(self.simulation)
        drawn = random.random() < 0.2
        self.may_lose = drawn if may_lose is None else may_lose
        self.ledger = Ledger(may_lose=self.may_lose)
        self.faults: list[str] = []
        self.host.model.on_xadd.append(self._on_xadd)
        self.host.model.on_hset.append(self._on_hset)
        self._writers: dict[tuple[bytes, bytes], Process | None] = {}
        self._lease_s = random.choice((4.0,) if is_outlived(seed) else (4.0, 10.0, 10.0))
        if is_outlived(seed):
            self.host.on_late = self._on_late
        self._token_s = random.choice((0.02, 0.1, 0.3))
        self._is_crowded = seed % _CROWDED == _CROWDED - 1
        self._is_late = is_late(seed)
        self._has_batch = has_batch(seed)
        self._has_tools = has_tools(seed)
        self._tools = ToolWorld(self.simulation, self.host, may_lose=self.may_lose)
        self._delay_s = random.choice((0.01, 0.1, 0.3) if self._is_crowded else (0.0005, 0.0005, 0.01, 0.1))
        self._lives: list[list[Server]] = [[] for _ in range(random.choice((2, 2, 3)))]  # of each server
        self._clients_process = Process(self.simulation, "clients")
        self._clients: list[Client | BatchClient | ToolClient] = []
        self._num_left = 0
        self._is_calm = False
        self._has_failed = False  # a server could not reach Redis
        self._begin_s = self._looks_s = self.simulation.now_s

    # Running

    def outcome(self) -> Outcome:
        """Run it."""
        violation = ""
        with _errors_of(self.simulation), self.simulation.entered():
            try:
                self._live()
            except Violation as error:
                violation = str(error)
        num_steps, num_commands = self.simulation.num_steps, self.host.num_commands
        simulated_s = self.simulation.now_s - self._begin_s
        return Outcome(
            self._seed, violation, self.ledger.digest, num_steps, num_commands, simulated_s, self.faults, self.may_lose
        )

    def _live(self) -> None:
        simulation = self.simulation
        for number in range(len(self._lives)):
            self._start(number)
        has_many = self._is_crowded or self._is_late
        latest_s = _FAULTS_S if has_many else _FAULTS_S / 2
        fewest, most = (10, 20) if self._is_crowded else (4, 8) if self._is_late else (1, 4)
        for number in range(simulation.random.randint(fewest, most)):
            simulation.after(simulation.random.uniform(0.0, latest_s), self._start_client, number)
            self._num_left += 1
        if self._has_batch:
            simulation.after(simulation.random.uniform(0.0, 2.0), self._start_batch)
            self._num_left += 1
        if self._has_tools:
            self._tools.draw()
            simulation.after(simulation.random.uniform(0.0, 2.0), self._start_tools)
            self._num_left += 1
        for _ in range(simulation.random.choice((4, 6, 8) if has_many else (0, 1, 1, 2, 2, 3, 4, 6))):
            simulation.after(simulation.random.uniform(0.5, _FAULTS_S), self._fault)
        simulation.after(_FAULTS_S + 1.0, self._calm_down)
        if not self._run(lambda: self._num_left == 0, _FAULTS_S + _PATIENCE_S):
            doing = [f"{client.stream_id}: {client.doing}" for client in self._clients if client.doing != _OVER]
            raise Violation(f"liveness: clients do not come to their end: {'; '.join(doing)}")
        self._calm_down()
        is_idle = self._run(self._is_idle, simulation.now_s - self._begin_s + _IDLE_S)
        if not is_idle:
            raise Violation(f"law 8: something is left: {self._left()}")
        self.ledger.check_ends(Counter(name for server in self._servers for name in server.ended))

    def _run(self, is_over: Callable[[], bool], duration_s: float) -> bool:
        found = self.simulation.run(is_over, until_s=self._begin_s + duration_s)
        if self.simulation.failures:
            raise Violation(f"an error that nobody expects: {self.simulation.failures[0]}")
        return found

    @property
    def _servers(self) -> list[Server]:
        return [server for lives in self._lives for server in lives]

    def _answering(self) -> list[Server]:
        return [lives[-1] for lives in self._lives if lives[-1].is_open and not lives[-1].process.is_frozen]

    # Servers and clients

    def _start(self, number: int) -> None:
        random, lives = self.simulation.random, self._lives[number]
        if lives and not lives[-1].is_over:
            return
        process = Process(
            self.simulation,
            f"server {number}.{len(lives)}",
            offset_s=random.uniform(0, 1e5),
            rate=random.uniform(0.999, 1.001),
            wall_offset_s=random.choice((0.0, 0.0, 840.0, -840.0)),
        )
        line = Line(self._delay_s)
        server = Server(
            self.simulation,
            self.host,
            process,
            line,
            lease_s=self._lease_s,
            token_s=self._token_s,
            open_batches=open_batches if self._has_batch else None,
            open_tools=self._tools.open if self._has_tools else None,
        )
        lives.append(server)
        self._watch(number, server)

    def _watch(self, number: int, server: Server) -> None:
        """Start the next life of a server some time after this one is over."""
        if server is not self._lives[number][-1]:
            return
        if server.is_over:
            self.simulation.after(self.simulation.random.uniform(0.1, 8.0), self._start, number)
        else:
            self.simulation.after(0.5, self._watch, number, server)

    def _start_client(self, number: int) -> None:
        random = self.simulation.random
        wish = Wish(
            name=f"wish {number}",
            num_tokens=random.choice((1, 5) if self._is_late else (1, 5, 20) if self._is_crowded else (1, 5, 20, 60)),
            linger_s=random.choice((0.0, 20.0, 20.0, 20.0)),
            has_key=random.random() < 0.6,
            num_readers=random.choice((1, 1, 2, 3)),
            cut_every=random.choice((0, 0, 3, 10)),
            stop_after=random.choice((0, 0, 0, 4)),
            deletes=random.random() < (0.9 if self._is_late else 0.2),
            patience_s=random.choice((2.0, 100.0) if self._is_crowded else (0.5, 2.0, 100.0, 100.0)),
            asks_twice=random.random() < 0.3,
        )
        client = Client(self.simulation, self._clients_process, self.ledger, self._answering, wish)
        if self._has_failed:
            client.expected.may_end.add("error")
        self._begin(client)

    def _start_batch(self) -> None:
        num_rows = self.simulation.random.choice((1, 10, 40))
        self._begin(BatchClient(self.simulation, self._clients_process, self.ledger, self._answering, num_rows))

    def _start_tools(self) -> None:
        self._begin(
            ToolClient(
                self.simulation, self._clients_process, self._tools, self._answering, may_fail=lambda: self._has_failed
            )
        )

    def _begin(self, client: Client | BatchClient | ToolClient) -> None:
        self._clients.append(client)

        async def live() -> None:
            try:
                await client.run()
            except Violation as error:
                self.simulation.failures.append(str(error))
            self._num_left -= 1

        self._clients_process.call_soon(lambda: self._clients_process.create_task(live()))

    def _on_death(self, process: Process) -> None:
        for server in self._servers:
            if server.process is process:
                server.kill()

    def _on_late(self, process: Process) -> None:
        random = self.simulation.random
        if not self._is_calm and random.random() < _AFTER_LATE:
            for server in self._servers:
                if server.process is process:
                    self.simulation.after(random.uniform(0.0, 1.0), self._kill, server)

    # Faults

    def _fault(self) -> None:
        if self._is_calm:
            return
        random = self.simulation.random
        kinds = _LOSSY if self.may_lose else _LATE if self._is_late else _LOSSLESS
        name = random.choice(kinds)
        server = random.choice(self._lives)[-1]
        getattr(self, f"_{name}")(server)

    def _fault_at_step(self) -> None:
        """A server that has just written a step of a tool loop is killed or frozen before it gets the answer."""
        for server in self._servers:
            if server.process is self.host.actor:
                random = self.simulation.random
                self.simulation.after(0.0, self._kill if random.random() < 0.5 else self._freeze, server)

    def _note(self, text: str) -> None:
        self.faults.append(f"{self.simulation.now_s - self._begin_s:.3f} {text}")

    def _may_end_as_error(self) -> None:
        self._has_failed = True
        for client in self._clients:
            if isinstance(client, Client):
                client.expected.may_end.add("error")

    def _kill(self, server: Server) -> None:
        self._note(f"kill {server.process.name}")
        server.kill()

    def _kill_soon(self, server: Server) -> None:
        server.process.steps_left = self.simulation.random.randint(1, 300)
        self._note(f"kill {server.process.name} after {server.process.steps_left} steps")

    def _freeze(self, server: Server) -> None:
        duration_s = self._lease_s * self.simulation.random.choice((0.3, 0.6, 0.9, 1.3, 2.5))
        self._note(f"freeze {server.process.name} for {duration_s:.1f} s")
        server.process.freeze()
        self.simulation.after(duration_s, server.process.thaw)

    def _stop(self, server: Server) -> None:
        self._note(f"stop {server.process.name}")
        server.stop()

    def _kill_engine(self, server: Server) -> None:
        self._note(f"kill the engine of {server.process.name}")
        server.kill_engine(self.simulation.random.uniform(0.1, 5.0))

    def _cut(self, server: Server) -> None:
        duration_s = self.simulation.random.choice((0.5, 1.5, 3.0, 7.0, 2 * self._lease_s))
        self._note(f"cut {server.process.name} off for {duration_s:.1f} s")
        self._may_end_as_error()
        server.line.is_cut = True
        self.simulation.after(duration_s, self._mend, server.line)

    def _flake(self, server: Server) -> None:
        random, line = self.simulation.random, server.line
        which = "late" if self._is_late else random.choice(("lose_command", "lose_answer", "lose_answer", "late"))
        chance = random.choice((0.02, 0.1, 0.3))
        if random.random() < 0.5:  # some commands only, and these more often
            line.only, chance = random.randrange(PARTS), random.choice((0.3, 0.6, 0.9))
        self._note(f"{which} of {server.process.name} with {chance}" + (f" in part {line.only}" if line.only else ""))
        self._may_end_as_error()
        setattr(line, which, chance)
        self.simulation.after(random.uniform(1.0, 8.0), self._mend, line)

    def _mend(self, line: Line) -> None:
        line.is_cut, line.only = False, None
        line.lose_command = line.lose_answer = line.late = 0.0

    def _restart_redis(self, server: Server) -> None:
        self._stop_redis(None, "with all that it had")

    def _set_clock(self, server: Server) -> None:
        offset_s = self.simulation.random.choice((-3600.0, -30.0, -2.0))
        self._note(f"set the clock of Redis by {offset_s} s")
        self.host.clock_offset_s += offset_s

    def _empty_redis(self, server: Server) -> None:
        self._stop_redis(({}, {}), "empty")

    def _rewind_redis(self, server: Server) -> None:
        state = self.host.model.snapshot()
        self.simulation.after(
            self.simulation.random.choice((0.01, 0.1, 1.0, 3.0)), self._stop_redis, state, "with less"
        )

    def _stop_redis(self, state: object | None, with_what: str) -> None:
        if not self.host.is_up:
            return
        duration_s = self.simulation.random.choice((0.0, 0.2, 1.0, 3.0, 7.0, 12.0))
        self._note(f"Redis dies, and comes back after {duration_s:.1f} s {with_what}")
        self._may_end_as_error()
        self.host.stop()
        self.simulation.after(duration_s, self.host.start, state)

    def _calm_down(self) -> None:
        """From now on nothing goes wrong."""
        self._is_calm = True
        for server in self._servers:
            server.process.steps_left = None
            self._mend(server.line)

    # What Redis keeps

    def _on_hset(self, key: bytes, fields: Mapping[bytes, bytes]) -> None:
        if key.endswith(b":batches:rows"):
            try:
                self.ledger.on_row(fields)
            except Violation as error:
                self.simulation.failures.append(str(error))
        if key.endswith(b":mcp:rows") and not self._is_calm and self.simulation.random.random() < _AT_STEPS:
            self._fault_at_step()
        if b"epoch" in fields:
            stream_id, epoch = key.rpartition(b":")[2], fields[b"epoch"]
            self._writers[stream_id, epoch] = self.host.actor
            try:
                self.ledger.on_writer(stream_id.decode(), int(epoch), self.host.actor)
            except Violation as error:
                self.simulation.failures.append(str(error))

    def _on_xadd(self, key: bytes, entry_id: bytes, fields: Sequence[bytes]) -> None:
        if b":events:" not in key:
            return
        stream_id = key.rpartition(b":")[2]
        epoch = self.host.model.hget(key.replace(b":events:", b":stream:"), b"epoch")
        is_writer = epoch is not None and self._writers.get((stream_id, epoch)) is self.host.actor
        last = int(entry_id.partition(b"-")[0])
        try:
            self.ledger.on_kept(stream_id.decode(), last, fields[1], epoch=int(epoch or 0), is_writer=is_writer)
        except Violation as error:
            self.simulation.failures.append(str(error))

    # What is left

    def _is_idle(self) -> bool:
        """Looks four times a second."""
        if self.simulation.now_s < self._looks_s:
            return False
        self._looks_s = self.simulation.now_s + 0.25
        return not self._left()

    def _left(self) -> list[str]:
        """Return what servers and Redis still have of streams that have ended, or that nobody reads."""
        left = []
        for lives in self._lives:
            server = lives[-1]
            if not server.is_open:
                left.append(f"{server.process.name} does not answer: {server.error!r}")
                continue
            generator, gate = server.generator, server.generator.gate
            left += [f"{server.process.name} runs {run.log.stream_id}" for run in generator.live]
            if gate.num_running or gate.num_waiting:
                left.append(f"{server.process.name} has {gate.num_running} slots in use, {gate.num_waiting} wait")
            if server.engine.receivers:
                left.append(f"the engine of {server.process.name} runs")
        model = self.host.model
        for table in (*model.keys_like(b"*:batches:rows"), *model.keys_like(b"*:mcp:rows")):
            keys = model.hgetall(table)[::2]
            left += [f"{one.decode()} has not ended" for one in keys if one.startswith(OPEN + b"/")]
        for key in map(bytes.decode, model.keys()):
            if ":stream:" in key and model.hget(key.encode(), b"ended") is None:
                left.append(f"{key} has not ended")
            elif ":owned:" in key:
                left.append(f"Redis has {key}")
            elif ":claim:" in key:
                # If its stream was given up while it was opened, or Redis has lost it, no server ends the key.
                _, stream_id, *_ = msgspec.msgpack.decode(model.get(key.encode()))
                most_ms = _ENDED_MS if model.keys_like(f"*:stream:{stream_id}".encode()) else _RUNNING_MS
                if not 0 <= model.pttl(key.encode()) < most_ms:
                    left.append(f"{key} is kept for longer than its stream")
        return left


_OVER = "nothing any more"
_LOSSLESS = (
    "kill",
    "kill_soon",
    "kill_soon",
    "freeze",
    "stop",
    "kill_engine",
    "cut",
    "flake",
    "flake",
    "restart_redis",
    "set_clock",
)
_LATE = ("kill_soon", "cut", "flake", "flake")
_LOSSY = ("kill", "kill_soon", "freeze", "cut", "flake", "empty_redis", "rewind_redis", "rewind_redis")
