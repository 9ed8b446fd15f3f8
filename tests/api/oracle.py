"""The expected answers of the scripted engine, and their form on each wire, computed without the code under test.

Only the engine's own function, `scripted_token`, and its vocabulary are taken from it. Prompts become their bytes.
"""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tailrace_outer.scripted.scripted_engine import CONTROL_TOKENS, scripted_token, tokenizer_json

__all__ = ["LOGPROB", "Answer", "chat_ids"]

LOGPROB = -0.5
_VOCABULARY = {index: text for text, index in json.loads(tokenizer_json())["model"]["vocab"].items()}


def chat_ids(content: str) -> tuple[int, ...]:
    """Return the ids of a chat with one user message, in the engine's template."""
    user, assistant = (256 + CONTROL_TOKENS.index(token) for token in ("<|user|>", "<|assistant|>"))
    return (user, *f"{content}\n".encode(), assistant)


def _piece(token_id: int) -> bytes:
    return bytes([token_id]) if token_id < 256 else _VOCABULARY[token_id].replace("Ġ", " ").encode()


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)


@dataclass(frozen=True)
class Answer:
    """The expected answer: `count` tokens, ended by length. `thinks` of them are reasoning, between markers."""

    prompt: str | tuple[int, ...]
    count: int
    seed: int = 0
    thinks: int = 0
    utf8: bool = True

    @cached_property
    def prompt_ids(self) -> tuple[int, ...]:
        return tuple(self.prompt.encode()) if isinstance(self.prompt, str) else self.prompt

    @cached_property
    def token_ids(self) -> list[int]:
        ids, seed = self.prompt_ids, self.seed
        return [scripted_token(ids, seed, at, utf8=self.utf8, thinks=self.thinks) for at in range(self.count)]

    @cached_property
    def texts(self) -> list[str]:
        """Return the text of each token: a character belongs to its last byte, an incomplete one to the last token."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        last = self.count - 1
        return [decoder.decode(_piece(token), index == last) for index, token in enumerate(self.token_ids)]

    @cached_property
    def pieces(self) -> list[bytes]:
        return [_piece(token_id) for token_id in self.token_ids]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def split(self) -> tuple[str, str]:
        """Return reasoning and text."""
        reasoning, _, text = self.text.removeprefix("<think>").partition("</think>")
        return reasoning.strip(), text.lstrip()

    @property
    def usage(self) -> dict[str, int]:
        return _usage(len(self.prompt_ids), self.count)

    def native(self, stream_id: str, *, choice: int = 0) -> list[bytes]:
        """Return the events of /v1/streams, with the terminal one."""
        events = []
        for seq, (text, token_id) in enumerate(zip(self.texts, self.token_ids, strict=True), 1):
            fields: dict[str, object] = {"text": text, "token_ids": [token_id]}
            if seq == self.count:
                fields["finish_reason"] = "length"
            retry = "retry: 1000\n" if seq == 1 else ""
            events.append(f"{retry}data: {_compact(fields)}\nid: {stream_id}-{seq}\n\n".encode())
        end = _compact({"status": "done", "usage": self.usage})
        events.append(f"event: done\ndata: {end}\nid: {stream_id}-{self.count + 1}\n\n".encode())
        return events

    def tgi(self, *, prompt_text: str = "", details: dict[str, Any] | None = None) -> bytes:  # Any: of JSON
        """Return the events of a TGI stream. If `prompt` is given, the whole text begins with it."""
        frames = []
        for index, text in enumerate(self.texts, 1):
            is_last = index == self.count
            frame = {
                "index": index,
                "token": {"id": self.token_ids[index - 1], "text": text, "logprob": LOGPROB, "special": False},
                "generated_text": prompt_text + self.text if is_last else None,
                "details": details if is_last else None,
            }
            frames.append(f"data: {_compact(frame)}\n\n")
        return "".join(frames).encode()

    def openai_chat(self, completion_id: str, created_s: int, *, include_usage: bool = False) -> bytes:
        """Return the chunks of /v1/chat/completions."""
        deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": text} for text in self.texts if text]
        choices = [[_chat_choice(delta, None)] for delta in deltas] + [[_chat_choice({}, "length")]]
        return self._chunks(completion_id, "chat.completion.chunk", created_s, choices, include_usage)

    def openai_text(self, completion_id: str, created_s: int, *, include_usage: bool = False) -> bytes:
        """Return the chunks of /v1/completions."""
        choices = []
        for index, text in enumerate(self.texts, 1):
            finish = "length" if index == self.count else None
            if text or finish:
                choices.append([{"text": text, "index": 0, "logprobs": None, "finish_reason": finish}])
        return self._chunks(completion_id, "text_completion", created_s, choices, include_usage)

    def _chunks(
        self, completion_id: str, kind: str, created_s: int, choices: list[list[dict[str, Any]]], include_usage: bool
    ) -> bytes:
        if include_usage:
            choices = [*choices, []]
        frames = []
        for choice in choices:
            head = {
                "id": completion_id,
                "object": kind,
                "created": created_s,
                "model": "scripted",
                "system_fingerprint": "fp_tailrace",
            }
            usage = {"usage": None if choice else self.usage} if include_usage else {}
            frames.append(f"data: {_compact({**head, 'choices': choice, **usage})}\n\n")
        return "".join([*frames, "data: [DONE]\n\n"]).encode()


def _chat_choice(delta: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _usage(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }
