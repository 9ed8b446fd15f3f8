"""The directories for files that can be downloaded again, and for data that cannot.

All functions raise ModelError if they need the user's home directory and there is none, as in some containers and
systemd units.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tailrace.errors import ModelError

__all__ = ["cache_path", "data_path", "expanded", "models_path", "prepared_path"]


def cache_path() -> Path:
    """Return `$TAILRACE_HOME` if it is set, else the user's cache directory (`$XDG_CACHE_HOME` is respected)."""
    home = os.environ.get("TAILRACE_HOME", "").strip()
    if home:
        return expanded(home).absolute()
    from platformdirs import user_cache_path

    return _at_home(lambda: user_cache_path("tailrace"))


def data_path() -> Path:
    """Return `$TAILRACE_HOME/data` if it is set, else the user's data directory (`$XDG_DATA_HOME` is respected)."""
    if os.environ.get("TAILRACE_HOME", "").strip():
        return cache_path() / "data"
    from platformdirs import user_data_path

    return _at_home(lambda: user_data_path("tailrace"))


def models_path() -> Path:
    return cache_path() / "models"


def prepared_path() -> str:
    """Return the directory of converted models. A string, for an `EngineSpec`."""
    return str(cache_path() / "prepared")


def expanded(path: str) -> Path:
    """Return a path with `~` replaced by the user's home directory."""
    return _at_home(Path(path).expanduser)


def _at_home(find: Callable[[], Path]) -> Path:
    try:
        return find()
    except RuntimeError:  # of pathlib and platformdirs
        raise ModelError(
            "This user has no home directory. Set HOME, or set TAILRACE_HOME to a directory for everything that "
            "tailrace keeps."
        ) from None
