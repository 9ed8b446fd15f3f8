"""Writes a GGUF file of random weights, shaped as a Llama of 1.2 billion parameters, to measure speed and memory.

    python bench/random_model.py --like GGUF OUTPUT

The types are those of Q4_K_M: Q4_K, and Q6_K for the embedding and for half of the values and of the down projections.
The tokenizer is that of another GGUF file, with unused tokens up to the size of the vocabulary. The same seed gives the
same file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

WIDTH, INNER, HEADS, KV_HEADS, BLOCKS, VOCABULARY = 2048, 8192, 32, 8, 16, 128_256
Q4_K, Q6_K, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q4_K", "Q6_K", "F32"))

Tensor = tuple[str, tuple[int, int] | tuple[int], gguf.GGMLQuantizationType]


def tensors() -> Iterator[Tensor]:
    """Yield names, shapes (rows, columns) and types."""
    kv_width = WIDTH // HEADS * KV_HEADS
    yield "token_embd.weight", (VOCABULARY, WIDTH), Q6_K
    yield "output_norm.weight", (WIDTH,), F32
    for block in range(BLOCKS):
        # As llama.cpp chooses them for Q4_K_M: the first and the last eighth, and every third block between.
        has_more = block < BLOCKS // 8 or block >= 7 * BLOCKS // 8 or (block - BLOCKS // 8) % 3 == 2
        better = Q6_K if has_more else Q4_K
        yield f"blk.{block}.attn_norm.weight", (WIDTH,), F32
        yield f"blk.{block}.ffn_norm.weight", (WIDTH,), F32
        yield f"blk.{block}.attn_q.weight", (WIDTH, WIDTH), Q4_K
        yield f"blk.{block}.attn_k.weight", (kv_width, WIDTH), Q4_K
        yield f"blk.{block}.attn_v.weight", (kv_width, WIDTH), better
        yield f"blk.{block}.attn_output.weight", (WIDTH, WIDTH), Q4_K
        yield f"blk.{block}.ffn_gate.weight", (INNER, WIDTH), Q4_K
        yield f"blk.{block}.ffn_up.weight", (INNER, WIDTH), Q4_K
        yield f"blk.{block}.ffn_down.weight", (WIDTH, INNER), better


def drawn(
    random: np.random.Generator, rows: int, columns: int, kind: gguf.GGMLQuantizationType
) -> npt.NDArray[np.uint8]:
    """Return random blocks of 256 weights. Their standard deviation is about 0.02, as in trained models."""
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = random.integers(0, 256, (rows * columns // 256, block_bytes), dtype=np.uint8)

    def half(value: float) -> npt.NDArray[np.uint8]:
        return np.frombuffer(np.float16(value).tobytes(), np.uint8)

    if kind is Q4_K:  # the scale of the scales, that of the minima, eight of each in six bits, then the codes
        scales, minima = random.integers(24, 40, (2, len(blocks), 8), dtype=np.uint8)
        blocks[:, 0:2], blocks[:, 2:4] = half(0.0043 / 32), half(0.0043 / 32 * 7.5)
        blocks[:, 4:8] = scales[:, :4] | scales[:, 4:] >> 4 << 6
        blocks[:, 8:12] = minima[:, :4] | minima[:, 4:] >> 4 << 6
        blocks[:, 12:16] = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    else:  # the codes, their scales in eight bits, then the scale of the scales
        blocks[:, 192:208] = random.integers(24, 40, (len(blocks), 16), dtype=np.uint8)
        blocks[:, 208:210] = half(0.001 / 32)
    return blocks.reshape(rows, -1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a GGUF file of random weights in the types of Q4_K_M.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--like", type=Path, required=True, help="a GGUF file of a Llama, whose tokenizer is taken")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    writer = gguf.GGUFWriter(options.output, "llama")
    writer.add_name("random 1.2B")
    writer.add_context_length(8192)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(BLOCKS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    for name, field in gguf.GGUFReader(options.like).fields.items():
        if name.startswith("tokenizer."):
            value = field.contents()
            if name == "tokenizer.ggml.tokens":
                value += [f"<|unused_{number}|>" for number in range(len(value), VOCABULARY)]
            elif name == "tokenizer.ggml.token_type":
                value += [int(gguf.TokenType.UNUSED)] * (VOCABULARY - len(value))
            kinds = field.types
            writer.add_key_value(name, value, kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None)
    for name, shape, kind in tensors():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            writer.add_tensor(name, drawn(random, *shape, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
