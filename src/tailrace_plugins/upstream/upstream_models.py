"""A model on another server: its address, the kind of server, and its card.

`openai:http://host:8000/v1`, followed by `#model` if the server has several, or `tgi:http://host:8080`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import msgspec

from tailrace.engines import FoundModel
from tailrace.errors import ModelError
from tailrace.models import ModelCard

__all__ = ["KEY_VARIABLE", "Address", "UpstreamKind", "find_upstream", "infill_url", "upstream_key"]

# The kind of an OpenAI-compatible server decides which parameters it supports; `openai` is any other server.
UpstreamKind = Literal["openai", "vllm", "llamacpp", "tailrace", "tgi"]

KEY_VARIABLE = "TAILRACE_UPSTREAM_KEY"
_OPENAI_HOST = "api.openai.com"
_UNKNOWN_CONTEXT_TOKENS = 2**20  # the upstream server itself refuses prompts that are too long
_MAX_CONTEXT_TOKENS = 2**31
_TIMEOUT_S = 10.0
_NAMED = 8  # models listed in an error
_MAX_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Address:
    """A model of a server. `str` gives `kind:url#model`."""

    kind: UpstreamKind
    url: str  # the base URL of its routes, without a trailing slash
    model: str

    @property
    def host(self) -> str:
        """Host and port, for messages."""
        return urlsplit(self.url).netloc

    @property
    def is_hosted_openai(self) -> bool:
        return urlsplit(self.url).hostname == _OPENAI_HOST

    def __str__(self) -> str:
        return f"{self.kind}:{self.url}#{self.model}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse the result of `str`. Raises: ModelError."""
        kind, _, rest = text.partition(":")
        url, _, model = rest.partition("#")
        if kind not in get_args(UpstreamKind):
            raise ModelError(f"There is no kind of server named {kind!r}.")
        return cls(kind, url, model)  # type: ignore[arg-type]  # one of them


def upstream_key(url: str) -> str:
    """Return the key for a server, from the environment. OPENAI_API_KEY is sent only to OpenAI."""
    key = os.environ.get(KEY_VARIABLE, "")
    if not key and urlsplit(url).hostname == _OPENAI_HOST:
        key = os.environ.get("OPENAI_API_KEY", "")
    return key.strip()


def find_upstream(source: str) -> FoundModel:
    """Read a server's model from the server itself. Takes at most ten seconds.

    Raises: ModelError if the server cannot be reached, refuses, or does not have the model.
    """
    scheme, _, rest = source.partition(":")
    url, _, name = rest.partition("#")
    url = _checked(scheme, url)
    host = urlsplit(url).netloc
    if scheme == "tgi":
        found = _ask(f"{url}/info", host)
        if not isinstance(found.get("model_id"), str):
            raise ModelError(f"{host} does not say which model it runs; is it a TGI server?")
        kind: UpstreamKind = "tgi"
        can_infill = False
        name, context = name or found["model_id"], found.get("max_total_tokens")
    else:
        model = _choose(_ask(f"{url}/models", host), name, host, source.partition("#")[0])
        kind, name = _kind_of(model), model["id"]
        can_infill = _can_infill(kind, url, model)
        meta = model.get("meta")
        context = model.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
    card = ModelCard(
        name=name.rpartition("/")[2] if name.startswith("/") else name,  # llama.cpp's server shows its file system
        path=Path(),
        format="upstream",
        tokenizer_json="",
        chat_template=None,
        bos_token="",
        eos_token="",
        add_bos=False,
        eos_token_ids=(),
        context_tokens=context
        if isinstance(context, int) and 0 < context < _MAX_CONTEXT_TOKENS
        else _UNKNOWN_CONTEXT_TOKENS,
        architecture=kind,
        can_infill=can_infill,
    )
    return FoundModel(card, address=str(Address(kind, url, name)), secret=upstream_key(url))


