"""Which file of a repository is downloaded, and that it arrives whole: with a fake hub, as a mirror is one."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.api.process import TAILRACE
from tests.models.fake_hub import Hub
from tests.waiting import LONG_S

from tailrace.models.catalogue import HubModel, hub_models, parse_source

_QWEN = hub_models()["qwen3-4b"]


def _pull(hub: Hub, home: Path, name: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = hub.environment(TAILRACE_HOME=str(home), **settings)
    return subprocess.run(
        [TAILRACE, "pull", name], env=environment, capture_output=True, text=True, timeout=LONG_S, check=False
    )


def test_a_known_name_comes_from_a_mirror_and_needs_no_network_afterwards(
    hub: Hub, write_gguf: Callable[..., Path], tmp_path: Path, refusing_port: int
) -> None:
    whole = write_gguf().read_bytes()
    hub.repos[_QWEN.repo] = {_QWEN.file: whole, "Qwen3-4B-Q8_0.gguf": b"another"}
    first = _pull(hub, tmp_path, "qwen3:4b")
    assert first.returncode == 0, first.stderr
    assert f"Fetching {_QWEN.file}: " in first.stderr
    assert "\nqwen3-4b: gguf, 512 tokens of context" in first.stderr
    assert hub.downloads == [_QWEN.file]
    for settings in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": f"http://127.0.0.1:{refusing_port}"}):
        again = _pull(hub, tmp_path, "QWEN3-4B", **settings)
        assert again.returncode == 0, again.stderr
        assert again.stderr.startswith("qwen3-4b: gguf")
    listed = subprocess.run(
        [TAILRACE, "ls"],
        env=hub.environment(TAILRACE_HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        check=True,
        timeout=LONG_S,
    )
    assert f"hf:{_QWEN.repo} (qwen3-4b)" in listed.stdout


def _state(hub: Hub, **files: bytes) -> None:
    for name, content in files.items():
        hub.stated[f"{name}.gguf"] = len(content), hashlib.sha256(content).hexdigest()


def test_a_broken_connection_and_a_killed_process_lose_no_bytes(hub: Hub, tmp_path: Path) -> None:
    whole = os.urandom(3_000_000)
    hub.repos["org/one"] = {"q4.gguf": whole}
    _state(hub, q4=whole)
    hub.cut_after = 2_000_000
    hub.holds_after_cut = True
    with subprocess.Popen([TAILRACE, "pull", "hf:org/one"], env=hub.environment(TAILRACE_HOME=str(tmp_path))) as pull:
        assert hub.is_cut.wait(LONG_S)
        (part,) = hub.cache.rglob("*.tailrace-part")
        while part.stat().st_size < 1_000_000:
            assert pull.poll() is None
            time.sleep(0.02)
        pull.kill()
    kept = part.stat().st_size
    hub.holds_after_cut = False
    ((kind, path, calls),) = hub.ask("hf:org/one")
    assert (kind, Path(path).read_bytes()) == ("path", whole)
    assert hub.ranges[0] == str(kept)
    assert calls[:2] == [["start", "Fetching q4.gguf", len(whole)], ["advance", kept]]
    assert not list(hub.cache.rglob("*.tailrace-part"))
    hub.repos["org/one"]["q8.gguf"] = whole[::-1]
    _state(hub, q8=whole[::-1])
    assert hub.ask("hf:org/one:q8.gguf")[0][0] == "path"  # broken in the middle, and asked again
    assert len(hub.ranges) == 2


def test_a_mirror_that_sends_the_whole_file_again(hub: Hub) -> None:
    whole = os.urandom(3_000_000)
    hub.repos["org/one"] = {"q4.gguf": whole}
    _state(hub, q4=whole)
    hub.cut_after = 2_000_000
    hub.knows_ranges = False
    ((kind, path, calls),) = hub.ask("hf:org/one")
    assert (kind, Path(path).read_bytes()) == ("path", whole)
    fetched = calls[: calls.index(["done"])]
    assert sum(int(str(call[1])) for call in fetched if call[0] == "advance") == len(whole)


@pytest.mark.deep
def test_several_processes_fetch_a_file_once(hub: Hub, tmp_path: Path) -> None:
    whole = os.urandom(200_000_000)
    hub.repos["org/one"] = {"q4.gguf": whole}
    _state(hub, q4=whole)
    with ThreadPoolExecutor() as threads:
        for ((kind, path, _calls),) in threads.map(hub.ask, ["hf:org/one"] * 3):
            assert (kind, Path(path).stat().st_size) == ("path", len(whole)), path
    assert hub.downloads == ["q4.gguf"]
    assert not list(hub.cache.rglob("*.tailrace-part"))


@pytest.mark.deep
def test_a_part_that_is_too_long_is_fetched_again(hub: Hub) -> None:
    whole = os.urandom(3_000_000)
    hub.repos["org/one"] = {"q4.gguf": whole}
    _state(hub, q4=whole)
    blobs = hub.cache / "hub/models--org--one/blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(whole).hexdigest()}.tailrace-part").write_bytes(whole + b"more")
    ((kind, path, _calls),) = hub.ask("hf:org/one")
    assert (kind, Path(path).read_bytes()) == ("path", whole), path


@pytest.mark.deep
def test_a_file_that_differs_from_its_hash_is_not_kept(hub: Hub) -> None:
    right = b"GGUF" + bytes(1000)
    hub.repos["org/one"] = {"q4.gguf": right[:-1] + b"x"}
    _state(hub, q4=right)
    for _ in range(2):
        ((kind, message, _calls),) = hub.ask("hf:org/one")
        assert kind == "error"
        assert "q4.gguf arrived with a wrong checksum" in message
    hub.repos["org/one"]["q4.gguf"] = right
    ((kind, path, calls),) = hub.ask("hf:org/one")
    assert (kind, Path(path).read_bytes()) == ("path", right)
    assert ["start", "Checking q4.gguf", len(right)] in calls
    assert hub.ask("hf:org/one")[0][2] == []  # neither fetched nor checked again


def test_a_model_that_does_not_fit_the_disk_is_not_begun(hub: Hub) -> None:
    names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m-f16.gguf"]
    hub.repos["org/large"] = dict.fromkeys(names, b"GGUF")
    hub.stated |= dict.fromkeys(names, (10**18, "0" * 64))
    ((kind, message, _),) = hub.ask("hf:org/large")
    assert kind == "error"
    assert "needs 3000000000.0 GB" in message
    assert "HF_HOME" in message
    assert hub.downloads == []


@pytest.mark.deep
def test_what_is_on_the_disk_already_needs_no_space(hub: Hub, tmp_path: Path) -> None:
    """A download that was interrupted goes on, although the disk has no room for the whole file any more."""
    num_bytes = shutil.disk_usage(tmp_path).free + 10**9
    hub.repos["org/tight"] = {"q4.gguf": b"GGUF"}
    blob = hub.cache / "hub/models--org--tight/blobs" / ("0" * 64)
    hub.stated["q4.gguf"] = num_bytes, blob.name
    assert "needs " in hub.ask("hf:org/tight")[0][1]
    blob.parent.mkdir(parents=True)
    part = blob.with_name(f"{blob.name}.tailrace-part")
    part.touch()
    os.truncate(part, num_bytes - 10)  # which takes no space
    ((_, message, calls),) = hub.ask("hf:org/tight")
    assert ["advance", num_bytes - 10] in calls
    assert "the connection ended" in message  # this hub does not have the last bytes
    part.rename(blob)
    assert hub.ask("hf:org/tight")[0][0] == "path"


@pytest.mark.deep
def test_a_type_of_weights_names_a_file(hub: Hub) -> None:
    names = ["m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "m-Q8_0.gguf", "Q6/n.Q6_K-00001-of-00001.gguf", "a/m-Q8_0.gguf"]
    hub.repos["org/many"] = {name: name.encode() for name in names}
    for wanted, file in (("Q4_K_M", names[0]), ("ud-q4_k_xl", names[1]), ("Q6_K", names[3])):
        ((kind, path, _),) = hub.ask(f"hf.co/org/many:{wanted}")
        assert (kind, Path(path).read_text()) == ("path", file)
    for wanted, expected in (
        ("K_M", "has no file `K_M`"),
        ("4_K_M", "has no file"),
        ("Q8_0", "has several files of Q8_0. Name one of them: a/m-Q8_0.gguf, m-Q8_0.gguf."),
    ):
        ((kind, message, _),) = hub.ask(f"https://huggingface.co/org/many:{wanted}")
        assert (kind, expected in message) == ("error", True), message


@pytest.mark.deep
def test_a_file_that_was_renamed_in_another_case_is_found(hub: Hub, refusing_port: int) -> None:
    hub.repos["org/one"] = {"gpt-MXFP4.gguf": b"GGUF"}
    for settings in ({}, {"HF_ENDPOINT": f"http://127.0.0.1:{refusing_port}"}):
        ((kind, path, _),) = hub.ask("hf:org/one:gpt-mxfp4.gguf", **settings)
        assert (kind, Path(path).name) == ("path", "gpt-MXFP4.gguf")


def test_every_known_model_names_one_file_of_a_repository() -> None:
    for name, model in hub_models().items():
        assert parse_source(name) is model
        assert isinstance(parse_source(name.upper()), HubModel)
        assert parse_source(f"hf:{model.repo}:{model.file}") == model.source, name
        assert model.num_bytes > 10**8, name
        assert 0 < model.read_share <= 1, name
        assert set(model.can) <= {"tools", "reasoning", "images", "infill", "embeddings", "ranking"}, name
        assert not any(word in name for word in (":", "/", " ")), name
    assert len(hub_models()) >= 30
