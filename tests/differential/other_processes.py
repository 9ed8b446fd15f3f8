"""Clients that run in another process: those in JavaScript, and one with conflicting dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.clients.installed import run_javascript, run_python
from tests.differential.drivers import MAX_TOKENS, ClientError, Outcome, batch_driver

__all__: list[str] = []

_SCRIPTS = Path(__file__).parents[1] / "clients" / "scripts"


def _outcomes(answers: Sequence[Any]) -> list[Outcome]:  # Any: JSON
    return [each["text"] if "text" in each else ClientError(each["error"], each["message"]) for each in answers]


def _javascript(wire: str, name: str, *, streams: bool = True, resumes: bool = False) -> None:
    """Register a client of tests/clients/js/clients.mjs, which has the same name there."""

    def read_all(url: str, prompts: Sequence[str]) -> list[Outcome]:
        return _outcomes(run_javascript(name, url=url, prompts=list(prompts), max_tokens=MAX_TOKENS))

    batch_driver(f"js {name}", wire, streams=streams, resumes=resumes, deep=True)(read_all)


_javascript("openai", "openai chat", streams=False)
_javascript("openai", "openai chat stream")
_javascript("openai", "openai chat helper")
_javascript("openai", "openai completion stream")
_javascript("openai", "hub chat", streams=False)
_javascript("openai", "hub chat stream")
_javascript("openai", "hub text", streams=False)
_javascript("openai", "hub text stream")
_javascript("openai", "eventsource-parser chat stream")
_javascript("tgi", "hub 4.13.16 text", streams=False)
_javascript("tgi", "hub 4.13.16 text stream")
_javascript("tgi", "hub 4.13.16 generated_text")
_javascript("tgi", "hub 2.5.0 as documented")
_javascript("native", "eventsource", resumes=True)
_javascript("native", "fetch-event-source", resumes=True)
_javascript("native", "eventsource-parser")
_javascript("responses", "openai response stream")
_javascript("anthropic", "anthropic stream")
_javascript("ollama", "ollama chat stream")
_javascript("front_ends", "ai sdk")
_javascript("websocket", "websocket")
_javascript("cumulative", "eventsource, text so far", resumes=True)
_javascript("plain", "fetch text")
_javascript("plain", "fetch pieces")


def _text_generation(method: str) -> None:
    def read_all(url: str, prompts: Sequence[str]) -> list[Outcome]:
        script = _SCRIPTS / "text_generation_outcomes.py"
        parameters = {"max_new_tokens": MAX_TOKENS}
        return _outcomes(
            run_python(
                "text-generation==0.7.0", script, method=method, url=url, prompts=list(prompts), parameters=parameters
            )
        )

    batch_driver(f"text-generation {method}", "tgi", streams=method.endswith("stream"), deep=True)(read_all)


for _method in ("generate", "generate_stream", "async generate", "async generate_stream"):
    _text_generation(_method)
