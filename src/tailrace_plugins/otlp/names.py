"""Names of the semantic conventions for generative AI.

*Source:* open-telemetry/semantic-conventions-genai, v0.1.0, status "development". Names that begin with `tailrace.` are
our own.
"""

from __future__ import annotations

__all__ = ["BOUNDS", "MEASURED", "PROVIDER", "REQUEST", "TPOT", "TTFT", "VERSION"]

VERSION = "semantic-conventions-genai 0.1.0"
PROVIDER = "tailrace"

REQUEST = "gen_ai.server.request.duration"
TTFT = "gen_ai.server.time_to_first_token"
TPOT = "gen_ai.server.time_per_output_token"

# The advised bounds of these histograms, in seconds.
BOUNDS = {
    REQUEST: (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    TTFT: (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    TPOT: (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
}

# Those attributes of a request that its values in the histograms have, too.
MEASURED = (
    "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.response.model", "gen_ai.operation.name", "error.type",
)  # fmt: skip
