"""`tailrace top` at a terminal of its own, and in a pipe."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.api.forks import run_text
from tests.api.own_keys import key_of
from tests.api.process import TAILRACE, Server, environment
from tests.plugins.terminal_chat.pty_process import terminal


def _run(*flags: str) -> subprocess.CompletedProcess[str]:
    return run_text([TAILRACE, "top", "--once", "--every", "0.3", *flags], environment())


def test_it_follows_a_server_in_a_terminal(paced: Server) -> None:
    stream = paced.create({"prompt": "A secret.", "max_tokens": 3000})
    with terminal("top", "--url", paced.url, "--every", "0.2") as screen:
        screen.wait_for("scripted")
        screen.wait_for(stream[:10], count=3)
        screen.wait_for("1 streams, 1 running, 0 waiting")
        paced.post(f"/v1/streams/{stream}/cancel", {})
        screen.wait_for("0 streams, 0 running")
        screen.process.send_signal(signal.SIGINT)
        assert screen.wait() == 0
        assert "secret" not in screen.text
        assert "Traceback" not in screen.text
        assert "\x1b[?1049l" in screen.raw  # the terminal has its old content again


def test_in_a_pipe_it_prints_one_look(paced: Server) -> None:
    stream = paced.create({"prompt": "Long.", "max_tokens": 3000})
    done = _run("--url", paced.url)
    paced.post(f"/v1/streams/{stream}/cancel", {})
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith(stream[:10]))
    assert "anonymous" in row
    assert int(row.split()[-1]) > 0  # tokens per second


def test_the_key_needs_its_scope(serve: Callable[..., Server], tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'records.sqlite'}"
    user, admin = key_of(database, "alice"), key_of(database, "boss", "admin")
    server = serve("scripted", "--data-dir", str(tmp_path), "--database", database)
    for token, text in (("", "needs a key with the scope admin"), (user, "does not have the scope admin")):
        done = _run("--url", server.url, "--key", token)
        assert (done.returncode, text in done.stderr) == (1, True), done.stderr
    done = _run("--url", server.url, "--key", admin)
    assert done.returncode == 0
    assert "no metrics" in done.stdout


class _WithoutMetrics(BaseHTTPRequestHandler):
    """A proxy that lets only `/v1` through."""

    def do_GET(self) -> None:
        is_known = self.path.startswith("/v1/")
        body = json.dumps({"data": [], "num_streams": 0}) if is_known else "<html>Not here</html>"
        self.send_response(200 if is_known else 404)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *given: object) -> None:
        pass


def test_a_proxy_that_has_no_metrics() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _WithoutMetrics) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        done = _run("--url", f"http://127.0.0.1:{proxy.server_port}")
        proxy.shutdown()
    assert done.returncode == 0, done.stderr
    assert "no metrics" in done.stdout


def test_what_is_no_server_is_said() -> None:
    done = _run("--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "http://127.0.0.1:9 cannot be reached" in done.stderr
