"""What keys and owners have used, and whether they may use more.

A request reserves the most that it can take before it begins, and pays what it took when it has ended. So what is spent
never exceeds a limit, whatever ends the stream.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple, NoReturn

from tailrace.access.principal import Principal
from tailrace.access.quota import NO_LIMITS, Quota, Rate
from tailrace.errors import QuotaExceeded, RequestError
from tailrace.streams import Record
from tailrace.types import Allowance, End

__all__ = ["LIMIT_HEADERS", "Account", "Quotas", "Spending", "month_start", "most_tokens"]

_MINUTE_S = 60.0
_WAIT_FOR_A_STREAM_S = 1.0

LIMIT_HEADERS = (
    "ratelimit",
    "ratelimit-policy",
    *(f"x-ratelimit-{fact}-{unit}" for fact in ("limit", "remaining", "reset") for unit in ("requests", "tokens")),
)

_NO_ALLOWANCE = Allowance()

Account = tuple[str, str]  # "key" or "owner", and its name


@dataclass(frozen=True, slots=True)
class Spending:
    """What an account has spent in a period so far."""

    account: Account
    period: str  # minute or month
    num_requests: int
    num_tokens: int


@dataclass(slots=True)
class _Window:
    """One minute or one month of an account. Tokens are those spent and those reserved."""

    start_s: float = 0.0
    end_s: float = 0.0
    requests: int = 0
    tokens: int = 0


class _Limit(NamedTuple):
    """One limit of an account."""

    name: str
    most: int
    rate: Rate | None  # None: streams at once
    policy: str  # its item in the header RateLimit-Policy, without the window

    def asks(self, num_tokens: int) -> int:
        """How much of it a request takes."""
        return num_tokens if self.rate is not None and self.rate.unit == "tokens" else 1


class _State(NamedTuple):
    """Where a limit stands."""

    limit: _Limit
    remaining: int
    reset_s: float
    window_s: float = 0.0


@dataclass(slots=True)
class _Usage:
    """What one account has used, and its limits."""

    limits: tuple[_Limit, ...] = ()
    allowance: Allowance = _NO_ALLOWANCE
    windows: dict[str, _Window] = field(default_factory=lambda: {"minute": _Window(), "month": _Window()})
    num_streams: int = 0

    def has(self, num_tokens: int, now_s: float) -> bool:
        """Return whether a request that takes at most `num_tokens` is within all limits."""
        windows = self.at(now_s)
        return all(limit.asks(num_tokens) <= limit.most - self._used(limit, windows) for limit in self.limits)

    def states(self, now_s: float) -> list[_State]:
        windows = self.at(now_s)
        states = []
        for limit in self.limits:
            remaining, reset_s, window_s = max(0, limit.most - self._used(limit, windows)), _WAIT_FOR_A_STREAM_S, 0.0
            if limit.rate is not None:
                window = windows[limit.rate.period]
                reset_s, window_s = max(0.0, window.end_s - now_s), window.end_s - window.start_s
            states.append(_State(limit, remaining, reset_s, window_s))
        return states

    def _used(self, limit: _Limit, windows: dict[str, _Window]) -> int:
        if limit.rate is None:
            return self.num_streams
        window = windows[limit.rate.period]
        return window.requests if limit.rate.unit == "requests" else window.tokens

    def at(self, now_s: float) -> dict[str, _Window]:
        """The windows of this moment. A clock that was set back stays in the window that it was in."""
        for period, window in self.windows.items():
            if now_s >= window.end_s:
                self.windows[period] = _Window(*_bounds(period, now_s))
        return self.windows


class _Reservation(NamedTuple):
    num_tokens: int
    accounts: tuple[_Usage, ...]
    windows: tuple[_Window, ...]


class Quotas:
    """Counts each key and each owner, also those without limits: one may be set at any time. Who has no key is not
    counted. Each server counts what it has let in itself, on top of what was recorded when it started."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._usage: dict[Account, _Usage] = {}
        self._reserved: dict[str, _Reservation] = {}  # by stream

    def limit(self, account: Account, quota: Quota) -> None:
        """Set an account's limits. What it has used counts."""
        if quota != NO_LIMITS or account in self._usage:
            usage = self._of(account)
            usage.limits = tuple(_limits(account[0], quota))
            tokens = [limit for rate, limit in quota.rates() if rate.unit == "tokens"]
            usage.allowance = Allowance(quota.answer_tokens, min(tokens, default=None))

    def spent_before(self, spendings: Sequence[Spending]) -> None:
        """Add what is recorded of the current minute and month."""
        now_s = self._clock()
        for one in spendings:
            window = self._of(one.account).at(now_s)[one.period]
            window.requests += one.num_requests
            window.tokens += one.num_tokens

    # What the generator asks for (generation.Meter)

    def allowance(self, key_id: str, owner: str) -> Allowance:
        """How much one request may take at all: the smallest limits of its key and its owner."""
        if not key_id:
            return _NO_ALLOWANCE
        of_key, of_owner = self._of(("key", key_id)).allowance, self._of(("owner", owner)).allowance
        return Allowance(
            _least(of_key.answer_tokens, of_owner.answer_tokens), _least(of_key.all_tokens, of_owner.all_tokens)
        )

    def reserve(self, record: Record) -> None:
        """Take the most that a request may use out of what its key and its owner have left.

        Raises: QuotaExceeded if there is not as much left now; RequestError if there never is.
        """
        if not record.key_id:
            return
        num_tokens, now_s = most_tokens(record), self._clock()
        accounts = self._accounts(record.key_id, record.owner)
        if not all(usage.has(num_tokens, now_s) for usage in accounts):
            self._refuse(accounts, num_tokens, now_s)
        self._take(record, num_tokens, now_s)

    def resume(self, record: Record) -> None:
        """Reserve for a stream that an earlier process began, whatever is left."""
        if record.key_id and record.stream_id not in self._reserved:
            self._take(record, most_tokens(record), record.created_s)

    def release(self, record: Record) -> None:
        """It has not begun after all."""
        reservation = self._give_back(record, 0)
        for window in reservation.windows if reservation is not None else ():
            window.requests -= 1

    # What it is told of streams

    def on_end(self, record: Record, end: End) -> None:
        """It pays what it took."""
        self._give_back(record, end.usage.num_prompt_tokens + end.usage.num_completion_tokens)

    # What is told to clients

    def headers(self, principal: Principal) -> list[tuple[str, str]]:
        """Where the limits of a key and its owner stand: draft-ietf-httpapi-ratelimit-headers-10, and OpenAI's."""
        if not principal.key_id:
            return []
        now_s = self._clock()
        states = [state for usage in self._accounts(principal.key_id, principal.owner) for state in usage.states(now_s)]
        if not states:
            return []
        return [
            ("ratelimit-policy", ", ".join(map(_policy_item, states))),
            ("ratelimit", ", ".join(map(_state_item, states))),
            *_openai_headers(states),
        ]

    def _refuse(self, accounts: tuple[_Usage, _Usage], num_tokens: int, now_s: float) -> NoReturn:
        """Raises: QuotaExceeded, RequestError."""
        waits_s: dict[str, float] = {}
        for usage in accounts:
            for limit, remaining, reset_s, _ in usage.states(now_s):
                asks = limit.asks(num_tokens)
                holder = limit.name.partition("-")[0]
                if asks > limit.most:
                    assert limit.rate is not None  # only of tokens does one request take more than one
                    raise RequestError(
                        f"This request may take {num_tokens} tokens, prompt and answer, and its {holder} has "
                        f"{limit.most} a {limit.rate.period}. Ask for fewer with max_tokens, or with a shorter prompt.",
                        param="max_tokens",
                    )
                if asks > remaining:
                    waits_s[_reason(holder, limit)] = reset_s
        reason, wait_s = max(waits_s.items(), key=lambda item: item[1])
        raise QuotaExceeded(reason, retry_after_s=wait_s)

    def _take(self, record: Record, num_tokens: int, now_s: float) -> None:
        accounts = self._accounts(record.key_id, record.owner)
        windows = tuple(window for usage in accounts for window in usage.at(now_s).values())
        for window in windows:
            window.requests += 1
            window.tokens += num_tokens
        for usage in accounts:
            usage.num_streams += 1
        self._reserved[record.stream_id] = _Reservation(num_tokens, accounts, windows)

    def _give_back(self, record: Record, num_spent: int) -> _Reservation | None:
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


