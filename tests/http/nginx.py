"""A real nginx in front of a server, with the recipe of docs/edge.md."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.missing import skip_missing
from tests.waiting import LONG_S

__all__ = ["PASSWORD", "recipe", "secured"]

PASSWORD = ("river", "bends")
_PAGE = Path(__file__).parents[2] / "docs" / "edge.md"
_MAIN = """
daemon off; worker_processes 1; pid {directory}/nginx.pid; error_log stderr; {user}
events {{ worker_connections 512; }}
http {{
    access_log off; client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi; uwsgi_temp_path {directory}/uwsgi; scgi_temp_path {directory}/scgi;
    include {directory}/tailrace.conf;
}}
"""


def recipe() -> str:
    """Return the configuration as it is printed."""
    found = re.findall(r"^```nginx\n(.*?)^```", _PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(found) == 1
    return str(found[0])


@contextlib.contextmanager
def secured(directory: Path, server_port: int) -> Iterator[int]:
    """Start nginx with the recipe, a certificate and one user; yields its port. Only the server's port, nginx's port
    and paths of files differ from the recipe. Skips the test if nginx or openssl is missing."""
    if missing := [name for name in ("nginx", "openssl") if shutil.which(name) is None]:
        skip_missing(missing[0])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = recipe()
    for printed, ours in (
        ("listen 8443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("http://127.0.0.1:8000", f"http://127.0.0.1:{server_port}"),
        ("/etc/nginx/", f"{directory}/"),
    ):
        assert printed in text
        text = text.replace(printed, ours)
    (directory / "tailrace.conf").write_text(text)
    user = "user root;" if os.getuid() == 0 else ""
    (directory / "nginx.conf").write_text(_MAIN.format(directory=directory, user=user))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=chat.example",
         "-keyout", str(directory / "tailrace.key"), "-out", str(directory / "tailrace.crt")],
        check=True, capture_output=True,
    )  # fmt: skip
    name, password = PASSWORD
    hashed = subprocess.run(["openssl", "passwd", "-apr1", password], check=True, capture_output=True, text=True).stdout
    (directory / "tailrace.htpasswd").write_text(f"{name}:{hashed}")
    with (directory / "nginx.log").open("wb") as log:
        process = subprocess.Popen(["nginx", "-p", str(directory), "-c", "nginx.conf"], stderr=log)
    try:
        _wait_open(process, port, directory)
        yield port
    finally:
        process.terminate()
        process.wait(LONG_S)


def _wait_open(process: subprocess.Popen[bytes], port: int, directory: Path) -> None:
    deadline_s = time.monotonic() + LONG_S
    while True:
        assert process.poll() is None, (directory / "nginx.log").read_text()
        assert time.monotonic() < deadline_s
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.02)  # nothing says when it listens
