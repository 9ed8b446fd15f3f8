"""A server that already runs, as an engine. `upstream_engine` implements the interface."""

from __future__ import annotations

from tailrace.engines import PASSED_ON, Kind

__all__ = ["ENGINE"]

ENGINE = Kind(
    "upstream",
    "a server that already runs",
    formats=("upstream",),
    prefixes=("openai", "tgi"),
    finds="tailrace_plugins.upstream.upstream_models:find_upstream",
    text_of="tailrace_plugins.upstream.upstream_text:text_of",
    preference=5,
    cls="tailrace_plugins.upstream.upstream_engine:UpstreamEngine",
    reach=PASSED_ON,
    may_be_silent=True,  # the model may reason, or the server may queue the request
    sees=lambda card: True,  # that server knows
)
