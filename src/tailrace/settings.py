"""All settings in one table. The flags, environment variables and docs/reference.md are made from it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from tailrace.extensions import Setting, installed_extensions

_HOST_NAME = re.compile(r"[^\s/:@?#\[\]*]+")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s,*]+", re.IGNORECASE)
_NAMED_PATH = re.compile(r"([A-Za-z0-9][A-Za-z0-9._:/-]{0,127})=(.+)", re.ASCII)  # ./a=b has no name
_METRIC_FAMILIES = ("tgi", "vllm")
_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_REDIS_SCHEMES = ("redis://", "rediss://", "redis+sentinel://", "rediss+sentinel://")

__all__ = ["Settings", "checked_settings", "settings_of", "settings_table"]


# Any: dataclass fields take their type from the annotation
def _setting(
    default: Any,
    text: str,
    *,
    kind: type | None = None,
    least: float = 0,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    of_model: bool = False,
    is_list: bool = False,
    reloads: bool = False,
) -> Any:
    kind = kind or type(default)
    row = {"text": text, "kind": kind, "least": least, "most": most, "choices": choices}
    return field(default=default, metadata=row | {"of_model": of_model, "is_list": is_list, "reloads": reloads})


_model_setting = partial(_setting, of_model=True)
_live, _live_model = partial(_setting, reloads=True), partial(_model_setting, reloads=True)


@dataclass(frozen=True, slots=True)
class Settings:
    """Units end the names: `_s` seconds, `_bytes`, `_tokens`."""

    host: str = _setting("127.0.0.1", "Address to listen on.")
    port: int = _setting(8000, "Port to listen on; 0 chooses a free one.", most=65_535)
    engine: str = _model_setting(
        "auto",
        "Engine that runs the model. auto chooses one that fits the model and is installed; see `tailrace doctor`.",
        choices=("auto", "openvino", "llamacpp", "vllm", "transformers"),
    )
    for_: str = _model_setting(
        "auto",
        "Expected load, for --engine auto: one stream, or many. For one, llamacpp is preferred to openvino, unless "
        "--exact or another setting that llamacpp does not support is given. auto means one with --max-sequences 1, "
        "and many otherwise.",
        choices=("auto", "one", "many"),
    )
    device: str = _model_setting(
        "",
        "Device of the engine: cpu, gpu, cuda, rocm, metal, vulkan, xpu or npu, with a number if there are several "
        "(cuda:1). Empty: the engine decides.",
    )
    gpus: int = _model_setting(1, "GPUs that vLLM splits one model across (tensor parallelism).", least=1, most=64)
    gpu_memory: float = _model_setting(
        0.0,
        "Share of a GPU's memory that vLLM takes for weights, KV cache and computation, such as 0.4 for one of two "
        "models on a GPU. 0: vLLM's own share, nearly all.",
        most=1,
    )
    kv_precision: str = _model_setting(
        "auto",
        "Number format of OpenVINO's KV cache. u8 is the smallest, f32 the most exact; auto is the library's default.",
        choices=("auto", "u8", "bf16", "f16", "f32"),
    )
    dtype: str = _model_setting(
        "auto",
        "Number format that transformers and vLLM compute in; auto is the format of the model's files.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    prompt_lookup_tokens: int = _model_setting(
        0,
        "Prompt lookup decoding in OpenVINO: tokens that are guessed per step from the prompt and the answer so far. "
        "Faster if an answer repeats itself or its prompt. 0 is off.",
        most=16,
    )
    draft: str = _model_setting(
        "",
        "Draft model in OpenVINO: a smaller model with the same vocabulary, named like the model itself, that guesses "
        "the next tokens. Answers stay the same. It guesses only where that saves time.",
    )
    draft_tokens: int = _model_setting(
        0, "Tokens that --draft guesses in each step, also where it saves no time. 0: as many as save time.", most=16
    )
    weights: str = _model_setting(
        "auto",
        "Bits of a weight in OpenVINO: 4, 8 or 16. auto keeps four bits where a GGUF file has them, and takes eight "
        "for all others, also for the files of a Hugging Face directory.",
        choices=("auto", "4", "8", "16"),
    )
    adapter: str = _model_setting(
        "",
        "LoRA adapter in PEFT's format: its directory, or its adapter_model.safetensors. It applies to all requests. "
        "NAME=PATH serves it as a model with this name, beside the model without it; may be repeated. Several in one "
        "text are separated by commas. For openvino, transformers and vllm.",
        is_list=True,
    )
    adapter_scale: float = _model_setting(1.0, "Weight of each --adapter; 1 is as it was trained.")
    threads: int = _model_setting(0, "Threads of the engine; 0: the engine decides.")
    exact: bool | None = _model_setting(
        None,
        "A replay after a crash of the engine gives the same answer, whatever other requests run. It uses full "
        "precision. --no-exact may be faster on processors with bfloat16, and "
        "reuses more of the prompt in a chat. For openvino (on by default) and llamacpp (off by default, because it "
        "costs two thirds of the speed).",
        kind=bool,
    )
    prefix_cache: bool = _model_setting(
        True,
        "Reuse the KV cache of earlier prompts with the same beginning.",
    )
    context_tokens: int = _model_setting(0, "Largest sum of prompt and answer; 0 is the model's context length.")
    kv_tokens: int = _model_setting(65_536, "Tokens in the engine's KV cache, for all streams together.", least=256)
    max_step_tokens: int = _model_setting(
        0,
        "Most prompt tokens in one step. A small number keeps the pauses of running streams short; a large one "
        "processes prompts faster. 0 is the engine's default: 256, for llamacpp 64 on a CPU and 512 on a GPU, for vllm "
        "that of its own server. llamacpp takes at least as many as --max-sequences.",
    )
    load: str = _setting(
        "first",
        "Which of several models are loaded before the server takes requests: the first one, or all.",
        choices=("first", "all"),
    )
    idle_unload_s: float = _live_model(
        0.0, "Time without a stream after which a model is unloaded. The next request loads it again. 0 is never."
    )
    memory_bytes: int = _live(
        0, "Memory limit for engines of several models. Loading one unloads idle ones to make room. 0 is no limit."
    )
    max_sequences: int = _model_setting(64, "Sequences that run at once; more are queued.", least=1)
    max_concurrent_requests: int = _live_model(128, "Requests running and queued; more are refused with 429.", least=1)
    default_max_tokens: int = _live_model(
        1024, "Longest answer if the request does not set a limit. /v1/completions uses 16, like OpenAI.", least=1
    )
    prompt_template: str = _live(
        "", "Template for prompts of the plain wires (/?prompt=, /query-stream, /generate-stream), with {prompt} in it."
    )
    reasoning: str = _model_setting(
        "auto",
        "Reasoning of models that think before they answer: auto separates it from the text in chats, text leaves it "
        "in the text.",
        choices=("auto", "text"),
    )
    reasoning_budget: int = _live_model(
        -1,
        "Most tokens of reasoning in an answer; then its end is forced, and the answer follows. -1 is no limit. "
        "Requests may set their own.",
        least=-1,
    )
    tool_format: str = _model_setting(
        "auto",
        "Format in which the model writes tool calls: auto finds it by the chat template; another name is one of the "
        "formats in docs/tools.md.",
    )
    strict: bool = _live(False, "Refuse fields that have no effect, instead of listing them in X-Tailrace-Ignored.")
    queue_s: float = _live(60.0, "Longest time of a request in the queue.")
    linger_s: float = _live(60.0, "How long a stream of /v1/streams continues without a reader.")
    retention_s: float = _setting(900.0, "How long a finished stream can still be read.")
    retention_bytes: int = _setting(256 * 2**20, "Space for finished streams; the oldest are dropped first.")
    journal: str = _setting(
        "disk",
        "Where streams are stored: disk, where they survive this process; memory; or the URL of a Redis or Valkey, "
        "where they survive this machine and other servers continue them: redis://HOST:PORT/0, rediss://… with TLS, "
        "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE. ?prefix=NAME separates two groups of servers.",
    )
    lease_s: float = _setting(
        10.0,
        "With a Redis in --journal: the longest time between the death of a server and the moment when another server "
        "continues its streams. A server that is stopped or cut off for half of this time loses its streams to the "
        "others.",
        least=1,
    )
    data_dir: str = _setting(
        "",
        "Directory of the journal; one server can use it at a time. The default is a directory for each port in the "
        "user's data directory; with --port 0, a temporary directory.",
    )
    journal_sync_s: float = _setting(
        0.1, "How often the journal is synced to the disk. A power cut loses what came after the last sync.", least=0.01
    )
    journal_key_file: str = _setting("", "File with a secret of 32 characters or more, which encrypts the journal.")
    journal_wait_s: float = _setting(
        5.0,
        "How long streams wait for a journal that cannot be written, or a Redis that does not answer. Then they end "
        "with an error. A failover of Redis takes 30 s with Sentinel's default.",
        least=0.1,
    )
    keep_finished: bool = _setting(
        True,
        "Keep finished streams in the journal for --retention-s. Otherwise they are deleted from disk at their end, "
        "and stay readable only while this process runs.",
    )
    heartbeat_s: float = _live(
        10.0, "Idle time after which a stream gets an event or a line without text, so that it is kept open."
    )
    body_bytes: int = _live(2_000_000, "Largest request body.", least=1)
    image_body_bytes: int = _live(
        20_000_000,
        "Largest request body with images, where a model reads them; at most an eighth of --pending-body-bytes. "
        "Besides the images it has at most --body-bytes.",
        least=1,
    )
    pending_body_bytes: int = _live(
        256 * 2**20,
        "Memory for the bodies of all requests without an answer yet, at least --body-bytes; beyond it 429. When less "
        "than half is free, large bodies are refused first.",
    )
    fetch_images: str = _setting(
        "",
        "Hosts from which images of questions are fetched, separated by commas; *.example.com allows all below a name, "
        "* any. Never from private addresses.",
    )
    body_gap_s: float = _live(1.0, "Timeout for the next piece of a request body.", least=0.1)
    body_s: float = _live(30.0, "Timeout for a whole request body.", least=0.1)
    header_s: float = _live(10.0, "Timeout for the head of a request: its request line and headers.", least=0.1)
    keep_alive_s: int = _live(
        90,
        "How long a connection stays open between a response and the next request. A proxy in front must give up idle "
        "connections earlier.",
        least=1,
    )
    write_s: float = _live(
        30.0,
        "Write timeout: a client must take 64 KiB, or all that is buffered, in this time. Otherwise it is "
        "disconnected, and can resume.",
        least=0.1,
        most=86_400,
    )
    max_connections: int = _live(
        10_000,
        "Connections open at once; more are refused with 503. The limit of open files (ulimit -n) minus 80 is also a "
        "limit.",
        least=1,
    )
    client_connections: int = _live(
        0,
        "Connections open at once from one address. 0 is a tenth of --max-connections; for loopback addresses, which "
        "may be proxies, three quarters.",
    )
    stall_s: float = _live_model(30.0, "Time without progress after which the engine is restarted.", least=0.1)
    load_s: float = _live_model(600.0, "Timeout for loading the engine.", least=0.1)
    recover_s: float = _live(
        120.0, "How long streams wait for a new engine after a crash, before they end with an error.", least=0.1
    )
    spare_engine: bool = _model_setting(
        False, "Keep a second engine loaded, so that streams continue at once after a crash. It needs as much memory."
    )
    shutdown_delay_s: float = _live(
        0.0,
        "How long new requests are still accepted after SIGTERM or Ctrl-C, while `/readyz` answers 503: until load "
        "balancers have seen it. Then --drain-s begins.",
    )
    drain_s: float = _live(
        10.0, "How long running streams may continue after SIGTERM or Ctrl-C; the journal keeps the others."
    )
    ws_sockets: int = _live(1000, "WebSockets open at once; more are refused with 429.", least=1)
    ws_owner_sockets: int = _live(
        200, "WebSockets that one owner of keys has open at once; more are refused with 429.", least=1
    )
    ws_streams: int = _live(64, "Streams that one WebSocket follows at once.", least=1)
    ws_message_bytes: int = _live(
        2**20, "Largest message on a WebSocket. On that of Responses, it may be as large as a request body.", least=1
    )
    ws_message_s: float = _live(30.0, "Timeout for a whole message on a WebSocket, from its first byte.", least=0.1)
    ws_ping_s: float = _live(
        20.0, "Time between pings on a WebSocket. A client that does not answer two is disconnected. 0 is never."
    )
    ws_idle_s: float = _live(
        3600.0, "How long a WebSocket stays open without a message from the client or a running request. 0 is forever."
    )
    allowed_hosts: str = _live("", "Further Host names of this server, separated by commas; * allows any.")
    allowed_origins: str = _live("", "Web origins that may call this server, separated by commas; * allows any.")
    root_path: str = _setting(
        "",
        "Path below which a proxy serves this server, such as /llm. The proxy must remove it from requests. The paths "
        "in answers begin with it.",
    )
    tls_cert: str = _setting("", "File with certificate and chain (PEM), for TLS. Reloaded when it changes.")
    tls_key: str = _setting("", "File with the certificate's private key (PEM). Empty: the key is in --tls-cert.")
    tls_client_ca: str = _setting("", "File with CA certificates (PEM), one of which must have signed each client's.")
    database: str = _setting(
        "",
        "Database for keys, conversations and requests: sqlite:///… or postgresql+psycopg://…. Empty is "
        "records.sqlite in the data directory.",
    )
    record_text: bool = _setting(False, "Store prompts and answers with requests, not only counts.")
    record_days: float = _live(90.0, "How long the rows of requests are kept. Sums per day stay. 0 is forever.")
    kept_image_bytes: int = _setting(
        2**30,
        "Size of all images in one owner's conversations and stored responses. With 0, they keep none.",
        least=0,
    )
    response_days: float = _live(
        30.0, "How long stored responses are kept in the database, if there is one. 0 is forever."
    )
    insecure: bool = _setting(
        False, "Allow other addresses than loopback without keys: all clients that reach the port have access."
    )
    log_level: str = _live(
        "warning",
        "Lowest level of log messages, also for apps under `tailrace run`. debug includes messages of libraries.",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = _live("text", "Log lines as text, or as one JSON object per line.", choices=("text", "json"))
    access_log: bool = _live(False, "Log one line per finished request, without prompts and answers.")
    metrics_as: str = _setting(
        "tgi", "Metric names of other servers beside tailrace's own at /metrics: tgi, vllm or vllm,tgi."
    )
    public_metrics: bool = _setting(False, "Show /metrics without a key: endpoint pickers and some scrapers send none.")
    audit_log: str = _setting(
        "",
        "File for the audit log: a line of JSON for each created or changed key, each failed authentication or "
        "authorization, and each started, stopped or deleted stream. It has no secrets, prompts "
        "or answers. SIGHUP reopens it.",
    )

    # Of extensions, by name: those that do not have their default. Any: of each setting's type
    of_extensions: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Raises: ValueError for settings that contradict each other, and invalid hosts, origins or paths."""
        if self.journal not in ("disk", "memory") and not self.journal.startswith(_REDIS_SCHEMES):
            raise ValueError("--journal takes disk, memory, or a URL such as redis://127.0.0.1:6379/0.")
        if self.prompt_template and "{prompt}" not in self.prompt_template:
            raise ValueError("--prompt-template must contain {prompt}.")
        if not self.metric_families <= set(_METRIC_FAMILIES):
            raise ValueError(f"--metrics-as takes {' and '.join(_METRIC_FAMILIES)}, separated by commas.")
        if (self.tls_key or self.tls_client_ca) and not self.tls_cert:
            raise ValueError("--tls-key and --tls-client-ca need --tls-cert.")
        if self.adapter_scale != 1.0 and not self.adapter:
            raise ValueError("--adapter-scale needs --adapter.")
        if self.draft_tokens and not self.draft:
            raise ValueError("--draft-tokens needs --draft.")
        _ = self.adapters
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ValueError("--root-path takes a path such as /llm, without a slash at its end.")
        for host in filter(None, map(str.strip, self.allowed_hosts.split(","))):
            if host != "*" and not _HOST_NAME.fullmatch(host) and not _is_address(host):
                raise ValueError("--allowed-hosts takes names without scheme and port, such as app.example, or *.")
        for origin in filter(None, map(str.strip, self.allowed_origins.split(","))):
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError("--allowed-origins takes origins such as https://app.example:8443, or *.")

    @property
    def shares_streams(self) -> bool:
        """Whether many servers have one log store."""
        return self.journal.startswith(_REDIS_SCHEMES)

    @property
    def metric_families(self) -> frozenset[str]:
        """The names in `metrics_as`."""
        return frozenset(filter(None, map(str.strip, self.metrics_as.split(","))))

    @property
    def adapters(self) -> dict[str, str]:
        """The paths in `adapter`, such as `poet=./poems,law=./law`, by their names; "" for the one without a name.
        Raises: ValueError for a name that is used twice."""
        found: dict[str, str] = {}
        for part in filter(None, map(str.strip, self.adapter.split(","))):
            match = _NAMED_PATH.fullmatch(part)
            name, path = (match[1], match[2]) if match else ("", part)
            if name in found:
                raise ValueError(f"--adapter has {f'the name {name} twice' if name else 'two paths without a name'}.")
            found[name] = path
        return found

    @property
    def is_for_one(self) -> bool:
        """Whether the engine is chosen for one stream."""
        return self.for_ == "one" or (self.for_ == "auto" and self.max_sequences == 1)

    @property
    def changed(self) -> dict[str, Any]:  # Any: of each setting's type
        """The settings that do not have their default, by name, without those of extensions."""
        return {row.name: value for row in _TABLE if (value := getattr(self, row.name)) != row.default}

    def of_model(self, own: Mapping[str, Any]) -> Settings:  # Any: of each setting's type
        """Return the settings with a model's own values. If the model has its own adapter, it does not inherit the
        scale of --adapter. Raises: ValueError."""
        first: dict[str, Any] = {"adapter_scale": 1.0} if "adapter" in own else {}
        return replace(self, **{**first, **own})

    def value_of(self, row: Setting) -> Any:  # Any: as above
        return getattr(self, row.name) if row in _TABLE else self.of_extensions.get(row.name, row.default)

    def taking(self, others: Settings) -> Settings:
        """Return the settings, with those that may change while a server runs (`Setting.reloads`) from others."""
        taken = {row.name: others.value_of(row) for row in settings_table() if row.reloads}
        own = {row.name: taken.pop(row.name) for row in _TABLE if row.reloads}
        return replace(self, **own, of_extensions={**self.of_extensions, **taken})


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


