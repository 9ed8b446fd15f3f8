"""Streams the text of `model.generate`, for deployments that call Hugging Face models themselves.

Most deployments need only `generate` and `generate_batch`. `TokenStream` is the streamer below them, for your own calls
of `model.generate(..., streamer=stream, stopping_criteria=stream.stopping_criteria)` in a thread.

torch and transformers are imported on first use, not with this module.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from tailrace_outer.serve._token_stream import TokenStream, ids_of, library, wake

__all__ = ["Prompt", "TokenStream", "generate", "generate_batch"]

# Models, tokenizers and tensors are Any: importing their types would import torch, and duck typing is enough.

Prompt = str | Sequence[Mapping[str, object]]  # text, or the messages of a chat

_MAX_NEW_TOKENS = 256


async def generate(model: Any, tokenizer: Any, prompt: Prompt, **options: Any) -> AsyncGenerator[str, None]:
    """Run `model.generate` in its own thread, and yield the text while it is generated.

    Messages of a chat go through the tokenizer's template. `options` are those of `model.generate`. If neither the
    options nor the model's generation config set `max_new_tokens` or `max_length`, the limit is 256 tokens. The model's
    context is always a limit.

    *Cancellation:* stops the model within one token, and waits for its thread. Closing does the same.

    *Raises:* ValueError for a prompt that fills the context, ImportError if torch or transformers is missing, and the
    exceptions of `model.generate`.
    """
    async with _Generating(model, tokenizer, [prompt], options) as stream:
        async for text in stream:
            yield text


async def generate_batch(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], **options: Any
) -> AsyncGenerator[list[str | type[StopIteration]], None]:
    """Like `generate`, for several prompts in one batch. Each step is a list with the new text of each prompt.

    The class `StopIteration` stands for a prompt that has ended, so that `@serve.batch` can yield the lists unchanged.
    Prompts are padded on the left and the padding is masked, so that each gets the same text as alone. The longest
    prompt decides how many tokens fit into the context.
    """
    if isinstance(prompts, str):
        raise TypeError("prompts should be a sequence of prompts, not a single string")
    if prompts:
        async with _Generating(model, tokenizer, prompts, options) as stream:
            async for step in stream:
                yield [step] if len(prompts) == 1 else step


class _Generating:
    """A call of `model.generate`. Leaving the context stops the model and waits for its thread.

    Not an `asynccontextmanager`: a closing event loop would close its generator at the same time as the generator that
    uses it.
    """

    def __init__(self, model: Any, tokenizer: Any, prompts: Sequence[Prompt], options: dict[str, Any]) -> None:
        self._model, self._tokenizer, self._prompts = model, tokenizer, prompts
        self._settings = settings = _Settings(model, options)
        eos_token_ids = ids_of(settings["eos_token_id"])
        self._stream = TokenStream(tokenizer, num_sequences=len(prompts), eos_token_ids=eos_token_ids)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> TokenStream:
        # Its own thread, because the loop's executor has few threads. A daemon, because its work is useless after the
        # loop has ended.
        run = contextvars.copy_context().run
        threading.Thread(target=run, args=(self._run,), name="tailrace-generate", daemon=True).start()
        return self._stream

    async def __aexit__(self, *exc_info: object) -> None:
        self._stream.cancel()
        await asyncio.wait([self._done])

    def _run(self) -> None:
        model, stream, settings = self._model, self._stream, self._settings
        try:
            rows = [_encode(self._tokenizer, prompt) for prompt in self._prompts]
            options = _options(model, self._tokenizer, settings, stream, max(len(ids) for ids in rows))
            inputs = _padded(model, rows, _pad_token_id(self._tokenizer, settings))
            if not stream.is_over:
                model.generate(**inputs, **options, streamer=stream)
            stream.end()
        except BaseException as error:  # without this, the reader would wait for ever
            stream.fail(error)
        finally:
            wake(self._done)


class _Settings:
    """Generation settings, in order of priority: the caller's options, the caller's config, the model's config."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self.options = dict(options)
        self.given = self.options.pop("generation_config", None)
        self._layers: list[Mapping[str, Any]] = [options]
        self._layers += [vars(config) for config in (self.given, getattr(model, "generation_config", None)) if config]

    def __getitem__(self, name: str) -> Any:
        return next((layer[name] for layer in self._layers if layer.get(name) is not None), None)

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        for layer in self._layers:
            if layer.get("max_new_tokens") is not None:
                return int(layer["max_new_tokens"])
            if layer.get("max_length") is not None:
                return max(0, int(layer["max_length"]) - num_prompt_tokens)
        return _MAX_NEW_TOKENS


def _padded(model: Any, rows: list[list[int]], pad_token_id: int) -> dict[str, Any]:
    # Not with the tokenizer: padding changes its state, and others may use it at the same time.
    torch, device = library("torch"), getattr(model, "device", None)
    width = max(len(ids) for ids in rows)
    ids = [[pad_token_id] * (width - len(ids)) + ids for ids in rows]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in rows]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def _options(
    model: Any, tokenizer: Any, settings: _Settings, stream: TokenStream, num_prompt_tokens: int
) -> dict[str, Any]:
    """Return the arguments of `model.generate`, besides the prompts."""
    context = _context_tokens(model)
    if context is not None and num_prompt_tokens >= context:
        raise ValueError(f"the prompt has {num_prompt_tokens} tokens, but the model's context has only {context}")
    max_new_tokens = settings.max_new_tokens(num_prompt_tokens)
    changed = {
        "max_length": None,  # transformers warns about two limits
        "max_new_tokens": max_new_tokens if context is None else min(max_new_tokens, context - num_prompt_tokens),
        "pad_token_id": _pad_token_id(tokenizer, settings),
    }
    criteria = stream.stopping_criteria
    criteria.extend(settings.options.get("stopping_criteria") or ())
    options = {**settings.options, "stopping_criteria": criteria}
    if settings["stop_strings"] is not None:
        options["tokenizer"] = tokenizer
    if settings.given is None:
        return options | changed
    config = copy.deepcopy(settings.given)  # transformers warns about a config together with other settings
    for name, value in changed.items():
        options.pop(name, None)
        setattr(config, name, value)
    return options | {"generation_config": config}


def _encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt)["input_ids"])
    else:
        encoding = tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=True, tokenize=True, return_dict=True
        )
        ids = list(encoding["input_ids"])
    if not ids and tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id]
    if not ids:
        raise ValueError("the prompt has no tokens")
    return ids


def _context_tokens(model: Any) -> int | None:
    config = model.config
    if hasattr(config, "get_text_config"):  # of multimodal models
        config = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions"):
        tokens = getattr(config, name, None)
        if isinstance(tokens, int) and tokens > 0:
            return tokens
    return None


def _pad_token_id(tokenizer: Any, settings: _Settings) -> int:
    """Return the token to pad with. In prompts it is masked; `generate` also pads sequences that have ended."""
    for ids in (settings["pad_token_id"], tokenizer.pad_token_id, settings["eos_token_id"], tokenizer.eos_token_id):
        for token_id in ids_of(ids):
            return token_id
    return 0
