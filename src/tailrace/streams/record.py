"""What is known of a stream besides its events: enough to show it on any wire, and to run it again."""

from __future__ import annotations

import msgspec

from tailrace.types import Prompt, Sampling

__all__ = ["Claim", "Record"]


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """An Idempotency-Key, and what request it came with."""

    key: str
    fingerprint: bytes


class Record(msgspec.Struct, frozen=True):
    """A stream as it was asked for. Written before anybody hears of the stream."""

    stream_id: str
    created_s: float  # since the epoch
    model: str = ""
    memo: bytes = b""  # what the wire that began it wants to see again
    prompts: tuple[Prompt, ...] = ()  # as long as it runs
    sampling: Sampling = Sampling()  # seed and max_tokens are set
    num_prompt_tokens: int = 0
    num_choices: int = 1
    linger_s: float = 0.0  # how long nobody may read before it is cancelled; 0: not at all
    exact: bool = False  # GenerateRequest.exact
    claim: Claim | None = None
    caller: str = ""  # GenerateRequest.caller, as long as it runs

    @property
    def seed(self) -> int:
        return self.sampling.seed or 0

    def finished(self) -> Record:
        """What is still worth knowing once the stream has ended: not what was asked, nor by whom."""
        return msgspec.structs.replace(self, prompts=(), caller="")
