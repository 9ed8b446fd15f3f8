"""The libraries of the page: fetched from a registry, checked, and never a reason why nothing is installed."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from scripts.page_libraries import LIBRARIES, MODULES
from tests.waiting import LONG_S

ROOT = Path(__file__).parent.parent
_CLOSED = "http://127.0.0.1:9"


def _packages() -> dict[str, bytes]:
    """Return a small package for each one that the page uses, by name."""
    files: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for place in MODULES.values():
        parts = place.split("/")
        name = "/".join(parts[:2]) if place.startswith("@") else parts[0]
        files[name][place.removeprefix(f"{name}/")] = f'import{{h}}from"preact";//{place}\n//# sourceMappingURL=x\n'
        files[name]["LICENSE"] = f"Licence of {name}\r\n"
    return {name: _archive(content) for name, content in files.items()}


def _archive(files: dict[str, str]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return content.getvalue()


_PACKAGES = _packages()


@contextmanager
def _registry(packages: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Yield the URL of a registry, and the values of Authorization that it gets."""
    sent: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/npm/").partition("/-/")[0]
            sent.append(self.headers.get("authorization", ""))
            content = packages.get(name, b"")
            self.send_response(200 if content else 404)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/npm", sent
        server.shutdown()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout whose lock file pins the small packages."""
    root = tmp_path / "checkout"
    (root / "scripts").mkdir(parents=True)
    (root / LIBRARIES.parent).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "page_libraries.py", root / "scripts")
    pins = {
        f"node_modules/{name}": {
            "version": "1.2.3",
            "integrity": "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode(),
        }
        for name, content in _PACKAGES.items()
    }
    (root / "package-lock.json").write_text(json.dumps({"packages": {"": {}, **pins}}))
    return root


def _make(checkout: Path, registry: str, npmrc: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    home = checkout.parent / "home"
    home.mkdir(exist_ok=True)
    (home / ".npmrc").write_text("\n".join(npmrc))
    hidden = ("npm_config_", "http_proxy", "https_proxy", "all_proxy", "pythonpath")
    environment = {name: text for name, text in os.environ.items() if not name.lower().startswith(hidden)}
    environment["HOME"] = str(home)
    if registry:
        environment["npm_config_registry"] = registry
    command = [sys.executable, str(checkout / "scripts" / "page_libraries.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONG_S, check=False)


def test_made_once(checkout: Path) -> None:
    with _registry(_PACKAGES) as (url, _):
        assert _make(checkout, url).returncode == 0
    made = {path.name: path.read_text() for path in (checkout / LIBRARIES).iterdir()}
    assert set(MODULES) < set(made)
    assert made["signals.js"] == 'import{h}from"./preact.js";//@preact/signals/dist/signals.module.js\n\n'
    assert made["temml.js"].endswith("export default temml;\n")
    assert "streaming-markdown\n\nLicence of streaming-markdown\n" in made["licences.txt"]
    again = _make(checkout, _CLOSED)
    assert (again.returncode, again.stderr) == (0, "")


def test_the_registry_and_its_token_are_those_of_npm(checkout: Path) -> None:
    with _registry(_PACKAGES) as (url, sent):
        address = url.removeprefix("http:")
        assert _make(checkout, "", [f"registry={url}/", "# a comment", f"{address}/:_authToken=secret"]).returncode == 0
    assert set(sent) == {"Bearer secret"}


def test_a_registry_that_cannot_be_reached(checkout: Path) -> None:
    failed = _make(checkout, "http://user:hunter2@127.0.0.1:9/npm/")
    assert failed.returncode == 1
    assert len(failed.stderr.splitlines()) == 1
    assert failed.stderr.startswith("The libraries of the page could not be fetched from http://127.0.0.1:9/npm: ")
    with _registry(_PACKAGES) as (url, _):
        assert _make(checkout, url).returncode == 0


@pytest.mark.parametrize(
    ("packages", "reason"),
    [
        ({**_PACKAGES, "htm": b"another package"}, "htm is not the package that package-lock.json pins."),
        ({}, "HTTP Error 404"),
    ],
)
def test_other_packages_are_refused_and_older_libraries_stay(
    checkout: Path, packages: dict[str, bytes], reason: str
) -> None:
    (checkout / LIBRARIES).mkdir()
    (checkout / LIBRARIES / "preact.js").write_text("older")
    with _registry(packages) as (url, _):
        failed = _make(checkout, url)
    assert failed.returncode == 1
    assert reason in failed.stderr
    assert "Traceback" not in failed.stderr
    assert [path.name for path in (checkout / LIBRARIES.parent).rglob("*.js")] == ["preact.js"]


@pytest.mark.parametrize("registry", ["nonsense", "ftp://127.0.0.1/x", "http://[", "file:///nowhere"])
def test_an_impossible_registry(checkout: Path, registry: str) -> None:
    failed = _make(checkout, registry)
    assert failed.returncode == 1
    assert len(failed.stderr.splitlines()) == 1


@pytest.mark.deep
def test_the_package_is_built_without_libraries(checkout: Path) -> None:
    """Where npm's registry cannot be reached, nothing but the page is missing."""
    for name in ("hatch_build.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    (checkout / "src" / "tailrace" / "__init__.py").write_text('__version__ = "1.0"\n')
    command = [sys.executable, "-m", "build", "--wheel"]
    built = subprocess.run(
        command, cwd=checkout, env={**os.environ, "npm_config_registry": _CLOSED}, capture_output=True, text=True,
        timeout=LONG_S, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert "could not be fetched" in built.stdout + built.stderr
    assert list((checkout / "dist").glob("*.whl"))
