"""`tailrace from-tgi`: what the flags of text-generation-launcher become. The flags are those of TGI 3.3.7, the last
release of an archived project."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click

__all__ = ["FLAGS", "VARIABLES", "Flag", "from_tgi", "translated"]

_PORT, _HOST = "3000", "0.0.0.0"  # noqa: S104  # TGI's defaults
_LEVELS = {"trace": "debug", "debug": "debug", "info": "info", "warn": "warning", "error": "error"}


class Flag(NamedTuple):
    """A flag of the launcher. `becomes` is a flag of `tailrace serve` with the same value, which only these `engines`
    have, if there are any; `note` says what else is to be known, or why nothing replaces it. With `is_refused`,
    answers would differ without it."""

    becomes: str = ""
    note: str = ""
    has_value: bool = True
    short: str = ""
    is_refused: bool = False
    engines: tuple[str, ...] = ()
    is_repeated: bool = False  # it may be there more than once


_BATCHING = "not needed: prompts are computed in pieces beside the running streams"
_CUDA = "not needed: the engine decides"
_SHARDS = "not needed: vLLM starts the processes of its GPUs"

FLAGS: dict[str, Flag] = {
    "model-id": Flag(note="becomes the MODEL: a directory, hf:ORG/NAME, or a name of `tailrace ls --available`"),
    "revision": Flag(note="main is fetched; of another, `hf download`, and serve its directory", is_refused=True),
    "tokenizer-config-path": Flag(note="has no counterpart: put the file into the model's directory", is_refused=True),
    "sharded": Flag(note="false becomes --gpus 1; true alone has no effect: --num-shard says how many"),
    "num-shard": Flag(note="becomes --engine vllm --gpus N, if larger than 1"),
    "quantize": Flag(note="left out: files state it; openvino takes others in eight bits, or in four with --weights 4"),
    "dtype": Flag("--dtype", "for vllm and transformers", engines=("vllm", "transformers")),
    "kv-cache-dtype": Flag(note="has no counterpart: the default engine keeps keys and values in eight bits"),
    "speculate": Flag(
        "--prompt-lookup-tokens", "for openvino; --draft takes a smaller model instead", engines=("openvino",)
    ),
    "trust-remote-code": Flag(note="has no counterpart: code of a repository never runs", has_value=False),
    "lora-adapters": Flag(note="becomes --adapter NAME=DIRECTORY for each; an id of the hub must be fetched before"),
    "rope-scaling": Flag(note="has no counterpart: put rope_scaling into the model's config.json", is_refused=True),
    "rope-factor": Flag(note="has no counterpart: put rope_scaling into the model's config.json", is_refused=True),
    "max-total-tokens": Flag("--context-tokens"),
    "max-input-tokens": Flag(note="not needed: prompt and answer share --context-tokens"),
    "max-input-length": Flag(note="not needed: prompt and answer share --context-tokens"),
    "max-batch-total-tokens": Flag("--kv-tokens"),
    "max-batch-prefill-tokens": Flag("--max-step-tokens"),
    "max-batch-size": Flag("--max-sequences"),
    "max-concurrent-requests": Flag("--max-concurrent-requests"),
    "max-waiting-tokens": Flag(note=_BATCHING),
    "waiting-served-ratio": Flag(note=_BATCHING),
    "max-best-of": Flag(note="not needed: the limit is fixed"),
    "max-stop-sequences": Flag(note="not needed: the limit is fixed"),
    "max-top-n-tokens": Flag(note="not needed: the limit is fixed, at 20 or less by engine"),
    "max-client-batch-size": Flag(note="not needed: each prompt of a request counts as one"),
    "payload-limit": Flag("--body-bytes"),
    "hostname": Flag("--host"),
    "port": Flag("--port", short="p"),
    "prometheus-port": Flag(note="/metrics is at --port; with keys, --public-metrics shows it without one"),
    "api-key": Flag(note="becomes a new key, of `tailrace keys create NAME`; clients send it in the same header"),
    "cors-allow-origin": Flag("--allowed-origins", is_repeated=True),
    "graceful-termination-timeout": Flag("--drain-s", "streams that take longer continue after the restart", short="g"),
    "json-output": Flag(note="becomes --log-format json", has_value=False),
    "otlp-endpoint": Flag(note="`--otlp`, which takes OTLP over HTTP (port 4318) and needs tailrace[otlp]"),
    "otlp-service-name": Flag(note="the variable `OTEL_SERVICE_NAME`"),
    "huggingface-hub-cache": Flag(note="becomes the variable HF_HUB_CACHE"),
    "weights-cache-override": Flag(note="becomes the variable HF_HUB_CACHE"),
    "validation-workers": Flag(note="not needed: long prompts are tokenized in other threads"),
    "cuda-graphs": Flag(note=_CUDA),
    "cuda-memory-fraction": Flag("--gpu-memory", "for vllm", engines=("vllm",)),
    "disable-custom-kernels": Flag(note=_CUDA, has_value=False),
    "shard-uds-path": Flag(note=_SHARDS),
    "master-addr": Flag(note=_SHARDS),
    "master-port": Flag(note=_SHARDS),
    "disable-grammar-support": Flag(note="not needed: grammars are limited in time and memory", has_value=False),
    "enable-prefill-logprobs": Flag(note="not needed: requests that ask for them get them", has_value=False),
    "watermark-gamma": Flag(note="has no counterpart: X-Tailrace-Ignored names `watermark`"),
    "watermark-delta": Flag(note="has no counterpart: X-Tailrace-Ignored names `watermark`"),
    "ngrok": Flag(note="has no counterpart: put a tunnel in front", has_value=False),
    "ngrok-authtoken": Flag(note="has no counterpart: put a tunnel in front"),
    "ngrok-edge": Flag(note="has no counterpart: put a tunnel in front"),
    "usage-stats": Flag(note="not needed: nothing is sent to anybody"),
    "env": Flag(note="becomes `tailrace doctor`", has_value=False, short="e"),
}  # fmt: skip

# The launcher's variables that have no flag.
VARIABLES = {
    "LOG_LEVEL": "becomes --log-level; its filters for single modules become nothing",
    "PREFIX_CACHING": "becomes --no-prefix-cache, unless it is 1 or true",
    "PREFILL_CHUNKING": _BATCHING,
    "ATTENTION": _CUDA,
    "USE_FLASH_ATTENTION": _CUDA,
    "TGI_WIGGLE_ROOM": _CUDA,
    "CUDA_VISIBLE_DEVICES": "has its effect; TGI counts its shards in it, and here --num-shard says how many",
    "HF_API_TOKEN": "not read: HF_TOKEN is",
    "HF_HUB_ENABLE_HF_TRANSFER": "not needed: large files are fetched without hf_transfer",
}


class Translation(NamedTuple):
    """The words of a command line, variables that it needs, and a line about each flag that needs one."""

    words: list[str]
    variables: dict[str, str]
    notes: list[str]


def translated(given: Mapping[str, str], variables: Mapping[str, str]) -> Translation:
    """Return what a launcher's flags become: values by name, without dashes; switches have an empty one. `variables`
    are those of `VARIABLES` that are set. Flags that some engines refuse are left out, unless the command names an
    engine that has them.

    Raises: click.UsageError for a flag without which answers would differ, or whose value is wrong.
    """
    if given.get("revision") == "main":
        given = {name: value for name, value in given.items() if name != "revision"}
    if refused := [name for name in given if FLAGS[name].is_refused]:
        raise click.UsageError(" ".join(f"--{name} {FLAGS[name].note}." for name in refused))
    words = [_model(given["model-id"])] if given.get("model-id") else []
    own = {**given, "hostname": given.get("hostname", _HOST), "port": given.get("port", _PORT)}
    shards = _num_shards(own)
    engine = ("--engine", "vllm", "--gpus", str(shards)) if shards > 1 else ()
    left_out = [name for name in given if (able := FLAGS[name].engines) and not set(able) & set(engine)]
    for name, value in own.items():
        if FLAGS[name].becomes and name not in left_out:
            words += [FLAGS[name].becomes, value]
    words += [*engine, *_special(own), *_of_variables(variables)]
    caches = [given[name] for name in ("huggingface-hub-cache", "weights-cache-override") if name in given]
    notes = [*_notes(given, left_out), *(f"{name}: {VARIABLES[name]}" for name in variables)]
    if "--insecure" in words:
        notes.append(
            "like TGI without --api-key, this server answers everybody who reaches its port (docs/security.md)"
        )
    return Translation(words, {"HF_HUB_CACHE": caches[-1]} if caches else {}, notes)


def _notes(given: Mapping[str, str], left_out: Sequence[str]) -> Iterator[str]:
    """Yield a line about each flag that needs one."""
    for name, value in given.items():
        flag = FLAGS[name]
        if name in left_out:
            words = f"--engine {flag.engines[0]} {flag.becomes} {value}"
            yield f"--{name}: left out, since the engine may be one that does not have it. With it: {words}"
        elif flag.note and name != "model-id":
            yield f"--{name}: {flag.note}"


def _model(name: str) -> str:
    if "/" not in name or name.startswith(("/", ".")) or Path(name).is_dir():
        return name  # without a slash it is a name of the catalogue: repositories have one
    return f"hf:{name}"


def _num_shards(given: Mapping[str, str]) -> int:
    shards = given.get("num-shard", "1")
    if not shards.isdecimal() or not int(shards):
        raise click.UsageError(f"--num-shard should be a number from 1, and is {shards!r}.")
    return 1 if given.get("sharded") == "false" else int(shards)


def _special(given: Mapping[str, str]) -> Iterator[str]:
    """Yield the words for flags whose values change."""
    for adapter in filter(None, given.get("lora-adapters", "").split(",")):
        name, separator, path = adapter.strip().partition("=")
        yield from ("--adapter", f"{name}={path}" if separator else f"{name}={name}")
    if "json-output" in given:
        yield from ("--log-format", "json")
    if "api-key" not in given and given["hostname"] not in ("127.0.0.1", "localhost", "::1"):
        yield "--insecure"


def _of_variables(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the words for variables that have no flag."""
    for word in variables.get("LOG_LEVEL", "").lower().split(","):
        if word in _LEVELS:
            yield from ("--log-level", _LEVELS[word])
    if variables.get("PREFIX_CACHING", "true").lower() not in ("1", "true"):
        yield "--no-prefix-cache"


