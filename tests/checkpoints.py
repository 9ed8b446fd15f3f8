"""Models as Hugging Face directories: a tiny one, the default one converted from its GGUF file; and the
default one with the chat template of a reasoning model or of one with tools, or with tokens for infill."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import pytest
from tests.missing import skip_missing

from tailrace.errors import ModelError
from tailrace.models import NoProgress
from tailrace.models.catalogue import CATALOGUE
from tailrace.models.directories import cache_path
from tailrace.models.fetch import fetch
from tailrace.models.gguf_header import read_metadata
from tailrace.models.resolve import read_card

_LINES = [
    "Tell me a story about dogs.",
    "Dogs are the best. Cats are the rest.",
    "Once upon a time there was a small dog who liked to swim in the sea.",
    "很久很久以前，有一只小狗。",  # noqa: RUF001  # the comma is Chinese
    "Über den Wölken 🐶🐕‍🦺 läuft ein Hund.",
]


@pytest.fixture(scope="session")
def tiny_gpt2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 with 128 positions and a byte-level tokenizer, whose greedy text is varied nonsense."""
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    return _tiny_gpt2(tmp_path_factory.mktemp("models") / "tiny-gpt2", 128, template)


@pytest.fixture(scope="session")
def tiny_tools_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with 2,048 positions, and a template with tools and calls in the format of Hermes."""
    return _tiny_gpt2(tmp_path_factory.mktemp("models") / "tiny-tools", 2048, _TOOLS)


_TOOLS = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}\n"
    "{% endfor %}"
)


def _tiny_gpt2(path: Path, num_positions: int, template: str) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    eos = "<|endoftext|>"
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=[eos], initial_alphabet=sorted(alphabet), show_progress=False
    )
    raw.train_from_iterator(_LINES, trainer)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # as in all of transformers
        tokenizer_object=raw, bos_token=eos, eos_token=eos, unk_token=eos, model_max_length=num_positions
    )
    tokenizer.chat_template = template
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=num_positions,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.4,  # so that it does not repeat one token
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = GPT2LMHeadModel(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Return the default model for transformers, in float32, with a limit of 40 tokens. Made once, in twenty
    seconds."""
    import transformers

    try:
        source = fetch(CATALOGUE["smollm2"], NoProgress())
    except ModelError as error:
        skip_missing("smollm2", error.message)
    path = cache_path() / "tests" / f"smollm2-hf-{transformers.__version__}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            _convert(source, making)
            making.rename(path)
        except OSError:
            if not path.exists():  # otherwise another process was faster
                raise
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return path


# As Qwen3's: the template shows earlier reasoning, and may open or close it in the prompt.
_THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if open_thinking %}<think>\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


