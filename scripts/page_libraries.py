"""Puts the libraries of the page into the package: a few modules of npm packages, as package-lock.json pins them.

    python scripts/page_libraries.py

They are not bundled or compiled. Browsers load them as they are, apart from the names of packages in their imports,
which become paths. If they are there already for this lock file, nothing is done. Otherwise the packages are fetched
from the registry that npm would use. Exit status 1, after one line, if that is impossible: the server works without
its page. The script needs only Python: it runs during the build, where nothing is installed.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import queue
import re
import shutil
import ssl
import sys
import tarfile
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import TypeVar, cast

__all__ = ["LIBRARIES", "MODULES", "MissingLibraries", "make"]

_Result = TypeVar("_Result")

ROOT = Path(__file__).parent.parent
LIBRARIES = Path("src", "tailrace", "api", "page", "lib")
_STAMP = "made-from.txt"  # the hash of what the libraries were made from
_SOURCES = ("package-lock.json", "scripts/page_libraries.py")
_LANGUAGES = (
    "bash", "c", "cpp", "css", "diff", "go", "java", "javascript", "json", "markdown", "python", "rust", "sql",
    "typescript", "xml", "yaml",
)  # fmt: skip
MODULES = {  # name here: its package and its place there
    "highlight.js": "@highlightjs/cdn-assets/es/core.min.js",
    "htm.js": "htm/dist/htm.module.js",
    "preact-hooks.js": "preact/hooks/dist/hooks.mjs",
    "preact.js": "preact/dist/preact.mjs",
    "signals-core.js": "@preact/signals-core/dist/signals-core.module.js",
    "signals.js": "@preact/signals/dist/signals.module.js",
    "streaming-markdown.js": "streaming-markdown/smd.min.js",
    "temml.js": "temml/dist/temml.min.js",
    **{f"language-{name}.js": f"@highlightjs/cdn-assets/es/languages/{name}.min.js" for name in _LANGUAGES},
}
_EXPORTS = {"temml.js": "temml"}  # of scripts that are no modules: the variable that they make
_IMPORTS = {
    "@preact/signals-core": "./signals-core.js",
    "preact": "./preact.js",
    "preact/hooks": "./preact-hooks.js",
}
_DEADLINE_S = 30.0  # for all packages
_TIMEOUT_S = 10.0  # of a connection
_MAX_BYTES = 32 * 2**20  # of a package
_CERTIFICATES = ("npm_config_cafile", "NODE_EXTRA_CA_CERTS", "PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
_PUBLIC = "https://registry.npmjs.org"


class MissingLibraries(Exception):
    """The libraries cannot be made. The text is one line."""


def make(root: Path = ROOT) -> None:
    """Make the folder of the libraries, unless it is there. An older one stays if this fails.

    Raises: MissingLibraries.
    """
    folder = root / LIBRARIES
    made_from = _hash(root)
    stamp = folder / _STAMP
    if stamp.is_file() and stamp.read_text() == made_from:
        return
    registry = _registry(os.environ, _npm_settings(os.environ))
    try:
        files = _collect(_within_time(lambda: _fetch(root, registry)))
    except (OSError, HTTPException, ValueError, KeyError, tarfile.TarError) as error:
        shown = re.sub(r"//[^/@]*@", "//", registry)  # without a password
        raise MissingLibraries(
            f"The libraries of the page could not be fetched from {shown}: {_reason(error)}."
        ) from None
    try:
        with tempfile.TemporaryDirectory(prefix="lib-", dir=folder.parent) as directory:
            made = Path(directory, "lib")
            made.mkdir()
            for name, text in files.items():
                (made / name).write_text(text, "utf-8")
            (made / _STAMP).write_text(made_from)
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    except OSError as error:
        raise MissingLibraries(f"The libraries of the page cannot be written to {folder}: {error.strerror}") from None


def _reason(error: Exception) -> str:
    """Return the first line of an error, without Python's names."""
    cause = error.reason if isinstance(error, urllib.error.URLError) and not error.filename else error
    text = (cause.strerror if isinstance(cause, OSError) else None) or str(cause).strip() or type(cause).__name__
    return text.splitlines()[0].rstrip(".")


def _hash(root: Path) -> str:
    return hashlib.sha256(b"\0".join((root / name).read_bytes() for name in _SOURCES)).hexdigest()


# The registry


