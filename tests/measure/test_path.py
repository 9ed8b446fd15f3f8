"""`tailrace doctor URL` through the real proxies of Debian, configured right, also by the docs, and wrong."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.api.forks import run_text
from tests.api.process import TAILRACE, Server, environment
from tests.http.certificates import write_certificate
from tests.missing import skip_missing
from tests.waiting import LONG_S

from tailrace_outer.measure.path import PROXIES, Found, PathFailed, measure_path, probe, settings_for

_NGINX = """
daemon off; worker_processes 1; pid {directory}/pid; error_log stderr; {user}
events {{ worker_connections 512; }}
http {{
    access_log off; client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi; uwsgi_temp_path {directory}/uwsgi; scgi_temp_path {directory}/scgi;
    server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://127.0.0.1:{server}; {more} }} }}
}}
"""
_RIGHT_NGINX = """
    proxy_http_version 1.1; proxy_set_header Host $http_host; client_max_body_size 20m; proxy_read_timeout 1h;
    proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection "upgrade";
"""
_HAPROXY = """
global
    maxconn 200
defaults
    mode http
    timeout connect 5s
    timeout client 1h
frontend front
    bind 127.0.0.1:{port}
    default_backend tailrace
backend tailrace
    server one 127.0.0.1:{server}
    {more}
