"""Which model files OpenVINO runs, in how many bits, and in how much memory. Imports no library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, cast

from tailrace.engines import EngineSpec, listed
from tailrace.errors import ModelError
from tailrace.models import ModelCard
from tailrace.models.gguf_header import read_metadata
from tailrace.system.processors import processor_flags
from tailrace_plugins.openvino.encoder_families import ARCHITECTURES as ENCODERS
from tailrace_plugins.openvino.encoder_families import GGUF_ENCODERS, read_encoder
from tailrace_plugins.openvino.eye_shapes import EYES, decoder_config, read_eye
from tailrace_plugins.openvino.families import ARCHITECTURES, GGUF_ARCHITECTURES, read_decoder

__all__ = [
    "FOUR_BITS", "Bits", "forms", "has_lone_form", "has_plain_form", "is_encoder", "least_bits", "memory_bytes", "sees",
    "vector_bits", "weight_bytes", "why_not",
]  # fmt: skip

# Of a weight. 0: those of the file where it has four, else eight. 32: float32 where the file has it, else float16.
Bits = Literal[0, 4, 8, 16, 32]

PROJECTORS = ("gemma3", "idefics3")  # of GGUF files
TENSOR_TYPES = frozenset(
    ("F32", "F16", "BF16", "MXFP4", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
     "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS")
)  # fmt: skip
FOUR_BITS = frozenset(("Q4_0", "Q4_1", "Q4_K"))  # kept if `least_bits` is 4; the other types get eight bits
_FLOATS = frozenset(("F32", "F16", "BF16"))
_SMALL_BYTES = 400 * 2**20  # of a file; in eight bits, a model of this size takes 0.3 GB more
_SHARE = 1.2  # of the file's bytes: the library keeps scales in float32
# Of a weight, by its bits, with its share of the scale. With four bits, the embedding has eight. With 16, the library
# computes in float32; it keeps two copies of some matrices.
_BYTES = {4: 0.7, 8: 17 / 16, 16: 4.0, 32: 4.0}
_KEPT_BYTES = 9.0  # of a weight of 16 bits, in each form
_EYE_BYTES = 8.0  # of a number of an eye, which is computed in float32: the library keeps a copy in another order
_MORE_FORMS_BYTES = 2**29  # of packed weights, up to which more copies are worth their memory
_OTHER_BYTES = 120 * 2**20  # the library, the graph and the vocabulary; measured with 49,000 and 128,000 tokens


def why_not(card: ModelCard) -> str:
    """Return why OpenVINO cannot run a GGUF file or a Hugging Face directory, or ""."""
    if card.format == "huggingface":
        return _why_not_directory(card)
    if card.format != "gguf":
        return ""
    known = (*GGUF_ARCHITECTURES, *(() if card.task == "generate" else GGUF_ENCODERS))
    if card.architecture not in known:
        return f"it runs GGUF files of {listed(known)}, not of {card.architecture}"
    if unknown := sorted(set(card.tensor_types) - TENSOR_TYPES):
        return f"it does not read {', '.join(unknown)} tensors"
    return ""


def _why_not_directory(card: ModelCard) -> str:
    known = (*ARCHITECTURES, *EYES) if card.task == "generate" else (*ENCODERS, *ARCHITECTURES)
    if card.architecture not in known:
        return f"it runs models of the types {listed(known)}, not {card.architecture}"
    if card.quantized_by:
        return f"its weights are quantised by {card.quantized_by}"
    try:
        config = json.loads((card.path / "config.json").read_text())
        if is_encoder(card):
            read_encoder(config, card.task)
        else:
            read_decoder(decoder_config(config), card.context_tokens)
            if sees(card):
                from tailrace_plugins.openvino.eye_pixels import read_preparation, read_processor  # it loads Pillow

                read_preparation(read_processor(card.path), read_eye(config).image_side)
    except (ModelError, OSError, ValueError) as error:
        return str(error).rstrip(".")
    return ""


def sees(card: ModelCard) -> bool:
    """Return whether OpenVINO reads images with a model that it can run."""
    if card.projector is not None:
        return _projector_type(card.projector) in PROJECTORS
    return card.has_vision and card.format == "huggingface" and card.architecture in EYES


def is_encoder(card: ModelCard) -> bool:
    return card.task != "generate" and card.architecture in ENCODERS


def vector_bits(card: ModelCard, wanted: int) -> Bits:
    """Return the bits of the weights of a decoder that embeds or ranks. They are those of the file: each text is read
    once, so reading weights is a small part of the time, and more exact ones cost little."""
    own: Bits = 32 if set(card.tensor_types) <= _FLOATS else 0
    return cast("Bits", wanted) if wanted else own


def _projector_type(path: Path) -> str:
    """Return what kind of projector a GGUF file has; "" if it cannot be read."""
    try:
        return read_metadata(path).get("clip.projector_type", str) or ""
    except ModelError:
        return ""


def least_bits(file_bytes: int) -> int:
    """Return the smallest number of bits for the weights of a GGUF file of this size: 4 keeps four-bit weights, 8
    converts them to eight bits.

    Without VNNI, the library computes in float32, and unpacking four bits takes longer than reading eight: with
    SmolLM2-135M, a step of one row takes 1.2 times as long, of 16 rows 1.05 times. A large model keeps four
    bits, because eight bits would need too much memory.
    """
    is_small = file_bytes <= _SMALL_BYTES
    return 8 if is_small and not _has_eight_bit_products(processor_flags()) else 4


def _has_eight_bit_products(flags: frozenset[str]) -> bool:
    """Return whether the processor sums products of integers of eight bits (VNNI). True for other kinds than x86."""
    return "avx2" not in flags or not flags.isdisjoint(("avx512_vnni", "avx_vnni"))


def has_lone_form(spec: EngineSpec, packed_bytes: int) -> bool:
    """Return whether a model is compiled a second time, for steps of a single row (`runner.py`)."""
    return not spec.never_alone and _has_more_forms(spec, packed_bytes)


def has_plain_form(spec: EngineSpec, packed_bytes: int) -> bool:
    """Return whether a model with adapters is also compiled without them, for steps in which no row has one."""
    may_have_none = bool(spec.adapters) and "" not in spec.adapters
    return may_have_none and _has_more_forms(spec, packed_bytes)


def _has_more_forms(spec: EngineSpec, packed_bytes: int) -> bool:
    return spec.device.upper() in ("", "CPU") and packed_bytes <= _MORE_FORMS_BYTES


def forms(card: ModelCard, spec: EngineSpec) -> str:
    """Say in what forms a model is compiled: each of the others also without adapters, if that is one. Each has a copy
    of the packed weights."""
    if card.task != "generate":
        return "one"
    packed = _packed_bytes(card, spec)
    found = ["for batches"]
    if has_lone_form(spec, packed):
        found.append("for a single row")
    if has_plain_form(spec, packed):
        found.append("without adapters")
    return ", ".join(found)


def _packed_bytes(card: ModelCard, spec: EngineSpec) -> int:
    return _decoder_parameters(card) * 2 if spec.weight_bits == 16 else weight_bytes(card, spec.weight_bits)


def weight_bytes(card: ModelCard, bits: int = 0) -> int:
    """Return an estimate of the weights that a step reads. `bits` are those of `EngineSpec.weight_bits`."""
    if card.format == "openvino":
        return card.weight_bytes
    if is_encoder(card):
        return card.num_parameters * 4
    if card.task != "generate":
        bits = vector_bits(card, bits)
    types = set(card.tensor_types) - _FLOATS
    has_four_bits = bool(types) and types <= FOUR_BITS | {"Q6_K", "Q8_0"} and least_bits(card.weight_bytes) == 4
    if has_four_bits and not bits:
        return round(card.weight_bytes * _SHARE)
    return round(_decoder_parameters(card) * _BYTES[bits or 8])


def memory_bytes(card: ModelCard, spec: EngineSpec) -> int:
    """Return an estimate of the engine's memory without keys and values."""
    weights = weight_bytes(card, spec.weight_bits)
    if card.task != "generate":
        has_floats = is_encoder(card) or vector_bits(card, spec.weight_bits) >= 16
        # The library keeps a second copy of float32, in the form of its kernels.
        return (1 + has_floats) * weights + _OTHER_BYTES
    if spec.weight_bits == 16:
        weights = round(_decoder_parameters(card) * _KEPT_BYTES)
    packed = _packed_bytes(card, spec)
    num_forms = (1 + has_lone_form(spec, packed)) * (1 + has_plain_form(spec, packed))
    return weights * num_forms + round(_eye_parameters(card) * _EYE_BYTES) + _OTHER_BYTES


def _decoder_parameters(card: ModelCard) -> int:
    return card.num_parameters - (0 if card.projector is not None else _eye_parameters(card))


def _eye_parameters(card: ModelCard) -> int:
    """Return how many numbers the eye has, if the model has one."""
    try:
        if card.projector is not None:
            return sum(tensor.num_elements for tensor in read_metadata(card.projector).tensors) if sees(card) else 0
        return read_eye(json.loads((card.path / "config.json").read_text())).num_parameters if sees(card) else 0
    except (ModelError, OSError, ValueError):
        return 0  # `why_not` says why
