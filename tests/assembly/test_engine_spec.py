"""The default settings of an engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tailrace.assembly.service import engine_spec
from tailrace.assembly.source import Source, find_named, find_source
from tailrace.errors import ModelError
from tailrace.models import NoProgress
from tailrace.settings import Settings


@pytest.fixture
def source() -> Source:
    return find_source("scripted", NoProgress())


@pytest.mark.parametrize(("engine", "step_tokens"), [("openvino", 256), ("llamacpp", 0), ("vllm", 0)])
def test_the_length_of_steps_depends_on_the_engine(source: Source, engine: str, step_tokens: int) -> None:
    of_this = replace(source, engine=engine)
    assert engine_spec(of_this, Settings(), cache_path="").max_step_tokens == step_tokens
    assert engine_spec(of_this, Settings(max_step_tokens=7), cache_path="").max_step_tokens == 7


@pytest.mark.parametrize(("engine", "exact"), [("openvino", True), ("llamacpp", False)])
def test_exactness_is_the_default_if_it_is_cheap(source: Source, engine: str, exact: bool) -> None:
    of_this = replace(source, engine=engine)
    assert engine_spec(of_this, Settings(), cache_path="").exact is exact
    assert engine_spec(of_this, Settings(exact=not exact), cache_path="").exact is not exact


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        (Settings(), "openvino"),
        (Settings(for_="one"), "llamacpp"),
        (Settings(max_sequences=1), "llamacpp"),
        (Settings(for_="many", max_sequences=1), "openvino"),
        (Settings(for_="one", prompt_lookup_tokens=2), "openvino"),
        (Settings(for_="one", exact=True), "openvino"),
    ],
)
def test_the_engine_is_chosen_for_the_expected_load(settings: Settings, engine: str) -> None:
    source = find_source("smollm2", NoProgress(), settings)
    assert source.engine == engine
    engine_spec(source, settings, cache_path="")  # refuses settings that the engine does not have


def test_each_model_has_its_own_load() -> None:
    own = {"smollm2": {"for_": "one"}, "other": {"for_": "many"}}
    first, other = find_named(["other=smollm2"], NoProgress(), Settings(max_sequences=1), first="smollm2", own=own)
    assert (first.engine, other.engine) == ("llamacpp", "openvino")


def test_weights_of_more_bits_need_more_memory() -> None:
    source = find_source("smollm2", NoProgress())
    specs = [engine_spec(source, Settings(weights=bits), cache_path="") for bits in ("4", "8", "16")]
    sizes = [source.weight_bytes(spec.weight_bits) for spec in specs]
    assert sizes == sorted(set(sizes))


def test_an_export_keeps_its_weights(source: Source) -> None:
    export = replace(source, card=replace(source.card, format="openvino"), engine="openvino")
    engine_spec(export, Settings(), cache_path="")
    with pytest.raises(ModelError, match="--weights does not apply to scripted: an OpenVINO export has its own"):
        engine_spec(export, Settings(weights="8"), cache_path="")
