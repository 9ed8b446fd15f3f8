"""A model that another server runs: where it is, what kind of server that is, and its card.

`openai:http://host:8000/v1`, with `#model` behind it where there are several, or `tgi:http://host:8080`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import msgspec

from tailrace.errors import ModelError
from tailrace.models.card import ModelCard

__all__ = ["KEY_VARIABLE", "Address", "UpstreamKind", "find_upstream", "upstream_key"]

# What an OpenAI-compatible server calls itself decides what may be asked of it; `openai` is any other.
UpstreamKind = Literal["openai", "vllm", "llamacpp", "tailrace", "tgi"]

KEY_VARIABLE = "TAILRACE_UPSTREAM_KEY"
_OPENAI_HOST = "api.openai.com"
_UNKNOWN_CONTEXT_TOKENS = 2**20  # that server refuses what is too long, and this one lets it say so
_MOST_TOKENS = 2**31
_WAIT_S = 10.0
_NAMED = 8  # models listed in an error
_MAX_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Address:
    """A model of a server. As text it is `kind:url#model`."""

    kind: UpstreamKind
    url: str  # that its routes are below, with no slash at its end
    model: str

    @property
    def host(self) -> str:
        """For people."""
        return urlsplit(self.url).netloc

    @property
    def is_hosted_openai(self) -> bool:
        return urlsplit(self.url).hostname == _OPENAI_HOST

    def __str__(self) -> str:
        return f"{self.kind}:{self.url}#{self.model}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """What `str` made of one. Raises: ModelError."""
        kind, _, rest = text.partition(":")
        url, _, model = rest.partition("#")
        if kind not in get_args(UpstreamKind):
            raise ModelError(f"There is no kind of server named {kind!r}.")
        return cls(kind, url, model)  # type: ignore[arg-type]  # one of them


def upstream_key(url: str) -> str:
    """The key for a server, from the environment. OPENAI_API_KEY is OpenAI's own, and is shown to nobody else."""
    key = os.environ.get(KEY_VARIABLE, "")
    if not key and urlsplit(url).hostname == _OPENAI_HOST:
        key = os.environ.get("OPENAI_API_KEY", "")
    return key.strip()


def find_upstream(source: str) -> tuple[ModelCard, Address]:
    """Ask a server for its model. Takes as long as that server does, ten seconds at the most.

    Raises: ModelError if it cannot be reached, refuses, or does not have that model.
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
        name, context = name or found["model_id"], found.get("max_total_tokens")
    else:
        model = _choose(_ask(f"{url}/models", host), name, host, source.partition("#")[0])
        kind, name = _kind_of(model), model["id"]
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
        context_tokens=context if isinstance(context, int) and 0 < context < _MOST_TOKENS else _UNKNOWN_CONTEXT_TOKENS,
        architecture=kind,
    )
    return card, Address(kind, url, name)


def _checked(scheme: str, url: str) -> str:
    """The address that routes are below. Raises: ModelError."""
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        has_host = False
    if not has_host or parts.scheme not in ("http", "https"):
        raise ModelError(f"Write {scheme}:http://host:port{'/v1' if scheme == 'openai' else ''}, or https.")
    if "@" in parts.netloc:
        raise ModelError(f"A key does not belong into an address; put it into {KEY_VARIABLE}.")
    if parts.query:
        raise ModelError("The address of a server has no query.")
    url = url.rstrip("/")
    return f"{url}/v1" if scheme == "openai" and parts.path in ("", "/") else url


def _ask(url: str, host: str) -> dict[str, Any]:  # Any: JSON
    """Raises: ModelError for all that is not an object of JSON."""
    import httpx

    key = upstream_key(url)
    headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        with (
            httpx.Client(timeout=_WAIT_S, follow_redirects=False) as client,
            client.stream("GET", url, headers=headers) as answer,
        ):
            body = b""
            for piece in answer.iter_raw():
                body += piece
                if len(body) > _MAX_BYTES:
                    raise ModelError(f"{host} answers with more than a list of models.")
    except httpx.HTTPError as error:
        raise ModelError(f"{host} cannot be reached ({_reason(error)}). Does the server run there?") from None
    except ValueError:  # a key that no header can hold
        raise ModelError(f"The key in {KEY_VARIABLE} has characters that a header cannot have.") from None
    status = answer.status_code
    if status in (401, 403):
        refused = "refuses the key in" if key else "wants a key: put it into"
        raise ModelError(f"{host} {refused} {KEY_VARIABLE}.")
    if status != 200:
        where = "" if status != 404 else f" at {urlsplit(url).path}; is the address complete?"
        raise ModelError(f"{host} answers with status {status}{where or '.'}")
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ModelError(f"{host} answers with something else than JSON; is it a server of models?")
    return found


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _choose(found: dict[str, Any], name: str, host: str, source: str) -> dict[str, Any]:
    """The model that is meant. Raises: ModelError."""
    listed = found.get("data")
    models = [one for one in listed if _is_model(one)] if isinstance(listed, list) else []
    if not models:
        raise ModelError(f"{host} lists no models; is it an OpenAI-compatible server?")
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
