from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.missing import skip_missing
from tokenizers import Tokenizer

from tailrace.errors import ModelError
from tailrace.models import CATALOGUE, ModelCard, NoProgress
from tailrace.models.fetch import locate
from tailrace.models.resolve import read_card, resolve

WriteGguf = Callable[..., Path]

SAME_FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_card(path, "tiny")
    assert "\n" not in caught.value.message
    return caught.value.message


def tokenizer(card: ModelCard) -> Any:
    return Tokenizer.from_str(card.tokenizer_json)


def pieces(card: ModelCard, text: str) -> list[str]:
    """Return the pieces of a text, as the pre-tokenizer splits it."""
    cuts = tokenizer(card).pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in cuts]


def test_gguf_card(write_gguf: WriteGguf) -> None:
    path = write_gguf()
    card = read_card(path, "tiny")
    assert (card.name, card.path, card.format, card.context_tokens) == ("tiny", path, "gguf", 512)
    assert (card.bos_token, card.eos_token, card.add_bos) == ("<|im_start|>", "<|im_end|>", False)
    assert card.eos_token_ids == (2, 0)  # its own, then <|endoftext|>
    assert card.chat_template == "{{ messages }}"


def test_a_gguf_file_may_recommend_how_to_sample(write_gguf: WriteGguf) -> None:
    assert read_card(write_gguf("a.gguf", temp=0.5), "tiny").sampling == {"temperature": 0.5, "top_k": 20}
    assert read_card(write_gguf("b.gguf"), "tiny").sampling == {}


def test_control_and_user_tokens_are_not_split(write_gguf: WriteGguf) -> None:
    made = tokenizer(read_card(write_gguf(), "tiny"))
    encoded = made.encode("<|im_start|>hello<tool><|im_end|>", add_special_tokens=False)
    assert encoded.tokens == ["<|im_start|>", "hello", "<tool>", "<|im_end|>"]
    assert made.decode(encoded.ids, skip_special_tokens=True) == "hello<tool>"


@pytest.mark.deep
@SAME_FILE
@given(text=st.text(max_size=40))
@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "default", "llama-bpe", "llama3", "qwen2"])
def test_decoding_restores_the_text(write_gguf: WriteGguf, tmp_path: Path, pre: str, text: str) -> None:
    path = tmp_path / f"{pre}.gguf"
    if not path.exists():
        write_gguf(path.name, pre=pre)
    made = tokenizer(read_card(path, "tiny"))
    expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert made.decode(made.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["a", " ", "1", "2", "3", "4", " don", "'t", " HE", "'", "LL", "  ", " x"]),
        ("gpt-2", ["a", " 1234", " don", "'t", " HE", "'", "LL", "  ", " x"]),
        ("llama-bpe", ["a", " ", "123", "4", " don", "'t", " HE", "'LL", "  ", " x"]),
        ("qwen2", ["a", " ", "1", "2", "3", "4", " don", "'t", " HE", "'LL", "  ", " x"]),
    ],
)
def test_each_family_has_its_own_pre_tokenizer(write_gguf: WriteGguf, pre: str, expected: list[str]) -> None:
    assert pieces(read_card(write_gguf(pre=pre), "tiny"), "a 1234 don't HE'LL   x") == expected


def test_whether_a_prompt_begins_with_bos(write_gguf: WriteGguf) -> None:
    assert read_card(write_gguf("a.gguf", pre="llama-bpe"), "tiny").add_bos  # llama.cpp's rule when the file is silent
    assert not read_card(write_gguf("b.gguf", pre="llama-bpe", add_bos=False), "tiny").add_bos
    assert read_card(write_gguf("c.gguf", pre="smollm", add_bos=True), "tiny").add_bos


def test_llama3_takes_whole_words_before_merging(write_gguf: WriteGguf) -> None:
    card = read_card(write_gguf(pre="llama-bpe", merges=["h e", "l l", "he ll"]), "tiny")
    assert tokenizer(card).encode("hello", add_special_tokens=False).tokens == ["hello"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"eos": 99_999}, "not in its vocabulary"),
        ({"merges": ["h e", "nothing here"]}, "merges"),
        ({"types": [1, 1]}, "do not fit together"),
    ],
)
def test_unsupported_models_are_named(write_gguf: WriteGguf, values: dict[str, Any], expected: str) -> None:
    assert expected in refused(write_gguf(**values))


