"""llama.cpp embeds: near transformers' own vectors, since its arithmetic has fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.missing import needs
from tests.plugins.openvino.bert_files import write_bert
from tests.plugins.openvino.test_vector_decoders import IDS, MODES, pooled, pooled_gguf, vectors_of
from tests.plugins.openvino.tiny_models import TINY, make

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.kinds import choose
from tailrace.errors import ModelError
from tailrace.models import CATALOGUE, NoProgress
from tailrace.models.fetch import fetch
from tailrace.models.resolve import read_card
from tailrace.text import Tokenizer

pytestmark = [pytest.mark.timeout(300), needs("torch", "transformers", "xllamacpp")]


@pytest.mark.deep
@pytest.mark.parametrize("mode", MODES)
def test_a_decoder(tmp_path: Path, mode: str) -> None:
    model = make(TINY["qwen3"], tmp_path / "plain")
    path = pooled_gguf(tmp_path, "qwen3", model, pooling=MODES[mode])
    engine = load_engine(EngineSpec("llamacpp", str(path), task="embed", context_tokens=256))
    many = IDS * 7  # more than it computes at once
    found = vectors_of(engine, many)
    engine.close()
    for vector, ids in zip(found, many, strict=True):
        np.testing.assert_allclose(vector, pooled(model, ids, mode), atol=0.02)


def test_an_encoder(tmp_path: Path) -> None:
    import torch
    from safetensors.numpy import load_file
    from transformers import AutoModel

    minilm = fetch(CATALOGUE["minilm"], NoProgress())
    tensors: dict[str, Any] = dict(load_file(minilm / "model.safetensors"))  # Any: arrays
    path = write_bert(minilm, tensors, tmp_path / "minilm.gguf", pooling=1, kind="F16")
    tokenizer = Tokenizer.from_json(read_card(path, "").tokenizer_json)
    ids = (*tokenizer.bos_ids, *tokenizer.encode("The river runs over stones.", special=False), *tokenizer.ends)
    engine = load_engine(EngineSpec("llamacpp", str(path), task="embed", context_tokens=512))
    (found,) = vectors_of(engine, [ids])
    engine.close()
    with torch.no_grad():
        expected = AutoModel.from_pretrained(minilm).eval()(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
    np.testing.assert_allclose(found, expected, atol=0.02)


def test_it_ranks_nothing(tmp_path: Path) -> None:
    model = make(TINY["qwen3"], tmp_path / "plain")
    card = read_card(pooled_gguf(tmp_path, "qwen3", model, pooling=4), "")
    with pytest.raises(ModelError, match="ranks nothing"):
        choose(card, "llamacpp")
