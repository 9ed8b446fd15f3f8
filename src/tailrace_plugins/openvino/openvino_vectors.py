"""Encoders and decoders on OpenVINO that make vectors or scores of texts. The arithmetic is float32, unless `exact` is
off."""

from __future__ import annotations

from tailrace.engines import EngineSpec
from tailrace.errors import ModelError
from tailrace_kit.vectors import VectorEngine, card_of
from tailrace_plugins.openvino.decoder_runner import DecoderRunner
from tailrace_plugins.openvino.encoder_runner import EncoderRunner
from tailrace_plugins.openvino.model_files import is_encoder
from tailrace_plugins.openvino.model_loading import reason_of

__all__ = ["OpenVINOVectors"]


class OpenVINOVectors(VectorEngine):
    """Implements `Engine`."""

    def __init__(self, spec: EngineSpec) -> None:
        for name, value in (("adapter", spec.adapters), ("draft", spec.draft)):
            if value:
                raise ModelError(f"--{name} does not apply to a model that embeds or ranks")
        card = card_of(spec)
        try:
            super().__init__(spec, EncoderRunner(spec, card) if is_encoder(card) else DecoderRunner(spec, card))
        except (RuntimeError, LookupError, ValueError, MemoryError) as error:  # exceptions of C++, too
            raise ModelError(reason_of(error)) from error
