"""Turns the prompts of requests into segments: checks texts, applies the chat template, tokenises, checks lengths."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

import msgspec

from tailrace.errors import ContextLengthExceeded, RequestError, UnsupportedParameter
from tailrace.text import ChatEncoder, ChatFacts, Tokenizer
from tailrace.types import (
    IMAGE_MARK,
    Attachment,
    GenerateRequest,
    Image,
    Infill,
    Message,
    Prompt,
    ReasoningFormat,
    Sampling,
    Segment,
    ids_of,
    num_tokens_of,
)

__all__ = ["PromptEncoder", "images_of", "with_images", "without_images"]

_INLINE_CHARACTERS = 8_192  # tokenised on the event loop in about 2 ms; longer prompts are tokenised in a thread
_MESSAGE_CHARACTERS = 32  # that the template adds to each message, estimated


class PromptEncoder:
    """Encodes the prompts of one model. `chat` is None if the model has no chat template."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        chat: ChatEncoder | None,
        context_tokens: int,
        add_bos: bool,
        is_framed: bool = False,  # whether each text has what the tokenizer puts before it and behind it
    ) -> None:
        self.tokenizer = tokenizer
        self.chat = chat
        self.chat_facts = chat.facts if chat is not None else ChatFacts()
        self.context_tokens = context_tokens
        self._add_bos = add_bos or is_framed
        self._ends = tokenizer.ends if is_framed else ()

    @property
    def can_infill(self) -> bool:
        return self.tokenizer.can_infill

    def check(self, request: GenerateRequest) -> None:
        """Check what can be checked without encoding. Raises: RequestError."""
        if any(isinstance(prompt, Infill) for prompt in request.prompts) and not self.can_infill:
            raise UnsupportedParameter(
                "This model cannot fill a gap: it has no tokens that mark the text before and after it, or its server "
                "takes no such prompts. Models for code have them, such as Qwen2.5-Coder, StarCoder2 and Granite.",
                param="suffix",
            )
        if request.messages and self.chat is None:
            raise UnsupportedParameter("This model has no chat template; send a prompt instead.", param="messages")
        for image in images_of(request):
            if request.images and not self.tokenizer.control_tokens:
                raise UnsupportedParameter("This model takes images only in chats.", param=image.param)
            if not self.chat_facts.shows_images:
                raise UnsupportedParameter(
                    f"{image.param}: this model's chat template takes no images.", param=image.param
                )
        for name in request.template_values:
            if self.chat is None or not self.chat.knows(name):
                raise UnsupportedParameter(
                    "This model's chat template does not use a value of that name.", param="chat_template_kwargs"
                )
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        texts += _texts_of_infills(request)
        reasoning = (message.reasoning for message in request.messages)
        if any("\0" in text for text in (*texts, *request.sampling.stop, *_texts_of(request.messages), *reasoning)):
            raise RequestError("Text must not contain NUL characters.", param="prompt")

    def check_ids(self, sampling: Sampling) -> None:
        """Raises: RequestError for a token id that the model does not have."""
        given = {
            "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
            "stop_token_ids": sampling.stop_token_ids,
            "allowed_token_ids": sampling.allowed_token_ids,
        }
        for name, ids in given.items():
            if not all(0 <= token_id < self.tokenizer.vocab_size for token_id in ids):
                raise RequestError(f"{name} has a token id that the model does not have.", param=name)

    def bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return the ids of texts that an answer must not have: of each text as it is, and after a space if that is
        another token. Source: vLLM's `SamplingParams.update_from_tokenizer`.

        Raises: RequestError for text with lone surrogates.
        """
        found: list[tuple[int, ...]] = []
        for word in words:
            text = word.lstrip()
            first, inner = (tuple(self.tokenizer.encode(one, special=False)) for one in (text, f" {text}"))
            found.append(first)
            if len(inner) == len(first) and inner[0] != first[0]:
                found.append(inner)
        return tuple(ids for ids in found if ids)

    async def encode(self, request: GenerateRequest) -> tuple[Prompt, ...]:
        """Return the prompts with their texts and segments. Long prompts are encoded in a thread.

        Raises: ContextLengthExceeded, RequestError.
        """
        texts = self._texts(request)
        for text in texts:
            at_least = self.tokenizer.at_least_tokens(text)
            if at_least > self.context_tokens and request.truncate is None:
                raise ContextLengthExceeded(at_least, self.context_tokens, at_least=True)
        num_characters = sum(map(len, texts)) + _MESSAGE_CHARACTERS * (len(request.messages) + len(texts))
        num_characters += sum(len(message.reasoning) for message in request.messages)
        num_characters += sum(map(len, _texts_of_infills(request)))
        if num_characters <= _INLINE_CHARACTERS and not request.tools:
            prompts = self._encode(request, texts)
        else:
            prompts = await asyncio.to_thread(self._encode, request, texts)
        if not all(any(prompt.segments) for prompt in prompts):
            raise RequestError("The prompt is empty.", param="prompt")
        return prompts

    def count(self, request: GenerateRequest) -> int:
        """Return the number of tokens of all prompts, also beyond the context window. May take long.

        Raises: RequestError.
        """
        return sum(prompt.num_tokens for prompt in self._encode(request, self._texts(request)))

    def tokenize(self, text: str, *, bos: bool = True) -> list[tuple[int, int, int]]:
        """Return the ids of a prompt, each with the start and end of its characters. With `bos` it has the
        tokens that the model's prompts have around a text. May take long. Raises: RequestError for lone surrogates."""
        found = self.tokenizer.offsets(text, bos=bos and self._add_bos)
        return [*found, *((token_id, len(text), len(text)) for token_id in self._ends if bos)]

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, with that of special tokens.

        Raises: RequestError for an id that the model does not have.
        """
        if not all(0 <= token_id < self.tokenizer.vocab_size for token_id in token_ids):
            raise RequestError("The prompt has a token id that the model does not have.", param="prompt")
        return b"".join(self.tokenizer.pieces[token_id] for token_id in token_ids).decode("utf-8", "replace")

    def tokenize_chat(self, messages: tuple[Message, ...]) -> tuple[str, list[tuple[int, int, int]]]:
        """Return the text of a chat from the template, and its ids as in `tokenize`.

        Raises: UnsupportedParameter without a template.
        """
        if self.chat is None:
            raise UnsupportedParameter("This model has no chat template.", param="messages")
        return self.chat.offsets(messages)

    def _encode(self, request: GenerateRequest, texts: Iterable[str]) -> tuple[Prompt, ...]:
        if request.messages:
            assert self.chat is not None
            one, reasoning = self._encode_chat(self.chat, request)
            encoded = [one]
        else:
            encoded, reasoning = [self._segments(prompt, request) for prompt in request.prompts], None
        if request.truncate is not None:
            encoded = [self.tokenizer.last_tokens(segments, request.truncate) for segments in encoded]
        return tuple(Prompt(*both, reasoning, request.calls) for both in zip(texts, encoded, strict=True))

    def _encode_chat(
        self, chat: ChatEncoder, request: GenerateRequest
    ) -> tuple[tuple[Segment, ...], ReasoningFormat | None]:
        messages, continues = request.messages, request.continue_final
        # A grammar constrains the answer from its first token.
        grammar = request.sampling.grammar
        is_plain = (grammar is not None and not grammar.is_free) or request.sampling.max_reasoning_tokens == 0
        prompt = chat.encode(
            messages,
            tools=request.tools,
            values=request.template_values,
            continue_final=continues,
            without_reasoning=is_plain,
        )
        if not request.split_reasoning:
            return prompt, None
        return prompt, chat.reasoning_after(messages, prompt, continue_final=continues, without_reasoning=is_plain)

    def _segments(self, prompt: str | Infill | tuple[Segment, ...], request: GenerateRequest) -> tuple[Segment, ...]:
        if isinstance(prompt, Infill):
            return self.tokenizer.infill(prompt, bos=self._add_bos, room=request.truncate)
        if not isinstance(prompt, str):
            return prompt
        first, *texts = prompt.split(IMAGE_MARK)
        segments = list(self.tokenizer.segments(first, bos=self._add_bos))
        for image, text in zip(request.images[: len(texts)], texts, strict=True):
            own = tuple(self.tokenizer.encode(image.expansion, special=True))
            segments.append(Attachment(image.digest, image.media_type, len(own), own))
            segments += self.tokenizer.segments(text, bos=False)
        return tuple(filter(None, segments))

    def _texts(self, request: GenerateRequest) -> list[str]:
        """Return one string for each prompt. Raises: ContextLengthExceeded, RequestError."""
        if request.messages:
            return ["".join(_texts_of(request.messages))]
        return [self._text_of(prompt, request.truncate) for prompt in request.prompts]

    def _text_of(self, prompt: str | Infill | tuple[Segment, ...], truncate: int | None) -> str:
        if isinstance(prompt, str):
            return prompt.replace(IMAGE_MARK, "")
        if isinstance(prompt, Infill):
            return prompt.before
        if truncate is not None:
            prompt = self.tokenizer.last_tokens(prompt, truncate)
        if (num_tokens := num_tokens_of(prompt)) > self.context_tokens:
            raise ContextLengthExceeded(num_tokens, self.context_tokens)
        return self.detokenize(ids_of(prompt))


def _texts_of_infills(request: GenerateRequest) -> Iterator[str]:
    for prompt in request.prompts:
        if isinstance(prompt, Infill):
            yield from (prompt.before, prompt.after, *chain.from_iterable(prompt.files))


def images_of(request: GenerateRequest) -> tuple[Image, ...]:
    """Return the images of the prompts or of all messages, in order."""
    return request.images or tuple(image for message in request.messages for image in message.images)


def with_images(request: GenerateRequest, images: Iterable[Image]) -> GenerateRequest:
    """Return a request with other images instead of its own."""
    if request.images:
        return msgspec.structs.replace(request, images=tuple(images))
    rest = iter(images)
    messages = tuple(replace(one, images=tuple(islice(rest, len(one.images)))) for one in request.messages)
    return msgspec.structs.replace(request, messages=messages)


def without_images(request: GenerateRequest) -> GenerateRequest:
    """Return a request with the texts of its prompts alone."""
    messages = tuple(
        replace(one, content=one.content.replace(IMAGE_MARK, " "), images=()) if one.images else one
        for one in request.messages
    )
    prompts = tuple(one.replace(IMAGE_MARK, " ") if isinstance(one, str) else one for one in request.prompts)
    return msgspec.structs.replace(request, messages=messages, prompts=prompts, images=())


def _texts_of(messages: Iterable[Message]) -> Iterator[str]:
    """Return the contents and the tool calls of messages. Reasoning is left out, as in most templates."""
    for message in messages:
        calls = ((call.name, call.arguments) for call in message.tool_calls)
        yield from (
            message.content.replace(IMAGE_MARK, "") if message.images else message.content,
            *chain.from_iterable(calls),
        )
