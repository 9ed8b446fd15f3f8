import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from tailrace import dialects
from tailrace.dialects import (
    Encoder,
    Generate,
    GenerateCall,
    Operation,
    ParsedRequest,
    ServerFacts,
    SocketChat,
    StreamFacts,
    Wire,
)
from tailrace.types import Event, GenerateRequest, Released, Sampling, TextDelta


class Body(msgspec.Struct):
    say: str
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 64


def parse(http: ParsedRequest) -> GenerateCall:
    body, ignored = dialects.read_fields(http.body, Body)
    request = GenerateRequest(prompts=(body.say,), sampling=Sampling(max_tokens=body.max_tokens))
    return GenerateCall(request, Lines(), stream=True, ignored=ignored)


@dataclass(frozen=True, slots=True)
class Lines:
    media_type = "application/x-ndjson"
    heartbeat = b""

    def open(self, facts: StreamFacts) -> Encoder:
        return LinesEncoder()


class LinesEncoder(Encoder):
    def encode(self, seq: int, event: Event | Released) -> bytes:
        if isinstance(event, TextDelta):
            return json.dumps({"said": event.text}).encode() + b"\n" if event.text else b""
        if event.status != "done":
            return dialects.encode_error(dialects.failure_of(event))[1] + b"\n"
        return json.dumps({"tokens": event.usage.num_completion_tokens}).encode() + b"\n"

    def whole(self, events: Sequence[Event]) -> bytes:
        return b"".join(self.encode(seq, event) for seq, event in enumerate(events, 1))


class Talk(SocketChat):
    def __init__(self, server: ServerFacts) -> None:
        self._max_tokens = server.default_max_tokens

    def ask(self, prompt: str) -> GenerateRequest:
        return GenerateRequest(prompts=(prompt,), sampling=Sampling(max_tokens=self._max_tokens))

    def encode(self, event: Event) -> bytes:
        return event.text.encode() if isinstance(event, TextDelta) else b"(silence)"


WIRE = Wire(
    name="parrot",
    title="Lines of JSON, as a parrot says them",
    operations=(
        Operation("POST", "/parrot", Generate(parse), "Say it.", body=Body, example={"say": "Hello.", "max_tokens": 8}),
    ),
    encode_error=dialects.encode_error,
    sockets={"/parrot": Talk},
    prefix="/parrot",
)
