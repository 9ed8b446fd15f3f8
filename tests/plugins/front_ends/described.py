"""The fields of the wires of front ends, for docs/compatibility.md."""

from __future__ import annotations

from tests.described_api import Api, fields_of

from tailrace_plugins.front_ends import ag_ui_wire as ag_ui
from tailrace_plugins.front_ends import ai_sdk_wire as ai_sdk

__all__ = ["APIS"]

_UI_MESSAGE = {"id": "1", "role": "user", "parts": [{"type": "text", "text": "Hi"}]}
_USER = {"role": "user", "content": "Hi"}
_OTHER_USER = {"role": "user", "content": "Ho"}

APIS = [
    Api(
        "AI SDK",
        "POST /v1/ai-sdk/chat",
        {"id": "c", "messages": [_UI_MESSAGE]},
        fields_of(ai_sdk.UiChatBody) | set(ai_sdk.WIRE.unused),
        {
            "experimental_attachments": [{"url": "data:,"}],
            "frequencyPenalty": 0.5,
            "id": "d",
            "maxOutputTokens": 7,
            "messages": [_UI_MESSAGE, _UI_MESSAGE],
            "model": "default",
            "presencePenalty": 0.5,
            "reasoningEffort": "low",
            "seed": 7,
            "stopSequences": ["x"],
            "system": "Be brief.",
            "temperature": 0.5,
            "toolChoice": "required",
            "tools": {"look": {"inputSchema": {"type": "object"}}},
            "topK": 5,
            "topP": 0.5,
            "messageId": "m",
            "trigger": "regenerate-message",
        },
        {"toolChoice": {"tools": {"look": {"inputSchema": {"type": "object"}}}}},
        {
            "messageId": "the messages already are what it asks for",
            "trigger": "the messages already are what it asks for",
        },
    ),
    Api(
        "AI SDK",
        "GET /v1/ai-sdk/chat/{chat:path}/stream",
        {},
        ["messageId"],
        {"messageId": "m"},
        in_query=True,
    ),
    Api(
        "AG-UI",
        "POST /v1/ag-ui",
        {"threadId": "t", "runId": "r", "messages": [_USER]},
        fields_of(ag_ui.RunBody) | set(ag_ui.WIRE.unused) | {"forwardedProps.max_tokens", "forwardedProps.color"},
        {
            "context": [{"description": "a", "value": "b"}],
            "forwardedProps": {"temperature": 0.5},
            "forwardedProps.color": "red",
            "forwardedProps.max_tokens": 7,
            "messages": [_OTHER_USER],
            "parentRunId": "q",
            "protocolVersion": "1.0.0",
            "resume": [{"interruptId": "i"}],
            "runId": "s",
            "state": {"a": 1},
            "threadId": "u",
            "tools": [{"name": "look"}],
        },
        moot={
            "parentRunId": "a run needs no other one",
            "protocolVersion": "the events are those of all versions",
            "state": "the model does not see the state of an app",
        },
    ),
    Api(
        "AG-UI",
        "GET /v1/ag-ui",
        {"runId": "r"},
        ["runId", "offset"],
        {"runId": "s", "offset": "-1"},
        moot={"offset": "the run is sent from its beginning, and clients leave out the events that they have"},
        in_query=True,
    ),
]
