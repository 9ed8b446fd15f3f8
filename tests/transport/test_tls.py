"""TLS: real handshakes, and a certificate that is replaced while streams run."""

from __future__ import annotations

import shutil
import signal
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.api.process import TAILRACE, Server, environment
from tests.http.certificates import write_certificate
from tests.waiting import LONG_S
from websockets.sync.client import connect

_LISTENING = r"Listening on https://127\.0\.0\.1:([0-9]+)"


def _context(trusted: Path, own: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(trusted))
    if own is not None:
        context.load_cert_chain(*own)
    return context


@pytest.fixture
def serve_tls() -> Callable[..., Server]:
    def start(certificate: Path, key: Path, *flags: str) -> Server:
        server = Server("scripted:tokens_per_s=100", "--tls-cert", str(certificate), "--tls-key", str(key), *flags)
        server.listening = _LISTENING
        return server.wait_ready()

    return start


def test_http_and_websockets(serve_tls: Callable[..., Server], tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path, "one")
    server = serve_tls(certificate, key)
    url = f"https://127.0.0.1:{server.port}"
    with httpx.Client(verify=_context(certificate), base_url=url) as client:
        answer = client.post("/v1/completions", json={"prompt": "Hi.", "max_tokens": 3})
        assert answer.status_code == 200
        assert client.get("/", headers={"accept": "text/html"}).status_code == 200
    with connect(f"wss://127.0.0.1:{server.port}/v1/ws", ssl=_context(certificate)) as socket:
        socket.send('{"type":"ping","id":"a"}')
        assert "pong" in str(socket.recv(LONG_S))
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://127.0.0.1:{server.port}/livez")
    old = _context(certificate)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    assert httpx.get(f"{url}/livez", verify=old).status_code == 200
    server.close()


@pytest.mark.parametrize("how", ["changed files", "SIGHUP"])
def test_a_new_certificate_interrupts_no_stream(serve_tls: Callable[..., Server], tmp_path: Path, how: str) -> None:
    one, other = write_certificate(tmp_path, "one"), write_certificate(tmp_path, "other")
    used = tmp_path / "used.crt", tmp_path / "used.key"
    for source, target in zip(one, used, strict=True):
        shutil.copy(source, target)
    server = serve_tls(*used, "--log-level", "info")
    url = f"https://127.0.0.1:{server.port}"
    body = {"prompt": "Hi.", "max_tokens": 60_000}
    streaming = httpx.Client(verify=_context(one[0]), timeout=LONG_S)
    with (
        streaming,
        streaming.stream("POST", f"{url}/v1/streams", json=body, headers={"accept": "text/event-stream"}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        used[1].write_text("broken")
        server.wait_line("the new certificate cannot be used, the old one stays")
        assert httpx.get(f"{url}/livez", verify=_context(one[0])).status_code == 200
        for source, target in zip(other, used, strict=True):
            shutil.copy(source, target)
        if how == "SIGHUP":
            server.send_signal(signal.SIGHUP)
        server.wait_line("the certificate was reloaded")
        assert httpx.get(f"{url}/livez", verify=_context(other[0])).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/livez", verify=_context(one[0]))
        for _ in range(20):
            next(lines)
    server.close()


def test_clients_with_certificates(serve_tls: Callable[..., Server], tmp_path: Path) -> None:
    own, theirs, strangers = (write_certificate(tmp_path, name) for name in ("own", "theirs", "strangers"))
    server = serve_tls(*own, "--tls-client-ca", str(theirs[0]))
    url = f"https://127.0.0.1:{server.port}/livez"
    assert httpx.get(url, verify=_context(own[0], theirs)).status_code == 200
    for wrong in (None, strangers):
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=_context(own[0], wrong))
    server.close()


def test_mistakes(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path, "one")
    (tmp_path / "broken.crt").write_text("broken")
    other = write_certificate(tmp_path, "other")[1]
    for flags, status, expected in (
        (["--tls-key", str(key)], 2, "need --tls-cert"),
        (["--tls-cert", str(tmp_path / "none.crt")], 1, "--tls-key cannot be used: No such file"),
        (["--tls-cert", str(tmp_path / "broken.crt"), "--tls-key", str(key)], 1, "--tls-key cannot be used"),
        (["--tls-cert", str(certificate), "--tls-key", str(other)], 1, "key values mismatch"),
    ):
        command = [TAILRACE, "serve", "scripted", "--port", "0", *flags]
        ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LONG_S, check=False)
        assert ran.returncode == status, ran.stderr
        assert expected in ran.stderr
        assert "Traceback" not in ran.stderr
