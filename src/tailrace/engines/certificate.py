"""Certificates: the results of `tailrace certify`, as small files that a server reads.

A certificate is valid for one version of one engine, one model, one type of processor, and one set of the settings that
affect the computed numbers.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec.structs import asdict

from tailrace import __version__
from tailrace.engines.protocol import EngineSpec
from tailrace.models.safetensors import adapter_file
from tailrace.models.shards import parts_of
from tailrace.system.processors import processor, usable_processors

__all__ = [
    "Certificate",
    "Finding",
    "Subject",
    "Verdict",
    "read_certificate",
    "subject",
    "write_certificate",
]

Verdict: TypeAlias = str  # "exact", or "not exact: N of M" when N of M replays differed


class Subject(msgspec.Struct, frozen=True):
    """The engine, model, processor and settings that a certificate is valid for."""

    engine: str  # name and version
    model: str  # file name and bytes
    processor: str
    settings: dict[str, float | str]


class Finding(msgspec.Struct, frozen=True):
    """One row: the number of replays in one situation, and how many of them differed."""

    name: str
    runs: int
    differences: int
    refill_runs: int  # continuing from the prompt and the delivered ids
    refill_differences: int


class Certificate(msgspec.Struct, frozen=True):
    subject: Subject
    date: str
    seed: int  # of the random choice of prompts and kill points
    findings: list[Finding]

    @property
    def verdict(self) -> Verdict:
        """Return "exact" if all replays gave the same tokens, else how many differed."""
        num_runs = sum(finding.runs for finding in self.findings)
        num_different = sum(finding.differences for finding in self.findings)
        return f"not exact: {num_different} of {num_runs}" if num_different else "exact"


# Fields of an `EngineSpec` that do not change the ids of an answer, or that are described in another way.
_NO_SETTINGS = frozenset((
    "adapters", "engine", "path", "eos_token_ids", "cache_path", "context_tokens", "kv_tokens", "max_sequences",
    "secret", "options",
))  # fmt: skip


def subject(engine: str, spec: EngineSpec) -> Subject:
    """Describe this machine and an engine. `engine` is the name in its capabilities. Only the sizes of model files
    count."""
    values = {name: value for name, value in asdict(spec).items() if name not in _NO_SETTINGS}
    settings: dict[str, float | str] = {
        "tailrace": __version__,  # its version decides the engine's inputs
        **{name: value if isinstance(value, str) else float(value) for name, value in values.items()},
        "adapter": ", ".join(f"{name}={_adapter(path)}" for name, path in spec.adapters.items()),
        "draft": _model(Path(spec.draft)) if spec.draft else "",
        **spec.options,
    }
    return Subject(engine, _model(Path(spec.path)) if spec.path not in ("", ".") else "", _machine(), settings)


def write_certificate(directory: Path, certificate: Certificate) -> Path:
    """Write a certificate into a data directory, and replace an older one. Returns its path. Raises: OSError."""
    path = _path(directory, certificate.subject)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(certificate)) + b"\n")
    new.replace(path)
    return path


def read_certificate(directory: Path, about: Subject) -> Certificate | None:
    """Return the certificate for exactly this subject, or None."""
    try:
        certificate = msgspec.json.decode(_path(directory, about).read_bytes(), type=Certificate)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return certificate if certificate.subject == about else None


def _machine() -> str:
    return f"{processor()}, {usable_processors()} cores"


def _model(path: Path) -> str:
    files = parts_of(path) if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return f"{path.name}, {sum(file.stat().st_size for file in files)} bytes"


def _adapter(path: str) -> str:
    return _model(adapter_file(path))


def _path(directory: Path, about: Subject) -> Path:
    key = hashlib.sha256(msgspec.json.encode(about, order="sorted")).hexdigest()[:16]
    return directory / "certificates" / f"{key}.json"
