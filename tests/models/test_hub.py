"""The real hub library with a fake hub on this machine."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from tests.models.fake_hub import Hub


def test_picks_a_file_and_keeps_its_name(hub: Hub) -> None:
    hub.repos["org/one"] = {"README.md": b"", "q4.gguf": b"GGUF" + bytes(50_000)}
    hub.repos["org/two"] = {"a.gguf": b"GGUFa", "sub/b.gguf": b"GGUFb"}
    answers = hub.ask("hf:org/one", "hf:org/two:sub/b.gguf", "hf:org/one")
    assert [(kind, Path(path).name) for kind, path, _ in answers] == [
        ("path", "q4.gguf"),
        ("path", "b.gguf"),
        ("path", "q4.gguf"),
    ]
    assert hub.downloads == ["q4.gguf", "sub/b.gguf"]
    told = answers[0][2]
    assert told[0] == ["start", "Fetching q4.gguf", 50_004]
    assert told[-1] == ["done"]
    assert sum(int(str(call[1])) for call in told if call[0] == "advance") == 50_004
    assert answers[2][2] == []  # the cache had it


@pytest.mark.deep
def test_all_parts_of_a_model_are_in_one_directory(hub: Hub) -> None:
    files = {f"Q4/m-0000{number}-of-00003.gguf": b"GGUF%d" % number for number in (1, 2, 3)}
    hub.repos["org/parts"] = {**files, "mmproj-m.gguf": b"", "README.md": b""}
    for source in ("hf:org/parts", "hf:org/parts:Q4/m-00001-of-00003.gguf"):
        ((kind, path, _),) = hub.ask(source)
        assert (kind, Path(path).name) == ("path", "m-00001-of-00003.gguf")
        assert sorted(file.name for file in Path(path).parent.iterdir()) == [Path(name).name for name in files]
    assert sorted(hub.downloads) == sorted(files)


def test_a_projector_comes_with_its_model(hub: Hub) -> None:
    wanted = ["eyes-Q8_0.gguf", "mmproj-eyes-f16.gguf"]
    hub.repos["org/eyes"] = {name: name.encode() for name in [*wanted, "mmproj-eyes-Q8_0.gguf", "README.md"]}
    for source in ("hf:org/eyes", "hf:org/eyes:eyes-Q8_0.gguf"):
        ((kind, path, _),) = hub.ask(source)
        assert (kind, Path(path).name) == ("path", wanted[0])
        assert sorted(file.name for file in Path(path).parent.iterdir()) == wanted
    assert sorted(hub.downloads) == wanted


def test_an_export_is_one_directory_without_other_weights(hub: Hub) -> None:
    wanted = ["openvino_model.xml", "openvino_model.bin", "tokenizer.json", "config.json", "chat_template.jinja"]
    others = ["model.safetensors", "README.md", "onnx/model.json"]
    others += ["openvino_tokenizer.xml", "openvino_tokenizer.bin", "openvino_detokenizer.bin"]
    hub.repos["org/ov"] = {name: name.encode() for name in [*wanted, *others]}
    ((kind, path, _),) = hub.ask("hf:org/ov")
    assert kind == "path"
    assert sorted(file.name for file in Path(path).iterdir()) == sorted(wanted)


_INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()


@pytest.mark.parametrize(
    "wanted",
    [
        {"model.safetensors": b"w"},
        {"model.safetensors.index.json": _INDEX, "model-1.safetensors": b"1", "model-2.safetensors": b"2"},
    ],
)
def test_a_model_is_fetched_in_one_form(wanted: dict[str, bytes], hub: Hub) -> None:
    wanted = {**wanted, "config.json": b"{}", "tokenizer.json": b"{}"}
    others = {"consolidated.safetensors": b"c", "pytorch_model.bin": b"p", "original/model.safetensors": b"o"}
    hub.repos["org/model"] = {**others, **wanted}
    ((kind, path, _),) = hub.ask("hf:org/model")
    assert kind == "path"
    assert sorted(file.name for file in Path(path).iterdir()) == sorted(wanted)


def test_cached_models_need_no_network(hub: Hub, refusing_port: int) -> None:
    hub.repos["org/one"] = {"q4.gguf": b"GGUF" + bytes(100)}
    hub.repos["org/ov"] = {"openvino_model.xml": b"x", "openvino_model.bin": b"b", "tokenizer.json": b"{}"}
    sources = ("hf:org/one", "hf:org/one:q4.gguf", "hf:org/ov")
    online = [answer[:2] for answer in hub.ask(*sources)]
    assert [kind for kind, _ in online] == ["path"] * 3
    for settings in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": f"http://127.0.0.1:{refusing_port}"}):
        assert [answer[:2] for answer in hub.ask(*sources, **settings)] == online


def test_errors_have_advice(hub: Hub) -> None:
    hub.repos["org/many"] = {f"q{number}.gguf": b"" for number in range(30)}
    hub.repos["org/parts"] = {f"m-0000{number}-of-00002.gguf": b"" for number in (1, 2)}
    hub.repos["org/lacking"] = {"m-00001-of-00002.gguf": b""}
    hub.repos["org/none"] = {"model.safetensors": b""}
    hub.errors = {
        "org/gated": (403, "GatedRepo"),
        "org/token": (401, ""),
        "org/broken": (418, ""),
    }
    cases = {
        "hf:org/many": "contains 30 GGUF models. Choose one with hf:org/many:FILE",
        "hf:org/none": "no GGUF file, no OpenVINO export",
        "hf:org/parts:m-00002-of-00002.gguf": "only one part of a model. Name its first part, m-00001-of-00002.gguf",
        "hf:org/lacking": "lacks parts of this model: m-00002-of-00002.gguf",
        "hf:org/many:q99.gguf": "has no file `q99.gguf`",
        "hf:org/gone": "HF_TOKEN",
        "hf:org/gated": "is gated",
        "hf:org/gated:q4.gguf": "is gated",
        "hf:org/token": "HF_TOKEN",
        "hf:org/broken": "HTTP 418",
        "hf:--org/..name": "not a name that the hub allows",
    }
    for (source, expected), (kind, message, _) in zip(cases.items(), hub.ask(*cases), strict=True):
        assert kind == "error", source
        assert expected in message, source
        assert "\n" not in message, source
    assert "q0.gguf" in hub.ask("hf:org/many")[0][1]


def test_no_network(hub: Hub, refusing_port: int) -> None:
    endpoint = f"http://127.0.0.1:{refusing_port}"
    cases = [
        ({"HF_ENDPOINT": endpoint}, f"{endpoint} could not be reached"),
        ({"HF_HUB_OFFLINE": "1"}, "OFFLINE is set"),
    ]
    for settings, expected in cases:
        for kind, message, _ in hub.ask("hf:org/one", "hf:org/one:q4.gguf", **settings):
            assert kind == "error"
            assert expected in message
            assert "\n" not in message


def test_without_a_network_there_are_no_retries(hub: Hub) -> None:
    """The library would retry six times for one file, with pauses of 23 s in total, and log each retry."""
    hub.errors["org/one"] = (503, "")
    ((kind, message, _),) = hub.ask("hf:org/one:q4.gguf")
    assert (kind, len(hub.requests)) == ("error", 1)
    assert "HTTP 503" in message


@pytest.mark.deep
def test_a_hub_that_does_not_answer(hub: Hub) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        ((kind, message, _),) = hub.ask("hf:org/one", HF_ENDPOINT=endpoint, HF_HUB_ETAG_TIMEOUT="1")
    assert kind == "error"
    assert "could not be reached" in message


@pytest.mark.deep
def test_for_a_cached_model_a_silent_hub_gets_one_request(hub: Hub) -> None:
    hub.repos["org/ov"] = {"openvino_model.xml": b"x", "openvino_model.bin": b"b", "tokenizer.json": b"{}"}
    online = hub.ask("hf:org/ov")[0][:2]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert hub.ask("hf:org/ov", HF_ENDPOINT=endpoint, HF_HUB_ETAG_TIMEOUT="1")[0][:2] == online
        silent.setblocking(False)
        asked, _ = silent.accept()
        asked.close()
        with pytest.raises(BlockingIOError):
            silent.accept()


@pytest.mark.deep
def test_a_file_outside_the_cache_needs_a_network(hub: Hub, refusing_port: int) -> None:
    hub.repos["org/one"] = {"q4.gguf": b"GGUF" + bytes(100), "q8.gguf": b"GGUF"}
    assert hub.ask("hf:org/one:q4.gguf")[0][0] == "path"
    endpoint = f"http://127.0.0.1:{refusing_port}"
    ((kind, message, _),) = hub.ask("hf:org/one:q8.gguf", HF_ENDPOINT=endpoint)
    assert kind == "error"
    assert "could not be reached" in message
