"""Encoders from GGUF files: the tokenizer and the vectors are those of the directory that they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.missing import needs
from tests.plugins.openvino.bert_files import write_bert

from tailrace.engines import EngineSpec, Sequence, load_engine
from tailrace.models import CATALOGUE, NoProgress
from tailrace.models.fetch import fetch
from tailrace.models.resolve import read_card
from tailrace.text import Tokenizer
from tailrace.types import VectorForm

pytestmark = [pytest.mark.timeout(300), needs("torch", "transformers")]

TEXTS = [
    "The river runs over stones.",
    "RIVERS\tand  Hôtels,   naïve café — 川が流れる 🐟 tokenization's unbelievable",
    "",
    "[UNK] [MASK] [unused5] ##ing ▁word don't e-mail a@b.c 3.14 ﬁne",
]


@pytest.fixture(scope="module")
def minilm() -> Path:
    return fetch(CATALOGUE["minilm"], NoProgress())


def _tensors(path: Path) -> dict[str, Any]:  # Any: arrays
    from safetensors.numpy import load_file

    return dict(load_file(path / "model.safetensors"))


def _vectors(path: Path, texts: list[str]) -> npt.NDArray[np.float32]:
    card = read_card(path, "")
    tokenizer = Tokenizer.from_json(card.tokenizer_json)
    engine = load_engine(EngineSpec("openvino", str(path), task=card.task, context_tokens=256, exact=True))
    for number, ids in enumerate(tokenizer.encode_all(texts)):
        framed = (*tokenizer.bos_ids, *ids, *tokenizer.ends)
        engine.submit(Sequence(number, (framed,), vector=VectorForm()))
    found: dict[int, npt.NDArray[np.float32]] = {}
    while len(found) < len(texts):
        found |= {delta.sequence_id: np.frombuffer(delta.vector, "<f4") for delta in engine.step()}
    engine.close()
    return np.array([found[number] for number in range(len(texts))])


@pytest.mark.parametrize(
    ("kind", "atol"),
    [
        ("F32", 1e-6),
        pytest.param("F16", 1e-3, marks=pytest.mark.deep),
        pytest.param("Q8_0", 2e-2, marks=pytest.mark.deep),
    ],
)
def test_a_real_model(minilm: Path, tmp_path: Path, kind: str, atol: float) -> None:
    path = write_bert(minilm, _tensors(minilm), tmp_path / "minilm.gguf", pooling=1, kind=kind)
    card = read_card(path, "")
    assert (card.task, card.pooling, card.num_dimensions, card.context_tokens) == ("embed", "mean", 384, 512)
    np.testing.assert_allclose(_vectors(path, TEXTS), _vectors(minilm, TEXTS), atol=atol)


@pytest.mark.parametrize("old_words", [False, True])
def test_its_tokenizer(minilm: Path, tmp_path: Path, *, old_words: bool) -> None:
    tensors = {name: values[:1] for name, values in _tensors(minilm).items() if "word_embeddings" in name}
    path = write_bert(minilm, tensors, tmp_path / "minilm.gguf", pooling=1, old_words=old_words)
    theirs, ours = (Tokenizer.from_json(read_card(one, "").tokenizer_json) for one in (minilm, path))
    assert ours.encode_all(TEXTS) == theirs.encode_all(TEXTS)
    assert (ours.bos_ids, ours.between, ours.ends) == ((101,), (102,), (102,))
    assert (ours.bos_ids, ours.between, ours.ends) == (theirs.bos_ids, theirs.between, theirs.ends)
    assert ours.pieces == theirs.pieces


def test_a_cross_encoder(minilm: Path, tmp_path: Path) -> None:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(5)
    more: dict[str, Any] = {"num_labels": 1, "max_position_embeddings": 64, "initializer_range": 0.3}
    more |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model: Any = BertForSequenceClassification(BertConfig(**more))  # Any: transformers' model
    model.eval()
    model.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer.json").write_text((minilm / "tokenizer.json").read_text())
    path = write_bert(tmp_path / "plain", model.state_dict(), tmp_path / "ranker.gguf", pooling=4)
    card = read_card(path, "")
    assert (card.task, card.pooling) == ("rank", "first")
    engine = load_engine(EngineSpec("openvino", str(path), task="rank", context_tokens=64, exact=True))
    query, document = (101, 7, 8, 102), (9, 10, 11, 102)
    engine.submit(Sequence(1, (query, document), vector=VectorForm()))
    (delta,) = engine.step()
    with torch.no_grad():
        expected = model(torch.tensor([[*query, *document]]), token_type_ids=torch.tensor([[0] * 4 + [1] * 4])).logits[
            0
        ]
    np.testing.assert_allclose(np.frombuffer(delta.vector, "<f4"), expected.numpy(), atol=2e-5)
