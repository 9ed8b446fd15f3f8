"""Batches as an extension of the server, and its settings."""

from __future__ import annotations

from tailrace.extensions import Extension, Setting

__all__ = ["EXTENSION"]

EXTENSION = Extension(
    "batches",
    "tailrace_plugins.batches.opening:open_batches",
    settings=(
        Setting(
            "batch_bytes",
            2**30,
            "Space for the files of batches and their results, in the journal. One owner has at most half of it. 0: no "
            "files and no batches.",
            int,
        ),
        Setting("batch_file_bytes", 200_000_000, "Largest file of a batch.", int, least=1),
        Setting("batch_rows", 50_000, "Rows that a batch has at most.", int, least=1, reloads=True),
        Setting("batch_rows_at_once", 64, "Rows of all batches that run at once.", int, least=1, reloads=True),
    ),
)
