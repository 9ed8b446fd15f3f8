"""Fits requests to what a model and its engine can do, and says what became of them (X-Tailrace-Ignored)."""

from __future__ import annotations

import re

from msgspec.structs import replace

from tailrace.dialects.shapes import note
from tailrace.generation import Generator
from tailrace.generation.vector_run import VectorRun
from tailrace.types import (
    NO_LIMIT,
    SHAPING,
    GenerateRequest,
    Record,
    Sampling,
    VectorRequest,
)

__all__ = ["cut_inputs", "fitted", "fitted_inputs", "left_open", "shortened"]

_NEUTRAL = Sampling()
_UNSAFE = re.compile(r"[^A-Za-z0-9_.$#/~\[\]-]")  # in a header, in the path of a keyword in a schema


def fitted(request: GenerateRequest, generator: Generator, *, is_strict: bool) -> tuple[GenerateRequest, list[str]]:
    """Return the request without the parameters that only shape the answer and that the engine does not have, and
    their names. With --strict nothing is left out or shortened, and the generator refuses the request."""
    if is_strict:
        return replace(request, may_shorten=False, may_loosen=False), []
    left_out = [name for name in generator.unsupported(request.sampling) if name in SHAPING]
    if not left_out:
        return request, []
    neutral = {name: getattr(_NEUTRAL, name) for name in left_out}
    return replace(request, sampling=replace(request.sampling, **neutral)), left_out


def shortened(request: GenerateRequest, record: Record, name: str) -> list[str]:
    """Return a note if a stream has less than the `max_tokens` of its request; `name` is the name of this parameter."""
    asked, used = request.sampling.max_tokens, record.sampling.max_tokens
    return [] if asked in (None, NO_LIMIT, used) else [note(name, f"{used} used")]


def fitted_inputs(request: VectorRequest, *, is_strict: bool) -> VectorRequest:
    """Return the request as the generator takes it. With --strict, an input is only cut if the client knows of it."""
    return replace(request, truncate="") if is_strict and request.truncate == "fit" else request


def cut_inputs(request: VectorRequest, run: VectorRun, name: str) -> list[str]:
    """Return a note if an input was cut and the client may not know it; `name` is the name of the inputs."""
    is_news = run.cut_to_tokens is not None and request.truncate == "fit"
    return [note(name, f"cut to {run.cut_to_tokens} tokens")] if is_news else []


def left_open(record: Record) -> list[str]:
    """Return notes about the constraints of a schema that the grammar of a stream does not keep."""
    grammar = record.sampling.grammar
    return [note(_UNSAFE.sub("?", path[:120]), "left open") for path in grammar.left_open] if grammar else []
