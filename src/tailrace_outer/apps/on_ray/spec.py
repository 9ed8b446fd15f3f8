"""What the replicas of the built-in server serve. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tailrace import DEFAULT_MODEL
from tailrace.errors import ModelError
from tailrace.settings import Settings, checked_settings, settings_of, settings_table
from tailrace.streams.opening import open_log_store
from tailrace.wording import did_you_mean

__all__ = ["DEFAULT_TARGET", "RayError", "ServerSpec", "check_app_settings", "check_redis", "read_replicas"]

DEFAULT_TARGET = 32
_MAX_REPLICAS = 1000
_REPLICAS = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
_ARGS = ("model", "models", "model_settings", "settings", "replicas", "target_requests", "autoscaling")
_SECRET = ("journal", "database")  # their URLs may have passwords
# Settings that Ray replaces: sockets, TLS and logs.
_NOT_ON_RAY = (
    "header_s", "write_s", "max_connections", "client_connections", "ws_message_s", "ws_ping_s", "tls_cert", "tls_key",
    "tls_client_ca", "log_format", "access_log", "audit_log",
)  # fmt: skip
_RAY_HAS_ITS_OWN = "cannot be used on Ray, which has its own sockets and logs."
# Settings of the front of `tailrace run`. On Ray there is no front.
_FRONT_SETTINGS = (
    "body_bytes", "body_gap_s", "ws_message_bytes", "load_s", "shutdown_delay_s", "drain_s", "allowed_hosts",
    "allowed_origins", "database",
)  # fmt: skip
# Settings that have an effect only if streams are stored in Redis.
_STREAM_SETTINGS = (
    "lease_s", "journal_wait_s", "linger_s", "heartbeat_s", "retention_s", "retention_bytes", "journal_key_file",
    "keep_finished",
)  # fmt: skip


class RayError(Exception):
    """Ray cannot do what was asked. The message says why."""


def check_app_settings(settings: Settings) -> None:
    """Raises: ValueError for a setting of `tailrace run` that means nothing on Ray."""
    _refuse(_NOT_ON_RAY, settings, _RAY_HAS_ITS_OWN)
    _refuse(_FRONT_SETTINGS, settings, "cannot be used on Ray: its proxies and the options of deployments apply.")
    if not settings.shares_streams:
        _refuse(
            _STREAM_SETTINGS, settings, "needs the URL of a Redis in --journal on Ray: without one, no stream is kept."
        )


def _refuse(names: Iterable[str], settings: Settings, reason: str) -> None:
    """Raises: ValueError if a setting of these names does not have its default."""
    rows = {row.name: row for row in settings_table()}
    for name in names:
        if getattr(settings, name) != rows[name].default:
            raise ValueError(f"{rows[name].flag} {reason}")


def check_redis(settings: Settings, *, of_apps: bool = False) -> None:
    """Raises: RayError if replicas cannot share their streams in the Redis of the settings."""

    async def check() -> None:
        with tempfile.TemporaryDirectory() as directory:
            async with open_log_store(settings, Path(directory), of_apps=of_apps):
                pass

    try:
        asyncio.run(check())
    except ModelError as error:
        raise RayError(error.message) from None


def read_replicas(text: str) -> tuple[int, int]:
    """Return the least and the greatest number of replicas of `N` or `MIN-MAX`. Raises: ValueError."""
    found = _REPLICAS.fullmatch(text)
    least = int(found[1]) if found else 0
    most = int(found[2] or least) if found else 0
    if not 1 <= least <= most <= _MAX_REPLICAS:
        raise ValueError(f"takes a number from 1 to {_MAX_REPLICAS}, such as 2, or a range, such as 2-8.")
    return least, most


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The models, settings and number of the replicas.

    Raises: ValueError for settings that replicas cannot honour.
    """

    first: str | None  # a model without a name of its own
    settings: Settings
    named: tuple[str, ...] = ()  # name=source
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # settings of single models; Any: of their types
    replicas: tuple[int, int] = (1, 1)  # least and greatest number
    target_requests: int = DEFAULT_TARGET  # running and waiting, per replica
    autoscaling: Mapping[str, Any] = field(default_factory=dict)  # of Ray's autoscaling_config; Any: of a YAML file

    def __post_init__(self) -> None:
        if not self.settings.shares_streams:
            raise ValueError(
                "on Ray, --journal must be the URL of a Redis, such as redis://127.0.0.1:6379/0: replicas come and go, "
                "and streams continue in other replicas."
            )
        _refuse(_NOT_ON_RAY, self.settings, _RAY_HAS_ITS_OWN)

    @property
    def num_gpus(self) -> int:
        """The GPUs of a replica."""
        device = self.settings.device.lower()
        is_gpu = device.startswith(("cuda", "gpu")) or (self.settings.engine == "vllm" and device != "cpu")
        return self.settings.gpus if is_gpu else 0

    @property
    def num_cpus(self) -> int:
        return self.settings.threads or 1

    @property
    def models_text(self) -> str:
        """The models, for messages."""
        return ", ".join([*([self.first] if self.first is not None else []), *self.named])

    @classmethod
    def of_args(cls, args: Mapping[str, Any]) -> ServerSpec:  # Any: of a YAML file
        """Read the `args` of a Serve config file.

        `model` is a source as for `tailrace serve`; `models` maps names to sources. `settings` are those of
        docs/reference.md by name; --journal and --database may be in the environment instead, as for `tailrace serve`.
        `model_settings` maps names of models to settings. `replicas` is a number or `MIN-MAX`; `autoscaling` has
        further options of Ray's `autoscaling_config`. Raises: ValueError, which names the field.
        """
        for key in args:
            if key not in _ARGS:
                raise ValueError(f"args has no field {key}.{did_you_mean(key, _ARGS)}")
        models = _texts(args.get("models", {}), "models")
        first = args.get("model", None if models else DEFAULT_MODEL)
        if first is not None and not isinstance(first, str):
            raise ValueError("args.model should be text.")
        own = _mapping(args.get("model_settings", {}), "model_settings")
        target = args.get("target_requests", DEFAULT_TARGET)
        if not isinstance(target, int) or isinstance(target, bool) or target < 1:
            raise ValueError("args.target_requests should be a whole number, at least 1.")
        try:
            replicas = read_replicas(str(args.get("replicas", 1)))
        except ValueError as error:
            raise ValueError(f"args.replicas {error}") from None
        for name in ("target_requests", "autoscaling"):
            if name in args and replicas[0] == replicas[1]:
                raise ValueError(f"args.{name} needs a range in args.replicas, such as 2-8.")
        variables = {name: os.environ.get(f"TAILRACE_{name.upper()}") for name in _SECRET}
        secret = {name: value for name, value in variables.items() if value is not None}
        return cls(
            first,
            settings_of(secret | _checked(args.get("settings", {}), "settings")),
            tuple(f"{name}={source}" for name, source in models.items()),
            {name: _checked(one, f"model_settings.{name}", of_model=True) for name, one in own.items()},
            replicas,
            target,
            _mapping(args.get("autoscaling", {}), "autoscaling"),
        )


def _checked(given: object, where: str, *, of_model: bool = False) -> dict[str, Any]:  # Any: of each setting's type
    rows = {row.name: row for row in settings_table() if row.of_model or not of_model}
    checked: dict[str, Any] = {}
    for name, value in _mapping(given, where).items():
        if name not in rows:
            raise ValueError(
                f"args.{where}.{name} is not a setting{' of a model' * of_model}.{did_you_mean(name, rows)}"
            )
        try:
            checked |= checked_settings({name: value})
        except ValueError as error:
            raise ValueError(f"args.{where}.{name} {error}") from None
    return checked


def _mapping(given: object, where: str) -> dict[str, Any]:  # Any: of a YAML file
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise ValueError(f"args.{where} should be a mapping.")
    return given


def _texts(given: object, where: str) -> dict[str, str]:
    texts = _mapping(given, where)
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"args.{where} should be a mapping of names to sources.")
    return texts
