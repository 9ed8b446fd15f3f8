"""Commands that install what is missing, made from the requirements that tailrace itself declares."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires

__all__ = ["install_command", "pip_install", "requirements"]

_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")


def requirements(*, extra: str = "") -> list[str]:
    """What an extra of tailrace adds, or without one what tailrace always needs, as pip takes it: `torch>=2.10`.

    Empty where tailrace is not installed as a package.
    """
    try:
        declared = requires("tailrace") or []
    except PackageNotFoundError:
        return []
    lines = (line.partition(";") for line in declared)
    found = ((line.strip(), _EXTRA.search(marker)) for line, _, marker in lines)
    return [line for line, match in found if (match[1] if match else "") == extra]


def pip_install(*arguments: str) -> str:
    """A line for a shell that runs `pip install` with these arguments in the environment of this process. It names the
    interpreter with its whole path: a `pip` on the PATH may be another environment's."""
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def install_command(*, extra: str = "", packages: Iterable[str] = ()) -> str:
    """A line for a shell that installs an extra of tailrace into the environment of this process; without an extra, it
    installs these packages again, in the versions that tailrace needs.

    The requirements are named one by one: that works wherever tailrace itself was installed from. Where they are not
    known, the line names the extra.
    """
    names = {name.replace("_", "-") for name in packages}
    wanted = requirements(extra=extra)
    if not extra:
        wanted = [line for line in wanted if re.split(r"[\s\[<>=!~]", line)[0] in names]
    options = [] if extra else ["--force-reinstall"]
    return pip_install(*options, *(wanted or sorted(names) or [f"tailrace[{extra}]"]))
