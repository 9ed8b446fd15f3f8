"""A stand-in for the vendor's `inferless` package, for apps that import it where it is not installed.

Its decorators return classes and functions unchanged; the deployment that they describe is read elsewhere. Functions
that send code to the vendor's machines have no effect either.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["REMOTE_NOTE", "install"]

REMOTE_NOTE = (
    "app.py: inferless.method, Cls and local_entry_point do not send code anywhere: functions run in this process."
)

Note = Callable[[str], None]


def install(note: Note) -> bool:
    """Make `import inferless` work. Returns whether it finds this stand-in. `note` is called for calls without
    effect."""
    present = sys.modules.get("inferless")
    if not hasattr(present, "__tailrace__") and (present or importlib.util.find_spec("inferless")):
        return False
    sys.modules["inferless"] = _stand_in(note)
    return True


def _stand_in(note: Note) -> ModuleType:
    module = ModuleType("inferless", __doc__)
    module.__spec__ = ModuleSpec("inferless", None)
    names: dict[str, object] = {
        "request": _bare_or_called(),
        "response": _bare_or_called(),
        "config": _bare_or_called(_export),
        "method": _bare_or_called(note=note),
        "local_entry_point": _bare_or_called(note=note),
        "Cls": lambda *args, **settings: _Remote(note),
    }
    vars(module).update(names, __all__=sorted(names), __tailrace__=True)
    return module


def _bare_or_called(use: Callable[[Any], None] | None = None, *, note: Note | None = None) -> Callable[..., Any]:
    """Return a decorator for `@name`, `@name()` and `@name(gpu="T4")`. It returns its argument unchanged."""

    def keep(decorated: Any) -> Any:  # Any: classes and functions of all kinds
        if use is not None:
            use(decorated)
        return decorated

    def decorator(*args: Any, **settings: Any) -> Any:
        if note is not None:
            note(REMOTE_NOTE)
        return keep(args[0]) if len(args) == 1 and not settings and callable(args[0]) else keep

    return decorator


def _export(config: Any) -> None:
    """Set a configuration's defaults as uppercase environment variables, like the vendor's decorator."""
    for name, one in config.model_fields.items():
        value = None if one.is_required() else one.get_default(call_default_factory=True)
        if value is not None:
            os.environ[name.upper()] = str(value)


class _Remote:
    """The object of `app = inferless.Cls(gpu="T4")`, with `@app.load`, `@app.infer` and any other decorator."""

    def __init__(self, note: Note) -> None:
        self._note = note

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return _bare_or_called(note=self._note)
