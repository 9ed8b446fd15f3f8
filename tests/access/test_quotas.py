"""Usage never exceeds a limit, and errors and headers show the right numbers."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.access.principal import Principal
from tailrace.access.quota import NO_LIMITS, Quota
from tailrace.access.quotas import LIMIT_HEADERS, Quotas, Spending, month_start
from tailrace.errors import QuotaExceeded, RequestError
from tailrace.types import Allowance, End, Record, Sampling, Usage

_KEY = "abcdefghjkmn"
_START_S = datetime(2026, 11, 23, 10, 0, 30, tzinfo=UTC).timestamp()  # in the middle of a minute
_NUMBERS = iter(range(10**9))


class _Clock:
    def __init__(self) -> None:
        self.now_s = _START_S

    def __call__(self) -> float:
        return self.now_s


def _record(prompt: int = 10, answer: int = 20, *, key_id: str = _KEY, owner: str = "alice", n: int = 1) -> Record:
    sampling = Sampling(max_tokens=answer, n=n)
    return Record(
        f"stream{next(_NUMBERS)}", _START_S, num_prompt_tokens=prompt, num_choices=n, sampling=sampling, owner=owner,
        key_id=key_id,
    )  # fmt: skip


def _end(prompt: int, answer: int) -> End:
    return End("done", Usage(prompt, answer))


def _quotas(key: Quota = NO_LIMITS, owner: Quota = NO_LIMITS) -> tuple[Quotas, _Clock]:
    clock = _Clock()
    quotas = Quotas(clock)
    quotas.limit(("key", _KEY), key)
    quotas.limit(("owner", "alice"), owner)
    return quotas, clock


def _headers(quotas: Quotas) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in quotas.headers(Principal("alice", _KEY))}


def test_the_longest_answer_is_reserved_and_the_rest_is_released() -> None:
    quotas, _ = _quotas(Quota(tokens_per_minute=100))
    first = _record(10, 60)
    quotas.reserve(first)
    with pytest.raises(QuotaExceeded, match="100 tokens per minute"):
        quotas.reserve(_record(10, 60))
    quotas.on_end(first, _end(10, 5))
    quotas.reserve(_record(10, 60))
    assert _headers(quotas)["x-ratelimit-remaining-tokens"] == "15"


def test_a_stream_that_is_not_kept_costs_nothing() -> None:
    quotas, _ = _quotas(Quota(tokens_per_minute=100, requests_per_minute=1, streams_at_once=1))
    record = _record()
    quotas.reserve(record)
    quotas.release(record)
    quotas.reserve(_record())


def test_the_end_is_settled_once() -> None:
    quotas, _ = _quotas(Quota(tokens_per_minute=100, streams_at_once=5))
    record = _record(10, 60)
    quotas.reserve(record)
    for _ in range(3):
        quotas.on_end(record, _end(10, 60))
    assert _headers(quotas)["x-ratelimit-remaining-tokens"] == "30"
    assert '"key-streams";r=5' in _headers(quotas)["ratelimit"]


def test_after_retry_after_the_request_is_admitted() -> None:
    quotas, clock = _quotas(Quota(requests_per_minute=2))
    quotas.reserve(_record())
    quotas.reserve(_record())
    with pytest.raises(QuotaExceeded) as refused:
        quotas.reserve(_record())
    assert refused.value.retry_after_s == 30
    clock.now_s += 29.9
    with pytest.raises(QuotaExceeded):
        quotas.reserve(_record())
    clock.now_s = _START_S + refused.value.retry_after_s
    quotas.reserve(_record())


def test_a_stream_counts_for_the_minute_of_its_start() -> None:
    quotas, clock = _quotas(Quota(tokens_per_minute=100, tokens_per_month=1000))
    record = _record(10, 60)
    quotas.reserve(record)
    clock.now_s += 60
    quotas.reserve(_record(10, 90))
    quotas.on_end(record, _end(10, 20))
    limits = _headers(quotas)["ratelimit"]
    assert '"key-tokens-minute";r=0;t=30' in limits
    assert '"key-tokens-month";r=870' in limits


@pytest.mark.parametrize(
    ("now", "end"),
    [
        (datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)),
        (datetime(2028, 2, 29, tzinfo=UTC), datetime(2028, 3, 1, tzinfo=UTC)),
    ],
)
def test_months_are_calendar_months(now: datetime, end: datetime) -> None:
    quotas, clock = _quotas(Quota(requests_per_month=1))
    clock.now_s = now.timestamp()
    quotas.reserve(_record())
    with pytest.raises(QuotaExceeded) as refused:
        quotas.reserve(_record())
    clock.now_s += refused.value.retry_after_s or 0
    assert clock.now_s == end.timestamp() == month_start(clock.now_s)
    quotas.reserve(_record())


def test_the_limit_of_an_owner_covers_all_keys() -> None:
    quotas, _ = _quotas(owner=Quota(tokens_per_minute=100))
    quotas.reserve(_record(10, 60, key_id="one"))
    with pytest.raises(QuotaExceeded, match="owner"):
        quotas.reserve(_record(10, 60, key_id="two"))
    quotas.reserve(_record(10, 60, key_id="three", owner="bob"))


def test_a_request_that_never_fits_is_refused_with_advice() -> None:
    quotas, _ = _quotas(Quota(tokens_per_minute=100))
    with pytest.raises(RequestError, match="max_tokens") as refused:
        quotas.reserve(_record(50, 60))
    assert not isinstance(refused.value, QuotaExceeded)
    assert refused.value.param == "max_tokens"


def test_a_taken_over_stream_counts_even_above_the_limit() -> None:
    quotas, clock = _quotas(Quota(tokens_per_minute=100, streams_at_once=1))
    quotas.spent_before([Spending(("key", _KEY), "minute", 3, 90)])
    record = _record(10, 60)
    quotas.resume(record)
    quotas.resume(record)
    assert _headers(quotas)["x-ratelimit-remaining-tokens"] == "0"
    with pytest.raises(QuotaExceeded):
        quotas.reserve(_record(1, 1))
    quotas.on_end(record, _end(10, 0))
    clock.now_s += 60
    quotas.reserve(_record(10, 90))


def test_without_a_key_nothing_is_counted() -> None:
    quotas, _ = _quotas(owner=Quota(requests_per_minute=1))
    for _ in range(3):
        quotas.reserve(_record(key_id=""))
    assert quotas.headers(Principal("alice")) == []


def test_headers() -> None:
    quotas, _ = _quotas(
        Quota(requests_per_minute=5, tokens_per_minute=100, streams_at_once=3), Quota(tokens_per_month=1000)
    )
    quotas.reserve(_record(10, 20))
    assert _headers(quotas) == {
        "ratelimit-policy": '"key-requests-minute";q=5;w=60, "key-tokens-minute";q=100;qu="tokens";w=60, '
        '"key-streams";q=3;qu="concurrent-requests", "owner-tokens-month";q=1000;qu="tokens";w=2592000',
        "ratelimit": '"key-requests-minute";r=4;t=30, "key-tokens-minute";r=70;t=30, "key-streams";r=2, '
        f'"owner-tokens-month";r=970;t={math.ceil(datetime(2026, 12, 1, tzinfo=UTC).timestamp() - _START_S)}',
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "30s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "70",
        "x-ratelimit-reset-tokens": "30s",
    }
    assert set(_headers(quotas)) == set(LIMIT_HEADERS)


def test_the_allowance_of_a_request_has_the_smaller_limits_of_key_and_owner() -> None:
    quotas, _ = _quotas(Quota(answer_tokens=50, tokens_per_month=900), Quota(answer_tokens=20, tokens_per_minute=1000))
    assert quotas.allowance(_KEY, "alice") == Allowance(20, 900)
    assert quotas.allowance(_KEY, "bob") == Allowance(50, 900)
    assert quotas.allowance("other", "alice") == Allowance(20, 1000)
    assert quotas.allowance("other", "bob") == Allowance()
    assert quotas.allowance("", "alice") == Allowance()


@pytest.mark.parametrize("body", ['{"tokens_per_minute": 0}', '{"streams_at_once": "4"}'])
def test_invalid_quotas(body: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=Quota)


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 40), st.integers(1, 80), st.integers(1, 3)),
        st.tuples(st.just("end"), st.integers(0, 20), st.floats(0, 1), st.just(0)),
        st.tuples(st.just("wait"), st.floats(0, 50), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(_STEPS, st.integers(1, 300), st.integers(1, 8))
def test_spent_is_never_above_the_limit(steps: list[tuple[str, float, float, int]], limit: int, streams: int) -> None:
    """In any order of starts and ends, the usage of the streams of a minute is at most the limit."""
    quotas, clock = _quotas(Quota(tokens_per_minute=limit, streams_at_once=streams))
    live: list[tuple[Record, int]] = []
    spent: dict[int, int] = {}
    for what, first, second, n in steps:
        if what == "ask":
            record = _record(int(first), int(second), n=n)
            try:
                quotas.reserve(record)
            except (QuotaExceeded, RequestError):
                continue
            live.append((record, int(clock.now_s // 60)))
        elif what == "end" and live:
            record, minute = live.pop(int(first) % len(live))
            taken = record.num_prompt_tokens + int(second * record.num_choices * (record.sampling.max_tokens or 0))
            quotas.on_end(record, _end(record.num_prompt_tokens, taken - record.num_prompt_tokens))
            spent[minute] = spent.get(minute, 0) + taken
        elif what == "wait":
            clock.now_s += first
        assert len(live) <= streams
    for record, minute in live:
        spent[minute] = spent.get(minute, 0) + record.num_prompt_tokens + record.num_choices * 1
    assert all(tokens <= limit for tokens in spent.values())
