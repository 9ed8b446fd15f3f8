"""transformers embeds and ranks with what it has, in batches: equal to one text after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.missing import needs
from tests.plugins.openvino.test_encoders import pooled_by

from tailrace.engines import EngineSpec, Sequence, load_engine
from tailrace.engines.interface import Engine
from tailrace.engines.kinds import choose
from tailrace.errors import ModelError
from tailrace.models.resolve import read_card
from tailrace.types import Segment, VectorForm
from tailrace_outer.scripted.scripted_engine import tokenizer_json

pytestmark = needs("torch", "transformers")

_SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 48, "max_position_embeddings": 70, "pad_token_id": 0}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {  # Any: of JSON
    "mpnet": {"pad_token_id": 1},
    "modernbert": {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
    "electra": {"embedding_size": 32},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
}
IDS = [tuple(np.random.default_rng(n).integers(5, 300, length).tolist()) for n, length in enumerate((7, 1, 60, 7))]


def _save(path: Path, family: str, kind: str, **more: Any) -> Any:  # Any: of JSON; transformers' model
    import torch
    import transformers

    torch.manual_seed(7)
    values = {**_SIZES, **FAMILIES[family], "initializer_range": 0.2, **more}
    model: Any = getattr(transformers, kind).from_config(transformers.AutoConfig.for_model(family, **values)).eval()
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer_json())
    return model


def _load(path: Path, **more: Any) -> Engine:  # Any: of EngineSpec
    card = read_card(path, "")
    return load_engine(
        EngineSpec("transformers", str(path), task=card.task, context_tokens=card.context_tokens, **more)
    )


def _run(engine: Engine, texts: list[tuple[Segment, ...]]) -> list[npt.NDArray[np.float32]]:
    for number, segments in enumerate(texts):
        engine.submit(Sequence(number, segments, vector=VectorForm(is_normalized=False)))
    found: dict[int, npt.NDArray[np.float32]] = {}
    while deltas := engine.step():
        found |= {delta.sequence_id: np.frombuffer(delta.vector, "<f4") for delta in deltas}
    engine.close()
    return [found[number] for number in range(len(texts))]


@pytest.mark.parametrize("mode", ["pooling_mode_mean_tokens", "pooling_mode_cls_token", "pooling_mode_lasttoken"])
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings(tmp_path: Path, family: str, mode: str) -> None:
    import torch

    model = _save(tmp_path, family, "AutoModel")
    pooled_by(tmp_path, mode)
    if family != "qwen3":
        assert choose(read_card(tmp_path, "")).kind.name == "transformers"  # openvino does not run it
    found = _run(_load(tmp_path), [(ids,) for ids in IDS])
    for vector, ids in zip(found, IDS, strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0].numpy()
        expected = {"mean": hidden.mean(0), "cls": hidden[0], "lasttoken": hidden[-1]}[mode.split("_")[2]]
        np.testing.assert_allclose(vector, expected, atol=1e-4)


@pytest.mark.parametrize("family", ["electra", "modernbert", "qwen3"])
def test_scores(tmp_path: Path, family: str) -> None:
    import torch

    model = _save(tmp_path, family, "AutoModelForSequenceClassification", num_labels=1)
    pairs: list[tuple[Segment, ...]] = [(IDS[0], IDS[1]), (IDS[3], IDS[2][:40]), (IDS[0],)]
    found = _run(_load(tmp_path), pairs)
    for score, pair in zip(found, pairs, strict=True):
        ids = [token_id for text in pair if isinstance(text, tuple) for token_id in text]
        read = {"input_ids": torch.tensor([ids])}
        if family == "electra":
            read["token_type_ids"] = torch.tensor([[0] * 7 + [1] * (len(ids) - 7)])
        with torch.no_grad():
            np.testing.assert_allclose(score, model(**read).logits[0].numpy(), atol=1e-4)


def test_scores_by_the_logits_of_two_tokens(tmp_path: Path) -> None:
    import torch

    model = _save(tmp_path, "qwen3", "AutoModelForCausalLM")
    parts = [{"path": "", "type": "a.Transformer"}, {"path": "1_LogitScore", "type": "b.LogitScore"}]
    (tmp_path / "modules.json").write_text(json.dumps(parts))
    (tmp_path / "1_LogitScore").mkdir()
    (tmp_path / "1_LogitScore/config.json").write_text(json.dumps({"true_token_id": 5, "false_token_id": 21}))
    for score, ids in zip(_run(_load(tmp_path), [(ids,) for ids in IDS]), IDS, strict=True):
        with torch.no_grad():
            last = model(torch.tensor([ids])).logits[0, -1].numpy()
        np.testing.assert_allclose(score, [last[5] - last[21]], atol=2e-4)


def test_what_it_does_not_take(tmp_path: Path) -> None:
    _save(tmp_path, "mpnet", "AutoModel")
    with pytest.raises(ModelError, match="--adapter"):
        _load(tmp_path, adapters={"": "x"})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError):
        _load(tmp_path)


def test_a_device_that_torch_does_not_have() -> None:
    import torch

    from tailrace_plugins.transformers.transformers_loading import device_of

    if torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available():
        pytest.skip("this machine has a GPU")
    assert (device_of(""), device_of("cpu")) == ("cpu", "cpu")
    for name in ("gpu", "cuda:1", "metal", "rocm", "xpu"):
        with pytest.raises(ModelError, match=f"torch has no {name[:4].rstrip(':')}.* --device can be cpu"):
            device_of(name)
