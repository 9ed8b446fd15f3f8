from __future__ import annotations

import pytest

from tailrace.models.advice import fits, models_to_try, tokens_per_s
from tailrace.models.catalogue import HubModel, hub_models


def _model(num_bytes: int, read_share: float = 1.0) -> HubModel:
    return HubModel("m", "org/m", "m.gguf", num_bytes, "mit", 4096, (), read_share)


def test_a_model_fits_with_room_for_its_tokens() -> None:
    assert fits(_model(4 * 10**9), 8 * 10**9)
    assert not fits(_model(4 * 10**9), 5 * 10**9)
    assert not fits(_model(1), 0)  # not known


def test_a_token_reads_only_some_experts() -> None:
    assert tokens_per_s(_model(2 * 10**9), 20e9) == pytest.approx(10)
    assert tokens_per_s(_model(2 * 10**9, 0.1), 20e9) == pytest.approx(100)


@pytest.mark.parametrize("gigabytes", [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128])
def test_two_models_that_fit_are_named(gigabytes: int) -> None:
    found = models_to_try(gigabytes * 10**9)
    assert len({model.name for model in found}) == len(found) <= 2
    assert bool(found) == (gigabytes >= 2)
    for model in found:
        assert hub_models()[model.name] is model
        assert fits(model, gigabytes * 10**9)
    if len(found) == 2:
        assert found[0].num_bytes < found[1].num_bytes


def test_more_memory_never_means_a_smaller_model() -> None:
    sizes = [max((model.num_bytes for model in models_to_try(gb * 10**9)), default=0) for gb in range(130)]
    assert sizes == sorted(sizes)