def test_without_a_name_the_pre_tokenizer_is_gpt2(write_gguf: WriteGguf) -> None:
    assert pieces(read_card(write_gguf(pre=None), "tiny"), "a 12") == ["a", " 12"]


def test_invalid_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_bytes(b"<html>not found</html>")
    assert "not a GGUF file" in refused(tmp_path / "page.gguf")
    (tmp_path / "empty.gguf").touch()
    assert "not a GGUF file" in refused(tmp_path / "empty.gguf")
    (tmp_path / "magic.gguf").write_bytes(b"GGUF\x03")
    assert "cut short" in refused(tmp_path / "magic.gguf")
    (tmp_path / "model.bin").touch()
    assert ".gguf" in refused(tmp_path / "model.bin")
    assert "There is no file" in refused(tmp_path / "gone.gguf")


def test_a_file_cut_anywhere_is_refused(write_gguf: WriteGguf, tmp_path: Path) -> None:
    whole = write_gguf().read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        refused(cut)


def test_wrong_lengths_allocate_nothing(tmp_path: Path) -> None:
    head = b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") + (1).to_bytes(8, "little")
    huge = (2**62).to_bytes(8, "little")
    key = (1).to_bytes(8, "little") + b"k"
    array = key + (9).to_bytes(4, "little") + (4).to_bytes(4, "little") + huge
    for tail in (huge, key + (8).to_bytes(4, "little") + huge, array, key + (77).to_bytes(4, "little")):
        path = tmp_path / "lie.gguf"
        path.write_bytes(head + tail + bytes(100))
        assert "damaged" in refused(path)


@SAME_FILE
@given(changes=st.lists(st.tuples(st.integers(0, 12_000), st.integers(0, 255)), min_size=1, max_size=8))
def test_any_damage_gives_a_card_or_a_model_error(
    write_gguf: WriteGguf, tmp_path: Path, changes: list[tuple[int, int]]
) -> None:
    whole = tmp_path / "tiny.gguf"
    content = bytearray((whole if whole.exists() else write_gguf()).read_bytes())
    for at, value in changes:
        content[at % len(content)] = value
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    try:
        card = read_card(damaged, "tiny")
    except ModelError:
        return
    assert card.context_tokens > 0


