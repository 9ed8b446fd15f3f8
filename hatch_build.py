"""Has the libraries of the page put into the package before it is built, also for an editable installation.

They come from another registry than Python's packages. Without that registry, the package is built without them: then
the server works without its page.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PageLibraries(BuildHookInterface[Any]):  # Any: of any build target
    """Runs scripts/page_libraries.py, which does nothing if the libraries are there."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        command = [sys.executable, str(Path(self.root, "scripts", "page_libraries.py"))]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            self.app.display_warning(done.stderr.strip())
