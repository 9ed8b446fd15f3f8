"""Reads from a directory whether its model makes vectors of texts, and how: the files of sentence-transformers, and
`config.json`.

*Source:* sentence-transformers' modules.json and Pooling; transformers' PretrainedConfig.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from tailrace.errors import ModelError
from tailrace.models.card import Pooling
from tailrace.types import Task

__all__ = ["ENCODERS", "VectorCard", "read_vector_card"]

# The families whose models generate nothing, whatever their files say.
ENCODERS = frozenset(
    ("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "modernbert", "mpnet",
     "roberta", "xlm-roberta", "xlm-roberta-xl")
)  # fmt: skip
_RANKS = "ForSequenceClassification"
_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "first", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last",
    "cls": "first", "mean": "mean", "lasttoken": "last",
}  # fmt: skip
_PARTS = frozenset(("Transformer", "Pooling", "Normalize", "LogitScore"))  # vectors are normalised by request


class VectorCard(NamedTuple):
    """How a model makes vectors of texts."""

    task: Task
    pooling: Pooling = "mean"
    num_dimensions: int = 0
    may_shorten: bool = False
    most_tokens: int | None = None  # of a text, if it is less than the model has positions
    score_tokens: tuple[int, ...] = ()


class _Config(msgspec.Struct):
    model_type: str = ""
    architectures: list[str] | None = None
    hidden_size: int = 0
    dim: int = 0  # DistilBERT's name of it
    id2label: dict[str, str] = {}
    num_labels: int | None = None
    is_matryoshka: bool = False  # as vLLM reads it
    matryoshka_dimensions: list[int] | None = None


class _Module(msgspec.Struct):
    path: str
    type: str


class _LogitScore(msgspec.Struct):
    true_token_id: int
    false_token_id: int | None = None


class _Limits(msgspec.Struct):
    max_seq_length: int | None = None


Read = TypeVar("Read")


def read_vector_card(path: Path) -> VectorCard | None:
    """Return None for a model that generates text. Raises: ModelError for a model whose vectors cannot be made here."""
    config = _decode(path / "config.json", _Config) or _Config()
    if any(name.endswith(_RANKS) for name in config.architectures or ()):
        num_labels = len(config.id2label) or config.num_labels
        if num_labels != 1:
            raise ModelError(f"{path} sorts texts into classes. Of such models, only those run that give one score.")
        return VectorCard("rank", "first" if config.model_type in ENCODERS else "last")
    modules = _decode(path / "modules.json", list[_Module])
    if modules is None:
        return VectorCard("embed", num_dimensions=_size(config)) if config.model_type in ENCODERS else None
    kinds = {module.type.rpartition(".")[2]: module for module in modules}
    if unknown := sorted(set(kinds) - _PARTS):
        raise ModelError(f"{path} has a part {unknown[0]} behind its encoder, which is not supported.")
    if "LogitScore" in kinds:
        return VectorCard("rank", "last", score_tokens=_score_tokens(path / kinds["LogitScore"].path / "config.json"))
    limits = _decode(path / "sentence_bert_config.json", _Limits) or _Limits()
    return VectorCard(
        "embed",
        _pooling(path / kinds["Pooling"].path / "config.json") if "Pooling" in kinds else "mean",
        _size(config),
        config.is_matryoshka or bool(config.matryoshka_dimensions),
        limits.max_seq_length,
    )


def _score_tokens(file: Path) -> tuple[int, ...]:
    found = _decode(file, _LogitScore)
    if found is None:
        raise ModelError(f"{file} is missing. Fetch the model again.")
    return (found.true_token_id,) if found.false_token_id is None else (found.true_token_id, found.false_token_id)


def _size(config: _Config) -> int:
    return config.hidden_size or config.dim


def _pooling(file: Path) -> Pooling:
    """Raises: ModelError if the file names none, several, or one that is not supported."""
    values = _decode(file, dict[str, object]) or {}
    named = [name for name, value in values.items() if value is True and name.startswith("pooling_mode_")]
    if isinstance(mode := values.get("pooling_mode"), str):
        named.append(mode)
    if len(named) != 1 or named[0] not in _POOLINGS:
        raise ModelError(f"{file} asks for a pooling that is not supported: {', '.join(named) or 'none'}.")
    return _POOLINGS[named[0]]


def _decode(file: Path, shape: type[Read]) -> Read | None:
    """Return None if there is no such file. Raises: ModelError."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=shape)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}. Fetch the model again.") from error
