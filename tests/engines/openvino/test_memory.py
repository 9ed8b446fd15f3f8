"""The memory limit of compiled grammars, with a fake heap."""

from __future__ import annotations

import platform
import re

import pytest

from tailrace.engines.interface import RestartNeeded
from tailrace.engines.openvino import memory as openvino_memory
from tailrace.engines.openvino.memory import GrammarMemory

MIB = 2**20


class _Heap:
    def __init__(self) -> None:
        self.num_bytes = 700 * MIB

    def __call__(self) -> int:
        return self.num_bytes


@pytest.fixture
def heap(monkeypatch: pytest.MonkeyPatch) -> _Heap:
    heap = _Heap()
    monkeypatch.setattr(openvino_memory, "heap_bytes", heap)
    return heap


def test_below_the_limit_nothing_is_raised(heap: _Heap) -> None:
    memory = GrammarMemory(100 * MIB)
    heap.num_bytes += 100 * MIB
    memory.measure()
    memory.check(is_idle=True)
    memory.check(is_idle=False)


def test_above_the_limit_an_idle_engine_is_replaced(heap: _Heap) -> None:
    memory = GrammarMemory(100 * MIB)
    heap.num_bytes += 101 * MIB
    memory.check(is_idle=True)  # nobody has measured
    memory.measure()
    memory.check(is_idle=False)
    with pytest.raises(RestartNeeded, match=re.escape("take 101 MiB of memory; --grammar-memory-bytes is 100 MiB")):
        memory.check(is_idle=True)


def test_above_twice_the_limit_a_busy_engine_is_replaced(heap: _Heap) -> None:
    memory = GrammarMemory(100 * MIB)
    heap.num_bytes += 200 * MIB
    memory.measure()
    memory.check(is_idle=False)
    heap.num_bytes += 1
    memory.measure()
    with pytest.raises(RestartNeeded):
        memory.check(is_idle=False)


def test_without_a_limit_the_heap_is_not_measured(heap: _Heap) -> None:
    memory = GrammarMemory(0)
    heap.num_bytes += 10**12
    memory.measure()
    memory.check(is_idle=True)
    memory.check(is_idle=False)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc says what is allocated")
def test_the_real_heap_grows_by_what_is_allocated() -> None:
    before = openvino_memory.heap_bytes()
    held = bytearray(50 * MIB)
    assert 50 * MIB <= openvino_memory.heap_bytes() - before < 60 * MIB
    del held
