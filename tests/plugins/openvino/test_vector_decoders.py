"""Decoders that embed or rank, with random weights: equal to transformers' own, from directories and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from tests.missing import needs
from tests.plugins.openvino.test_encoders import pooled_by
from tests.plugins.openvino.tiny_models import CONTEXT_TOKENS, TINY, make, write_gguf

from tailrace.engines import EngineSpec, Sequence, load_engine
from tailrace.engines.interface import Delta, Engine
from tailrace.errors import ModelError, SequenceFailed
from tailrace.models.resolve import read_card
from tailrace.types import VectorForm
from tailrace_outer.scripted.scripted_engine import tokenizer_json

pytestmark = needs("torch", "transformers")

LENGTHS = (7, 1, 200, 7, 32, 33)  # some take several steps
IDS = [tuple(np.random.default_rng(n).integers(3, 96, length).tolist()) for n, length in enumerate(LENGTHS)]
FAMILIES = ("qwen3", "llama", "mistral", "qwen2", "gemma3")
MODES = {"lasttoken": 3, "mean_tokens": 1, "cls_token": 2}  # and llama.cpp's numbers of them


def _load(path: Path, **more: Any) -> Engine:  # Any: of EngineSpec
    card = read_card(path, "")
    more = {"max_step_tokens": 32, "context_tokens": min(card.context_tokens, CONTEXT_TOKENS), "exact": True, **more}
    return load_engine(EngineSpec("openvino", str(path), task=card.task, **more))


def vectors_of(engine: Engine, texts: list[tuple[int, ...]] = IDS) -> list[npt.NDArray[np.float32]]:
    for number, ids in enumerate(texts):
        engine.submit(Sequence(number, (ids,), vector=VectorForm(is_normalized=False)))
    found: dict[int, npt.NDArray[np.float32]] = {}
    while len(found) < len(texts):
        for delta in engine.step():
            assert delta.finish_reason == "stop"
            found[delta.sequence_id] = np.frombuffer(delta.vector, "<f4")
    return [found[number] for number in range(len(texts))]


def pooled(model: Any, ids: tuple[int, ...], mode: str) -> npt.NDArray[np.float32]:  # Any: transformers' model
    import torch

    with torch.no_grad():
        hidden: npt.NDArray[np.float32] = model.model(torch.tensor([ids])).last_hidden_state[0].numpy()
    found: npt.NDArray[np.float32] = (
        hidden.mean(0) if mode == "mean_tokens" else hidden[0 if mode == "cls_token" else -1]
    )
    return found


def _directory(path: Path, family: str, *, is_bare: bool = False) -> Any:  # Any: transformers' model
    model = make(TINY[family], path)
    if is_bare:
        model.model.save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer_json())
    return model


def _each(families: Iterable[str]) -> pytest.MarkDecorator:
    """Run a test with each family and each way of pooling. In `make test`, one family has all ways."""
    first, *others = families
    return pytest.mark.parametrize(
        ("family", "mode"),
        [
            *((first, mode) for mode in MODES),
            *(
                pytest.param(family, mode, marks=pytest.mark.deep if number else ())
                for family in others
                for number, mode in enumerate(MODES)
            ),
        ],
    )


def pooled_gguf(path: Path, family: str, model: Any, **keys: int) -> Path:  # Any: transformers' model
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_pooling_type(gguf.PoolingType(keys["pooling"]))

    return write_gguf(TINY[family], model, path / "model.gguf", more=add)


@_each(FAMILIES)
def test_directories(tmp_path: Path, family: str, mode: str) -> None:
    model = _directory(tmp_path, family)
    pooled_by(tmp_path, f"pooling_mode_{mode}")
    engine = _load(tmp_path)
    found = vectors_of(engine)
    engine.close()
    for vector, ids in zip(found, IDS, strict=True):
        np.testing.assert_allclose(vector, pooled(model, ids, mode), atol=1e-4)


def test_float32_is_kept_and_names_may_have_no_prefix(tmp_path: Path) -> None:
    """Weights that float16 cannot hold, saved as sentence-transformers does: the model without its head."""
    import torch

    model = _directory(tmp_path, "qwen3")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0003)
    model.model.save_pretrained(tmp_path)
    pooled_by(tmp_path, "pooling_mode_lasttoken")
    for bits, atol in ((0, 1e-4), (16, 0.05), (8, 1.0)):
        found = vectors_of(_load(tmp_path, weight_bits=bits))
        expected = [pooled(model, ids, "lasttoken") for ids in IDS]
        np.testing.assert_allclose(found, expected, atol=atol)
    assert np.abs(np.array(found) - expected).max() > 1e-3  # with eight bits


@_each(("qwen3", "llama", "gemma3"))
def test_gguf_files(tmp_path: Path, family: str, mode: str) -> None:
    model = make(TINY[family], tmp_path / "plain")
    path = pooled_gguf(tmp_path, family, model, pooling=MODES[mode])
    assert read_card(path, "").num_dimensions == 64
    engine = _load(path)
    for vector, ids in zip(vectors_of(engine), IDS, strict=True):
        np.testing.assert_allclose(vector, pooled(model, ids, mode), atol=1e-4)
    engine.close()


def test_an_end_token_that_the_file_asks_for(tmp_path: Path) -> None:
    from tailrace.text import Tokenizer

    model = make(TINY["qwen3"], tmp_path / "plain")
    for asks in (True, False):

        def add(writer: gguf.GGUFWriter, *, asks: bool = asks) -> None:
            writer.add_pooling_type(gguf.PoolingType.LAST)
            writer.add_add_eos_token(asks)

        path = write_gguf(TINY["qwen3"], model, tmp_path / "model.gguf", more=add)
        tokenizer = Tokenizer.from_json(read_card(path, "").tokenizer_json)
        assert (tokenizer.bos_ids, tokenizer.ends) == ((), (2,) if asks else ())


def _scores(engine: Engine) -> npt.NDArray[np.float32]:
    return np.array(vectors_of(engine))[:, 0]


def test_scores_by_the_logits_of_two_tokens(tmp_path: Path) -> None:
    """As sentence-transformers has rerankers that answer yes or no."""
    from tests.plugins.openvino.tiny_models import logits

    model = _directory(tmp_path, "qwen3")
    parts = [{"path": "", "type": "a.Transformer"}, {"path": "1_LogitScore", "type": "b.LogitScore"}]
    (tmp_path / "modules.json").write_text(json.dumps(parts))
    (tmp_path / "1_LogitScore").mkdir()
    for no in (21, None):
        (tmp_path / "1_LogitScore/config.json").write_text(json.dumps({"true_token_id": 5, "false_token_id": no}))
        last = [logits(model, list(ids))[-1] for ids in IDS]
        expected = [one[5] - (one[no] if no is not None else 0) for one in last]
        np.testing.assert_allclose(_scores(_load(tmp_path)), expected, atol=2e-4)
    (tmp_path / "1_LogitScore/config.json").unlink()
    with pytest.raises(ModelError, match="LogitScore"):
        read_card(tmp_path, "")


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_scores_by_a_head(tmp_path: Path, family: str) -> None:
    import torch
    import transformers

    model = _directory(tmp_path, family)
    config = model.config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(3)
    ranker: Any = getattr(transformers, f"{TINY[family].kind}ForSequenceClassification")(config).eval()
    ranker.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = [float(ranker(torch.tensor([ids])).logits[0, 0]) for ids in IDS]
    np.testing.assert_allclose(_scores(_load(tmp_path)), expected, atol=2e-4)


def test_scores_of_a_gguf_file(tmp_path: Path) -> None:
    """llama.cpp's conversion of Qwen3-Reranker: the rows of "yes" and "no"."""
    model = make(TINY["qwen3"], tmp_path / "plain")
    rows = model.lm_head.weight[[5, 21]].detach().numpy()

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_pooling_type(gguf.PoolingType.RANK)
        writer.add_tensor("cls.output.weight", rows)
        writer.add_string("tokenizer.chat_template.rerank", "Q {query} D {document} ?")

    path = write_gguf(TINY["qwen3"], model, tmp_path / "model.gguf", more=add)
    card = read_card(path, "")
    assert (card.task, card.pair_template) == ("rank", "Q {query} D {document} ?")
    from tests.plugins.openvino.tiny_models import logits

    expected = [(one := logits(model, list(ids))[-1])[5] - one[21] for ids in IDS]
    np.testing.assert_allclose(_scores(_load(path)), expected, atol=2e-4)