"""
_CADDY = """
{{
    admin off
    auto_https off
    storage file_system {directory}
}}
http://127.0.0.1:{port} {{
    {more}
}}
"""
_RIGHT = {
    "nginx": _RIGHT_NGINX,
    "haproxy": "timeout server 1h",
    "caddy": "reverse_proxy 127.0.0.1:{server}",
}
_DOCS = Path(__file__).parents[2] / "docs"
_CADDY_OPTIONS = _CADDY[: _CADDY.index("http://")]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--journal", "memory", "--heartbeat-s", "2", "--durable-poll-s", "5")
    with contextlib.closing(Server("scripted:tokens_per_s=100", *flags)) as server:
        yield server.wait_ready()


@contextlib.contextmanager
def _proxy(name: str, more: str, server: Server, directory: Path) -> Iterator[str]:
    """Start a proxy in front of a server; yields its address. Skips the test if the proxy is missing."""
    port = _free_port()
    text = {"nginx": _NGINX, "haproxy": _HAPROXY, "caddy": _CADDY}[name]
    facts = {"directory": str(directory), "port": port, "server": server.port, "user": "user root;"}
    with _running(name, text.format(**facts, more=more.replace("{server}", str(server.port))), directory, port):
        yield f"http://127.0.0.1:{port}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextlib.contextmanager
def _running(name: str, text: str, directory: Path, port: int) -> Iterator[None]:
    if shutil.which(name) is None:
        skip_missing(name)
    config = directory / "proxy.conf"
    config.write_text(text)
    command = {
        "nginx": ["nginx", "-p", str(directory), "-e", "stderr", "-c", str(config)],
        "haproxy": ["haproxy", "-db", "-f", str(config)],
        "caddy": ["caddy", "run", "--config", str(config), "--adapter", "caddyfile"],
    }[name]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment() | {"HOME": str(directory)})
    try:
        end_s = time.monotonic() + LONG_S
        while True:
            assert process.poll() is None, (directory / "log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < end_s
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait(LONG_S)


def _recipe(page: str, begin: str, *replaced: tuple[str, str]) -> str:
    """Return the configuration on a page that begins so, with the ports and files of a test."""
    (text,) = re.findall(rf"^```\n({re.escape(begin)}.*?)^```", (_DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    for printed, ours in replaced:
        assert printed in text
        text = text.replace(printed, ours)
    return str(text)


def _problems(found: list[Found]) -> set[str]:
    return {one.problem for one in found if one.problem is not None}


def test_without_a_proxy_nothing_is_wrong(server: Server) -> None:
    found = measure_path(server.url, idle_s=0)
    assert _problems(found) == set()
    assert {one.name: one.text for one in found}["resume"] == "a stream goes on after the last event that was read"


def test_an_address_with_a_password_or_a_default_port(server: Server) -> None:
    """Neither is in the headers that browsers send, or in messages."""
    found = measure_path(server.url.replace("//", "//river:bends@"), idle_s=0)
    assert _problems(found) == set(), found
    for address in ("http://127.0.0.2:80", "http://river:bends@127.0.0.2"):  # where nothing listens
        with pytest.raises(PathFailed, match=r"^127\.0\.0\.2 "):
            measure_path(address, idle_s=0)


def test_a_certificate_that_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = write_certificate(tmp_path, "one")
    server = Server("scripted", "--journal", "memory", "--tls-cert", str(certificate), "--tls-key", str(key))
    server.listening = r"Listening on https://127\.0\.0\.1:([0-9]+)"
    with contextlib.closing(server):
        url = server.wait_ready().url.replace("http:", "https:")
        with pytest.raises(PathFailed, match=r"shows a certificate that is not trusted; SSL_CERT_FILE names one"):
            measure_path(url, idle_s=0)
        looked = run_text([TAILRACE, "top", "--once", "--url", url], environment())
        assert f"The server at {url} shows a certificate that is not trusted" in looked.stderr
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        found = measure_path(url, idle_s=0)
    assert _problems(found) == set(), found


@pytest.mark.deep
@pytest.mark.parametrize("name", _RIGHT)
def test_a_proxy_that_is_configured_right(name: str, server: Server, tmp_path: Path) -> None:
    with _proxy(name, _RIGHT[name], server, tmp_path) as url:
        found = measure_path(url, idle_s=9)
    assert _problems(found) == set(), found


@pytest.mark.deep
@pytest.mark.parametrize("name", ["caddy", "haproxy"])
def test_a_proxy_that_is_configured_as_the_docs_say(
    name: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nginx is in tests/http/nginx.py."""
    port, ours = _free_port(), f"127.0.0.1:{server.port}"
    certificate, key = write_certificate(tmp_path, "chat.example")
    both = tmp_path / "tailrace.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    if name == "caddy":
        site = "chat.example {", f"https://127.0.0.1:{port} {{\n    tls {certificate} {key}"
        text = _recipe("edge.md", "chat.example", site, ("127.0.0.1:8000", ours))
        text = _CADDY_OPTIONS.format(directory=tmp_path) + text
    else:
        binds = ":443 ssl crt /etc/haproxy/tailrace.pem", f"127.0.0.1:{port} ssl crt {both}"
        servers = ("10.0.0.11:8000", ours), ("10.0.0.12:8000", ours)
        text = _recipe("edge.md", "frontend", binds) + _recipe("many-servers.md", "backend", *servers)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with _running(name, text, tmp_path, port):
        found = measure_path(f"https://127.0.0.1:{port}", idle_s=9)
    assert _problems(found) == set(), found


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "more", "expected", "setting"),
    [
        ("nginx", "", {"body", "websocket", "origin"}, "client_max_body_size"),
        (
            "nginx",
            f"{_RIGHT_NGINX} gzip on; gzip_types *; gzip_min_length 0; gzip_proxied any; gzip_http_version 1.0;",
            {"compression"},
            "gzip_types",
        ),
        ("nginx", f'{_RIGHT_NGINX} proxy_set_header Last-Event-ID "";', {"last_event_id"}, "Last-Event-ID"),
        ("haproxy", "timeout server 1h\n    http-request set-header Host 127.0.0.1:1", {"origin"}, "set-header Host"),
        (
            "haproxy",
            "timeout server 1h\n    http-request del-header Last-Event-ID",
            {"last_event_id"},
            "del-header Last-Event-ID",
        ),
        (
            "caddy",
            "reverse_proxy 127.0.0.1:{server} {\n header_up -Last-Event-ID\n header_up Host 127.0.0.1:1\n }",
            {"last_event_id", "origin"},
            "header_up",
        ),
        (
            "caddy",
            "reverse_proxy 127.0.0.1:{server} {\n buffer_responses\n max_buffer_size 1MB\n }",
            {"buffering", "websocket"},
            "response_buffers",
        ),
        ("caddy", "request_body {\n max_size 1MB\n }\n reverse_proxy 127.0.0.1:{server}", {"body"}, "max_size"),
    ],
)
def test_a_proxy_that_is_configured_wrong(
    name: str, more: str, expected: set[str], setting: str, server: Server, tmp_path: Path
) -> None:
    with _proxy(name, more, server, tmp_path) as url:
        found = measure_path(url, idle_s=0)
    assert _problems(found) == expected, found
    settings = [text for one in found for proxy, text in settings_for(one) if proxy.lower() == name]
    assert any(setting in text for text in settings)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("nginx", _RIGHT_NGINX.replace("1h", "1s"), {"idle", "silence"}),
        ("haproxy", "timeout server 1s", {"idle", "silence"}),
        (
            "caddy",
            "reverse_proxy 127.0.0.1:{server} {\n transport http {\n response_header_timeout 1s\n }\n }",
            {"silence"},
        ),
    ],
)
def test_a_proxy_that_cuts_what_is_silent(
    name: str, more: str, expected: set[str], server: Server, tmp_path: Path
) -> None:
    with _proxy(name, more, server, tmp_path) as url:
        found = measure_path(url, idle_s=9)
    assert _problems(found) == expected, found