_TABLE = tuple(Setting(name=row.name, default=row.default, **row.metadata) for row in fields(Settings) if row.metadata)


def settings_table() -> tuple[Setting, ...]:
    """Return all settings: the fields of `Settings`, and then those of extensions."""
    known = {row.name for row in _TABLE}
    others = [row for extension in installed_extensions().values() for row in extension.settings]
    return (*_TABLE, *(row for row in others if row.name not in known))


def settings_of(values: Mapping[str, Any]) -> Settings:  # Any: of each setting's type
    """Return the settings with these values, also those of extensions. Raises: as `Settings`."""
    known = {row.name for row in _TABLE}
    return Settings(
        **{name: value for name, value in values.items() if name in known},
        of_extensions={name: value for name, value in values.items() if name not in known},
    )


def checked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:  # Any: of each setting's type
    """Check settings and return them. Raises: ValueError, which says what a value should be."""
    rows = {row.name: row for row in settings_table()}
    value: object
    for name, value in settings.items():
        row = rows.get(name)
        if row is None:
            raise ValueError("is not a setting.")
        kinds = (int, float) if row.kind is float else (row.kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and row.kind is not bool):
            raise ValueError(f"should be {_KINDS[row.kind]}.")
        if isinstance(value, (int, float)) and not row.least <= value <= row.limit:
            raise ValueError(f"should be from {row.least:g} to {row.limit:g}.")
        if row.choices and value not in row.choices and row.name != "engine":  # which may be of another package
            raise ValueError(f"should be one of {', '.join(row.choices)}.")
    return dict(settings)
