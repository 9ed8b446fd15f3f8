"""The directories for files that can be downloaded again, and for data that cannot."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_path", "data_path", "models_path", "prepared_path"]


def cache_path() -> Path:
    """Return `$TAILRACE_HOME` if it is set, else the user's cache directory (`$XDG_CACHE_HOME` is respected)."""
    home = os.environ.get("TAILRACE_HOME", "").strip()
    if home:
        return Path(home).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("tailrace")


def data_path() -> Path:
    """Return `$TAILRACE_HOME/data` if it is set, else the user's data directory (`$XDG_DATA_HOME` is respected)."""
    if os.environ.get("TAILRACE_HOME", "").strip():
        return cache_path() / "data"
    from platformdirs import user_data_path

    return user_data_path("tailrace")


def models_path() -> Path:
    return cache_path() / "models"


def prepared_path() -> str:
    """Return the directory of converted models. A string, for an `EngineSpec`."""
    return str(cache_path() / "prepared")
