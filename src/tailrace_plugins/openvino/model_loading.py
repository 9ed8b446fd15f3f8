"""Loads a model for the engine: a GGUF file, a Hugging Face directory or an OpenVINO export."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openvino as ov

from tailrace.engines import EngineSpec
from tailrace.errors import ModelError
from tailrace.models import ModelCard
from tailrace_kit.adapters import read_adapters
from tailrace_kit.scratch import scratch_directory
from tailrace_plugins.openvino.blocks import BLOCK_TOKENS
from tailrace_plugins.openvino.decoder import Images, build, layer_names
from tailrace_plugins.openvino.exports import read_export
from tailrace_plugins.openvino.eye_files import open_eye
from tailrace_plugins.openvino.image_thread import VisionTower
from tailrace_plugins.openvino.model_files import has_lone_form, has_plain_form, sees
from tailrace_plugins.openvino.openvino_adapters import Branches, split_fused
from tailrace_plugins.openvino.prepared import Weights, prepare
from tailrace_plugins.openvino.runner import Piece, Runner

__all__ = ["ENGINE", "device_of", "images_of", "load_eye", "load_runner", "reason_of", "say"]

ENGINE = f"openvino {ov.__version__.partition('-')[0]}"


@dataclass(frozen=True, slots=True)
class _Read:
    model: Any  # Any: the library's
    plain: Any  # the same without adapters, or None
    num_bytes: int
    weights: Weights | None


def load_eye(spec: EngineSpec, card: ModelCard) -> VisionTower | None:
    """Load what reads images, if the model has it. Raises: ModelError; the library's RuntimeError."""
    if not sees(card):
        return None
    device = device_of(spec.device)
    try:
        return VisionTower(open_eye(card), device, _eye_options(spec))
    except Exception as error:  # of a damaged file; the library raises several kinds
        if card.projector is None:
            raise
        # Nobody has asked for this file.
        why = error.message if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
        say(f"The model reads no images, because {card.projector.name} does not load: {why}")
        return None


def images_of(eye: VisionTower | None) -> Images:
    """Return which inputs for images the decoder needs."""
    return "" if eye is None else "mutual" if eye.sees_each_other else "causal"


def load_runner(
    spec: EngineSpec, card: ModelCard, meanwhile: Callable[[int], object] = lambda _: None, images: Images = ""
) -> Runner:
    """Load a model and run a first step. `meanwhile` gets the size of the vocabulary while the library compiles, for
    which it does not need the interpreter's lock. Raises: ModelError; the library's RuntimeError."""
    device = device_of(spec.device)
    with ExitStack() as stack:
        cache = Path(spec.cache_path or stack.enter_context(scratch_directory("tailrace-prepared-")))
        read = _read(spec, card, cache, images)
        if read.weights is not None:
            stack.enter_context(read.weights.released())
        runner = Runner(
            read.model,
            device,
            _options(spec),
            spec.kv_tokens // BLOCK_TOKENS,
            has_lone_form=has_lone_form(spec, read.num_bytes),
            plain=read.plain,
            meanwhile=meanwhile,
        )
        _warm_up(runner)
    return runner


def _read(spec: EngineSpec, card: ModelCard, cache: Path, images: Images) -> _Read:
    path = Path(spec.path)
    adapters = list(read_adapters(spec).values())
    if card.format == "openvino":
        num_bytes = (path / "openvino_model.bin").stat().st_size
        plain = read_export(path) if has_plain_form(spec, num_bytes) else None
        return _Read(read_export(path, adapters), plain, num_bytes, None)
    decoder, weights = prepare(path, cache, spec.context_tokens, bits=spec.weight_bits, say=say)
    names = layer_names(decoder)
    shapes = {name: weights.shape(name) for name in names}
    by_long = {names[name]: shape for name, shape in shapes.items()}
    branches = Branches([split_fused(adapter, by_long) for adapter in adapters], names)
    branches.check(shapes)
    plain = build(decoder, weights, Branches(), images) if has_plain_form(spec, weights.num_bytes) else None
    return _Read(build(decoder, weights, branches, images), plain, weights.num_bytes, weights)


def _options(spec: EngineSpec) -> dict[str, Any]:  # Any: as the library has it
    options: dict[str, Any] = {}
    if spec.exact:
        options["INFERENCE_PRECISION_HINT"] = "f32"
        # The default, per channel, quantises a partly filled block again with each piece of a prompt.
        options["KEY_CACHE_QUANT_MODE"] = "BY_TOKEN"
    if spec.threads:
        options["INFERENCE_NUM_THREADS"] = spec.threads
    if spec.kv_precision:
        options["KV_CACHE_PRECISION"] = spec.kv_precision
        if spec.kv_precision == "f32":  # required by the library
            options["INFERENCE_PRECISION_HINT"] = "f32"
    return options


def _eye_options(spec: EngineSpec) -> dict[str, Any]:  # Any: as above
    """Return the options of a vision tower. It computes in bfloat16 where the processor has it, which takes half of the
    time and rounds no more than eight bits in the decoder's weights, unless more bits are asked for."""
    options: dict[str, Any] = {}
    if spec.weight_bits == 16 or spec.kv_precision == "f32":
        options["INFERENCE_PRECISION_HINT"] = "f32"
    if spec.threads:
        options["INFERENCE_NUM_THREADS"] = spec.threads
    return options


def reason_of(error: Exception) -> str:
    """Return the library's message without the position in its source."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip().rstrip(".")[:200] if lines else type(error).__name__


def device_of(name: str) -> str:
    """Return a device by the library's name. Raises: ModelError if this machine does not have it."""
    if not name:
        return "CPU"
    wanted = name.upper() if "," in name else name.upper().replace(":", ".")  # a combination has commas
    devices = ov.Core().available_devices  # the library looks for them, which takes 0.1 s
    if wanted.partition(".")[0] not in {device.partition(".")[0] for device in devices}:
        raise ModelError(f"OpenVINO has no device {name} on this machine. --device can be {', '.join(devices)}.")
    return wanted


def _warm_up(runner: Runner) -> None:
    """Run a step in each form: the library packs the weights then."""
    for adapter in range(runner.num_kinds):
        runner.run([Piece((1, 2, 3), 0, (0,), is_sampled=True, adapter=adapter)], is_batch=True)
        runner.run([Piece((1,), 3, (0,), is_sampled=True, adapter=adapter)], is_batch=True)
        runner.run([Piece((1,), 4, (0,), is_sampled=True, adapter=adapter)], is_batch=False)


def say(text: str) -> None:
    """Show a line to whoever has started the server."""
    sys.stderr.write(f"tailrace: {text}\n")
