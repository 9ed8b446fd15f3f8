"""Measures the time of an image with the default engine, and the memory of its vision tower.

    python bench/images.py [--threads N] [--weights 0|16] [--directory DIRECTORY]

The model has random weights in the shape of SmolVLM-256M: a tower of 12 layers for squares of 512 pixels, which become
64 tokens each, and a decoder of 30 layers. An image is cut into at most 16 squares, and is a square itself. Processor
time is that of all threads: other programs change it little. `again` is the same question, whose image is still known.
With --weights 16 the tower computes in float32.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from machine import this_machine
from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Sequence
from tailrace.types import Attachment, Sampling

DECODER: dict[str, Any] = {  # Any: JSON, also below
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_280, "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0, "max_position_embeddings": 8192,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "model_type": "idefics3", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "image_size": 512, "patch_size": 16,
}  # fmt: skip
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 2048},
    "max_image_size": {"longest_edge": 512},
}  # fmt: skip


def tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of all weights."""
    size, mlp, heads = DECODER["hidden_size"], DECODER["intermediate_size"], 64
    yield "model.text_model.embed_tokens.weight", (DECODER["vocab_size"], size)
    yield "model.text_model.norm.weight", (size,)
    for layer in range(DECODER["num_hidden_layers"]):
        name = f"model.text_model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}.{norm}.weight", (size,)
        for short, count in (("q", 9), ("k", 3), ("v", 3)):
            yield f"{name}.self_attn.{short}_proj.weight", (count * heads, size)
        yield f"{name}.self_attn.o_proj.weight", (size, size)
        yield f"{name}.mlp.gate_proj.weight", (mlp, size)
        yield f"{name}.mlp.up_proj.weight", (mlp, size)
        yield f"{name}.mlp.down_proj.weight", (size, mlp)
    size, mlp = TOWER["hidden_size"], TOWER["intermediate_size"]
    name = "model.vision_model"
    yield f"{name}.embeddings.patch_embedding.weight", (size, 3, 16, 16)
    yield f"{name}.embeddings.patch_embedding.bias", (size,)
    yield f"{name}.embeddings.position_embedding.weight", (1024, size)
    for layer in range(TOWER["num_hidden_layers"]):
        name = f"model.vision_model.encoder.layers.{layer}"
        linear = [(f"self_attn.{short}_proj", size, size) for short in ("q", "k", "v", "out")]
        for short, rows, columns in (*linear, ("mlp.fc1", mlp, size), ("mlp.fc2", size, mlp)):
            yield f"{name}.{short}.weight", (rows, columns)
            yield f"{name}.{short}.bias", (rows,)
        for norm in ("layer_norm1", "layer_norm2"):
            yield f"{name}.{norm}.weight", (size,)
            yield f"{name}.{norm}.bias", (size,)
    yield "model.vision_model.post_layernorm.weight", (size,)
    yield "model.vision_model.post_layernorm.bias", (size,)
    yield "model.connector.modality_projection.proj.weight", (DECODER["hidden_size"], 16 * size)


def write_model(path: Path) -> None:
    """Write the model in float16, with a tokenizer of single bytes and the tokens that stand for images."""
    random = np.random.default_rng(0)
    weights: dict[str, NDArray[np.float16]] = {}
    for name, shape in tensors():
        middle = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        spread = 0.02 if len(shape) == 1 else (shape[0] / np.prod(shape)) ** 0.5
        weights[name] = (middle + random.normal(0, spread, shape)).astype(np.float16)
    head: dict[str, Any] = {}
    end = 0
    for name, values in weights.items():
        head[name] = {"dtype": "F16", "shape": list(values.shape), "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
    text = json.dumps(head).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in weights.values():
            file.write(values.tobytes())
    alphabet = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    cells = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    special = ["<end>", "<image>", "<fake_token_around_image>", "<global-img>", *cells]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path / "tokenizer.json"))
    image = tokenizer.token_to_id("<image>")
    config = {"model_type": "idefics3", "text_config": DECODER, "vision_config": TOWER, "scale_factor": 4}
    (path / "config.json").write_text(json.dumps(config | {"image_token_id": image}))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def picture(width: int, height: int, seed: int) -> bytes:
    """Return the PNG of a picture of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


class Asker:
    """Asks an engine, and says how long it took."""

    def __init__(self, engine: Any, tokenizer: Tokenizer) -> None:  # Any: an engine that may see
        self._engine = engine
        self._tokenizer = tokenizer
        self._number = 0

    def about(self, content: bytes) -> tuple[float, float, int]:
        """Return the time until the first token of an answer about a picture, on the clock and of the processors, in s,
        and the tokens of the picture."""
        ids = tuple(self._tokenizer.encode(self._engine.see(content).expansion, add_special_tokens=False).ids)
        digest = Attachment.of(content, "image/png", 0).digest
        segments = ((40, 41, 42), Attachment(digest, "image/png", len(ids), ids), (43, 44, 45))
        sampling = Sampling(temperature=0.0, seed=1, max_tokens=1, ignore_eos=True)
        self._number += 1
        began_s, of_processors_s = time.perf_counter(), time.process_time()
        self._run(Sequence(self._number, segments, sampling, attachments={digest: content}))
        return time.perf_counter() - began_s, time.process_time() - of_processors_s, len(ids)

    def _run(self, sequence: Sequence) -> None:
        self._engine.submit(sequence)
        while not any(delta.finish_reason is not None for delta in self._engine.step()):
            pass


def memory_bytes() -> int:
    """Return the anonymous memory of this process."""
    fields = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the time of an image with the default engine.")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--weights", type=int, choices=(0, 16), default=0)
    parser.add_argument("--directory", type=Path, help="of the model; default: one that is removed")
    options = parser.parse_args()
    print(json.dumps(this_machine()))
    with tempfile.TemporaryDirectory(prefix="tailrace-images-") as scratch:
        path = options.directory or Path(scratch) / "seeing"
        path.mkdir(exist_ok=True)
        write_model(path)
        tokenizer, before = Tokenizer.from_file(str(path / "tokenizer.json")), memory_bytes()
        for has_tower in (False, True):
            if has_tower:  # without this file it is a model of texts
                (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
            began_s = time.perf_counter()
            spec = EngineSpec(
                "openvino", str(path), context_tokens=4096, kv_tokens=16_384, threads=options.threads, exact=True,
                cache_path=scratch, prefix_cache=False, weight_bits=options.weights,
            )  # fmt: skip
            engine: Any = load_engine(spec)
            took_s, now = time.perf_counter() - began_s, memory_bytes()
            print(f"{'with' if has_tower else 'without'} the tower: {took_s:.1f} s, {(now - before) / 1e6:,.0f} MB")
            before = now
        asker = Asker(engine, tokenizer)
        for width, height in ((512, 512), (1024, 512), (2048, 256)):
            content = picture(width, height, width + height)
            first_s, of_processors_s, num_tokens = asker.about(content)
            again_s, again_of_processors_s, _ = asker.about(content)
            print(
                f"{width} x {height}: {num_tokens:,} tokens, first token after {first_s:.2f} s "
                f"({of_processors_s:.1f} s of processors), again {again_s:.2f} s ({again_of_processors_s:.1f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