def test_a_long_text_takes_several_steps_and_can_be_aborted(tmp_path: Path) -> None:
    _directory(tmp_path, "qwen3")
    pooled_by(tmp_path, "pooling_mode_lasttoken")
    engine: Any = _load(tmp_path)  # Any: it reports progress, too
    engine.submit(Sequence(1, (IDS[2],), vector=VectorForm()))
    engine.submit(Sequence(2, (IDS[0],), vector=VectorForm()))
    assert engine.step() == []
    assert [(one.sequence_id, one.num_read_tokens) for one in engine.progress()] == [(1, 32)]
    engine.abort(1)
    found: list[Delta] = engine.step()
    assert [(one.sequence_id, one.finish_reason) for one in found] == [(1, "cancelled"), (2, "stop")]
    assert engine.progress() == []
    (again,) = vectors_of(engine, [IDS[2]])
    (alone,) = vectors_of(_load(tmp_path), [IDS[2]])
    np.testing.assert_array_equal(again, alone)
    for ids in ((), (96,), (-1,), (7,) * 257):
        with pytest.raises(SequenceFailed):
            engine.submit(Sequence(3, (ids,), vector=VectorForm()))


def test_many_short_texts(tmp_path: Path) -> None:
    """More than a step has blocks of the cache for."""
    _directory(tmp_path, "qwen3")
    pooled_by(tmp_path, "pooling_mode_mean_tokens")
    engine = _load(tmp_path, max_step_tokens=256)
    many = [(3 + number % 90,) * (1 + number % 3) for number in range(300)]
    together = vectors_of(engine, many)
    for number in (0, 1, 150, 299):
        np.testing.assert_allclose(together[number], vectors_of(engine, [many[number]])[0], atol=1e-5)
