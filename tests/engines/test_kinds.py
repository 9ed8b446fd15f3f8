"""The choice of the engine for a model, and the error if there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from tests.waiting import LONG_S

from tailrace.engines import EngineSpec, choose, kinds, load_engine, own_kinds
from tailrace.engines.devices import read_device
from tailrace.errors import ModelError
from tailrace.models import ModelCard

GGUF = ModelCard(
    name="m",
    path=Path("m.gguf"),
    format="gguf",
    tokenizer_json="{}",
    chat_template=None,
    bos_token="",
    eos_token="",
    add_bos=False,
    eos_token_ids=(),
    context_tokens=512,
    architecture="llama",
    tensor_types=("F32", "Q4_1"),
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Make only these packages appear installed."""
    there = {"openvino", "xllamacpp", "torch", "transformers", "vllm"}
    monkeypatch.setattr(kinds, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr(kinds, "has_metal", lambda: False)
    return there


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def has_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(kinds, "has_gpu", lambda: request.param)
    return bool(request.param)


def why(card: ModelCard, wanted: str = "auto") -> str:
    with pytest.raises(ModelError) as caught:
        choose(card, wanted)
    return caught.value.message


def test_auto(installed: set[str], has_gpu: bool) -> None:
    assert choose(GGUF).kind.name == "openvino"
    assert choose(replace(GGUF, architecture="gemma")).kind.name == "llamacpp"
    assert choose(replace(GGUF, tensor_types=("Q5_1",))).kind.name == "openvino"
    assert choose(replace(GGUF, tensor_types=("TQ1_0",))).kind.name == "llamacpp"
    assert choose(replace(GGUF, format="openvino")).kind.name == "openvino"
    huggingface = replace(GGUF, format="huggingface")
    assert choose(huggingface).kind.name == ("vllm" if has_gpu else "transformers")
    installed.discard("vllm" if has_gpu else "transformers")
    chosen = choose(huggingface)
    assert chosen.kind.name == ("transformers" if has_gpu else "vllm")
    assert "is not installed" in chosen.why


def test_auto_for_one_stream(installed: set[str]) -> None:
    for_one, for_many = choose(GGUF, for_one=True), choose(GGUF)
    assert (for_one.kind.name, for_many.kind.name) == ("llamacpp", "openvino")
    assert for_one.why == "a GGUF file; for one stream: --for many takes openvino"
    assert for_many.why == "a GGUF file; for many streams: --for one takes llamacpp"
    assert choose(replace(GGUF, format="openvino"), for_one=True).why == "an OpenVINO export"
    assert choose(replace(GGUF, architecture="gemma"), for_one=True).why == "a GGUF file"
    assert choose(replace(GGUF, format="huggingface"), for_one=True).kind.name != "llamacpp"
    assert choose(GGUF, "openvino", for_one=True) == (own_kinds()["openvino"], "as asked")
    installed.discard("xllamacpp")
    assert choose(GGUF, for_one=True).why == "a GGUF file; llamacpp is not installed"
    assert choose(GGUF).why == "a GGUF file"


def test_for_one_stream_a_setting_may_need_another_engine(installed: set[str]) -> None:
    adapted = choose(GGUF, for_one=True, changed={"adapter": "a", "port": 9000})
    assert (adapted.kind.name, adapted.why) == ("openvino", "a GGUF file; llamacpp does not support --adapter")
    assert choose(GGUF, changed={"adapter": "a"}).why == "a GGUF file"
    exact = choose(GGUF, for_one=True, changed={"exact": True})
    assert (exact.kind.name, exact.why) == ("openvino", "a GGUF file; llamacpp is slow with --exact")
    assert choose(GGUF, for_one=True, changed={"exact": False, "threads": 2}).kind.name == "llamacpp"


def test_auto_uses_the_gpu_of_a_mac(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "has_metal", lambda: True)
    wanted: tuple[dict[str, object], ...] = ({}, {"device": "metal"}, {"threads": 2})
    unfit: tuple[dict[str, object], ...] = ({"device": "cpu"}, {"adapter": "a"}, {"exact": True})
    for changed in wanted:
        assert choose(GGUF, changed=changed).kind.name == "llamacpp"
    assert choose(GGUF).why == "a GGUF file; it uses this Mac's GPU, and openvino does not"
    assert choose(GGUF, for_one=True).why == choose(GGUF).why
    assert choose(replace(GGUF, format="openvino")).kind.name == "openvino"
    for changed in unfit:
        assert choose(GGUF, changed=changed).kind.name == "openvino"
    installed.discard("xllamacpp")
    assert choose(GGUF).why == "a GGUF file; llamacpp is not installed"


def test_auto_takes_an_engine_that_has_the_device(installed: set[str]) -> None:
    for device in ("CUDA0", "cuda:1", "Vulkan0"):
        assert choose(GGUF, changed={"device": device}).kind.name == "llamacpp"
    for for_one in (False, True):
        assert choose(GGUF, for_one=for_one, changed={"device": "GPU.1"}) == (own_kinds()["openvino"], "a GGUF file")
    assert choose(GGUF, for_one=True, changed={"device": "cpu"}).kind.name == "llamacpp"


def test_vllm_comes_first_on_a_gpu_and_last_on_the_processor(installed: set[str], has_gpu: bool) -> None:
    huggingface = replace(GGUF, format="huggingface", architecture="gemma")
    for device in ("cuda", "cuda:1", "rocm"):
        assert choose(huggingface, changed={"device": device}).kind.name == "vllm"
    assert choose(huggingface, changed={"device": "cpu"}).kind.name == "transformers"
    assert choose(huggingface, "vllm", changed={"device": "cpu"}).kind.name == "vllm"
    assert choose(huggingface, changed={"device": "metal"}).kind.name == "transformers"
    installed.discard("vllm")
    assert choose(huggingface, changed={"device": "cuda"}).kind.name == "transformers"


def test_any_gpu(installed: set[str], has_gpu: bool) -> None:
    """OpenVINO's is Intel's, which has no device file of its own here."""
    assert choose(GGUF, changed={"device": "gpu"}).kind.name == ("llamacpp" if has_gpu else "openvino")


_WITHOUT_OPENVINO = """
import sys
sys.modules["tailrace_plugins.openvino"] = None
from dataclasses import replace
from tests.engines.test_kinds import GGUF, why
print(why(replace(GGUF, format="openvino")))
print(why(GGUF, "openvino"))
"""


def test_an_engine_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    """Another package has an engine named llamacpp, too. It is left out, but an engine of this name is there."""
    facts = tmp_path / "other-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[tailrace.engines]\nllamacpp = other:KIND\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])}
    command = [sys.executable, "-c", _WITHOUT_OPENVINO]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=LONG_S)
    found, asked = ran.stdout.splitlines()
    assert asked.startswith("The engine openvino cannot be used: ")
    assert found.startswith("No engine runs m ")
    assert found.endswith(asked)
    assert "llamacpp of the package other is left out" in ran.stderr
    assert "The engine llamacpp cannot be used" not in found


