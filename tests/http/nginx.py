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

__all__ = ["PASSWORD", "below_a_path", "recipe", "secured"]

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


def recipe(*, is_below_a_path: bool = False) -> str:
    """Return the configuration as it is printed."""
    whole, first_lines = re.findall(r"^```nginx\n(.*?)^```", _PAGE.read_text(), re.DOTALL | re.MULTILINE)
    if not is_below_a_path:
        return str(whole)
    replaced = re.sub(r"    location / \{\n.*?\n", lambda _: str(first_lines), whole, count=1, flags=re.DOTALL)
    assert replaced != whole
    return replaced


@contextlib.contextmanager
def secured(directory: Path, server_port: int) -> Iterator[int]:
    """Start nginx with the recipe, a certificate and one user; yields its port. Only the server's port, nginx's port
    and paths of files differ from the recipe. Skips the test if nginx or openssl is missing."""
    if shutil.which("openssl") is None:
        skip_missing("openssl")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=chat.example",
         "-keyout", str(directory / "tailrace.key"), "-out", str(directory / "tailrace.crt")],
        check=True, capture_output=True,
    )  # fmt: skip
    name, password = PASSWORD
    hashed = subprocess.run(["openssl", "passwd", "-apr1", password], check=True, capture_output=True, text=True).stdout
    (directory / "tailrace.htpasswd").write_text(f"{name}:{hashed}")
    with _running(directory, server_port, recipe(), "") as port:
        yield port


@contextlib.contextmanager
def below_a_path(directory: Path, server_port: int) -> Iterator[int]:
    """Start nginx with the recipe for `/llm/`, without TLS and password; yields its port."""
    text = re.sub(r"    (?:ssl_|auth_)[^\n]*\n", "", recipe(is_below_a_path=True)).replace(
        "listen 8443 ssl", "listen 8443"
    )
    with _running(directory, server_port, text, "/") as port:
        yield port


@contextlib.contextmanager
def _running(directory: Path, server_port: int, text: str, end: str) -> Iterator[int]:
    if shutil.which("nginx") is None:
        skip_missing("nginx")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for printed, ours in (
        ("listen 8443", f"listen 127.0.0.1:{port}"),
        (f"http://127.0.0.1:8000{end};", f"http://127.0.0.1:{server_port}{end};"),
    ):
        assert printed in text
        text = text.replace(printed, ours)
    (directory / "tailrace.conf").write_text(text.replace("/etc/nginx/", f"{directory}/"))
    user = "user root;" if os.getuid() == 0 else ""
    (directory / "nginx.conf").write_text(_MAIN.format(directory=directory, user=user))
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
