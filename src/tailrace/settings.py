"""Every setting, once: flags, environment names and the reference page are made from this table."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

_HOST_NAME = re.compile(r"[^\s/:@?#\[\]*]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s,*]+", re.IGNORECASE)

__all__ = ["Setting", "Settings", "settings_table"]


# Any: dataclass fields take their type from the annotation
def _setting(
    default: Any,
    text: str,
    *,
    kind: type | None = None,
    least: float = 0,
    most: float = math.inf,
    choices: tuple[str, ...] = (),
    of_model: bool = False,
) -> Any:
    row = {"text": text, "kind": kind or type(default), "least": least, "most": most}
    return field(default=default, metadata=row | {"choices": choices, "of_model": of_model})


_model_setting = partial(_setting, of_model=True)


@dataclass(frozen=True, slots=True)
class Settings:
    """Units end the names: `_s` seconds, `_bytes`, `_tokens`."""

    host: str = _setting("127.0.0.1", "Address to listen on.")
    port: int = _setting(8000, "Port to listen on; 0 takes a free one.", most=65_535)
    engine: str = _model_setting(
        "auto",
        "What runs the model; auto chooses by the model and what is installed. `tailrace doctor` shows both.",
        choices=("auto", "openvino", "llamacpp", "vllm", "transformers"),
    )
    device: str = _model_setting(
        "", "Where the engine computes, in its own words: cpu, cuda, cuda:1, GPU.0. Empty lets it decide."
    )
    gpus: int = _model_setting(1, "GPUs over which vLLM spreads one model (tensor parallel).", least=1, most=64)
    kv_precision: str = _model_setting(
        "auto",
        "What OpenVINO keeps keys and values in: u8 holds most, f32 is most exact; auto is what the library takes.",
        choices=("auto", "u8", "bf16", "f16", "f32"),
    )
    dtype: str = _model_setting(
        "auto",
        "What transformers and vLLM compute in; auto is what the model was saved in.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    prompt_lookup_tokens: int = _model_setting(
        0,
        "Tokens that OpenVINO guesses ahead, out of what the prompt and the answer have said before, and checks in one "
        "step: quicker where an answer repeats its prompt. Nothing is claimed of exactness then. 0 is none.",
        most=16,
    )
    grammar_memory_bytes: int = _model_setting(
        2**29,
        "What the grammars may take that OpenVINO has compiled and keeps. Beyond it, the engine is replaced as soon as "
        "nothing runs; beyond twice as much, at once, and its streams run on behind the next one. 0 is no limit.",
    )
    adapter: str = _model_setting(
        "",
        "A LoRA adapter as PEFT saves it, for all requests: its directory, or adapter_model.safetensors in it. For "
        "openvino, transformers and vllm.",
    )
    adapter_scale: float = _model_setting(1.0, "By how much of it --adapter changes the model; 1 is as it was trained.")
    threads: int = _model_setting(0, "Threads the engine computes with; 0 lets it decide.")
    exact: bool | None = _model_setting(
        None,
        "Answers do not depend on what else is running or was asked before, so that they come out the same when an "
        "engine dies: full precision, no sequence decodes alone. --no-exact may be faster on processors with "
        "bfloat16, and reuses more in follow-up turns of a chat. For openvino, where it is on by default, and for "
        "llamacpp, where it is not, since it takes two thirds of the speed.",
        kind=bool,
    )
    prefix_cache: bool = _model_setting(
        True,
        "A prompt that begins like an earlier one starts sooner. With it, --exact has an exception: prompts with a "
        "repetition penalty. `tailrace certify` measures how exact this machine is.",
    )
    context_tokens: int = _model_setting(0, "Longest prompt and answer together; 0 is what the model was made for.")
    kv_tokens: int = _model_setting(65_536, "Tokens that the engine's memory holds, all streams together.", least=256)
    max_step_tokens: int = _model_setting(
        0,
        "Prompt tokens worked on in one step: less is smoother, more is faster. 0 is what suits the engine: 256, with "
        "llamacpp 512, with vllm what its own server has.",
    )
    load: str = _setting(
        "first",
        "What is loaded before requests are taken, of several models: the first one, or all.",
        choices=("first", "all"),
    )
    idle_unload_s: float = _model_setting(
        0.0, "Time without a stream after which a model is unloaded; its next request loads it. 0 is never."
    )
    memory_bytes: int = _setting(
        0, "Memory that the engines of several models may take together: idle ones make room for others. 0 is no limit."
    )
    max_sequences: int = _model_setting(64, "Sequences that run at once; more wait.", least=1)
    max_concurrent_requests: int = _model_setting(
        128, "Requests running and waiting; more are refused with 429.", least=1
    )
    default_max_tokens: int = _model_setting(1024, "Length of an answer whose client does not say.", least=1)
    prompt_template: str = _setting(
        "", "What prompts of the bare wires (/?prompt=, /query-stream, /generate-stream) are put into, at {prompt}."
    )
    reasoning: str = _model_setting(
        "auto",
        "What becomes of the reasoning of a model that thinks before it answers: auto tells it apart from the text in "
        "chats, text leaves it in the text.",
        choices=("auto", "text"),
    )
    strict: bool = _setting(False, "Refuse fields that have no effect, instead of naming them in X-Tailrace-Ignored.")
    queue_s: float = _setting(60.0, "How long a request may wait for its turn.")
    linger_s: float = _setting(60.0, "How long a stream of /v1/streams runs on with nobody reading.")
    retention_s: float = _setting(900.0, "How long a finished stream can still be read.")
    retention_bytes: int = _setting(256 * 2**20, "Room for finished streams; the oldest go first.")
    journal: str = _setting(
        "disk",
        "Where streams are kept: on disk, where they outlive this process, or in memory only.",
        choices=("disk", "memory"),
    )
    data_dir: str = _setting(
        "",
        "Directory of the journal, for one server at a time. Where it is not given it is in the user's data directory, "
        "one for each port; with --port 0 it is a temporary one.",
    )
    journal_sync_s: float = _setting(
        0.1, "How often the journal is synced to the disk, which is what a power cut may take.", least=0.01
    )
    journal_key_file: str = _setting("", "File with a secret of 32 characters or more; the journal is sealed with it.")
    keep_finished: bool = _setting(
        True,
        "Leave finished streams in the journal for their retention. Without it they are dropped from disk at their "
        "end, and can be read as long as this process runs.",
    )
    durable_bytes: int = _setting(
        64 * 2**20, "Memory for the streams that clients make at /v1/durable; beyond it 507. 0 closes /v1/durable."
    )
    durable_poll_s: float = _setting(20.0, "Longest wait of a long poll at /v1/durable.", least=0.1)
    heartbeat_s: float = _setting(
        10.0, "Silence after which a stream gets a comment line, so that proxies keep it open."
    )
    body_bytes: int = _setting(2_000_000, "Largest request body.", least=1)
    pending_body_bytes: int = _setting(
        256 * 2**20,
        "Memory for the bodies of all requests that have not begun to be answered, and at least one of --body-bytes; "
        "beyond it 429. The less is free, the smaller the bodies that are still taken.",
    )
    body_gap_s: float = _setting(1.0, "Longest wait for the next piece of a request body.", least=0.1)
    body_s: float = _setting(30.0, "Longest wait for a whole request body.", least=0.1)
    header_s: float = _setting(10.0, "Longest wait for the head of a request: its line and its headers.", least=0.1)
    keep_alive_s: int = _setting(
        20, "How long a connection stays open between an answer and the next request.", least=1
    )
    write_s: float = _setting(
        30.0,
        "Time in which a client takes 64 KiB, or all that waits for it; a slower one is cut off, and can resume.",
        least=0.1,
        most=86_400,
    )
    max_connections: int = _setting(
        10_000,
        "Connections open at once; more are refused with 503. Never more than the process's open files (ulimit -n) "
        "less 64.",
        least=1,
    )
    client_connections: int = _setting(
        0,
        "Connections open at once from one address. 0 is a tenth of all, and three quarters for a loopback address, "
        "from where a proxy may connect.",
    )
    stall_s: float = _model_setting(30.0, "Time without progress after which the engine is replaced.", least=0.1)
    load_s: float = _model_setting(600.0, "Longest time that the engine may take to load.", least=0.1)
    recover_s: float = _setting(
        120.0, "How long streams wait for an engine that was lost to be replaced, before they end.", least=0.1
    )
    spare_engine: bool = _model_setting(
        False, "Keep a second engine loaded, so that streams go on at once when the first is lost. Takes its memory."
    )
    drain_s: float = _setting(
        10.0, "Time that running streams get to finish on SIGTERM or Ctrl-C; what is left waits in the journal."
    )
    ws_sockets: int = _setting(1000, "WebSockets open at once; more are refused with 429.", least=1)
    ws_streams: int = _setting(64, "Streams that one WebSocket follows at once.", least=1)
    ws_message_bytes: int = _setting(2**20, "Largest message on a WebSocket.", least=1)
    ws_message_s: float = _setting(
        30.0, "Longest wait for the whole of a message on a WebSocket, from its first byte.", least=0.1
    )
    ws_ping_s: float = _setting(
        20.0, "Time between pings on a WebSocket; a client not heard for two is cut off. 0 is never."
    )
    ws_idle_s: float = _setting(
        3600.0, "How long a WebSocket stays open with nothing said by its client and nothing running. 0 is for ever."
    )
    allowed_hosts: str = _setting(
        "", "Further names under which this server may be addressed, separated by commas; * is any."
    )
    allowed_origins: str = _setting("", "Web origins that may call this server, separated by commas; * is any.")
    tls_cert: str = _setting("", "File of a certificate and its chain (PEM): speak TLS. Read again when it changes.")
    tls_key: str = _setting("", "File of the certificate's key (PEM). Empty is the file of the certificate.")
    tls_client_ca: str = _setting("", "File of certificates (PEM), one of which must have signed each client's own.")
    database: str = _setting(
        "",
        "Where keys and a row for each request are kept: sqlite:///… or postgresql+psycopg://…. Empty is "
        "records.sqlite in the data directory.",
    )
    record_text: bool = _setting(False, "Keep prompts and answers with the rows of requests, not only counts.")
    record_days: float = _setting(90.0, "How long the row of a request is kept; sums by the day stay. 0 is for ever.")
    response_days: float = _setting(
        30.0, "How long a response is kept in the database, where there is one. 0 is for ever."
    )
    insecure: bool = _setting(
        False, "Listen on other addresses than loopback though there are no keys: whoever reaches the port gets in."
    )
    log_level: str = _setting(
        "warning",
        "From which level on the log is shown, also that of apps under `tailrace run`; debug shows the libraries' too.",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = _setting("text", "Lines of text, or one JSON object a line.", choices=("text", "json"))
    access_log: bool = _setting(
        False, "One line in the log for each request when it is over; never prompts or answers."
    )

    audit_log: str = _setting(
        "",
        "File to which a line of JSON is added for each key that is made or changed, each request that is not let in, "
        "and each stream that is begun, stopped or deleted; never secrets, prompts or answers. SIGHUP opens it again.",
    )

    def __post_init__(self) -> None:
        """Raises: ValueError for what would leave a server that cannot do as it is told."""
        if self.prompt_template and "{prompt}" not in self.prompt_template:
            raise ValueError("--prompt-template has no {prompt}, where the prompt would go.")
        if (self.tls_key or self.tls_client_ca) and not self.tls_cert:
            raise ValueError("--tls-key and --tls-client-ca need a --tls-cert.")
        if self.adapter_scale != 1.0 and not self.adapter:
            raise ValueError("--adapter-scale is of an --adapter, and there is none.")
        for host in filter(None, map(str.strip, self.allowed_hosts.split(","))):
            if host != "*" and not _HOST_NAME.fullmatch(host) and not _is_address(host):
                raise ValueError("--allowed-hosts takes names without scheme and port, such as app.example, or *.")
        for origin in filter(None, map(str.strip, self.allowed_origins.split(","))):
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError("--allowed-origins takes origins such as https://app.example:8443, or *.")

    def of_model(self, own: Mapping[str, Any]) -> Settings:  # Any: of each setting's type
        """With what one of several models has for itself. The scale of an adapter goes with it. Raises: ValueError."""
        first: dict[str, Any] = {"adapter_scale": 1.0} if "adapter" in own else {}
        return replace(self, **{**first, **own})


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    name: str
    kind: type
    default: Any  # Any: of type `kind`, or None where it depends
    text: str
    least: float  # for numbers
    most: float
    choices: tuple[str, ...]  # for texts; none is any
    of_model: bool  # each of several models may have its own

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "TAILRACE_" + self.name.upper()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def settings_table() -> tuple[Setting, ...]:
    return tuple(Setting(name=row.name, default=row.default, **row.metadata) for row in fields(Settings))
