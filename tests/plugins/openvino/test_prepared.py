"""The packed weights of models in the cache directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.missing import needs
from tests.models.parts import split
from tests.plugins.openvino.tiny_models import TINY, make, write_gguf

from tailrace.errors import ModelError
from tailrace_plugins.openvino import model_files, packer
from tailrace_plugins.openvino import prepared as openvino_prepared
from tailrace_plugins.openvino.prepared import Weights, prepare, prepared_path, remove_unused

pytestmark = needs("torch", "transformers")

_DAY_S = 86_400.0
_FILE = "weights.safetensors"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as a Hugging Face directory in several files."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    make(TINY["qwen3"], path).save_pretrained(path, max_shard_size="100KB")
    (path / "model.safetensors").unlink()  # of the first saving
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    return write_gguf(TINY["llama"], make(TINY["llama"], path / "tiny"), path / "tiny.gguf")


@pytest.fixture
def model(file: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copy(file, tmp_path / "model.gguf"))


def _prepare(path: Path, cache: Path) -> tuple[Weights, list[str]]:
    said: list[str] = []
    _, weights = prepare(path, cache, 128, say=said.append)
    return weights, said


def _same(first: Weights, second: Weights) -> bool:
    return first.path.read_bytes() == second.path.read_bytes()


def test_it_is_made_once(model: Path, tmp_path: Path) -> None:
    first, said = _prepare(model, tmp_path / "cache")
    inode = first.path.stat().st_ino
    again, _ = _prepare(model, tmp_path / "cache")
    assert again.path == first.path
    assert again.path.stat().st_ino == inode
    assert said == []
    assert [path.name for path in first.path.parent.parent.iterdir()] == [first.path.parent.name]


@pytest.mark.parametrize("lost", ["the end", "the head", "a file", "the list"])
def test_a_damaged_one_is_made_again(lost: str, model: Path, tmp_path: Path) -> None:
    first, _ = _prepare(model, tmp_path / "cache")
    sound = first.path.read_bytes()
    if lost == "the end":
        os.truncate(first.path, len(sound) - 100)
    elif lost == "the head":
        first.path.write_bytes(bytes(100) + sound[100:])
    elif lost == "a file":
        first.path.unlink()
    else:
        (first.path.parent / "matrices.json").write_text("{")
    again, _ = _prepare(model, tmp_path / "cache")
    assert again.path.read_bytes() == sound


def test_another_state_of_the_file_replaces_it(model: Path, tmp_path: Path) -> None:
    first, _ = _prepare(model, tmp_path / "cache")
    os.utime(model, (1, 1))
    second, _ = _prepare(model, tmp_path / "cache")
    assert second.path != first.path
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [second.path.parent.name]


def test_other_bits_have_their_own(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    own = [prepare(model, cache, 128, bits=bits)[1] for bits in (0, 4, 8, 16)]
    assert len({weights.path for weights in own}) == 4
    assert own[1].num_bytes < own[2].num_bytes < own[3].num_bytes
    assert len(list(cache.iterdir())) == 4


def test_versions_keep_the_forms_of_each_other(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds its own at every start, however often both start."""
    forms = []
    for form in (9, 10, 9, 10):
        monkeypatch.setattr(openvino_prepared, "FORM", form)
        weights, _ = _prepare(model, tmp_path / "cache")
        forms.append((weights.path, weights.path.stat().st_ino))
    assert forms[:2] == forms[2:]
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_processors_keep_the_forms_of_each_other(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may share a cache directory. A large model has the same form for all."""

    def path_for(*flags: str) -> Path:
        monkeypatch.setattr(model_files, "processor_flags", lambda: frozenset(flags))
        return prepared_path(model, model.parent)

    assert path_for("avx2", "avx_vnni") == path_for("avx2", "avx512_vnni") == path_for("asimd")
    assert path_for("avx2", "fma") != path_for("avx2", "fma", "avx_vnni")
    os.truncate(model, 2**30)
    assert path_for("avx2", "fma") == path_for("avx2", "fma", "avx_vnni")


def _made(directory: Path, file: Path | None, *, state: str = "", days_ago: float = 0, name: str = _FILE) -> Path:
    directory.mkdir(parents=True)
    content = directory / name
    content.touch()
    os.utime(content, (time.time() - days_ago * _DAY_S,) * 2)
    if file is not None:
        origin = {"file": str(file)} | ({"state": state} if state else {})
        (directory / "tailrace_origin.json").write_text(json.dumps(origin))
    return directory


def test_forms_that_nobody_uses_are_removed(model: Path) -> None:
    cache = model.parent / "cache"
    state = f"{model.stat().st_size} {model.stat().st_mtime_ns}"
    own = _made(prepared_path(model, cache), model, state=state, days_ago=400)
    older = "openvino_model.xml"  # of the forms before 7
    kept = {
        own,
        _made(cache / f"model-{'1' * 16}", model, days_ago=29, name=older),
        _made(cache / f"model-form3-{'2' * 16}", model, state=state, days_ago=29, name=older),
        _made(cache / f"model-packed6-{'a' * 16}", model, state=state, days_ago=29),
        _made(cache / f"model-{'3' * 16}", model.parent / "elsewhere" / "model.gguf", days_ago=400),
        _made(cache / f"model-large-{'4' * 16}", model.parent / "model-large.gguf", days_ago=400),
        _made(cache / f"other-{'5' * 16}", None, days_ago=400),
    }
    _made(cache / f"model-{'6' * 16}", None, days_ago=31, name=older)  # of form 1
    _made(cache / f"model-{'7' * 16}", model, days_ago=31, name=older)
    _made(cache / f"model-form4-{'8' * 16}", model, state=state, days_ago=31, name=older)
    _made(cache / f"model-packed6-{'b' * 16}", model, state=state, days_ago=31)
    _made(cache / f"model-packed6-{'9' * 16}", model, state="5 6")  # of an earlier state of the file
    remove_unused(model, own)
    assert set(cache.iterdir()) == kept


def test_a_use_is_noted(model: Path, tmp_path: Path) -> None:
    weights, _ = _prepare(model, tmp_path / "cache")
    os.utime(weights.path, (1, 1))
    _prepare(model, tmp_path / "cache")
    assert time.time() - weights.path.stat().st_mtime < _DAY_S


def test_a_cache_of_another_user_is_used(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, _ = _prepare(model, tmp_path / "cache")

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    assert _prepare(model, tmp_path / "cache")[0].path == weights.path


def _prepare_elsewhere(path: Path, cache: Path) -> bytes:
    return prepare(path, cache, 128)[1].path.read_bytes()


@pytest.mark.deep
def test_several_processes_at_once(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with ProcessPoolExecutor(3, get_context("forkserver")) as pool:
        works = [pool.submit(_prepare_elsewhere, model, cache) for _ in range(3)]
        assert len({work.result() for work in works}) == 1
    assert len(list(cache.iterdir())) == 1


def test_parts_are_the_whole(model: Path, tmp_path: Path) -> None:
    whole, _ = _prepare(model, tmp_path / "cache")
    parts = split(model, tmp_path / "parts", num_parts=3, has_tensors_first=False)
    some, _ = _prepare(parts[0], tmp_path / "cache")
    assert _same(whole, some)
    assert some.path.parent.name.startswith("parts-packed")
    os.utime(parts[2], (1, 1))
    again, _ = _prepare(parts[0], tmp_path / "cache")
    assert again.path != some.path
    assert not some.path.exists()


def test_a_directory_in_several_files(directory: Path, tmp_path: Path) -> None:
    import transformers

    assert len(list(directory.glob("*.safetensors"))) > 1
    some, _ = _prepare(directory, tmp_path / "cache")
    transformers.AutoModelForCausalLM.from_pretrained(directory).save_pretrained(tmp_path / "whole")
    whole, _ = _prepare(tmp_path / "whole", tmp_path / "cache")
    assert _same(whole, some)
    shutil.copy(tmp_path / "whole" / "model.safetensors", directory / "consolidated.safetensors")
    beside, _ = _prepare(directory, tmp_path / "cache")  # as some directories have it, with other names
    assert beside.path == some.path
    (directory / "consolidated.safetensors").unlink()


def test_matrices_are_packed_in_parts(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = _prepare(model, tmp_path / "whole")
    monkeypatch.setattr(packer, "PART", 300)  # less than two rows, and fewer than some rows have
    parts, _ = _prepare(model, tmp_path / "parts")
    assert _same(whole, parts)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs the memory of each mapping, as Linux shows it")
def test_memory_of_the_file_is_given_back(model: Path, tmp_path: Path) -> None:
    weights, _ = _prepare(model, tmp_path / "cache")
    with weights.released():
        before = [array.copy() for array in _arrays(weights)]
    assert _resident_bytes(weights.path) == 0
    assert all(np.array_equal(old, new) for old, new in zip(before, _arrays(weights), strict=True))
    assert _resident_bytes(weights.path) > 0


def _arrays(weights: Weights) -> list[NDArray[Any]]:
    names = [(name,) for name in ("embedding", "layers.0.o", "layers.1.down")]
    return [matrix.packed.codes for name in names for matrix in weights.matrices(name)]


def _resident_bytes(file: Path) -> int:
    mappings = re.findall(rf" {re.escape(str(file))}\n(?:.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    return 1024 * sum(map(int, mappings))


def test_large_models_are_announced(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer, "LARGE_BYTES", 1000)
    monkeypatch.setattr(packer, "REPORT_S", -1.0)
    _, said = _prepare(model, tmp_path / "cache")
    assert said[0] == "Preparing model.gguf for OpenVINO (only once) …"
    parts = [int(text.removeprefix("Preparing model.gguf: ").removesuffix(" %")) for text in said[1:]]
    assert parts == sorted(parts)
    assert parts[-1] == 100


def test_a_place_that_cannot_be_written(model: Path) -> None:
    with pytest.raises(ModelError, match=r"^model\.gguf cannot be prepared for OpenVINO: Not a directory\.$"):
        prepare(model, model / "cache", 128)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_of_another_user(model: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o555)
    with pytest.raises(ModelError, match=r"^model\.gguf cannot be prepared for OpenVINO: Permission denied\.$"):
        prepare(model, tmp_path / "cache", 128)


def test_a_full_disk(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000))
    with pytest.raises(
        ModelError, match=r"cannot be prepared for OpenVINO: .*cache has less than \d+ MiB of free space"
    ):
        prepare(model, tmp_path / "cache", 128)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"model\.gguf .*damaged"):
        prepare(tmp_path / "model.gguf", tmp_path / "cache", 128)


def _changed(model: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Write a copy whose tensors were changed."""
    reader = gguf.GGUFReader(model)
    path = model.with_name("changed.gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    tensors: dict[str, Any] = {tensor.name: tensor.data for tensor in reader.tensors}
    change(tensors)
    for name, content in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(content))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _experts(tensors: dict[str, Any]) -> None:
    """As in Mixtral."""
    for name in ("gate", "up", "down"):
        tensors[f"blk.1.ffn_{name}_exps.weight"] = np.stack([tensors.pop(f"blk.1.ffn_{name}.weight")] * 2)
    tensors["blk.1.ffn_gate_inp.weight"] = np.ones((2, 64), np.float32)


def _spoil(name: str) -> Callable[[dict[str, Any]], object]:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[5] = np.nan

    return spoil


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_experts, r"OpenVINO cannot run changed\.gguf: it has no tensor for layers\.1\.gate\."),
        (
            lambda tensors: tensors.update({"blk.0.attn_sinks.weight": np.ones(4, np.float32)}),
            r"OpenVINO cannot run changed\.gguf: it has tensors that the model's family does not have, such as "
            r"blk\.0\.attn_sinks\.weight\.",
        ),
        (lambda tensors: tensors.pop("blk.2.attn_v.weight"), r"it has no tensor for layers\.2\.v\."),
        (lambda tensors: tensors.pop("blk.2.attn_norm.weight"), r"it has no tensor for layers\.2\.before_attention\."),
        (lambda tensors: tensors.pop("output_norm.weight"), r"it has no tensor for final_norm\."),
        (lambda tensors: tensors.pop("token_embd.weight"), r"it has no tensor for embedding\."),
        (_spoil("blk.1.attn_k.weight"), r"damaged: blk\.1\.attn_k\.weight contains NaN or infinite numbers\."),
        (_spoil("blk.1.attn_norm.weight"), r"damaged: blk\.1\.attn_norm\.weight contains NaN or infinite numbers\."),
        (
            lambda tensors: tensors.update({"blk.1.attn_k.weight": tensors["blk.1.attn_k.weight"][:16]}),
            r"blk\.1\.attn_k\.weight has the shape 16 x 64, but the model needs 32 x 64\.",
        ),
    ],
)
def test_a_model_of_another_form(change: Callable[[dict[str, Any]], object], reason: str, model: Path) -> None:
    path = _changed(model, change)
    with pytest.raises(ModelError, match=reason):
        prepare(path, model.parent / "cache", 128)
    assert list((model.parent / "cache").iterdir()) == []