def test_a_device_that_the_engine_does_not_have(installed: set[str]) -> None:
    huggingface = replace(GGUF, format="huggingface", architecture="gemma")
    for engine, device, text in (
        ("openvino", "cuda:1", "openvino computes on cpu, gpu, .*, not on cuda. llamacpp, vllm and transformers can"),
        ("llamacpp", "npu", "not on npu. openvino can"),
        ("auto", "nonsense", "--device is one of cpu, gpu, .*npu, also with a number, such as cuda:1"),
        ("auto", "cuda:", "--device is"),
    ):
        with pytest.raises(ModelError, match=text):
            choose(GGUF, engine, changed={"device": device})
    with pytest.raises(
        ModelError, match=r"No engine for this model computes on vulkan: .*transformers computes on cpu"
    ):
        choose(huggingface, changed={"device": "vulkan"})


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("", ""), ("CPU", "cpu"), (" cuda:1 ", "cuda:1"), ("CUDA0", "cuda:0"), ("GPU.1", "gpu:1"), ("mps", "metal"),
        ("MTL0", "metal:0"), ("Vulkan0", "vulkan:0"), ("hip", "rocm"), ("MULTI:GPU,CPU", "multi:gpu,cpu"),
    ],
)  # fmt: skip
def test_the_notations_of_a_device(text: str, device: str) -> None:
    assert read_device(text) == device


