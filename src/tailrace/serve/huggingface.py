"""Text of `model.generate` as it is made, for those who call Hugging Face models in their own deployment.

`generate` and `generate_batch` are all that most need. `TokenStream` is the streamer below them, for own calls of
`model.generate(..., streamer=stream, stopping_criteria=stream.stopping_criteria)` in a thread.

torch and transformers are imported when they are needed first, not with this module.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from tailrace.serve._token_stream import TokenStream, ids_of, library, wake

__all__ = ["Prompt", "TokenStream", "generate", "generate_batch"]

# Models, tokenizers and tensors are Any throughout: their types would have to be imported, and any that have the
# methods called here will do.

Prompt = str | Sequence[Mapping[str, object]]  # text, or the messages of a chat

_MAX_NEW_TOKENS = 256


async def generate(model: Any, tokenizer: Any, prompt: Prompt, **options: Any) -> AsyncGenerator[str, None]:
    """The text that `model.generate` makes of a prompt, while it makes it, in a thread of its own.

    Messages of a chat go through the tokenizer's template. `options` are those of `model.generate`. Without
    `max_new_tokens` and `max_length`, there and in the model's generation config, it is 256 tokens; never more than the
    model's context has room for.

    *Cancellation:* stops the model within a token, as closing does, and waits for its thread.
    *Raises:* ValueError for a prompt that leaves no room in the context, ImportError when torch or transformers is
    missing, and what `model.generate` raises.
    """
    async with _Generating(model, tokenizer, [prompt], options) as stream:
        async for text in stream:
            yield text


async def generate_batch(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], **options: Any
) -> AsyncGenerator[list[str | type[StopIteration]], None]:
    """As `generate`, for several prompts in one batch: each step is a list with what it added to each of them.

    The class `StopIteration` takes the place of one that has ended, so that `@serve.batch` can be given the lists as
    they are. Prompts are padded on the left and the padding is masked, which leaves each with the text that it would
    have had alone; the longest alone says how much the context has room for.
    """
    if isinstance(prompts, str):
        raise TypeError("prompts is a sequence of prompts, not one")
    if prompts:
        async with _Generating(model, tokenizer, prompts, options) as stream:
            async for step in stream:
                yield [step] if len(prompts) == 1 else step


class _Generating:
    """A call of `model.generate` for as long as its text is read; leaving stops it and waits for its thread.

    Not a generator with a decorator: a loop that closes would close that as well, at the same time as the one it is in.
    """

    def __init__(self, model: Any, tokenizer: Any, prompts: Sequence[Prompt], options: dict[str, Any]) -> None:
        self._model, self._tokenizer, self._prompts = model, tokenizer, prompts
        self._settings = settings = _Settings(model, options)
        eos_token_ids = ids_of(settings["eos_token_id"])
        self._stream = TokenStream(tokenizer, num_sequences=len(prompts), eos_token_ids=eos_token_ids)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> TokenStream:
        # A thread of its own, since the loop's executor has few, which others need; a daemon, since what it works for
        # ends with the loop.
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
        except BaseException as error:  # else the reader would wait for ever
            stream.fail(error)
        finally:
            wake(self._done)


class _Settings:
    """Generation settings, the nearest first: the caller's options, its generation config, the model's."""

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
    # Not by the tokenizer: that would change it for everyone who uses it at the same time.
    torch, device = library("torch"), getattr(model, "device", None)
    width = max(len(ids) for ids in rows)
    ids = [[pad_token_id] * (width - len(ids)) + ids for ids in rows]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in rows]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def _options(
    model: Any, tokenizer: Any, settings: _Settings, stream: TokenStream, num_prompt_tokens: int
) -> dict[str, Any]:
    """What `model.generate` is called with beside the prompts."""
    context = _context_tokens(model)
    if context is not None and num_prompt_tokens >= context:
        raise ValueError(f"the prompt has {num_prompt_tokens} tokens, but the model's context is {context}")
    max_new_tokens = settings.max_new_tokens(num_prompt_tokens)
    changed = {
        "max_length": None,  # transformers warns of two limits
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
    config = copy.deepcopy(settings.given)  # since transformers warns of a config with settings beside it
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
    if hasattr(config, "get_text_config"):  # of models that also see or hear
        config = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions"):
        tokens = getattr(config, name, None)
        if isinstance(tokens, int) and tokens > 0:
            return tokens
    return None


def _pad_token_id(tokenizer: Any, settings: _Settings) -> int:
    """One to pad with. It is masked, so that any will do; but generate also pads what has ended, where eos is none."""
    for ids in (settings["pad_token_id"], tokenizer.pad_token_id, settings["eos_token_id"], tokenizer.eos_token_id):
        for token_id in ids_of(ids):
            return token_id
    return 0
