"""A fake hub on this machine, which the real hub library asks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.waiting import LONG_S

__all__ = ["Hub", "running_hub"]

# The library reads its settings when it is imported, so each case is a process of its own.
_CHILD = """
import json, sys
from tailrace.models.catalogue import parse_source
from tailrace.models.hub import fetch_from_hub
from tailrace.errors import ModelError

class Told:
    calls = []
    def start(self, label, total_bytes): self.calls.append(["start", label, total_bytes])
    def advance(self, num_bytes): self.calls.append(["advance", num_bytes])
    def done(self): self.calls.append(["done"])
    def message(self, text): self.calls.append(["message", text])

for source in sys.argv[1:]:
    try:
        print(json.dumps(["path", str(fetch_from_hub(parse_source(source), Told())), Told.calls]))
    except ModelError as error:
        print(json.dumps(["error", error.message, Told.calls]))
    Told.calls.clear()
"""

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A hub with repositories by name. `errors` has the status and the hub's error code of repositories that fail."""

    def __init__(self, cache: Path) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.errors: dict[str, tuple[int, str]] = {}
        self.stated: dict[str, tuple[int, str]] = {}  # the size and the hash of a large file, if the hub states them
        self.downloads: list[str] = []
        self.ranges: list[str] = []
        self.cut_after: int | None = None  # bytes, after which the connection of one download breaks
        self.holds_after_cut = False  # or stays open without more bytes
        self.is_cut = threading.Event()
        self.knows_ranges = True
        self.requests: list[str] = []
        self.cache = cache
        hub = self

        class Requests(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.requests.append(self.path)
                parts = self.path.partition("?")[0].strip("/").split("/")
                api = parts[:2] == ["api", "models"]
                repo = "/".join(parts[2:4] if api else parts[:2])
                if repo in hub.errors or repo not in hub.repos:
                    status, code = hub.errors.get(repo, (404, "RepoNotFound"))
                    self._answer(status, b"{}", {"X-Error-Code": code})
                elif api:
                    files = [self._sibling(name) for name in hub.repos[repo]]
                    listing = {"id": repo, "sha": _COMMIT, "siblings": files}
                    self._answer(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})
                else:
                    self._file(hub.repos[repo], "/".join(parts[4:]))

            do_HEAD = do_GET  # noqa: N815 - the name is the standard library's

            def _sibling(self, name: str) -> dict[str, object]:
                if name not in hub.stated:
                    return {"rfilename": name}
                size, sha256 = hub.stated[name]
                return {"rfilename": name, "size": size, "lfs": {"size": size, "sha256": sha256, "pointerSize": 130}}

            def _file(self, files: dict[str, bytes], name: str) -> None:
                if name not in files:
                    self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
                    return
                if self.command == "GET":
                    hub.downloads.append(name)
                etag = hashlib.sha256(files[name]).hexdigest()
                headers = {"ETag": f'"{etag}"', "X-Repo-Commit": _COMMIT, "Accept-Ranges": "bytes"}
                start = self.headers.get("Range", "").removeprefix("bytes=").removesuffix("-")
                if self.command == "GET" and start and hub.knows_ranges:
                    hub.ranges.append(start)
                    whole = f"bytes {start}-{len(files[name]) - 1}/{len(files[name])}"
                    self._answer(206, files[name][int(start) :], headers | {"Content-Range": whole})
                else:
                    self._answer(200, files[name], headers)

            def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for header, value in headers.items():
                    self.send_header(header, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self._send(body)

            def _send(self, body: bytes) -> None:
                if hub.cut_after is None or len(body) <= hub.cut_after:
                    self.wfile.write(body)
                    return
                self.wfile.write(body[: hub.cut_after])
                hub.is_cut.set()
                self.close_connection = True
                if hub.holds_after_cut:
                    with contextlib.suppress(OSError):
                        self.connection.recv(1)  # until the client has gone
                else:
                    hub.cut_after = None

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def environment(self, **settings: str) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        return own | {"HF_ENDPOINT": self.url, "HF_HOME": str(self.cache), "NO_PROXY": "127.0.0.1"} | settings

    def ask(self, *sources: str, **settings: str) -> list[tuple[str, str, list[list[object]]]]:
        """Return for each source "path" or "error", its value, and the calls of the progress."""
        command = [sys.executable, "-c", _CHILD, *sources]
        ran = subprocess.run(
            command, env=self.environment(**settings), capture_output=True, text=True, timeout=LONG_S, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return [tuple(json.loads(line)) for line in ran.stdout.splitlines()]


@contextmanager
def running_hub(cache: Path) -> Iterator[Hub]:
    hub = Hub(cache)
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()
    thread.join()
