"""Which GPUs vLLM's processes see. vLLM itself is not needed."""

from __future__ import annotations

import pytest

from tailrace.errors import ModelError
from tailrace_plugins.vllm.vllm_devices import seen_gpus


@pytest.mark.parametrize(
    ("device", "build", "num_gpus", "seen", "expected"),
    [
        ("", "cuda", 1, "", ""),
        ("", "cuda", 2, "3,4", "3,4"),
        ("", "cpu", 1, "", ""),
        ("cpu", "cpu", 1, "", ""),
        ("gpu", "cuda", 1, "", ""),
        ("gpu", "rocm", 1, "2", "2"),
        ("cuda", "cuda", 1, "", ""),
        ("cuda:1", "cuda", 1, "", "1"),
        ("gpu:1", "rocm", 1, "", "1"),
        ("cuda:2", "cuda", 2, "", "2,3"),
        ("cuda:1", "cuda", 2, "4,GPU-a,7", "GPU-a,7"),  # as torch counts them
    ],
)
def test_its_processes_see_the_gpus_that_are_named(
    device: str, build: str, num_gpus: int, seen: str, expected: str
) -> None:
    assert seen_gpus(device, build=build, num_gpus=num_gpus, seen=seen) == expected


@pytest.mark.parametrize(
    ("device", "build", "message"),
    [
        ("cpu", "cuda", "computes on cuda, not on cpu"),
        ("cuda:1", "cpu", "computes on cpu, not on cuda"),
        ("gpu", "cpu", "computes on cpu, not on gpu"),
        ("cuda", "rocm", "computes on rocm, not on cuda"),
        ("cuda:2", "cuda", "no cuda:2 .* sees: 4,5"),
    ],
)
def test_a_device_that_this_vllm_does_not_have(device: str, build: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        seen_gpus(device, build=build, num_gpus=1, seen="4,5")