@pytest.mark.deep
def test_a_host_that_the_server_refuses_is_named(server: Server, tmp_path: Path) -> None:
    with (
        _proxy("nginx", "proxy_set_header Host other.example;", server, tmp_path) as url,
        pytest.raises(PathFailed, match="refuses the Host that it gets"),
    ):
        measure_path(url, idle_s=0)


@pytest.mark.deep
def test_the_command_names_the_settings_of_the_proxy_that_names_itself(server: Server, tmp_path: Path) -> None:
    with _proxy("nginx", "", server, tmp_path) as url:
        command = [TAILRACE, "doctor", url, "--quick"]
        shown = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LONG_S, check=False)
        plain = subprocess.run(
            [*command, "--json"], env=environment(), capture_output=True, text=True, timeout=LONG_S, check=False
        )
    assert shown.returncode == plain.returncode == 1
    assert (
        "! bodies       a request of 1.5 MB is refused on its way (413)\n    nginx: client_max_body_size"
        in shown.stdout
    )
    assert "Caddy" not in shown.stdout
    assert "tailrace: 3 things are not as streams need it." in shown.stderr
    rows = {row["name"]: row for row in json.loads(plain.stdout)}
    assert rows["WebSocket"]["problem"] == "websocket"
    assert list(rows["WebSocket"]["settings"]) == ["nginx"]


def test_a_file_of_certificates_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/none")
    for scheme in ("http", "https"):
        with pytest.raises(PathFailed, match="SSL_CERT_FILE or SSL_CERT_DIR cannot be read"):
            measure_path(f"{scheme}://127.0.0.1:9")


