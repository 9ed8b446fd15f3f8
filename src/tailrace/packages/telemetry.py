"""Switch off the usage statistics of the libraries that engines use."""

from __future__ import annotations

import os
import sys

__all__ = ["switch_off"]

# Each is read by its library at import. A value that the user has set stays.
_VARIABLES = {
    "DO_NOT_TRACK": "1",  # Hugging Face, vLLM, and others that follow the convention
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def switch_off() -> None:
    """Switch the statistics off. Must run in each process before such a library is imported; `tailrace/__init__.py`
    calls it.

    OpenVINO's package for statistics has no environment variable. Only a file in the home directory would switch it
    off, and the package writes further files there. OpenVINO works without the package, so its import is made to fail.
    """
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    if "openvino_telemetry" not in sys.modules:
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # makes an import raise ImportError
