"""How many bits OpenVINO gives to the weights of a model, and how much memory it is expected to need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from tests.engines.test_kinds import GGUF

from tailrace.engines import EngineSpec
from tailrace.models import ModelCard
from tailrace_plugins.openvino import model_files


@pytest.mark.parametrize(
    ("types", "num_bytes"),
    [(("F32", "Q4_1"), 2_280), (("F32", "F16"), 3_400), (("Q6_K", "Q4_K"), 2_280), (("Q6_K", "Q5_K"), 3_400)],
)
def test_weights_have_eight_bits_for_some_types(
    types: tuple[str, ...], num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "processor_flags", lambda: frozenset(("avx2", "avx_vnni")))
    card = replace(GGUF, tensor_types=types, num_parameters=3_200, weight_bytes=1_900)
    assert model_files.weight_bytes(card, 0) == num_bytes
    assert model_files.weight_bytes(replace(card, format="openvino"), 0) == 1_900


@pytest.mark.parametrize("form", ["gguf", "huggingface"])
def test_weights_have_the_bits_that_are_asked_for(form: Literal["gguf", "huggingface"]) -> None:
    card = replace(GGUF, format=form, tensor_types=("F32", "Q4_1"), num_parameters=3_200, weight_bytes=1_900)
    sizes = [model_files.weight_bytes(card, bits) for bits in (4, 8, 16)]
    assert sizes == [2_240, 3_400, 12_800]


def test_weights_have_eight_bits_for_small_files_without_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "processor_flags", lambda: frozenset(("avx2",)))
    small = replace(GGUF, tensor_types=("F32", "Q4_1"), num_parameters=3_200, weight_bytes=1_900)
    large = replace(small, weight_bytes=2**30)
    assert model_files.weight_bytes(small, 0) == 3_400
    assert model_files.weight_bytes(large, 0) == round(1.2 * 2**30)


def test_the_memory_of_openvino_is_that_of_all_its_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "processor_flags", lambda: frozenset(("avx2", "avx_vnni")))
    small = replace(GGUF, tensor_types=("F32", "Q4_1"), num_parameters=16 * 10**7, weight_bytes=10**8)
    large = replace(small, num_parameters=16 * 10**8, weight_bytes=10**9)

    def weights(card: ModelCard, **settings: Any) -> int:  # Any: of each field's type
        """Return the memory of the weights in bytes, without the library's own."""
        spec = EngineSpec("openvino", **settings)
        estimate = model_files.memory_bytes
        return estimate(card, spec) - estimate(replace(card, num_parameters=0, weight_bytes=0), spec)

    assert weights(small) == 2 * 12 * 10**7
    assert weights(small, device="cpu") == 2 * 12 * 10**7
    assert weights(small, device="GPU") == weights(small, never_alone=True) == 12 * 10**7
    assert weights(small, weight_bits=8) == 2 * 17 * 10**7
    assert weights(small, weight_bits=16) == 2 * 9 * 16 * 10**7
    assert weights(small, adapters={"a": "a"}) == 4 * 12 * 10**7
    assert weights(small, adapters={"a": "a"}, never_alone=True) == 2 * 12 * 10**7
    assert weights(small, adapters={"a": "a", "": "all"}) == 2 * 12 * 10**7  # each row has one
    assert weights(large) == weights(large, adapters={"a": "a"}) == 12 * 10**8
    assert weights(large, weight_bits=16) == 9 * 16 * 10**8
    assert model_files.forms(small, EngineSpec("openvino")) == "for batches, for a single row"
    assert model_files.forms(large, EngineSpec("openvino", adapters={"a": "a"})) == "for batches"
    assert model_files.forms(small, EngineSpec("openvino", adapters={"a": "a"})).endswith(", without adapters")