def test_missing_packages_are_named_with_the_command(installed: set[str]) -> None:
    installed.clear()
    assert "-m pip install --force-reinstall 'xllamacpp>=" in why(GGUF, "llamacpp")
    assert "-m pip install " in why(replace(GGUF, format="huggingface"))
    with pytest.raises(ModelError, match=r"needs torch and transformers: .* -m pip install .* 'torch>="):
        load_engine(EngineSpec("transformers"))


def test_an_engine_that_cannot_run_it_says_why(installed: set[str]) -> None:
    assert "olmo2, phi3, qwen2, qwen3 and smollm3, not of gemma" in why(replace(GGUF, architecture="gemma"), "openvino")
    assert "--engine auto takes llamacpp" in why(replace(GGUF, architecture="gemma"), "openvino")
    installed.discard("xllamacpp")
    assert "llamacpp would run it: " in why(replace(GGUF, architecture="gemma"), "openvino")
    assert "TQ1_0" in why(replace(GGUF, tensor_types=("F32", "TQ1_0")), "openvino")
    assert "this is a GGUF file" in why(GGUF, "transformers")
    assert "no engine named 'nonsense'" in why(GGUF, "nonsense")


def test_every_kind_has_a_text() -> None:
    assert all(kind.text and kind.formats for kind in own_kinds().values())


def test_a_setting_that_an_engine_does_not_have_is_refused() -> None:
    own_kinds()["openvino"].check(["adapter", "adapter_scale", "device", "kv_precision", "weights"])
    own_kinds()["openvino"].check(["draft", "draft_tokens", "prompt_lookup_tokens"])
    with pytest.raises(
        ModelError,
        match=r"The engine llamacpp does not support --adapter\. It is supported by openvino, vllm, transformers and",
    ):
        own_kinds()["llamacpp"].check(["adapter"])
    with pytest.raises(
        ModelError, match=r"The engine openvino does not support --dtype\. It is supported by vllm and transformers"
    ):
        own_kinds()["openvino"].check(["dtype"])


def test_a_model_with_a_projector_is_read_with_its_images(installed: set[str], tmp_path: Path) -> None:
    """By openvino or, for one stream, by llamacpp. Neither reads those of another type."""
    projector = tmp_path / "mmproj.gguf"
    _write_projector(projector, "idefics3")
    seeing = replace(GGUF, has_vision=True, projector=projector)
    assert choose(seeing).kind.name == "openvino"
    assert choose(seeing, for_one=True).kind.name == "llamacpp"
    _write_projector(projector, "idefics3", num_heads=0)  # llama.cpp would end the process
    found = choose(seeing, for_one=True)
    assert (found.kind.name, found.why) == ("openvino", "a GGUF file; llamacpp reads no images")
    installed.discard("openvino")
    assert choose(seeing, for_one=True).kind.name == "llamacpp"
    installed.add("openvino")
    _write_projector(projector, "pixtral")
    assert choose(seeing, for_one=True).kind.name == "llamacpp"


def test_a_directory_of_a_model_that_reads_images(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers and vLLM read them, so a GPU decides."""
    seeing = replace(GGUF, format="huggingface", architecture="qwen2_vl", has_vision=True)
    found = choose(seeing)
    assert (found.kind.name, found.why) == ("transformers", "a Hugging Face directory")
    monkeypatch.setattr(kinds, "has_gpu", lambda: True)
    found = choose(seeing)
    assert (found.kind.name, found.why) == ("vllm", "a Hugging Face directory")
    installed.discard("vllm")
    assert choose(seeing).kind.name == "transformers"


def _write_projector(path: Path, kind: str, num_heads: int = 2) -> None:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_clip_projector_type(kind)
    writer.add_vision_head_count(num_heads)
    writer.add_vision_block_count(1)
    writer.add_vision_embedding_length(4)
    writer.add_vision_image_size(8)
    writer.add_vision_patch_size(4)
    writer.add_tensor("v.patch_embd.bias", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
