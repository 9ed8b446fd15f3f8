"""Durable streams as an extension of the server, and its settings."""

from __future__ import annotations

from tailrace.extensions import Extension, Setting

__all__ = ["EXTENSION"]

EXTENSION = Extension(
    "durable",
    "tailrace_plugins.durable_streams.durable_opening:open_streams",
    settings=(
        Setting(
            "durable_bytes",
            64 * 2**20,
            "Memory for the streams that clients create at /v1/durable; beyond it 507. 0 disables /v1/durable. Each "
            "server that shares a Redis has all of these streams in memory.",
            int,
        ),
        Setting("durable_poll_s", 20.0, "Longest wait of a long poll at /v1/durable.", float, least=0.1, reloads=True),
    ),
)
