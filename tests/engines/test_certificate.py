from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tailrace.engines import EngineSpec
from tailrace.engines.certificate import Certificate, Finding, read_certificate, subject, write_certificate


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    return EngineSpec(engine="openvino", path=str(tmp_path / "tiny.gguf"), exact=True)


def _certificate(spec: EngineSpec, differences: int = 0) -> Certificate:
    findings = [Finding("alone", 5, 0, 5, 4), Finding("in a batch", 5, differences, 0, 0)]
    return Certificate(subject("engine 1", spec), "2026-11-21", 7, findings)


def test_a_certificate_is_read_for_the_same_subject(tmp_path: Path, spec: EngineSpec) -> None:
    assert read_certificate(tmp_path / "data", subject("engine 1", spec)) is None
    for differences in (1, 0):
        written = _certificate(spec, differences)
        write_certificate(tmp_path / "data", written)
        assert read_certificate(tmp_path / "data", subject("engine 1", spec)) == written


def test_any_other_subject_has_none(tmp_path: Path, spec: EngineSpec) -> None:
    write_certificate(tmp_path, _certificate(spec))
    assert read_certificate(tmp_path, subject("engine 2", spec)) is None
    for change in ({"exact": False}, {"prefix_cache": False}, {"threads": 3}, {"never_alone": True}, {"gpus": 2}):
        assert read_certificate(tmp_path, subject("engine 1", msgspec.structs.replace(spec, **change))) is None
    draft = msgspec.structs.replace(spec, draft=spec.path)
    write_certificate(tmp_path, _certificate(draft))
    assert read_certificate(tmp_path, subject("engine 1", draft)) is not None
    Path(spec.path).write_bytes(b"GGUF of another size")
    assert read_certificate(tmp_path, subject("engine 1", draft)) is None
    assert read_certificate(tmp_path, subject("engine 1", spec)) is None


def test_settings_without_effect_on_ids_are_ignored(tmp_path: Path, spec: EngineSpec) -> None:
    write_certificate(tmp_path, _certificate(spec))
    wider = msgspec.structs.replace(spec, max_sequences=3, kv_tokens=4096, cache_path="elsewhere")
    assert read_certificate(tmp_path, subject("engine 1", wider)) is not None


def test_a_copied_or_broken_certificate_is_ignored(tmp_path: Path, spec: EngineSpec) -> None:
    path = write_certificate(tmp_path, _certificate(spec))
    other = write_certificate(tmp_path, _certificate(msgspec.structs.replace(spec, threads=3)))
    path.write_bytes(other.read_bytes())
    assert read_certificate(tmp_path, subject("engine 1", spec)) is None
    path.write_bytes(b"{")
    assert read_certificate(tmp_path, subject("engine 1", spec)) is None


def test_one_replay_that_differs_makes_it_inexact_and_refills_do_not(spec: EngineSpec) -> None:
    assert _certificate(spec).verdict == "exact"
    assert _certificate(spec, differences=1).verdict == "not exact: 1 of 10"
