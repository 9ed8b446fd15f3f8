"""Tiny models of random weights that read images, in the real architectures, and pictures for them."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

if TYPE_CHECKING:
    from tests.api.process import Server

__all__ = [
    "ARCHITECTURES",
    "QUESTION",
    "answered",
    "data_url",
    "generated",
    "make_model",
    "picture",
    "seeing_dir",
    "shifting",
]

QUESTION = "What is in it?"

_EOS = "<|endoftext|>"
_LINES = ["Tell me a story about dogs.", "Dogs are the best. Cats are the rest.", "\n\n", "\n\n\n"]
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_EYES = _SMALL | {"image_size": 32, "patch_size": 8}


def picture(seed: int, width: int = 90, height: int = 50, kind: str = "PNG", **options: Any) -> bytes:
    """Return the file of a picture of noise. Any: of Pillow's `save`."""
    noise = random.Random(seed).randbytes(3 * width * height)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), noise).save(file, kind, **options)
    return file.getvalue()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


@pytest.fixture(scope="session")
def seeing_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes a model of an architecture, once."""
    folder = tmp_path_factory.mktemp("models")

    def make(architecture: str) -> Path:
        path = folder / f"tiny-{architecture}"
        if not path.exists():
            make_model(architecture, path)
        return path

    return make


def answered(server: Server, pictures: list[bytes], max_tokens: int) -> tuple[int, list[int]]:
    """Ask a server about pictures. Returns the number of tokens of the prompt, and the ids of the answer."""
    parts = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in pictures]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}
    body = {"messages": [message], "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    body |= {"on_disconnect": "detach"}
    with server.http.stream("POST", "/v1/streams", json=body, headers={"accept": "text/event-stream"}) as answer:
        events = [json.loads(line[5:]) for line in answer.iter_lines() if line.startswith("data:")]
    assert answer.status_code < 300, events
    ids = [token_id for one in events for token_id in one.get("token_ids", ())]
    return events[-1]["usage"]["prompt_tokens"], ids


def generated(path: Path, pictures: list[bytes], max_tokens: int) -> tuple[int, list[int]]:
    """Return what transformers itself generates for a question: the number of tokens of its prompt, and the ids."""
    import transformers

    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(path)
    processor: Any = transformers.AutoProcessor.from_pretrained(path)  # type: ignore[no-untyped-call]
    asked = [{"role": "user", "content": [*({"type": "image"} for _ in pictures), {"type": "text", "text": QUESTION}]}]
    prompt = processor.apply_chat_template(asked, add_generation_prompt=True)
    images = [Image.open(io.BytesIO(one)).convert("RGB") for one in pictures]
    given = processor(text=[prompt], images=images, return_tensors="pt", add_special_tokens=False)
    ids = model.generate(**given, max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1)
    num_prompt = given["input_ids"].shape[1]
    return num_prompt, ids[0, num_prompt:].tolist()


def make_model(architecture: str, path: Path, *, head_dim: int = 16) -> None:
    """`head_dim`: of the attention of its texts. Not every engine has each."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(7)
        model, processor = ARCHITECTURES[architecture](head_dim)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "vision" in name or "projector" in name or "connector" in name:  # the library's are near 0, or 0
                    middle = 1.0 if "norm" in name and "soft" not in name and name.endswith("weight") else 0.0
                    parameter.copy_(middle + 0.3 * torch.randn_like(parameter))
                parameter.copy_(parameter.half().float())  # so that weights of 16 bits are exact
    model.save_pretrained(path)
    processor.save_pretrained(path)


def _tokenizer(placeholder: str, tokens: list[str], **named: str) -> Any:  # Any: of the library, also below
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=[_EOS, *tokens], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(_LINES, trainer)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw, bos_token=_EOS, eos_token=_EOS, model_max_length=4096,
        extra_special_tokens=named or tokens,
    )  # fmt: skip
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE", placeholder)
    return tokenizer


