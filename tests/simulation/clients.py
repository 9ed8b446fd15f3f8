"""Clients: they begin streams, read them with cuts, stop and delete them, and try again when something fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.simulation.laws import Expected, Ledger
from tests.simulation.servers import MODEL, Answer, Message, Server
from tests.simulation.simulated_time import Process, Simulation, Violation

from tailrace.errors import SeqOutOfRange, StreamError, StreamExpired, TailraceError, UnknownStream
from tailrace.types import Claim, End, Event, GenerateRequest, Released, Sampling

__all__ = ["Client", "Wish"]


@dataclass(frozen=True)
class Wish:
    """What a client does with its stream."""

    name: str
    num_tokens: int
    linger_s: float
    has_key: bool
    num_readers: int
    cut_every: int  # events, on average; 0: never
    stop_after: int  # events; 0: never
    deletes: bool
    patience_s: float  # how long it waits for its stream to begin
    asks_twice: bool  # at the same time, if it has a key


class Client:
    """One client and its stream. `servers` returns those that answer now."""

    def __init__(
        self,
        simulation: Simulation,
        process: Process,
        ledger: Ledger,
        servers: Callable[[], Sequence[Server]],
        wish: Wish,
    ) -> None:
        self._simulation = simulation
        self._process = process
        self._ledger = ledger
        self._servers = servers
        self._wish = wish
        ids = tuple(wish.name.encode())
        self.expected = Expected(ids, simulation.random.getrandbits(32), wish.num_tokens)
        if not wish.linger_s:
            self.expected.may_end |= {"cancelled", "interrupted"}  # when its reader leaves, or its server
        self.stream_id: str | None = None
        self.doing = "nothing"  # for the report of one that does not come to its end

    async def run(self) -> None:
        if self._wish.asks_twice and self._wish.has_key:
            await asyncio.gather(self._live(), self._ask_again())
        else:
            await self._live()

    async def _ask_again(self) -> None:
        """Send the same request to another server, and leave when it has begun."""
        await asyncio.sleep(self._simulation.random.choice((0.0, 0.01, 0.2)))
        answer = (await self._server()).create(self._process, self._request(), self._claim())
        if isinstance(message := await answer.take(), str):
            self._ledger.on_begun(message, self.expected)
        answer.cut()

    async def _live(self) -> None:
        first = await self._begin()
        if self.stream_id is None:
            return
        readers = [self._read(first, self._wish.stop_after)]
        readers += [self._read(None, 0) for _ in range(self._wish.num_readers - 1)]
        await asyncio.gather(*readers)
        self.doing = "reading again"
        await self._read(None, 0, is_cut=False)
        if self._wish.deletes:
            await self._delete()
        self.doing = "nothing any more"

    async def _server(self) -> Server:
        while not (servers := self._servers()):
            await asyncio.sleep(0.05)
        return self._simulation.random.choice(servers)

    def _request(self) -> GenerateRequest:
        wish = self._wish
        return GenerateRequest(
            model=MODEL,
            prompts=((self.expected.prompt_ids,),),
            sampling=Sampling(temperature=0.0, max_tokens=wish.num_tokens, seed=self.expected.seed),
            on_disconnect="detach" if wish.linger_s else "cancel",
            linger_s=wish.linger_s,
        )

    def _claim(self) -> Claim | None:
        return Claim(self._wish.name, b"request") if self._wish.has_key else None

    async def _begin(self) -> Answer | None:
        """Create the stream. With an idempotency key, try again until there is an answer."""
        wish, request, claim = self._wish, self._request(), self._claim()
        while True:
            self.doing = "creating"
            answer = (await self._server()).create(self._process, request, claim)
            message: Message = None
            try:
                async with asyncio.timeout(wish.patience_s):
                    message = await answer.take()
            except TimeoutError:
                answer.cut()
            if isinstance(message, str):
                self.stream_id = message
                self._ledger.on_begun(message, self.expected)
                return answer
            if not wish.has_key and message is None:
                return None  # nobody will ever ask for it
            if isinstance(message, TailraceError) and not _may_happen(message):
                raise Violation(f"a request was refused: {message!r}")
            await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(self._simulation.random.uniform(0.01, 0.5))

    async def _read(self, answer: Answer | None, stop_after: int, *, is_cut: bool = True) -> None:
        """Read the stream to its end, over any number of connections."""
        assert self.stream_id is not None
        wish, seen = self._wish, list[Event]()
        while True:
            if answer is None:
                self.doing = f"following after {len(seen)}"
                answer = (await self._server()).follow(self._process, self.stream_id, len(seen))
                if (failure := await answer.take()) is None or not isinstance(failure, str):
                    answer = None
                    if isinstance(failure, TailraceError):
                        self._check_refusal(failure, len(seen))
                    if isinstance(failure, End) and not self._ledger.may_lose:
                        raise Violation(f"law 4: {self.stream_id} has ended before event {len(seen)}, which was read")
                    if self.expected.is_deleted or isinstance(failure, StreamError | End):
                        return  # Redis has lost it, or its last events
                    await self._pause()
                    continue
            self.doing = f"reading after {len(seen)}"
            left = 1 + self._simulation.random.randrange(2 * wish.cut_every) if wish.cut_every and is_cut else 1 << 30
            while left and not isinstance(message := await answer.take(), Released | TailraceError | str | None):
                seen.append(message)
                self._ledger.on_seen(self.stream_id, len(seen), message)
                if isinstance(message, End):
                    return
                left -= 1
                if len(seen) == stop_after:
                    await self._stop()
            answer.cut()
            answer = None
            if left:
                await self._pause()

    def _check_refusal(self, error: TailraceError, num_seen: int) -> None:
        """A stream that a client has read is not unknown, and not shorter than what was read."""
        if self._ledger.may_lose or self.expected.is_deleted:
            return
        if isinstance(error, UnknownStream | StreamExpired | SeqOutOfRange) or not _may_happen(error):
            raise Violation(f"law 6: {error!r} for {self.stream_id} after event {num_seen}")

    async def _stop(self) -> None:
        assert self.stream_id is not None
        self.expected.may_end.add("cancelled")
        self.doing = "stopping"
        message = await (await self._server()).cancel(self._process, self.stream_id).take()
        if isinstance(message, TailraceError):
            self._check_refusal(message, 0)

    async def _delete(self) -> None:
        """Delete the stream; then nobody finds it any more."""
        assert self.stream_id is not None
        self.expected.is_deleted = True
        self.expected.may_end.add("cancelled")  # if Redis has lost its end
        while True:
            self.doing = "deleting"
            message = await (await self._server()).delete(self._process, self.stream_id).take()
            if message == self.stream_id:
                self._ledger.on_deleted(self.stream_id)
            if message == self.stream_id or isinstance(message, UnknownStream | StreamExpired):
                break
            await self._pause()
        self.doing = "following what was deleted"
        num_refusals = 0
        while num_refusals < 2:
            server = await self._server()
            answer = server.follow(self._process, self.stream_id, 0)
            message = await answer.take()
            if isinstance(message, UnknownStream | StreamExpired):
                num_refusals += 1
            elif self._ledger.may_lose:
                return  # it may be there again
            else:
                if isinstance(message, str):
                    await self._read_deleted(server, answer)
                await self._pause()

    async def _read_deleted(self, server: Server, answer: Answer) -> None:
        """The server that writes the stream may show it until it hears of the deletion, but not an end that it knew
        when it began to show it. One that Redis kept before the deletion may be on its way to the server."""
        assert self.stream_id is not None
        self._ledger.on_shown(self.stream_id, server.process)
        shown_s = self._simulation.now_s
        while not isinstance(message := await answer.take(), Released | TailraceError | None):
            if isinstance(message, End) and self._simulation.now_s == shown_s:
                raise Violation(f"law 6: {self.stream_id} can be read to its end after it was deleted")


def _may_happen(error: TailraceError) -> bool:
    return not isinstance(error, StreamError) and error.status in (429, 503, 504, 507)
