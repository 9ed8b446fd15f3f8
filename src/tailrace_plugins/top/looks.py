"""Asks a server what it does: its streams and models at `/v1/admin`, its tokens at `/metrics`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tailrace.client import NOT_TRUSTED, is_not_trusted, trusted_certificates

__all__ = ["Look", "Looks", "NoLook"]

_TIMEOUT_S = 10.0


class NoLook(Exception):
    """The server cannot be asked, or refuses. The message is for the user."""


@dataclass(slots=True)
class Look:
    """What a server does at one time."""

    url: str
    at_s: float  # monotonic
    models: list[dict[str, Any]]  # Any: of JSON
    streams: list[dict[str, Any]]
    num_streams: int
    num_tokens: float | None = None  # of all answers so far; None: metrics cannot be read
    tokens_per_s: float | None = None  # since the last look
    stream_rates: dict[str, float] = field(default_factory=dict)  # tokens per second, by stream


class Looks:
    def __init__(self, url: str, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._url = url.rstrip("/")
        try:
            certificates = trusted_certificates()
        except ValueError as error:
            raise NoLook(str(error)) from None
        try:
            self._http = httpx.Client(base_url=self._url, headers=headers, timeout=_TIMEOUT_S, verify=certificates)
        except (ValueError, httpx.InvalidURL):
            raise NoLook(f"--url takes an address such as http://127.0.0.1:8000, not {url}.") from None
        self._last: Look | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()

    def take(self) -> Look:
        """Raises: NoLook."""
        streams = self._json("/v1/admin/streams")
        models = self._json("/v1/admin/models")
        look = Look(self._url, time.monotonic(), models["data"], streams["data"], streams["num_streams"])
        look.num_tokens = self._num_tokens()
        if (last := self._last) is not None:
            passed_s = max(1e-6, look.at_s - last.at_s)
            if look.num_tokens is not None and last.num_tokens is not None:
                look.tokens_per_s = max(0.0, look.num_tokens - last.num_tokens) / passed_s
            before = {one["id"]: one["completion_tokens"] for one in last.streams}
            for one in look.streams:
                if one["id"] in before:
                    new = one["completion_tokens"] - before[one["id"]]
                    look.stream_rates[one["id"]] = max(0.0, new) / passed_s
        self._last = look
        return look

    def _num_tokens(self) -> float | None:
        answer = self._get("/metrics")
        if answer.status_code != 200:
            return None
        families = text_string_to_metric_families(answer.text)
        samples = (one for family in families for one in family.samples if one.name == "tailrace_tokens_total")
        return sum(one.value for one in samples if one.labels["phase"] == "decode")

    def _json(self, path: str) -> dict[str, Any]:
        answer = self._get(path)
        if answer.status_code == 401:
            raise NoLook("The server needs a key with the scope admin: --key or TAILRACE_KEY.")
        if answer.status_code == 403:
            raise NoLook("The key does not have the scope admin.")
        try:
            found = answer.json()
            if answer.status_code == 200 and isinstance(found["data"], list):
                return dict(found)
        except (ValueError, KeyError, TypeError):
            pass
        raise NoLook(f"{self._url} is not a tailrace server, or an older one.")

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._http.get(path)
        except httpx.HTTPError as error:
            if is_not_trusted(error):
                raise NoLook(f"The server at {self._url} {NOT_TRUSTED}.") from None
            raise NoLook(f"{self._url} cannot be reached: {error}. Set another address with --url.") from None