def _within_time(fetch: Callable[[], _Result]) -> _Result:
    """Run a call in a thread: a registry has many addresses, and the timeout of a connection is for each of them.

    Raises: what the call raises; TimeoutError.
    """
    results: queue.SimpleQueue[tuple[_Result | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((fetch(), None))
        except Exception as error:  # raised again in the caller
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = results.get(timeout=_DEADLINE_S)
    except queue.Empty:
        raise TimeoutError(f"there was no complete answer within {_DEADLINE_S:g} s") from None
    if error is not None:
        raise error
    return cast(_Result, result)


def _registry(environment: Mapping[str, str], settings: Mapping[str, str]) -> str:
    """Return the URL of npm's registry, without a slash at its end."""
    named = next((value for name, value in environment.items() if name.lower() == "npm_config_registry"), "")
    return (named or settings.get("registry") or _PUBLIC).rstrip("/")


def _npm_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in the user's `.npmrc`."""
    place = environment.get("NPM_CONFIG_USERCONFIG") or environment.get("npm_config_userconfig")
    try:
        text = (Path(place) if place else Path.home() / ".npmrc").read_text("utf-8")
    except (OSError, RuntimeError, UnicodeDecodeError):  # RuntimeError: there is no home
        return {}
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and line.strip()[:1] not in ("#", ";"))
    known = {name.strip(): value.strip().strip("\"'") for name, value in pairs}
    return {
        name: re.sub(r"\$\{(\w+)\}", lambda found: environment.get(found[1], ""), value)
        for name, value in known.items()
    }


def _fetch(root: Path, registry: str) -> dict[str, dict[str, bytes]]:
    """Return the files of each package by their paths in it. Raises: OSError; ValueError for a package that is not the
    pinned one; tarfile.TarError."""
    settings = _npm_settings(os.environ)
    proxies = {kind: settings[name] for kind, name in (("http", "proxy"), ("https", "https-proxy")) if name in settings}
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({**urllib.request.getproxies(), **proxies}),
        urllib.request.HTTPSHandler(context=_trust(os.environ, settings)),
    )
    packages = {}
    for place, pinned in json.loads((root / "package-lock.json").read_text("utf-8"))["packages"].items():
        if not place:
            continue  # the page itself
        name = place.removeprefix("node_modules/")
        url = f"{registry}/{name}/-/{name.rpartition('/')[2]}-{pinned['version']}.tgz"
        request = urllib.request.Request(url, headers={"user-agent": "tailrace"})
        for header, value in _authorization(registry, settings):
            request.add_unredirected_header(header, value)
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            content = answer.read(_MAX_BYTES)
        kind, _, digest = pinned["integrity"].partition("-")
        if kind != "sha512" or hashlib.sha512(content).digest() != base64.b64decode(digest):
            raise ValueError(f"{name} is not the package that package-lock.json pins")
        packages[name] = dict(_files(content))
    return packages


def _trust(environment: Mapping[str, str], settings: Mapping[str, str]) -> ssl.SSLContext:
    """Return the certificates of the system, and those that npm, Node or pip were given, such as a proxy's own."""
    context = ssl.create_default_context()
    for place in (settings.get("cafile"), *(environment.get(name) for name in _CERTIFICATES)):
        if place and Path(place).is_file():
            context.load_verify_locations(place)
    return context


def _authorization(registry: str, settings: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the header for a registry that needs one, as npm's settings have it."""
    address = "//" + registry.partition("://")[2]
    for name, scheme in (("_authToken", "Bearer"), ("_auth", "Basic")):
        if value := settings.get(f"{address}/:{name}") or settings.get(f"{address}:{name}"):
            yield "authorization", f"{scheme} {value}"
            return


def _files(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a package. They are below one folder, whose name says nothing."""
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name.partition("/")[2], file.read()


# The modules


def _collect(packages: Mapping[str, Mapping[str, bytes]]) -> dict[str, str]:
    """Return the modules, and the licences that go with them. Raises: KeyError if a package lacks one."""
    files = {f"{name}/{path}": content for name, package in packages.items() for path, content in package.items()}
    modules = {}
    for name, source in MODULES.items():
        text = re.sub(r"//# sourceMappingURL=\S*", "", _text(files[source]))
        for package, path in _IMPORTS.items():
            text = re.sub(rf'\bfrom ?"{package}"', f'from"{path}"', text)
        if name in _EXPORTS:
            text += f"\nexport default {_EXPORTS[name]};\n"
        modules[name] = text
    licences = sorted(path for path in files if path.rpartition("/")[2].lower() in ("licence", "license"))
    parts = [f"{path.rpartition('/')[0]}\n\n{_text(files[path]).strip()}\n" for path in licences]
    return {**modules, "licences.txt": "\n\n".join(parts)}


def _text(content: bytes) -> str:
    return content.decode().replace("\r\n", "\n")


if __name__ == "__main__":
    try:
        make()
    except MissingLibraries as error:
        sys.exit(str(error))