def test_other_servers_and_addresses_are_errors(tmp_path: Path) -> None:
    for address in ("http://", "http://[", "http://h:99999", "http://h:x", "http://a\0b", "ftp://h"):
        with pytest.raises(PathFailed, match="address of a server"):
            measure_path(address)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(PathFailed, match="cannot be reached"):
            measure_path(f"http://127.0.0.1:{bound.getsockname()[1]}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    other = subprocess.Popen(
        [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end_s = time.monotonic() + LONG_S
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.02)
        with pytest.raises(PathFailed, match="does not answer as a tailrace server"):
            measure_path(f"http://127.0.0.1:{port}")
    finally:
        other.terminate()
        other.wait(LONG_S)


@contextlib.contextmanager
def _broken(rules: Mapping[str, str | int]) -> Iterator[str]:
    """Serve what looks like a server behind a proxy; yields its address. A rule is of a method and a part of a path: a
    status, `cut`, `hold`, or `hold later`, which answers the first request. Streams have no messages."""
    over = threading.Event()
    asked_before = set()

    class Requests(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            asked = f"{self.command} {self.path}"
            rule = next((rule for part, rule in rules.items() if part in asked), 200)
            if rule == "hold later":
                rule = "hold" if asked in asked_before else 200
            asked_before.add(asked)
            if rule == "hold":
                over.wait(LONG_S)
            is_stream = "live=sse" in self.path and rule == 200
            self.close_connection = is_stream or isinstance(rule, str)
            if isinstance(rule, str):
                return
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(201 if self.command == "PUT" and rule == 200 else rule)
            self.send_header("stream-next-offset", "0")
            if not is_stream:
                self.send_header("content-length", "0")
            self.end_headers()
            if is_stream:
                over.wait(LONG_S)

        def log_message(self, *given: object) -> None:
            pass

    for method in ("GET", "POST", "PUT", "DELETE"):
        setattr(Requests, f"do_{method}", Requests.answer)
    with ThreadingHTTPServer(("127.0.0.1", 0), Requests) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}"
        finally:
            over.set()
            proxy.shutdown()


@pytest.mark.parametrize(
    ("begin", "rule", "message"),
    [
        ("GET /livez", "hold", r"broke GET /livez \(ReadTimeout\)"),
        ("GET /v1/models", "cut", r"broke GET /v1/models \(RemoteProtocolError\)"),
        ("POST /v1/durable/", "hold", r"broke POST /v1/durable/doctor-\w+ \(ReadTimeout\)"),
        ("POST /v1/durable/", "cut", r"broke POST /v1/durable/doctor-\w+ \(R"),
        ("POST /v1/durable/", 502, "a message got status 502"),
        ("PUT /v1/durable/", 403, r"forbids a PUT request \(status 403\). Something before the server"),
        ("PUT /v1/durable/", 401, "needs a key"),
        ("GET /v1/durable/", 403, "the reader got status 403: something before the server forbids it"),
        ("GET /v1/durable/", 502, "the reader got status 502\\."),
        ("GET /v1/durable/", "cut", "the reader broke"),
    ],
)
def test_a_path_that_breaks_requests(
    begin: str, rule: str | int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "ANSWER_S", 3.0)
    with _broken({begin: rule}) as url, pytest.raises(PathFailed, match=message):
        measure_path(url, idle_s=0)


@pytest.mark.deep
def test_a_connection_that_is_silently_dead_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request in it has no answer for longer than the other waits take."""
    monkeypatch.setattr(probe, "ANSWER_S", 6.0)
    with _broken({"-none": "hold later"}) as url:
        found = {one.name: one for one in measure_path(url, idle_s=1)}
    assert found["connections"].problem == "keep_alive"
    assert found["silence"].text == "a request that is answered after 0 s gets its answer"


def test_models_that_are_forbidden_say_nothing_about_the_host() -> None:
    with _broken({"GET /v1/models": 403}) as url:
        (page,) = [one for one in measure_path(url, idle_s=0) if one.name == "page"]
    assert page.problem is None
    assert "refused without an Origin" in page.text


def test_every_problem_has_a_setting_in_every_proxy() -> None:
    from typing import get_args

    for problem in get_args(probe.Problem):
        assert [proxy for proxy, _ in settings_for(Found("x", "y", problem))] == list(PROXIES)
        assert [proxy for proxy, _ in settings_for(Found("x", "y", problem), "1.1 Caddy")] == ["Caddy"]
    assert settings_for(Found("x", "y")) == []