def _text(tokenizer: Any, **more: object) -> dict[str, object]:
    return {
        "model_type": "llama", "vocab_size": len(tokenizer), **_SMALL, "num_key_value_heads": 2,
        "max_position_embeddings": 4096, "initializer_range": 0.4, "bos_token_id": 0, "eos_token_id": 0,
        "pad_token_id": 0, **more,
    }  # fmt: skip


def _idefics3(head_dim: int) -> tuple[Any, Any]:
    """As SmolVLM: an image is cut into a grid, each part of which has tokens around it."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    grid = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = _tokenizer(
        "<image>", ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *grid]
    )
    reader = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    config = Idefics3Config(
        vision_config=_EYES, text_config=_text(tokenizer, head_dim=head_dim), scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    return Idefics3ForConditionalGeneration(config), Idefics3Processor(reader, tokenizer, image_seq_len=4)


def _llava(head_dim: int) -> tuple[Any, Any]:
    """Each image has the same number of tokens."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = _tokenizer("<image>", ["<image>"])
    reader = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    config = LlavaConfig(
        vision_config=_EYES | {"model_type": "clip_vision_model", "projection_dim": 32},
        text_config=_text(tokenizer, head_dim=head_dim),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"), vision_feature_layer=-1,
    )  # fmt: skip
    processor = LlavaProcessor(  # type: ignore[no-untyped-call]
        reader, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return LlavaForConditionalGeneration(config), processor


def _gemma3(head_dim: int) -> tuple[Any, Any]:
    """Empty lines around an image join those of the text, and its tokens see each other."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _tokenizer("<start_of_image>", list(names.values()), **names)
    begin, end, soft = tokenizer.convert_tokens_to_ids(list(names.values()))
    text = _text(
        tokenizer,
        model_type="gemma3_text",
        head_dim=head_dim,
        sliding_window=64,
        tie_word_embeddings=False,
        query_pre_attn_scalar=16,
    )  # as in GGUF files
    config = Gemma3Config(
        vision_config=_EYES | {"model_type": "siglip_vision_model", "vision_use_head": False}, text_config=text,
        mm_tokens_per_image=4, boi_token_index=begin, eoi_token_index=end, image_token_index=soft,
        tie_word_embeddings=False,
    )  # fmt: skip
    reader = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    return Gemma3ForConditionalGeneration(config), Gemma3Processor(reader, tokenizer, image_seq_length=4)


def shifting() -> tuple[Any, Callable[[bytes | None], tuple[list[int], dict[str, Any]]]]:
    """Return a Qwen2-VL, and a function that reads a prompt with a picture: its ids, and what the model gets besides.
    The library's processor, which also reads videos, needs torchvision."""
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    text = {
        "vocab_size": 300, **_SMALL, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "initializer_range": 0.4, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
        "rope_parameters": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    }  # fmt: skip
    eyes = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    begin, end, image, video = 296, 297, 298, 299
    config = Qwen2VLConfig(
        vision_config=eyes, text_config=text, image_token_id=image, video_token_id=video,
        vision_start_token_id=begin, vision_end_token_id=end,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model: Any = Qwen2VLForConditionalGeneration(config)
    reader: Any = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28})

    def read(content: bytes | None) -> tuple[list[int], dict[str, Any]]:
        if content is None:
            return [60, 61, 62, 63], {}
        given: dict[str, Any] = dict(reader([Image.open(io.BytesIO(content))], return_tensors="pt"))
        count = int(given["image_grid_thw"].prod()) // 4
        ids = [60, begin, *[image] * count, end, 61]
        return ids, given | {"mm_token_type_ids": torch.tensor([[int(one == image) for one in ids]])}

    return model.eval(), read


ARCHITECTURES: dict[str, Callable[[int], tuple[Any, Any]]] = {"idefics3": _idefics3, "llava": _llava, "gemma3": _gemma3}
