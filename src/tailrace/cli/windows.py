"""Whether a model's window is large enough for coding agents."""

from __future__ import annotations

from tailrace.settings import Settings

__all__ = ["AGENT_TOKENS", "small_window"]

AGENT_TOKENS = 32_768
"""What an agent needs: its first prompt takes a third to two thirds of it, and the files that it reads the rest.
Source: docs/agents.md, which has the prompts of each agent."""


def small_window(limit_tokens: int, model_tokens: int, settings: Settings) -> str:
    """Return a line that says how a window of `limit_tokens` becomes large enough for agents; "" if it is.

    `model_tokens` is the window that the model was trained for.
    """
    if limit_tokens >= AGENT_TOKENS:
        return ""
    need = f"they need about {AGENT_TOKENS} tokens of context or more"
    if model_tokens < AGENT_TOKENS:
        return f"{need}; this model has {model_tokens}, which --context-tokens cannot raise (docs/agents.md)"
    flag = "--context-tokens" if 0 < settings.context_tokens < AGENT_TOKENS else "--kv-tokens"
    return f"{need}; here they get {limit_tokens}: raise {flag} (docs/agents.md)"
