"""Requests of wires whose prompt is a plain text: no roles, and few parameters or none."""

from __future__ import annotations

from msgspec.structs import replace

from tailrace.dialects.facts import ServerFacts
from tailrace.dialects.fields import SamplingFields, sampling_of
from tailrace.errors import RequestError
from tailrace.types import GenerateRequest, Message, Sampling

__all__ = ["bare_request", "bare_sampling"]

_SAMPLING_FIELDS = set(SamplingFields.__struct_fields__) - {"max_tokens", "max_completion_tokens", "stop"}


def bare_sampling(server: ServerFacts, fields: SamplingFields) -> Sampling:
    """Return the sampling parameters. By default sampling is greedy, as in Ray Serve's tutorial, with a small
    repetition penalty if the engine supports it: without it, small models repeat themselves endlessly.
    Raises: RequestError."""
    sampling = sampling_of(fields)
    if any(getattr(fields, name) is not None for name in _SAMPLING_FIELDS):
        return sampling
    penalty = 1.1 if "repetition_penalty" in server.generator.parameters else 1.0
    return replace(sampling, temperature=0.0, repetition_penalty=penalty)


def bare_request(server: ServerFacts, prompt: str, sampling: Sampling) -> GenerateRequest:
    """Return a request for a plain prompt. It is put into `--prompt-template` if that is set; otherwise it is a chat of
    one turn if the model has a chat template; otherwise it is used unchanged. Reasoning is a part of the answer: these
    wires have no other place for it. Raises: RequestError if the prompt is empty."""
    if not prompt:
        raise RequestError("The prompt is empty.", param="prompt")
    if server.prompt_template:
        return GenerateRequest(prompts=(server.prompt_template.replace("{prompt}", prompt),), sampling=sampling)
    if server.chat.can_chat:
        return GenerateRequest(messages=(Message("user", prompt),), sampling=sampling, split_reasoning=False)
    return GenerateRequest(prompts=(prompt,), sampling=sampling)