def test_reading_a_card_loads_no_numpy_and_no_hub(write_gguf: WriteGguf) -> None:
    script = (
        "import sys; from pathlib import Path; from tailrace.models.resolve import read_card;"
        "read_card(Path(sys.argv[1]), 'x');"
        "print(sorted({'numpy', 'gguf', 'huggingface_hub', 'rich', 'httpx'} & set(sys.modules)))"
    )
    made = subprocess.run([sys.executable, "-c", script, write_gguf()], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"


def test_resolve_names_a_local_file_by_its_stem(write_gguf: WriteGguf) -> None:
    assert resolve(f" {write_gguf('My.Model-Q4.gguf')} ", NoProgress()).name == "My.Model-Q4"


@pytest.fixture
def export(tmp_path: Path) -> Path:
    directory = tmp_path / "Qwen-ov"
    directory.mkdir()
    (directory / "openvino_model.xml").write_text("<net/>")
    (directory / "openvino_model.bin").write_bytes(b"")
    added = [{"id": 7, "content": "<eos>", "special": True}, {"id": 8, "content": "<turn>", "special": True}]
    write_json(directory / "tokenizer.json", {"model": {"type": "BPE"}, "added_tokens": added})
    write_json(
        directory / "tokenizer_config.json",
        {"chat_template": "{{ a }}", "bos_token": {"content": "<bos>"}, "eos_token": "<eos>"},
    )
    write_json(directory / "config.json", {"max_position_embeddings": 2048, "eos_token_id": 7})
    return directory


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def test_openvino_card(export: Path) -> None:
    card = resolve(str(export), NoProgress())
    assert (card.name, card.path, card.format, card.context_tokens) == ("Qwen-ov", export, "openvino", 2048)
    assert (card.bos_token, card.eos_token, card.add_bos, card.eos_token_ids) == ("<bos>", "<eos>", False, (7,))
    assert card.chat_template == "{{ a }}"
    assert json.loads(card.tokenizer_json)["model"] == {"type": "BPE"}


def test_a_directory_with_safetensors(export: Path) -> None:
    for file in ("openvino_model.xml", "openvino_model.bin"):
        (export / file).unlink()
    tensors = {
        "norm": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "weight": {"dtype": "BF16", "shape": [2, 8], "data_offsets": [8, 40]},
        "scale": {"dtype": "F32", "shape": [1], "data_offsets": [40, 44]},
    }
    head = json.dumps(tensors).encode()
    (export / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(44))
    card = read_card(export, "x")
    assert (card.format, card.num_parameters, card.weight_bytes) == ("huggingface", 19, 44)
    assert card.weight_type == "BF16"


def test_generation_config_has_more_end_tokens(export: Path) -> None:
    write_json(export / "generation_config.json", {"eos_token_id": [8, 7]})
    assert read_card(export, "x").eos_token_ids == (7, 8)


def test_generation_config_recommends_how_to_sample(export: Path) -> None:
    write_json(
        export / "generation_config.json",
        {
            "do_sample": True,
            "temperature": 0.6,
            "top_k": 20.0,
            "top_p": "high",
            "min_p": -1,
            "repetition_penalty": True,
        },
    )
    assert read_card(export, "x").sampling == {"temperature": 0.6, "top_k": 20}


def test_without_configs_the_eos_token_is_the_end(export: Path) -> None:
    write_json(export / "config.json", {"text_config": {"max_position_embeddings": 100}})
    card = read_card(export, "x")
    assert (card.eos_token_ids, card.context_tokens) == ((7,), 100)
    write_json(export / "config.json", {"model_type": "gemma3", "text_config": {"sliding_window": 1024}})
    write_json(export / "tokenizer_config.json", {"model_max_length": 10**30})
    assert read_card(export, "").context_tokens == 131_072


def test_chat_template_from_a_list_or_a_file(export: Path) -> None:
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write_json(export / "tokenizer_config.json", {"chat_template": templates})
    assert read_card(export, "x").chat_template == "D"
    (export / "chat_template.jinja").write_text("J")
    assert read_card(export, "x").chat_template == "J"


def test_bos_comes_from_the_template_of_the_tokenizer(export: Path) -> None:
    single = [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processors = [{"type": "ByteLevel"}, {"type": "TemplateProcessing", "single": single}]
    model = {"model": {"type": "BPE"}, "post_processor": {"type": "Sequence", "processors": processors}}
    write_json(export / "tokenizer.json", model)
    assert read_card(export, "x").add_bos
    write_json(export / "tokenizer_config.json", {"bos_token": "<bos>", "add_bos_token": False})
    assert not read_card(export, "x").add_bos


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("openvino_model.xml", "not a complete OpenVINO export"),
        ("openvino_model.bin", "not a complete OpenVINO export"),
        ("tokenizer.json", "lacks tokenizer.json"),
        ("config.json", "lacks config.json"),
    ],
)
def test_an_export_with_a_missing_file(export: Path, file: str, expected: str) -> None:
    (export / file).unlink()
    assert expected in refused(export)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b'{"eos_token_id": "x", "model": 1, "bos_token": 1}'])
def test_an_export_with_a_damaged_file(export: Path, file: str, content: bytes) -> None:
    (export / file).write_bytes(content)
    assert file in refused(export)


@pytest.fixture
def default() -> ModelCard:
    if locate(CATALOGUE["smollm2"]) is None:
        skip_missing("smollm2", "run `tailrace pull`")
    return resolve("smollm2", NoProgress())


def test_the_default_model(default: ModelCard) -> None:
    assert (default.name, default.context_tokens, default.add_bos) == ("smollm2", 8192, False)
    assert (default.eos_token_ids, default.eos_token) == ((2, 0), "<|im_end|>")
    assert default.chat_template is not None
