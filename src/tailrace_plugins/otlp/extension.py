"""The settings of the export to OpenTelemetry."""

from __future__ import annotations

from tailrace.extensions import Extension, Setting

__all__ = ["EXTENSION"]

EXTENSION = Extension(
    "otlp",
    "tailrace_plugins.otlp.exporting:open_export",
    settings=(
        Setting(
            "otlp",
            "",
            "Address of an OpenTelemetry collector (OTLP over HTTP), such as http://127.0.0.1:4318, which gets a trace "
            "of each request. Needs tailrace[otlp]. Empty is none.",
            str,
        ),
        Setting("otlp_text", False, "Traces have prompts and answers.", bool),
    ),
)