# With tools and calls in the format of Hermes.
_CALLING = (
    "{% if tools %}<|im_start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'A call: <tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{% if not loop.first %}\n{% endif %}"
    "<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


_GGUF_ALIGNMENT = 32  # of the tensors, where a file names no other


# Tokens of the default model, which texts do not have, and what they are called here.
_INFILL = {"<reponame>": "<fim_prefix>", "<gh_stars>": "<fim_suffix>", "<issue_start>": "<fim_middle>"}


@pytest.fixture(scope="session")
def smollm2_thinking() -> Path:
    """Return the default model with a chat template that has reasoning markers. Made once."""
    return _changed("thinking", "tokenizer.chat_template", lambda _: _THINKING, _THINKING)


@pytest.fixture(scope="session")
def smollm2_calling() -> Path:
    """Return the default model with a chat template that has tools. Made once."""
    return _changed("calling", "tokenizer.chat_template", lambda _: _CALLING, _CALLING)


@pytest.fixture(scope="session")
def smollm2_infill() -> Path:
    """Return the default model with the names of tokens for infill. Made once; its answers make no sense."""

    def renamed(tokens: list[str]) -> list[str]:
        return [_INFILL.get(token, token) for token in tokens]

    return _changed("infill", "tokenizer.ggml.tokens", renamed, str(_INFILL))


def _changed(name: str, key: str, change: Callable[[Any], Any], made_by: str) -> Path:
    """Return the default model with another value for a key of its file, which is a string or a list of strings.
    `made_by` is different for each change."""
    try:
        source = fetch(CATALOGUE["smollm2"], NoProgress())
    except ModelError as error:
        skip_missing("smollm2", error.message)
    path = cache_path() / "tests" / f"smollm2-{name}-{crc32(made_by.encode()):08x}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            making = Path(directory) / path.name
            making.write_bytes(_with_value(source, key, change))
            making.rename(path)
    return path


def _with_value(source: Path, key: str, change: Callable[[Any], Any]) -> bytes:
    """Return the content of a GGUF file with another value for a key. The library gguf takes seconds for it."""
    content, metadata = source.read_bytes(), read_metadata(source)
    old = metadata.get(key, object)
    position = content.index(_gguf_string(key)) + len(_gguf_string(key)) + 4  # the type stays
    if isinstance(old, list):
        position += 4 + 8  # the type of the elements and their number stay
    written_old, written_new = (
        b"".join(map(_gguf_string, value if isinstance(value, list) else [value])) for value in (old, change(old))
    )
    assert content[position:].startswith(written_old)
    last = metadata.tensors[-1]  # at the end of the header: its name, dimensions, type and place
    end = content.index(_gguf_string(last.name)) + len(_gguf_string(last.name)) + 4 + 8 * len(last.shape) + 4 + 8
    header = content[:position] + written_new + content[position + len(written_old) : end]
    return header + bytes(-len(header) % _GGUF_ALIGNMENT) + content[end + -end % _GGUF_ALIGNMENT :]


def _gguf_string(text: str) -> bytes:
    return len(text.encode()).to_bytes(8, "little") + text.encode()


def _convert(source: Path, path: Path) -> None:
    """Convert the model directly: transformers would read the file four times, which takes most of a minute."""
    import gguf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(source, "c")  # copy on write: torch warns of arrays that are read-only

    def metadata(name: str) -> Any:  # Any: whatever the key has
        return reader.fields[name].contents()

    heads, kv_heads = metadata("llama.attention.head_count"), metadata("llama.attention.head_count_kv")
    num_layers = metadata("llama.block_count")
    config = LlamaConfig(
        vocab_size=len(metadata("tokenizer.ggml.tokens")),
        hidden_size=metadata("llama.embedding_length"),
        intermediate_size=metadata("llama.feed_forward_length"),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=metadata("llama.context_length"),
        rms_norm_eps=metadata("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": metadata("llama.rope.freq_base")},
        bos_token_id=metadata("tokenizer.ggml.bos_token_id"),
        eos_token_id=metadata("tokenizer.ggml.eos_token_id"),
        pad_token_id=metadata("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
    )
    with torch.device("meta"):  # every weight is replaced: drawing them at random takes seconds
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu").tie_weights()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, num_layers)
    weights = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = weights[f"{names.get_name(name, ('.weight',))}"]
            if name.endswith(("q_proj.weight", "k_proj.weight")):  # whose rows llama.cpp keeps in pairs
                pairs = weight.reshape(heads if "q_proj" in name else kv_heads, -1, 2, weight.shape[1])
                weight = pairs.swapaxes(1, 2).reshape(weight.shape)
            parameter.copy_(torch.from_numpy(weight))
    model.generation_config.max_new_tokens = 40
    model.save_pretrained(path)
    _tokenizer(source).save_pretrained(path)


def _tokenizer(source: Path) -> Any:
    """Return the tokenizer. transformers' own reader gives the same result, but takes as long as everything else."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    card = read_card(source, "smollm2")
    form = msgspec.json.decode(card.tokenizer_json) | {"post_processor": None}  # which would add a bos_token
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # as in all of transformers
        tokenizer_object=Tokenizer.from_str(msgspec.json.encode(form).decode()),
        bos_token=card.bos_token, eos_token=card.eos_token, pad_token=card.eos_token, unk_token="<|endoftext|>",
    )  # fmt: skip
    tokenizer.chat_template = card.chat_template
    return tokenizer
