"""Models as Hugging Face directories: a tiny one made on the spot, and the default one made from its GGUF."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tailrace.errors import ModelError
from tailrace.models import NoProgress
from tailrace.models.catalogue import CATALOGUE
from tailrace.models.fetch import fetch
from tailrace.models.places import cache_path

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
        tokenizer_object=raw, bos_token=eos, eos_token=eos, unk_token=eos, model_max_length=128
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=128,
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
    path = tmp_path_factory.mktemp("models") / "tiny-gpt2"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model for transformers, in float32, with 40 tokens as its own limit. Made once, which takes a minute;
    a test that may be the first wants a time limit to match.
    """
    import transformers

    try:
        source = fetch(CATALOGUE["smollm2"], NoProgress())
    except ModelError as error:
        pytest.skip(f"the default model cannot be fetched: {error}")
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


def _convert(source: Path, path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # Not by from_pretrained(gguf_file=...), which wants `accelerate` and then has no use for it.
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    loaded = load_gguf_checkpoint(source, return_tensors=True, model_to_load=model)  # type: ignore[no-untyped-call]
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # which is the embedding
    model.tie_weights()
    model.generation_config.max_new_tokens = 40
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(path)
