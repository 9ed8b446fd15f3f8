"""The gate compared with an oracle that has two lists: the queue in order, and the running requests."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.examples import examples
from tests.streams.virtual_time import run as run_scenario

from tailrace.admission import Gate, QueueEntry
from tailrace.errors import (
    AdmissionError,
    ContextLengthExceeded,
    Draining,
    EngineLost,
    QueueFull,
    RequestError,
    TailraceError,
)


def new_gate(*, tokens: int = 100, sequences: int = 4, block: int = 1, max_requests: int = 128) -> Gate:
    gate = Gate(max_requests=max_requests)
    gate.open(capacity_tokens=tokens, capacity_sequences=sequences, block_tokens=block)
    return gate


def enter(gate: Gate, started: list[str], name: str = "", *, tokens: int = 1, sequences: int = 1) -> QueueEntry:
    entry = QueueEntry(tokens, sequences, lambda: started.append(name))
    gate.enter(entry)
    return entry


class GateMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[QueueEntry] = []
        self.running: list[QueueEntry] = []
        self.started: list[QueueEntry] = []
        self.expected: list[QueueEntry] = []
        self.hasty: set[QueueEntry] = set()  # leave as soon as they are started
        self.is_open = False
        self.refusal: type[TailraceError] | None = None

    @initialize(
        max_requests=st.integers(1, 8), tokens=st.integers(1, 60), sequences=st.integers(1, 4), block=st.integers(1, 8)
    )
    def build(self, max_requests: int, tokens: int, sequences: int, block: int) -> None:
        self.gate = Gate(max_requests=max_requests)
        self.max_requests, self.tokens, self.sequences, self.block = max_requests, tokens, sequences, block
        self.open()

    def admit(self) -> None:
        """Requests start in order of arrival: the first one starts when it fits, and nothing overtakes it."""
        while self.is_open and self.waiting:
            used_tokens = sum(entry.num_tokens for entry in self.running)
            used_sequences = sum(entry.num_sequences for entry in self.running)
            first = self.waiting[0]
            if used_tokens + first.num_tokens > self.tokens or used_sequences + first.num_sequences > self.sequences:
                return
            self.expected.append(self.waiting.pop(0))
            if first not in self.hasty:
                self.running.append(first)

    def demand(self, tokens: int, sequences: int) -> int:
        """Count whole blocks, with a spare block for each sequence if blocks have more than one token."""
        blocks = 0
        while blocks * self.block < tokens:
            blocks += 1
        return sequences * (blocks + (1 if self.block > 1 else 0)) * self.block

    def refusal_of(self, tokens: int, sequences: int) -> type[TailraceError] | None:
        if self.refusal is not None:
            return self.refusal
        if tokens > self.tokens:
            return ContextLengthExceeded
        if sequences > self.sequences:
            return RequestError
        return QueueFull if len(self.waiting) + len(self.running) >= self.max_requests else None

    @rule(prompt=st.integers(1, 40), answer=st.integers(1, 30), sequences=st.integers(1, 5), hasty=st.booleans())
    def request(self, prompt: int, answer: int, sequences: int, hasty: bool) -> None:
        wanted = self.demand(prompt + answer, sequences)
        refusal = self.refusal_of(wanted, sequences)
        if refusal is not None:
            with pytest.raises(refusal) as caught:
                self.gate.check(prompt, answer, sequences)
            assert type(caught.value) is refusal
            if refusal is QueueFull:
                assert 1 <= (caught.value.retry_after_s or 0) <= 30
            return
        num_tokens = self.gate.check(prompt, answer, sequences)
        assert num_tokens == wanted

        def start() -> None:
            self.started.append(entry)
            if hasty:
                self.gate.leave(entry)

        entry = QueueEntry(num_tokens, sequences, start)
        if hasty:
            self.hasty.add(entry)
        self.waiting.append(entry)
        self.admit()
        self.gate.enter(entry)

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 9))
    def leave_running(self, pick: int) -> None:
        entry = self.running.pop(pick % len(self.running))
        self.admit()
        self.gate.leave(entry)

    @precondition(lambda self: self.waiting)
    @rule(pick=st.integers(0, 9))
    def leave_waiting(self, pick: int) -> None:
        entry = self.waiting.pop(pick % len(self.waiting))
        self.admit()
        self.gate.leave(entry)

    @rule()
    def open(self) -> None:
        self.is_open = True
        if self.refusal is EngineLost:
            self.refusal = None
        self.admit()
        self.gate.open(capacity_tokens=self.tokens, capacity_sequences=self.sequences, block_tokens=self.block)

    @rule(is_broken=st.booleans())
    def shut(self, is_broken: bool) -> None:
        self.is_open = False
        if self.refusal is not Draining:
            self.refusal = EngineLost if is_broken else None
        self.gate.shut(EngineLost("none") if is_broken else None)

    @precondition(lambda self: self.started)
    @rule()
    def drain(self) -> None:
        self.refusal = Draining
        self.gate.drain(5.0)

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "gate"):
            return
        assert self.started == self.expected
        assert self.gate.num_running == len(self.running)
        assert self.gate.num_waiting == len(self.waiting)
        assert sum(entry.num_tokens for entry in self.running) <= self.tokens
        assert sum(entry.num_sequences for entry in self.running) <= self.sequences
        assert all(entry.admitted_s is None for entry in self.waiting)
        assert all(entry.admitted_s is not None for entry in self.started)
        assert 1 <= self.gate.retry_after_s <= 30
        assert self.gate.is_draining == (self.refusal is Draining)


GateMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestGateAgainstTwoLists = GateMachine.TestCase


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    started: list[str] = []
    gate = new_gate(tokens=10)
    first = enter(gate, started, "first", tokens=6)
    enter(gate, started, "large", tokens=6)
    enter(gate, started, "small", tokens=1)
    assert started == ["first"]
    gate.leave(first)
    assert started == ["first", "large", "small"]


def test_when_the_head_leaves_the_next_request_starts() -> None:
    started: list[str] = []
    gate = new_gate(tokens=10)
    enter(gate, started, "first", tokens=6)
    large = enter(gate, started, "large", tokens=6)
    enter(gate, started, "small", tokens=1)
    gate.leave(large)
    assert started == ["first", "small"]


def test_only_the_leaving_request_is_removed() -> None:
    started: list[str] = []
    gate = new_gate(sequences=1)
    first, second, third = [enter(gate, started, name) for name in ("first", "second", "third")]
    gate.leave(third)
    assert gate.num_waiting == 1
    gate.leave(first)
    gate.leave(second)
    assert started == ["first", "second"]


def test_sequences_have_their_own_budget() -> None:
    started: list[str] = []
    gate = new_gate(tokens=1_000, sequences=4)
    first = enter(gate, started, "first", sequences=3)
    enter(gate, started, "second", sequences=2)
    assert started == ["first"]
    gate.leave(first)
    assert started == ["first", "second"]


def test_many_requests_that_end_when_they_start() -> None:
    """This happens when the engine is lost between admission and the first sequence."""
    started: list[int] = []
    gate = Gate(max_requests=5_000)

    def start(number: int) -> None:
        started.append(number)
        gate.leave(entries[number])

    entries: list[QueueEntry] = []
    for number in range(2_000):
        entries.append(QueueEntry(1, 1, lambda number=number: start(number)))  # type: ignore[misc]
        gate.enter(entries[-1])
    gate.open(capacity_tokens=1, capacity_sequences=1, block_tokens=1)
    assert started == list(range(2_000))
    assert (gate.num_running, gate.num_waiting) == (0, 0)


def test_the_gate_survives_a_failing_start() -> None:
    def fail() -> None:
        raise RuntimeError

    started: list[str] = []
    gate = new_gate(sequences=1)
    broken = QueueEntry(1, 1, fail)
    with pytest.raises(RuntimeError):
        gate.enter(broken)
    gate.leave(broken)
    enter(gate, started, "next")
    assert started == ["next"]


@given(
    num_prompt_tokens=st.integers(1, 300),
    max_tokens=st.integers(1, 300),
    sequences=st.integers(1, 6),
    block=st.sampled_from([1, 2, 16, 32]),
)
def test_check_passes_exactly_the_requests_that_fit_alone(
    num_prompt_tokens: int, max_tokens: int, sequences: int, block: int
) -> None:
    gate = new_gate(tokens=640, sequences=4, block=block)
    started: list[str] = []
    spare = block if block > 1 else 0
    exact = sequences * (num_prompt_tokens + max_tokens)
    try:
        num_tokens = gate.check(num_prompt_tokens, max_tokens, sequences)
    except RequestError as error:
        too_long = isinstance(error, ContextLengthExceeded)
        assert exact + sequences * (block - 1 + spare) > 640 if too_long else sequences > 4
        return
    assert exact <= num_tokens <= exact + sequences * (block - 1 + spare)
    assert num_tokens % block == 0
    enter(gate, started, "it", tokens=num_tokens, sequences=sequences)
    assert started == ["it"]


def test_a_request_that_can_never_run_is_a_client_error() -> None:
    """A retry would not help, so the error must not be 429 or have Retry-After."""
    gate = new_gate(tokens=100, sequences=2)
    for num_prompt_tokens, max_tokens, sequences in ((60, 41, 1), (30, 21, 2), (1, 1, 3)):
        with pytest.raises(RequestError) as caught:
            gate.check(num_prompt_tokens, max_tokens, sequences)
        assert caught.value.status == 400
        assert caught.value.retry_after_s is None
    assert gate.check(60, 40, 1) == 100
    assert gate.check(30, 20, 2) == 100


def test_the_refusal_names_both_counts() -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        new_gate(tokens=100).check(60, 50, 2)
    error = caught.value
    assert (error.num_prompt_tokens, error.max_tokens, error.limit_tokens) == (60, 50, 50)
    assert (
        error.message == "The maximum context length is 50 tokens. The prompt has 60, and the answer may have 50. "
        "Shorten the prompt, or ask for a shorter answer."
    )


def test_running_and_queued_requests_share_one_limit() -> None:
    started: list[str] = []
    gate = new_gate(sequences=2, max_requests=3)
    entries = []
    for name in "abc":
        gate.check(1, 1, 1)
        entries.append(enter(gate, started, name))
    assert started == ["a", "b"]
    with pytest.raises(QueueFull) as caught:
        gate.check(1, 1, 1)
    assert caught.value.status == 429
    gate.leave(entries[2])
    gate.check(1, 1, 1)


def test_draining_refuses_new_requests_and_keeps_the_others() -> None:
    started: list[str] = []
    gate = new_gate(sequences=1)
    first = enter(gate, started, "first")
    enter(gate, started, "second")
    gate.drain(5.0)
    gate.shut(EngineLost("gone"))
    gate.open(capacity_tokens=100, capacity_sequences=1, block_tokens=1)
    with pytest.raises(Draining) as caught:
        gate.check(1, 1, 1)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 5.0)
    gate.leave(first)
    assert started == ["first", "second"]


def test_requests_wait_while_the_gate_is_shut() -> None:
    started: list[str] = []
    gate = new_gate(sequences=2)
    running = enter(gate, started, "first")
    gate.shut()
    gate.check(1, 1, 1)
    enter(gate, started, "second")
    gate.leave(running)
    assert started == ["first"]
    gate.open(capacity_tokens=100, capacity_sequences=2, block_tokens=1)
    assert started == ["first", "second"]


def test_requests_are_refused_until_a_broken_engine_starts() -> None:
    gate = new_gate()
    gate.shut(EngineLost("gone", retry_after_s=4.0))
    with pytest.raises(EngineLost) as caught:
        gate.check(1, 1, 1)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 4.0)
    gate.open(capacity_tokens=100, capacity_sequences=1, block_tokens=1)
    gate.check(1, 1, 1)


def test_requests_wait_for_the_first_engine() -> None:
    started: list[str] = []
    gate = Gate(max_requests=1)
    assert gate.check(10**6, 10**6, 100) == 2 * 10**8
    enter(gate, started)
    assert started == []
    with pytest.raises(AdmissionError):
        gate.check(1, 1, 1)


@pytest.mark.parametrize(("service_s", "least", "most"), [(0.0, 1, 1), (8.0, 5, 15), (10**6, 30, 30)])
def test_retry_after_follows_the_duration_of_requests(
    service_s: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    started: list[str] = []
    gate = new_gate(sequences=1)
    for _ in range(40):
        entry = enter(gate, started)
        now_s += service_s
        gate.leave(entry)
    enter(gate, started)
    assert least <= gate.retry_after_s <= most
    alone = gate.retry_after_s
    enter(gate, started)
    assert gate.retry_after_s == min(30.0, 2 * alone) or alone == 1.0


# Callers who keep killing engines


def slowed(gate: Gate, started: list[str], name: str) -> QueueEntry:
    entry = QueueEntry(1, 1, lambda: started.append(name), is_slowed=True)
    gate.enter(entry)
    return entry


def test_slowed_requests_start_one_at_a_time_and_are_overtaken() -> None:
    gate, started = new_gate(sequences=9), list[str]()
    first, second, third = (slowed(gate, started, name) for name in "abc")
    assert started == ["a"]
    enter(gate, started, "other")
    assert started == ["a", "other"]
    gate.settle(first)
    assert started == ["a", "other", "b"]
    gate.settle(first)
    assert started == ["a", "other", "b"]
    gate.leave(second)
    assert started == ["a", "other", "b", "c"]
    gate.leave(third)


def test_slowed_requests_keep_their_order() -> None:
    gate, started = new_gate(sequences=1), list[str]()
    running = enter(gate, started, "running")
    slowed(gate, started, "a")
    enter(gate, started, "late")
    gate.leave(running)
    assert started == ["running", "a"]


def test_slowed_requests_leave_a_quarter_of_the_slots() -> None:
    gate = new_gate(sequences=1, max_requests=8)
    for _ in range(6):
        gate.check(1, 1, 1, is_slowed=True)
        enter(gate, [])
    with pytest.raises(QueueFull) as refused:
        gate.check(1, 1, 1, is_slowed=True)
    assert refused.value.retry_after_s is not None
    gate.check(1, 1, 1)


def test_one_slot_is_enough_for_a_slowed_request() -> None:
    new_gate(max_requests=1).check(1, 1, 1, is_slowed=True)


def test_during_a_pause_no_slowed_request_starts_beside_others() -> None:
    async def scenario() -> None:
        gate, started = new_gate(), list[str]()
        running = enter(gate, started, "running")
        gate.pause_slowed(10.0)
        waiting = slowed(gate, started, "a")
        enter(gate, started, "other")
        await asyncio.sleep(9)
        assert started == ["running", "other"]
        await asyncio.sleep(2)
        assert started == ["running", "other", "a"]
        gate.leave(waiting)
        gate.leave(running)

    run_scenario(scenario())


def test_a_pause_without_running_requests_has_no_effect() -> None:
    async def scenario() -> None:
        gate, started = new_gate(), list[str]()
        running = enter(gate, started, "running")
        gate.pause_slowed(10.0)
        slowed(gate, started, "a")
        gate.leave(running)
        assert started == ["running", "a"]

    run_scenario(scenario())


def test_the_time_until_all_have_caught_up_is_counted() -> None:
    async def scenario() -> None:
        gate = Gate()
        await asyncio.sleep(2)
        gate.open(capacity_tokens=1, capacity_sequences=1, block_tokens=1)
        gate.caught_up()
        await asyncio.sleep(3)
        assert gate.total_lost_s == pytest.approx(2)
        gate.shut()
        gate.shut()
        await asyncio.sleep(4)
        assert gate.total_lost_s == pytest.approx(6)
        gate.open(capacity_tokens=1, capacity_sequences=1, block_tokens=1)
        await asyncio.sleep(1)
        gate.shut()
        await asyncio.sleep(1)
        gate.open(capacity_tokens=1, capacity_sequences=1, block_tokens=1)
        gate.caught_up()
        await asyncio.sleep(5)
        assert gate.total_lost_s == pytest.approx(8)

    run_scenario(scenario())
