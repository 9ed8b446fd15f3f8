"""Encoders of each family with random weights: equal to transformers' own, alone and in batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.missing import needs

from tailrace.engines import EngineSpec, Sequence, load_engine
from tailrace.engines.interface import Delta, Engine
from tailrace.errors import ModelError, SequenceFailed
from tailrace.models.resolve import read_card
from tailrace.types import VectorForm
from tailrace_outer.scripted.scripted_engine import tokenizer_json

pytestmark = needs("torch", "transformers")

_SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 48, "max_position_embeddings": 70}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {  # Any: of JSON
    "bert": {**_SIZES, "type_vocab_size": 2},
    "roberta": {**_SIZES, "type_vocab_size": 1, "pad_token_id": 1},
    "xlm-roberta": {**_SIZES, "type_vocab_size": 1, "pad_token_id": 1, "hidden_act": "gelu_new"},
    "distilbert": {"vocab_size": 300, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48,
                   "max_position_embeddings": 70},
}  # fmt: skip
_LENGTHS = (7, 1, 60, 7, 23)
IDS = [tuple(np.random.default_rng(n).integers(5, 300, length).tolist()) for n, length in enumerate(_LENGTHS)]


def _save(path: Path, family: str, kind: str, **more: Any) -> Any:  # Any: of JSON; transformers' model
    import torch
    import transformers

    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family], initializer_range=0.2, **more)
    model: Any = getattr(transformers, kind).from_config(config).eval()
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer_json())
    return model


def pooled_by(path: Path, mode: str) -> None:
    """Write the files of sentence-transformers."""
    parts = [{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"}]
    (path / "modules.json").write_text(json.dumps(parts))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": False, mode: True}))


def _load(path: Path, **more: Any) -> Engine:  # Any: of EngineSpec
    card = read_card(path, "")
    return load_engine(
        EngineSpec("openvino", str(path), task=card.task, context_tokens=card.context_tokens, exact=True, **more)
    )


def _run(engine: Engine) -> dict[int, npt.NDArray[np.float32]]:
    found: list[Delta] = []
    while deltas := engine.step():
        found += deltas
    assert all(delta.finish_reason == "stop" for delta in found)
    return {delta.sequence_id: np.frombuffer(delta.vector, "<f4") for delta in found}


def _hidden(model: Any, ids: tuple[int, ...]) -> npt.NDArray[np.float32]:  # Any: transformers' model
    import torch

    with torch.no_grad():
        hidden: npt.NDArray[np.float32] = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    return hidden


@pytest.mark.parametrize("mode", ["pooling_mode_mean_tokens", "pooling_mode_cls_token", "pooling_mode_lasttoken"])
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings(tmp_path: Path, family: str, mode: str) -> None:
    model = _save(tmp_path, family, "AutoModel")
    pooled_by(tmp_path, mode)
    engine = _load(tmp_path)
    for number, ids in enumerate(IDS):
        engine.submit(Sequence(number, (ids,), vector=VectorForm(is_normalized=False)))
    vectors = _run(engine)
    engine.submit(Sequence(9, (IDS[2],), vector=VectorForm(num_dimensions=8)))
    shortened = _run(engine)[9]
    engine.close()
    for number, ids in enumerate(IDS):
        hidden = _hidden(model, ids)
        pooled = {"mean": hidden.mean(0), "cls": hidden[0], "lasttoken": hidden[-1]}
        expected = pooled[mode.split("_")[2]]
        np.testing.assert_allclose(vectors[number], expected, atol=2e-5)
    first = vectors[2][:8]
    np.testing.assert_allclose(shortened, first / np.linalg.norm(first), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_pairs(tmp_path: Path, family: str) -> None:
    import torch

    model = _save(tmp_path, family, "AutoModelForSequenceClassification", num_labels=1)
    engine = _load(tmp_path)
    pairs = [(IDS[0], IDS[1]), (IDS[3], IDS[4]), (IDS[0], IDS[4])]
    for number, pair in enumerate(pairs):
        engine.submit(Sequence(number, pair, vector=VectorForm()))
    scores = _run(engine)
    engine.close()
    for number, (query, document) in enumerate(pairs):
        read: dict[str, Any] = {"input_ids": torch.tensor([[*query, *document]])}
        if family == "bert":
            read["token_type_ids"] = torch.tensor([[0] * len(query) + [1] * len(document)])
        with torch.no_grad():
            expected = model(**read).logits[0].numpy()
        np.testing.assert_allclose(scores[number], expected, atol=2e-5)


def test_steps_take_texts_of_one_length_and_the_oldest_first(tmp_path: Path) -> None:
    _save(tmp_path, "bert", "AutoModel")
    engine = _load(tmp_path, max_step_tokens=20)
    for number, length in enumerate((9, 30, 8, 2, 9, 30)):
        engine.submit(Sequence(number, ((7,) * length,), vector=VectorForm()))
    assert [sorted(delta.sequence_id for delta in engine.step()) for _ in range(5)] == [[0, 4], [1], [2, 3], [5], []]


def test_an_aborted_text_ends(tmp_path: Path) -> None:
    _save(tmp_path, "bert", "AutoModel")
    engine = _load(tmp_path)
    engine.submit(Sequence(1, (IDS[0],), vector=VectorForm()))
    engine.abort(1)
    engine.abort(2)
    assert [(delta.sequence_id, delta.finish_reason) for delta in engine.step()] == [(1, "cancelled")]
    for ids in ((), (300,), (-1,), (7,) * 71):
        with pytest.raises(SequenceFailed):
            engine.submit(Sequence(1, (ids,), vector=VectorForm()))


def test_positions_of_roberta_begin_later(tmp_path: Path) -> None:
    _save(tmp_path, "roberta", "AutoModel")
    engine = _load(tmp_path)
    assert engine.capabilities.context_tokens == 68
    engine.submit(Sequence(1, ((7,) * 68,), vector=VectorForm()))
    assert engine.step()


def test_what_is_not_computed_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, "bert", "AutoModel")
    pooled_by(tmp_path, "pooling_mode_max_tokens")
    with pytest.raises(ModelError, match="pooling_mode_max_tokens"):
        read_card(tmp_path, "")
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "2_Dense", "type": "a.Dense"}]))
    with pytest.raises(ModelError, match="Dense"):
        read_card(tmp_path, "")
    (tmp_path / "modules.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForSequenceClassification"]}))
    with pytest.raises(ModelError, match="classes"):
        read_card(tmp_path, "")
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "swishy"}))
    with pytest.raises(ModelError, match="swishy"):
        _load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 49, "hidden_size": 36}))
    with pytest.raises(ModelError):
        _load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="--weights"):
        _load(tmp_path, weight_bits=8)