def _checked(scheme: str, url: str) -> str:
    """Check an address; returns the base URL of the routes. Raises: ModelError."""
    import httpx

    try:
        parts = urlsplit(url)
        has_host = bool(httpx.URL(url).host.encode("idna")) and (parts.port is None or parts.port > 0)
    except (ValueError, httpx.InvalidURL):
        has_host = False
    if not has_host or parts.scheme not in ("http", "https"):
        raise ModelError(f"Write {scheme}:http://host:port{'/v1' if scheme == 'openai' else ''}, or https.")
    if "@" in parts.netloc:
        raise ModelError(f"The address must not contain a key. Put it into {KEY_VARIABLE}.")
    if parts.query:
        raise ModelError("The address of a server must not have a query.")
    url = url.rstrip("/")
    return f"{url}/v1" if scheme == "openai" and parts.path in ("", "/") else url


def _ask(url: str, host: str) -> dict[str, Any]:  # Any: JSON
    """Send a GET request; returns the JSON object. Raises: ModelError."""
    import httpx

    headers = {"accept-encoding": "identity"} | _authorization(url)
    try:
        with (
            httpx.Client(timeout=_TIMEOUT_S, follow_redirects=False) as client,
            client.stream("GET", url, headers=headers) as answer,
        ):
            body = b""
            for piece in answer.iter_raw():
                body += piece
                if len(body) > _MAX_BYTES:
                    raise ModelError(f"The answer of {host} is too large for a list of models.")
    except httpx.HTTPError as error:
        raise ModelError(f"{host} cannot be reached ({_reason(error)}). Does the server run there?") from None
    except ValueError:  # the key has characters that a header cannot contain
        raise ModelError(f"The key in {KEY_VARIABLE} has characters that an HTTP header cannot contain.") from None
    status = answer.status_code
    if status in (401, 403):
        refused = "rejects the key in" if upstream_key(url) else "needs a key: put it into"
        raise ModelError(f"{host} {refused} {KEY_VARIABLE}.")
    if status != 200:
        where = "" if status != 404 else f" at {urlsplit(url).path}; is the address complete?"
        raise ModelError(f"{host} answers with status {status}{where or '.'}")
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ModelError(f"{host} does not answer with JSON. Is it a model server?")
    return found


def _authorization(url: str) -> dict[str, str]:
    key = upstream_key(url)
    return {"authorization": f"Bearer {key}"} if key else {}


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _choose(found: dict[str, Any], name: str, host: str, source: str) -> dict[str, Any]:
    """Choose the model. Raises: ModelError."""
    listed = found.get("data")
    models = [one for one in listed if _is_model(one)] if isinstance(listed, list) else []
    if not models:
        raise ModelError(f"{host} lists no models. Is it an OpenAI-compatible server?")
    names = [model["id"] for model in models]
    if name:
        if name not in names:
            raise ModelError(f"{host} has no model {name}; it has {_some(names)}.")
        return dict(models[names.index(name)])
    if len(models) > 1:
        raise ModelError(f"{host} has {_some(names)}. Name one: {source}#{names[0]}")
    return dict(models[0])


def _is_model(one: object) -> bool:
    name = one.get("id") if isinstance(one, dict) else None
    return isinstance(name, str) and 0 < len(name) <= 500 and name.isprintable()


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _kind_of(model: dict[str, Any]) -> UpstreamKind:
    owner = model.get("owned_by")
    for kind in ("vllm", "llamacpp", "tailrace"):
        if owner == kind:
            return kind
    return "openai"


def infill_url(url: str) -> str:
    """Return where llama.cpp's server fills gaps. `url`: the base URL of OpenAI's routes."""
    return f"{url.removesuffix('/v1')}/infill"


def _can_infill(kind: UpstreamKind, url: str, model: dict[str, Any]) -> bool:
    """Return whether the model fills gaps. vLLM refuses `suffix`; of an unknown server nobody knows before it is
    asked."""
    match kind:
        case "tailrace":
            capabilities = model.get("capabilities")
            return isinstance(capabilities, list) and "insert" in capabilities
        case "llamacpp":
            return _llama_can_infill(infill_url(url), model["id"])
    return kind == "openai"


def _llama_can_infill(url: str, model: str) -> bool:
    """Ask with a request that lacks the texts: the answer is 501 if the model has no tokens for them, otherwise
    400."""
    import httpx

    try:
        answer = httpx.post(url, json={"model": model}, headers=_authorization(url), timeout=_TIMEOUT_S)
    except httpx.HTTPError:
        return False
    return answer.status_code == 400
