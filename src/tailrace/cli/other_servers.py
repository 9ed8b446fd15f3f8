"""Commands and flags of other servers, and what they are here: docs/from-ollama.md and the pages beside it say more.
Also settings that were removed."""

from __future__ import annotations

from collections.abc import Iterable

import click

from tailrace.wording import did_you_mean

__all__ = ["COMMANDS", "FLAGS", "hint_of_command", "hint_of_flag", "hint_of_setting"]

COMMANDS = {
    "cp": "--model NAME=SOURCE",
    "create": "--model NAME=SOURCE",
    "list": "tailrace ls",
    "show": "tailrace doctor MODEL",
    "stop": "--idle-unload-s",
}
FLAGS = {
    "--alias": "--model NAME=SOURCE",
    "--batch-size": "--max-step-tokens",
    "--ctx-size": "--context-tokens",
    "--enable-prefix-caching": "--prefix-cache",
    "--gpu-layers": "--device",
    "--gpu-memory-utilization": "--gpu-memory",
    "--lora": "--adapter",
    "--lora-modules": "--adapter",
    "--max-model-len": "--context-tokens",
    "--max-num-batched-tokens": "--max-step-tokens",
    "--max-num-seqs": "--max-sequences",
    "--model-draft": "--draft",
    "--n-gpu-layers": "--device",
    "--parallel": "--max-sequences",
    "--predict": "--default-max-tokens",
    "--reasoning-parser": "--reasoning",
    "--served-model-name": "--model NAME=SOURCE",
    "--shutdown-timeout": "--drain-s",
    "--ssl-cert-file": "--tls-cert",
    "--ssl-certfile": "--tls-cert",
    "--ssl-key-file": "--tls-key",
    "--ssl-keyfile": "--tls-key",
    "--tensor-parallel-size": "--gpus",
}
_REMOVED = {"grammar-memory-bytes": "It was removed: compiled grammars take little memory now."}


def hint_of_setting(name: str, known: Iterable[str]) -> str:
    """Return a sentence to append to an error about an unknown setting; "" if there is nothing to say."""
    removed = _REMOVED.get(name.lower().replace("_", "-"), "")
    return f" {removed}" if removed else did_you_mean(name, known)


def hint_of_command(name: str) -> str:
    """Return a sentence to append to an error; "" for an unknown name."""
    ours = COMMANDS.get(name, "")
    where = " of `tailrace serve`" if ours.startswith("--") else ""
    return f" Ollama's `{name}` is `{ours}`{where} here." if ours else ""


def hint_of_flag(error: click.NoSuchOption) -> str:
    """Return a sentence to append to an error of `tailrace serve`; "" for an unknown flag."""
    if removed := _REMOVED.get(error.option_name.removeprefix("--")):
        return f" {removed}"
    ours = FLAGS.get(error.option_name, "")
    is_serve = error.ctx is not None and error.ctx.command.name == "serve"
    return f" It is `{ours}` here." if ours and is_serve else ""
