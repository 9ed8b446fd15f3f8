"""Rate limits: what keys and owners have used, and whether they may use more.

A request reserves the most tokens that it can use before it starts. When it has ended, the unused tokens are returned.
So usage never exceeds a limit, however the stream ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple, NoReturn, Protocol

from tailrace.access.keys import Key
from tailrace.access.principal import Principal
from tailrace.access.quota import NO_LIMITS, Quota, Rate
from tailrace.errors import QuotaExceeded, RequestError
from tailrace.types import Allowance, End

__all__ = ["LIMIT_HEADERS", "Account", "Metered", "Quotas", "Spending", "month_start"]

_MINUTE_S = 60.0
_STREAM_RETRY_S = 1.0

_PARTS = ("limit", "remaining", "reset")
LIMIT_HEADERS = (
    "ratelimit",
    "ratelimit-policy",
    *(f"x-ratelimit-{part}-{unit}" for part in _PARTS for unit in ("requests", "tokens")),
)

_NO_ALLOWANCE = Allowance()

Account = tuple[str, str]  # "key" or "owner", and its name


class Metered(Protocol):
    """What is counted of a stream: a `streams.Record`."""

    @property
    def stream_id(self) -> str: ...
    @property
    def created_s(self) -> float: ...
    @property
    def key_id(self) -> str: ...
    @property
    def owner(self) -> str: ...
    @property
    def most_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Spending:
    """What an account has spent in the current period."""

    account: Account
    period: str  # minute or month
    num_requests: int
    num_tokens: int


@dataclass(slots=True)
class _Window:
    """One minute or one month of an account. `tokens` are spent and reserved ones."""

    end_s: float = 0.0
    policy: str = ""  # its length, as in the header RateLimit-Policy
    requests: int = 0
    tokens: int = 0


class _Limit(NamedTuple):
    """One limit of an account."""

    name: str
    most: int
    rate: Rate | None  # None: concurrent streams
    policy: str  # item of the header RateLimit-Policy, without the window
    remaining: str  # beginning of the item of the header RateLimit
    headers: tuple[bytes, ...]  # names of OpenAI's headers

    def cost(self, num_tokens: int) -> int:
        """Return how much of the limit a request takes."""
        return num_tokens if self.rate is not None and self.rate.unit == "tokens" else 1


class _State(NamedTuple):
    """What remains of a limit, and when it is reset."""

    limit: _Limit
    remaining: int
    reset_s: float
    policy: str


@dataclass(slots=True)
class _Usage:
    """The usage and the limits of one account."""

    limits: tuple[_Limit, ...] = ()
    allowance: Allowance = _NO_ALLOWANCE
    windows: dict[str, _Window] = field(default_factory=lambda: {"minute": _Window(), "month": _Window()})
    num_streams: int = 0

    def has(self, num_tokens: int, now_s: float) -> bool:
        """Return whether a request that takes at most `num_tokens` is within all limits."""
        windows = self.at(now_s)
        return all(limit.cost(num_tokens) <= limit.most - self._used(limit, windows) for limit in self.limits)

    def states(self, now_s: float) -> list[_State]:
        windows = self.at(now_s)
        states = []
        for limit in self.limits:
            remaining, reset_s, policy = max(0, limit.most - self._used(limit, windows)), _STREAM_RETRY_S, limit.policy
            if limit.rate is not None:
                window = windows[limit.rate.period]
                reset_s, policy = max(0.0, window.end_s - now_s), policy + window.policy
            states.append(_State(limit, remaining, reset_s, policy))
        return states

    def _used(self, limit: _Limit, windows: dict[str, _Window]) -> int:
        if limit.rate is None:
            return self.num_streams
        window = windows[limit.rate.period]
        return window.requests if limit.rate.unit == "requests" else window.tokens

    def at(self, now_s: float) -> dict[str, _Window]:
        """Return the current windows. If the clock is set back, the later window stays."""
        for period, window in self.windows.items():
            if now_s >= window.end_s:
                start_s, end_s = _bounds(period, now_s)
                self.windows[period] = _Window(end_s, f";w={end_s - start_s:.0f}")
        return self.windows


class _Reservation(NamedTuple):
    num_tokens: int
    accounts: tuple[_Usage, ...]
    windows: tuple[_Window, ...]


class Quotas:
    """Counts the usage of each key and each owner, also of those without limits, because a limit may be set at any
    time. Requests without a key are not counted. Each server counts its own requests, on top of what was recorded when
    it started."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._usage: dict[Account, _Usage] = {}
        self._reserved: dict[str, _Reservation] = {}  # by stream

    def limit(self, account: Account, quota: Quota) -> None:
        """Set an account's limits. Earlier usage counts."""
        if quota != NO_LIMITS or account in self._usage:
            usage = self._of(account)
            usage.limits = tuple(_limits(account[0], quota))
            tokens = [limit for rate, limit in quota.rates() if rate.unit == "tokens"]
            usage.allowance = Allowance(quota.answer_tokens, min(tokens, default=None))

    def update(self, keys: Iterable[Key], owners: Mapping[str, Quota]) -> None:
        """Set the limits of keys and owners that are new or have changed."""
        for owner, quota in owners.items():
            self.limit(("owner", owner), quota)
        for key in keys:
            self.limit(("key", key.key_id), key.quota)

    def spent_before(self, spendings: Sequence[Spending]) -> None:
        """Add the recorded usage of the current minute and month."""
        now_s = self._clock()
        for one in spendings:
            window = self._of(one.account).at(now_s)[one.period]
            window.requests += one.num_requests
            window.tokens += one.num_tokens

    # generation.Meter

    def allowance(self, key_id: str, owner: str) -> Allowance:
        """Return how much one request may use at most: the smaller limits of its key and its owner."""
        if not key_id:
            return _NO_ALLOWANCE
        key_allowance, owner_allowance = self._of(("key", key_id)).allowance, self._of(("owner", owner)).allowance
        return Allowance(
            _least(key_allowance.answer_tokens, owner_allowance.answer_tokens),
            _least(key_allowance.all_tokens, owner_allowance.all_tokens),
        )

    def reserve(self, record: Metered) -> None:
        """Reserve the most tokens that a request can use, from its key and its owner.

        Raises: QuotaExceeded if not enough remain now; RequestError if the request exceeds a limit by itself.
        """
        if not record.key_id:
            return
        num_tokens, now_s = record.most_tokens, self._clock()
        accounts = self._accounts(record.key_id, record.owner)
        if not all(usage.has(num_tokens, now_s) for usage in accounts):
            self._refuse(accounts, num_tokens, now_s)
        self._take(record, num_tokens, now_s)

    def resume(self, record: Metered) -> None:
        """Reserve tokens for a stream of an earlier process, without checking the limits."""
        if record.key_id and record.stream_id not in self._reserved:
            self._take(record, record.most_tokens, record.created_s)

    def release(self, record: Metered) -> None:
        """Undo the reservation of a stream that did not start."""
        reservation = self._settle(record, 0)
        for window in reservation.windows if reservation is not None else ():
            window.requests -= 1

    # generation.Observer

    def on_end(self, record: Metered, end: End) -> None:
        """Replace the reservation of an ended stream by its usage."""
        self._settle(record, end.usage.num_prompt_tokens + end.usage.num_completion_tokens)

    # Response headers

    def headers(self, principal: Principal) -> list[tuple[bytes, bytes]]:
        """Return rate limit headers of a key and its owner: draft-ietf-httpapi-ratelimit-headers-10, and OpenAI's."""
        if not principal.key_id:
            return []
        now_s = self._clock()
        states = [state for usage in self._accounts(principal.key_id, principal.owner) for state in usage.states(now_s)]
        if not states:
            return []
        return [
            (b"ratelimit-policy", ", ".join([state.policy for state in states]).encode()),
            (b"ratelimit", ", ".join(map(_remaining_item, states)).encode()),
            *_openai_headers(states),
        ]

    def _refuse(self, accounts: tuple[_Usage, _Usage], num_tokens: int, now_s: float) -> NoReturn:
        """Raises: QuotaExceeded, RequestError."""
        waits_s: dict[str, float] = {}
        for usage in accounts:
            for limit, remaining, reset_s, _ in usage.states(now_s):
                cost = limit.cost(num_tokens)
                holder = limit.name.partition("-")[0]
                if cost > limit.most:
                    assert limit.rate is not None  # a request takes more than 1 only of a limit of tokens
                    raise RequestError(
                        f"Prompt and answer can take {num_tokens} tokens, but the limit of the {holder} is "
                        f"{limit.most} per {limit.rate.period}. Lower max_tokens, or shorten the prompt.",
                        param="max_tokens",
                    )
                if cost > remaining:
                    waits_s[_reason(holder, limit)] = reset_s
        reason, wait_s = max(waits_s.items(), key=lambda item: item[1])
        raise QuotaExceeded(reason, retry_after_s=wait_s)

    def _take(self, record: Metered, num_tokens: int, now_s: float) -> None:
        accounts = self._accounts(record.key_id, record.owner)
        windows = tuple(window for usage in accounts for window in usage.at(now_s).values())
        for window in windows:
            window.requests += 1
            window.tokens += num_tokens
        for usage in accounts:
            usage.num_streams += 1
        self._reserved[record.stream_id] = _Reservation(num_tokens, accounts, windows)

    def _settle(self, record: Metered, num_spent: int) -> _Reservation | None:
        reservation = self._reserved.pop(record.stream_id, None)
        if reservation is None:
            return None
        for window in reservation.windows:
            window.tokens -= reservation.num_tokens - num_spent
        for usage in reservation.accounts:
            usage.num_streams -= 1
        return reservation

    def _accounts(self, key_id: str, owner: str) -> tuple[_Usage, _Usage]:
        return self._of(("key", key_id)), self._of(("owner", owner))

    def _of(self, account: Account) -> _Usage:
        usage = self._usage.get(account)
        if usage is None:
            usage = self._usage[account] = _Usage()
        return usage


