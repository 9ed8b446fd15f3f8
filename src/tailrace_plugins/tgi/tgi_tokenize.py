"""`POST /tokenize` and `POST /chat_tokenize`. Four servers have the first path. The fields of a request say which one
is meant, and the answer has that server's form.

A request with `inputs` is TGI's or that of Text Embeddings Inference (TEI). It is TEI's if `inputs` is a list, if it
has `add_special_tokens`, or if the first model makes vectors, as for `/info`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from tailrace.dialects import (
    JsonBody,
    Messages,
    Operation,
    ParsedRequest,
    Reply,
    ServerFacts,
    Show,
    find_model,
    named_model,
    read_fields,
    read_messages,
    to_json,
)
from tailrace.errors import RequestError

__all__ = ["TOKENIZE", "TgiChatBody", "TokenizeBody", "find_adapter", "tokenize", "tokenize_chat"]

_NAMED = {"content", "prompt", "messages"}  # texts of servers whose requests name their model
_MAX_INPUTS = 1024


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`inputs` of TGI and TEI, `content` of llama.cpp's server, or `prompt` or `messages` of vLLM."""

    inputs: str | Annotated[list[str], msgspec.Meta(max_length=_MAX_INPUTS)] | None = None
    parameters: dict[str, Any] | None = None
    stream: bool = False
    content: str | None = None
    add_special: bool = False
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    model: str | None = None


class TgiChatBody(msgspec.Struct, kw_only=True):
    messages: Messages


def find_adapter(request: ParsedRequest) -> ServerFacts | None:
    """Return the model with the adapter that a request names; of /tokenize, in the forms of other servers, the model.
    TEI has one model, which makes vectors."""
    if not _NAMED.isdisjoint(request.body):
        return named_model(request)
    if _is_tei(request):
        return next((server for server in request.every if server.task != "generate"), request.server)
    parameters = request.body.get("parameters")
    return find_model(request, parameters.get("adapter_id") if isinstance(parameters, dict) else None)


def _is_tei(request: ParsedRequest) -> bool:
    body = request.body
    if isinstance(body.get("inputs"), list):
        return True
    if "inputs" not in body or "parameters" in body:
        return False
    return "add_special_tokens" in body or request.server.task != "generate"


def tokenize(request: ParsedRequest) -> Reply:
    """Answer in the form of the server whose request this is. Raises: RequestError."""
    fields, unused = read_fields(request.body, TokenizeBody)
    server, notes = request.server, list(unused)
    if sum(given is not None for given in (fields.inputs, fields.content, fields.prompt, fields.messages)) != 1:
        raise RequestError("Send one of `inputs`, `content`, `prompt` and `messages`.", param="inputs")
    if fields.inputs is not None:
        texts = [fields.inputs] if isinstance(fields.inputs, str) else fields.inputs
        found = [(text, server.prompts.tokenize(text, bos=fields.add_special_tokens)) for text in texts]
        shown: object = [_tei_tokens(server, *one) for one in found] if _is_tei(request) else _encode(*found[0])
    elif fields.content is not None:
        tokens = server.prompts.tokenize(fields.content, bos=fields.add_special)
        shown = {"tokens": [token_id for token_id, *_ in tokens]}
    else:
        if fields.messages is not None:
            _, tokens = server.prompts.tokenize_chat(read_messages(fields.messages, notes))
        else:
            tokens = server.prompts.tokenize(fields.prompt or "", bos=fields.add_special_tokens)
        ids = [token_id for token_id, *_ in tokens]
        shown = {"count": len(ids), "max_model_len": server.generator.limit_tokens(), "tokens": ids}
    return Reply(to_json(shown), ignored=tuple(notes))


def tokenize_chat(request: ParsedRequest) -> Reply:
    fields, unused = read_fields(request.body, TgiChatBody)
    notes = list(unused)
    text, tokens = request.server.prompts.tokenize_chat(read_messages(fields.messages, notes))
    shown = {"tokenize_response": _encode(text, tokens), "templated_text": text}
    return Reply(to_json(shown), ignored=tuple(notes))


def _tei_tokens(server: ServerFacts, text: str, tokens: Sequence[tuple[int, int, int]]) -> list[JsonBody]:
    """Return tokens as TEI does. Those that the model's tokenizer adds have no characters of the text."""
    return [
        {"id": token_id, "text": text[start:stop], "special": False, "start": start, "stop": stop}
        if start != stop
        else {
            "id": token_id,
            "text": server.prompts.detokenize((token_id,)),
            "special": True,
            "start": None,
            "stop": None,
        }
        for token_id, start, stop in tokens
    ]


def _encode(text: str, tokens: Sequence[tuple[int, int, int]]) -> list[JsonBody]:
    """Return ids with the start and end of their characters."""
    return [
        {"id": token_id, "text": text[start:stop], "start": start, "stop": stop} for token_id, start, stop in tokens
    ]


TOKENIZE = (
    Operation(
        "POST",
        "/tokenize",
        Show(tokenize, is_slow=True),
        "Show the tokens of a text, in the form of TGI, TEI, llama.cpp's server or vLLM.",
        body=TokenizeBody,
        example={"inputs": "What is Deep Learning?"},
    ),
    Operation(
        "POST",
        "/chat_tokenize",
        Show(tokenize_chat, is_slow=True),
        "Show the prompt and the tokens of a chat.",
        body=TgiChatBody,
        example={"messages": [{"role": "user", "content": "Hello"}]},
    ),
)
