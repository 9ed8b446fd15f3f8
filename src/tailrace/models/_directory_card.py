"""Reads the card of a directory: a Hugging Face model with safetensors, or an OpenVINO export.

Pickled weights are refused here, before a library reads them, because reading a pickle can run code.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from tailrace.errors import ModelError
from tailrace.models._tokenizer import tokenizer_json
from tailrace.models._vector_card import VectorCard, read_vector_card
from tailrace.models._vocabulary import CONTROL, NORMAL, Vocabulary, parse_merges
from tailrace.models.card import ModelCard, recommended
from tailrace.models.pre_tokenizers import GPT2
from tailrace.models.safetensors import read_head, weight_files

__all__ = ["EXPORT_FILES", "read"]

EXPORT_FILES = ("openvino_model.xml", "openvino_model.bin")
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")  # how images are prepared
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

# Of models whose files leave it out. Source: the defaults of transformers' configuration classes.
_CONTEXTS = {"gemma3": 131_072}
_UNSET_LENGTH = 10**9  # transformers writes 10**30 for "no limit known"


class _AddedToken(msgspec.Struct):
    content: str
    id: int = -1


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _Bpe(msgspec.Struct):
    type: str


class _Processor(msgspec.Struct):
    type: str
    single: list[dict[str, dict[str, object]]] = []
    processors: list[_Processor] = []


class _Tokenizer(msgspec.Struct):
    model: _Bpe
    added_tokens: list[_AddedToken] = []
    post_processor: _Processor | None = None


class _TokenizerConfig(msgspec.Struct):
    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: str | _AddedToken | None = None
    eos_token: str | _AddedToken | None = None
    add_bos_token: bool | None = None
    model_max_length: float | None = None


class _TextConfig(msgspec.Struct):
    max_position_embeddings: int | None = None


class _Quantization(msgspec.Struct):
    quant_method: str = "an unknown method"


class _Config(msgspec.Struct):
    model_type: str = ""
    max_position_embeddings: int | None = None
    n_positions: int | None = None  # GPT-2's name of the context length
    text_config: _TextConfig | None = None
    quantization_config: _Quantization | None = None
    eos_token_id: int | list[int] | None = None
    vision_config: dict[str, object] | None = None


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None
    temperature: object = None
    top_p: object = None
    top_k: object = None
    min_p: object = None
    repetition_penalty: object = None


Read = TypeVar("Read", _Tokenizer, _TokenizerConfig, _Config, _GenerationConfig)


def read(path: Path, name: str) -> ModelCard:
    kind = _format(path)
    num_parameters, weight_bytes, weight_type = _weights(path, kind)
    text = _tokenizer_text(path)
    tokenizer = _decode(path / "tokenizer.json", _Tokenizer, text)
    config = _decode(path / "tokenizer_config.json", _TokenizerConfig)
    bos_token, eos_token = _content(config.bos_token), _content(config.eos_token)
    starts = config.add_bos_token
    model = _decode(path / "config.json", _Config)
    generation = _decode(path / "generation_config.json", _GenerationConfig)
    vectors = read_vector_card(path) or VectorCard("generate")
    context_tokens = _context_tokens(path, config)
    return ModelCard(
        name=name,
        path=path,
        format=kind,
        tokenizer_json=text,
        chat_template=_chat_template(path, config),
        bos_token=bos_token,
        eos_token=eos_token,
        add_bos=bool(bos_token) and (_puts_first(tokenizer.post_processor, bos_token) if starts is None else starts),
        eos_token_ids=_ends(path, generation, tokenizer, eos_token),
        context_tokens=min(context_tokens, vectors.most_tokens or context_tokens),
        architecture=model.model_type,
        quantized_by=model.quantization_config.quant_method if model.quantization_config else "",
        weight_type=weight_type,
        has_vision=model.vision_config is not None and any((path / file).is_file() for file in _PROCESSOR_FILES),
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
        sampling=recommended(msgspec.structs.asdict(generation)),
        task=vectors.task,
        pooling=vectors.pooling,
        score_tokens=vectors.score_tokens,
        num_dimensions=vectors.num_dimensions,
        may_shorten=vectors.may_shorten,
    )


def _format(path: Path) -> Literal["openvino", "huggingface"]:
    """Return the format of the weights. Raises: ModelError if they are missing or pickled."""
    try:
        names = [file.name for file in path.iterdir()]
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}. Check its permissions.") from error
    if any(name in names for name in EXPORT_FILES):
        for file in EXPORT_FILES:
            if file not in names:
                raise ModelError(
                    f"{path} is not a complete OpenVINO export: {file} is missing. Export or download it again."
                )
        return "openvino"
    if any(name.endswith(".safetensors") for name in names):
        return "huggingface"
    pickled = sorted(name for name in names if name.endswith(_PICKLED))
    if pickled:
        raise ModelError(
            f"The weights of {path} are pickled ({pickled[0]}). Reading them can run code, so they are refused. "
            "Use the repository's safetensors, or convert them with transformers: save_pretrained(directory)."
        )
    raise ModelError(
        f"{path} contains no model: neither *.safetensors nor {EXPORT_FILES[0]}. Give the directory of a Hugging Face "
        "model or of an OpenVINO export, or the path of a .gguf file."
    )


def _weights(path: Path, kind: str) -> tuple[int, int, str]:
    """Return the number of parameters (0 if unknown), the bytes of the weights, and the type of most of them ("" if
    unknown). Raises: ModelError."""
    if kind == "openvino":
        weights = path / EXPORT_FILES[1]
        try:
            return 0, weights.stat().st_size, ""
        except OSError as error:
            raise ModelError(f"{weights} cannot be read: {error.strerror}.") from error
    num_parameters = 0
    num_bytes = Counter[str]()  # by type
    for file in weight_files(path):
        for tensor in read_head(file)[0].values():
            num_parameters += math.prod(tensor.shape)
            num_bytes[tensor.dtype] += tensor.data_offsets[1] - tensor.data_offsets[0]
    return num_parameters, num_bytes.total(), max(num_bytes, key=num_bytes.__getitem__, default="")


def _tokenizer_text(path: Path) -> str:
    """Return tokenizer.json, or make it from the two files (vocab.json, merges.txt) of older models."""
    text = _text(path / "tokenizer.json")
    if text is not None:
        return text
    vocab, merges = _text(path / "vocab.json"), _text(path / "merges.txt")
    if vocab is None or merges is None:
        raise ModelError(
            f"{path} lacks tokenizer.json. Copy it from the repository that the model comes from, or have transformers "
            "write it: AutoTokenizer.from_pretrained(directory).save_pretrained(directory)."
        )
    try:
        ids = msgspec.json.decode(vocab, type=dict[str, int])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{path / 'vocab.json'} is damaged: {error}. Fetch the model again.") from error
    tokens = sorted(ids, key=ids.__getitem__)
    lines = [line for line in merges.splitlines() if line and not line.startswith("#version")]
    special = [CONTROL if token.startswith("<|") and token.endswith("|>") else NORMAL for token in tokens]
    return tokenizer_json(Vocabulary(tokens, special, parse_merges(path / "merges.txt", lines, tokens)), GPT2)


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read ({error}). Export or fetch the model again.") from error


def _decode(file: Path, shape: type[Read], text: str | None = None) -> Read:
    """Decode a file, or its text if already read. A missing file gives the defaults."""
    try:
        return msgspec.json.decode(text or _text(file) or "{}", type=shape)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{file} is damaged: {error}. Export or fetch the model again.") from error


def _content(token: str | _AddedToken | None) -> str:
    return token.content if isinstance(token, _AddedToken) else token or ""


def _chat_template(path: Path, config: _TokenizerConfig) -> str | None:
    """Return the chat template. `chat_template.jinja` has priority, as in transformers."""
    if (template := _text(path / "chat_template.jinja")) is not None:
        return template
    if isinstance(config.chat_template, list):
        by_name = {template.name: template.template for template in config.chat_template}
        return by_name.get("default")
    return config.chat_template


def _puts_first(processor: _Processor | None, token: str) -> bool:
    """Return whether the tokenizer's post-processor puts `token` before a text."""
    if processor is None:
        return False
    if processor.single:
        return processor.single[0].get("SpecialToken", {}).get("id") == token
    return any(_puts_first(part, token) for part in processor.processors)


def _ends(path: Path, generation: _GenerationConfig, tokenizer: _Tokenizer, eos_token: str) -> tuple[int, ...]:
    """Return the end tokens of generation_config.json (often several), else of config.json, else the EOS token."""
    own = [token.id for token in tokenizer.added_tokens if token.content == eos_token and token.id >= 0]
    for declared in (
        generation.eos_token_id,
        _decode(path / "config.json", _Config).eos_token_id,
    ):
        if declared is not None:
            ids = [declared] if isinstance(declared, int) else declared
            return tuple(dict.fromkeys([*(end for end in own if end in ids), *ids, *own]))
    return tuple(own)


def _context_tokens(path: Path, tokenizer_config: _TokenizerConfig) -> int:
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{path} lacks config.json. Copy it from the repository that the model comes from.")
    config = _decode(file, _Config)
    nested = config.text_config.max_position_embeddings if config.text_config else None
    own = config.max_position_embeddings or config.n_positions or nested or _CONTEXTS.get(config.model_type)
    limit = own or tokenizer_config.model_max_length
    if not limit or not 0 < limit < _UNSET_LENGTH:
        raise ModelError(
            f"{path} does not say how long its context is: config.json lacks max_position_embeddings. "
            "Copy config.json from the repository that the model comes from."
        )
    return int(limit)