def _variable(name: str) -> str | None:
    """Return the launcher's environment variable for a flag. Containers set HOSTNAME themselves."""
    return None if name in ("hostname", "env") else name.replace("-", "_").upper()


def _options() -> list[click.Parameter]:
    return [
        click.Option(
            [f"--{name}", *([f"-{flag.short}"] if flag.short else []), name.replace("-", "_")],
            is_flag=not flag.has_value,
            multiple=flag.is_repeated,
            metavar="VALUE" if flag.has_value else None,
            envvar=_variable(name),
            help=": ".join(text for text in (flag.becomes, flag.note) if text) + ".",
        )
        for name, flag in FLAGS.items()
    ]  # fmt: skip


@click.pass_context
def _from_tgi(context: click.Context, /, run: bool, **values: str | bool | tuple[str, ...] | None) -> None:
    """Show the command of tailrace for a command line of Text Generation Inference.

    \b
    tailrace from-tgi --model-id Qwen/Qwen3-4B --max-total-tokens 4096
    tailrace from-tgi --run --model-id /data/model --port 8080      in a container, instead of TGI's image

    The flags and variables (MODEL_ID, NUM_SHARD, …) are those of text-generation-launcher 3.3.7. The command goes to
    standard output, remarks to standard error. docs/from-tgi.md says what changes for clients, and what does not.
    """
    given = {
        name: "" if value is True else ",".join(value) if isinstance(value, tuple) else str(value)
        for name in FLAGS
        if (value := values[name.replace("-", "_")]) not in (None, False, ())
    }
    if not given.get("model-id"):
        raise click.UsageError("--model-id is missing: the model that TGI serves.", context)
    words, variables, notes = translated(given, {name: os.environ[name] for name in VARIABLES if name in os.environ})
    for note in notes:
        click.echo(f"# {note}", err=True)
    if run:
        os.environ.update(variables)
        for name in given:  # PORT and the like mean nothing to the server
            os.environ.pop(_variable(name) or "", None)
        os.execv(sys.executable, [sys.executable, "-m", "tailrace", "serve", *words])  # noqa: S606
    settings = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    click.echo(" ".join([*settings, "tailrace", "serve", *map(shlex.quote, words)]))


from_tgi = click.Command(
    "from-tgi",
    params=[
        click.Option(["--run"], is_flag=True, help="Start the server instead of showing the command."),
        *_options(),
    ],
    callback=_from_tgi,
    help=_from_tgi.__doc__,
    short_help="Show the command for one of TGI's launcher.",
)
