"""Makes prompts: any number of different questions, the same ones for the same random seed."""

from __future__ import annotations

from random import Random

from tailrace.models import ModelCard
from tailrace.text import ChatEncoder, ChatTemplate, Tokenizer
from tailrace.types import Message, ids_of

__all__ = ["PromptMaker"]

_TOPICS = (
    "rivers", "bread", "Ada Lovelace", "the colour of the sky", "counting to ten", "a dog", "mills", "glass", "trains",
    "the sea", "chess", "tea", "maps", "salt", "bees", "clocks", "silk", "owls", "iron", "rain", "ink", "wolves",
)  # fmt: skip
_QUESTIONS = (
    "Tell me about {}.",
    "Why do people like {}?",
    "Write a short story about {} and an old man.",
    "List three facts about {}.",
    "Explain {} to a child, in number {}.",
)


class PromptMaker:
    """Encodes questions as token ids, as a chat if the model has a chat template."""

    def __init__(self, card: ModelCard) -> None:
        self._tokenizer = Tokenizer.from_json(card.tokenizer_json)
        self._chat: ChatEncoder | None = None
        if card.chat_template is not None:
            template = ChatTemplate(card.chat_template, bos_token=card.bos_token, eos_token=card.eos_token)
            self._chat = ChatEncoder(self._tokenizer, template)

    def ids(self, question: str, *, system: str = "") -> tuple[int, ...]:
        if self._chat is None:
            return tuple(self._tokenizer.encode(f"{system}\n\n{question}\n" if system else question, special=True))
        messages = [Message("user", question)]
        if system:
            messages.insert(0, Message("system", system))
        return ids_of(self._chat.encode(messages))

    def question(self, draw: Random) -> str:
        return draw.choice(_QUESTIONS).format(draw.choice(_TOPICS), draw.randrange(10_000))

    def text(self, draw: Random, num_sentences: int) -> str:
        """Return a text of random sentences."""
        return " ".join(self.question(draw) for _ in range(num_sentences))
