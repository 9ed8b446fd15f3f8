"""Random Llamas of one layer with any vocabulary, and llama.cpp's server to tokenise with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec
import pytest

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

CORPUS = [
    "The quick brown fox's 12345 jumps, don't WE'LL camelCaseWord HTTPServer'S a_b.c@d == x**2; // {'a': [1,2]}",
    "Über naïve Привет мир, مرحبا! ไทย ॐ 한국어 日本語のテキスト 中文。 １２ Ⅷ ½ ²",  # noqa: RUF001  # other scripts
    "a  b   c    d\n\n\te\r\n \n  f ====== -------- ........ the theme of them then",
]

Values = Mapping[str, object]


def write_llama(path: Path, values: Values, name: str = "tiny") -> Path:
    """Write a GGUF file. `values` are its fields `tokenizer.ggml.…`."""
    import gguf
    import numpy as np

    tokens = values["tokens"]
    assert isinstance(tokens, list)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    for key, value in values.items():
        match value:
            case bool():
                writer.add_bool(f"tokenizer.ggml.{key}", value)
            case int():
                writer.add_uint32(f"tokenizer.ggml.{key}", value)
            case str():
                writer.add_string(f"tokenizer.ggml.{key}", value)
            case list():
                writer.add_array(f"tokenizer.ggml.{key}", value)
    draw = np.random.default_rng(7)
    shapes = {"token_embd": (len(tokens), 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for tensor, shape in (shapes | {f"blk.0.{part}": (32, 32) for part in square}).items():
        writer.add_tensor(f"{tensor}.weight", draw.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@cache
def _learned(meta: bool, size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return tokens and merges, learned without a pre-tokenizer, so merges cross the positions at which one would
    split."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    if meta:
        raw.normalizer = normalizers.Replace(" ", "\u2581")
        raw.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    else:
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=[] if meta else sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=8,
    )
    # Pieces of every length from every place, so that many strings of a few characters become tokens.
    raw.train_from_iterator((line[i : i + 12] for line in CORPUS for i in range(0, len(line), 5)), trainer)
    model = msgspec.json.decode(raw.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [(left, right) for left, right in model["merges"]]


def byte_level(pre: str) -> dict[str, object]:
    tokens, merges = _learned(meta=False, size=700)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": ["<|im_end|>", *tokens],
        "token_type": [CONTROL, *[NORMAL] * len(tokens)],
        "merges": [f"{left} {right}" for left, right in merges],
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def sentencepiece(**values: object) -> dict[str, object]:
    """A SentencePiece vocabulary in which some letters have no piece. As in Llama's, `▁▁` has the lowest score."""
    learned, merges = _learned(meta=True, size=500)
    left_out = {"й", "語", "ü"}
    pieces = [*dict.fromkeys([*learned, *("\u2581" * count for count in (2, 4, 8))])]
    pieces = [piece for piece in pieces if left_out.isdisjoint(piece)]
    ranks = {left + right: -1.0 - rank for rank, (left, right) in enumerate(merges)}
    added = ["<|end|>", "<|endoftext|>", "<tool>", "   "]
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return {
        "model": "llama",
        "tokens": [*head, *pieces, *added],
        "token_type": [
            UNKNOWN,
            CONTROL,
            CONTROL,
            *[BYTE] * 256,
            *[NORMAL] * len(pieces),
            CONTROL,
            CONTROL,
            *[USER_DEFINED] * 2,
        ],
        "scores": [*[0.0] * len(head), *(ranks.get(piece, -1e9) for piece in pieces), *[-1000.0] * len(added)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **values,
    }


def gemma4() -> dict[str, object]:
    """A vocabulary in SentencePiece's notation, with merges in the file."""
    values = sentencepiece(model="gemma4")
    tokens, types = values["tokens"], values["token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    known = set(tokens)
    merges = [f"{a} {b}" for a, b in _learned(meta=True, size=500)[1] if {a, b, a + b} <= known]
    return {
        **values,
        "tokens": [*tokens, "\n\n"],
        "token_type": [*types, NORMAL],
        "scores": [0.0] * (len(tokens) + 1),
        "merges": [*merges, "\n \n"],
    }


class Oracle:
    """llama.cpp's own tokenizer. Its socket is in `folder`, whose name has to be short."""

    def __init__(self, path: Path, folder: str) -> None:
        pytest.importorskip("tailrace_plugins.llamacpp.llamacpp_engine")
        from tailrace.engines import EngineSpec
        from tailrace_plugins.llamacpp.llamacpp_model import start_server
        from tailrace_plugins.llamacpp.socket_requests import ask

        self._ask = ask
        self._socket_path = f"{folder}/oracle.sock"
        spec = EngineSpec(
            engine="llamacpp",
            path=str(path),
            context_tokens=64,
            kv_tokens=64,
            max_sequences=1,
            max_step_tokens=32,
            eos_token_ids=(),
        )
        self._server = start_server(spec, self._socket_path)

    def ids(self, text: str, *, special: bool, bos: bool = False) -> list[int]:
        asked = {"content": text, "parse_special": special, "add_special": bos}
        answer = self._ask(self._socket_path, "POST /tokenize", asked)
        ids: list[int] = msgspec.json.decode(answer)["tokens"]
        return ids
