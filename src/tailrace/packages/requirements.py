"""Commands that install missing packages, made from the requirements that tailrace declares."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable

__all__ = ["install_command", "pip_install", "requirements"]

_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")


def requirements(*, extra: str = "") -> list[str]:
    """Return the requirements of an extra, or of tailrace itself, in pip's format: `torch>=2.10`.

    Empty if tailrace is not installed as a package.
    """
    from importlib.metadata import PackageNotFoundError, requires  # imports a lot, and only errors need it

    try:
        declared = requires("tailrace") or []
    except PackageNotFoundError:
        return []
    lines = (line.partition(";") for line in declared)
    found = ((line.strip(), _EXTRA.search(marker)) for line, _, marker in lines)
    return [line for line, match in found if (match[1] if match else "") == extra]


def pip_install(*arguments: str) -> str:
    """Return a shell command that runs `pip install` in the environment of this process. It has the full path of the
    interpreter, because a `pip` on the PATH may belong to another environment."""
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def install_command(*, extra: str = "", packages: Iterable[str] = ()) -> str:
    """Return a shell command that installs an extra of tailrace in the environment of this process; without an extra,
    one that reinstalls packages in the versions that tailrace needs.

    The command lists the requirements one by one, which works wherever tailrace was installed from. If they are
    unknown, it names the extra.
    """
    names = {name.replace("_", "-") for name in packages}
    wanted = requirements(extra=extra)
    if not extra:
        wanted = [line for line in wanted if re.split(r"[\s\[<>=!~]", line)[0] in names]
    options = [] if extra else ["--force-reinstall"]
    return pip_install(*options, *(wanted or sorted(names) or [f"tailrace[{extra}]"]))