def most_tokens(record: Record) -> int:
    """The most tokens that a stream can take, prompts and answers."""
    return record.num_prompt_tokens + record.num_choices * (record.sampling.max_tokens or 0)


def month_start(now_s: float) -> float:
    """When the month began, in UTC."""
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
        name = f"{holder}-{rate.unit}-{rate.period}"
        unit = "" if rate.unit == "requests" else ';qu="tokens"'
        yield _Limit(name, most, rate, f'"{name}";q={most}{unit}')
    if quota.streams_at_once is not None:
        name, most = f"{holder}-streams", quota.streams_at_once
        yield _Limit(name, most, None, f'"{name}";q={most};qu="concurrent-requests"')


def _reason(holder: str, limit: _Limit) -> str:
    if limit.rate is None:
        return f"The {holder} has {limit.most} streams at once, and they are in use."
    return f"The {holder} has {limit.most} {limit.rate.unit} a {limit.rate.period}, and not enough of them are left."


def _policy_item(state: _State) -> str:
    return state.limit.policy if state.limit.rate is None else f"{state.limit.policy};w={state.window_s:.0f}"


def _state_item(state: _State) -> str:
    item = f'"{state.limit.name}";r={state.remaining}'
    return item if state.limit.rate is None else f"{item};t={math.ceil(state.reset_s)}"


def _openai_headers(states: Sequence[_State]) -> Iterator[tuple[str, str]]:
    """x-ratelimit-*, of the limit of each unit that is nearest."""
    nearest: dict[str, _State] = {}
    for state in states:
        rate = state.limit.rate
        if rate is not None and (rate.unit not in nearest or state.remaining < nearest[rate.unit].remaining):
            nearest[rate.unit] = state
    for unit in sorted(nearest):
        limit, remaining, reset_s, _ = nearest[unit]
        yield f"x-ratelimit-limit-{unit}", str(limit.most)
        yield f"x-ratelimit-remaining-{unit}", str(remaining)
        yield f"x-ratelimit-reset-{unit}", f"{math.ceil(reset_s)}s"
