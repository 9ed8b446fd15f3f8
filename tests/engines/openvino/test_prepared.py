"""The converted forms of GGUF files in the cache directory."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import msgspec
import pytest

from tailrace.engines import EngineSpec
from tailrace.engines.openvino import facts
from tailrace.engines.openvino import prepared as openvino_prepared
from tailrace.engines.openvino.model import load_pipeline, num_rows
from tailrace.engines.openvino.prepared import prepare, prepared_path, remove_unused
from tailrace.errors import ModelError

_DAY_S = 86_400.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def _made(directory: Path, file: Path | None, *, state: str = "", days_ago: float = 0) -> Path:
    directory.mkdir(parents=True)
    xml = directory / "openvino_model.xml"
    xml.touch()
    os.utime(xml, (time.time() - days_ago * _DAY_S,) * 2)
    if file is not None:
        origin = {"file": str(file)} | ({"state": state} if state else {})
        (directory / "tailrace_origin.json").write_text(json.dumps(origin))
    return directory


def _state(path: Path) -> str:
    return f"{path.stat().st_size} {path.stat().st_mtime_ns}"


def test_versions_keep_the_forms_of_each_other(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds its own at every start, however often both start."""
    cache = model.parent / "cache"
    forms = []
    for form in (4, 5):
        monkeypatch.setattr(openvino_prepared, "FORM", form)
        forms.append(_made(prepared_path(model, cache), model, state=_state(model)))
    older = _made(cache / f"model-{'0' * 16}", model)
    for _ in range(2):
        for form, directory in zip((4, 5), forms, strict=True):
            monkeypatch.setattr(openvino_prepared, "FORM", form)
            assert prepare(model, cache) == directory  # no conversion, which this file would not survive
    assert set(cache.iterdir()) == {*forms, older}


def test_processors_keep_the_forms_of_each_other(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may share a cache directory. A large model has the same form for all."""

    def path_for(*flags: str) -> Path:
        monkeypatch.setattr(facts, "processor_flags", lambda: frozenset(flags))
        return prepared_path(model, model.parent)

    assert path_for("avx2", "avx_vnni") == path_for("avx2", "avx512_vnni") == path_for("asimd")
    assert path_for("avx2", "fma") != path_for("avx2", "fma", "avx_vnni")
    os.truncate(model, 2**30)
    assert path_for("avx2", "fma") == path_for("avx2", "fma", "avx_vnni")


def test_an_older_version_does_not_see_the_form(model: Path) -> None:
    """It removes what has the stem of the file and sixteen digits."""
    name = prepared_path(model, model.parent).name
    assert name.startswith("model-form")
    assert len(name) > len("model-") + 16


def test_forms_that_nobody_uses_are_removed(model: Path) -> None:
    cache = model.parent / "cache"
    prepared = _made(prepared_path(model, cache), model, state=_state(model), days_ago=400)
    kept = {
        prepared,
        _made(cache / f"model-{'1' * 16}", model, days_ago=29),
        _made(cache / f"model-form3-{'2' * 16}", model, state=_state(model), days_ago=29),
        _made(cache / f"model-{'3' * 16}", model.parent / "elsewhere" / "model.gguf", days_ago=400),
        _made(cache / f"model-large-{'4' * 16}", model.parent / "model-large.gguf", days_ago=400),
        _made(cache / f"other-{'5' * 16}", None, days_ago=400),
    }
    _made(cache / f"model-{'6' * 16}", None, days_ago=31)  # of form 1
    _made(cache / f"model-{'7' * 16}", model, days_ago=31)
    _made(cache / f"model-form4-{'8' * 16}", model, state=_state(model), days_ago=31)
    _made(cache / f"model-form5-{'9' * 16}", model, state="5 6")  # of an earlier state of the file
    remove_unused(model, prepared)
    assert set(cache.iterdir()) == kept


def test_a_use_is_noted(model: Path) -> None:
    cache = model.parent / "cache"
    prepared = _made(prepared_path(model, cache), model, state=_state(model), days_ago=400)
    assert prepare(model, cache) == prepared
    assert time.time() - (prepared / "openvino_model.xml").stat().st_mtime < _DAY_S


def test_a_missing_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="openvino_model"):
        num_rows(tmp_path)


def test_a_file_that_cannot_be_converted(model: Path) -> None:
    model.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"^model\.gguf cannot be prepared for OpenVINO: .*\.$"):
        prepare(model, model.parent / "cache")
    assert list((model.parent / "cache").iterdir()) == []


def test_a_conversion_that_ends_without_a_reason(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ModelError, match=r"ended \(exit status 1\)"):
        prepare(model, model.parent / "cache")


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_the_number_of_rows_is_that_of_the_loaded_model(openvino_spec: EngineSpec) -> None:
    """Without a cache directory, too: the prefix cache is exact only with it."""
    found = [
        load_pipeline(msgspec.structs.replace(openvino_spec, cache_path=path)).num_rows
        for path in ("", openvino_spec.cache_path)
    ]
    assert found[0] == found[1] > 0