def month_start(now_s: float) -> float:
    """Return the start of the month in UTC."""
    return _bounds("month", now_s)[0]


def _bounds(period: str, now_s: float) -> tuple[float, float]:
    if period == "minute":
        start_s = now_s // _MINUTE_S * _MINUTE_S
        return start_s, start_s + _MINUTE_S
    now = datetime.fromtimestamp(now_s, UTC)
    start = datetime(now.year, now.month, 1, tzinfo=UTC)
    end = datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC)
    return start.timestamp(), end.timestamp()


def _least(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else min(one, other)


def _limits(holder: str, quota: Quota) -> Iterator[_Limit]:
    for rate, most in quota.rates():
        unit = "" if rate.unit == "requests" else ';qu="tokens"'
        yield _limit(f"{holder}-{rate.unit}-{rate.period}", most, unit, rate)
    if quota.streams_at_once is not None:
        yield _limit(f"{holder}-streams", quota.streams_at_once, ';qu="concurrent-requests"', None)


def _limit(name: str, most: int, unit: str, rate: Rate | None) -> _Limit:
    headers = [f"x-ratelimit-{part}-{rate.unit}".encode() for part in _PARTS] if rate is not None else ()
    return _Limit(name, most, rate, f'"{name}";q={most}{unit}', f'"{name}";r=', tuple(headers))


def _reason(holder: str, limit: _Limit) -> str:
    if limit.rate is None:
        return f"The {holder} may have {limit.most} streams at once, and all are in use."
    return f"The {holder} may use {limit.most} {limit.rate.unit} per {limit.rate.period}, and too few remain."


def _remaining_item(state: _State) -> str:
    item = f"{state.limit.remaining}{state.remaining}"
    return item if state.limit.rate is None else f"{item};t={math.ceil(state.reset_s)}"


def _openai_headers(states: Sequence[_State]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers x-ratelimit-*, for the limit of each unit that has the least remaining."""
    nearest: dict[str, _State] = {}
    for state in states:
        rate = state.limit.rate
        if rate is not None and (rate.unit not in nearest or state.remaining < nearest[rate.unit].remaining):
            nearest[rate.unit] = state
    for limit, remaining, reset_s, _ in nearest.values():
        yield from zip(limit.headers, (b"%d" % limit.most, b"%d" % remaining, b"%ds" % math.ceil(reset_s)), strict=True)
