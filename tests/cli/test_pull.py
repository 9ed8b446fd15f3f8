from __future__ import annotations

import contextlib
import http.server
import io
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.api.process import TAILRACE, environment
from tests.waiting import LONG_S

from tailrace.cli import main
from tailrace.cli.pull import pull, terminal_progress

_PULL = "from tailrace.cli.pull import pull; pull(prog_name='tailrace pull')"
_BAR = """
from tailrace.cli.pull import terminal_progress
progress = terminal_progress()
progress.message("before [bold]")
progress.start("Fetching [tiny]", 2_000_000)
progress.advance(500_000)
progress.message("between")
progress.advance(1_500_000)
progress.done()
"""


def test_help_has_examples_and_imports_little() -> None:
    result = CliRunner().invoke(pull, ["--help"])
    assert result.exit_code == 0
    assert "hf:org/name:q4.gguf" in result.output
    assert "TAILRACE_HOME" in result.output
    script = "import sys, tailrace.cli.pull; print(sorted({'rich', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_an_unknown_name_is_one_line_and_exit_1() -> None:
    result = CliRunner().invoke(main, ["pull", "smolm2"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("tailrace: No model is called `smolm2`. Did you mean smollm2?")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", ["pull", "serve"])
def test_each_retry_of_the_hub_is_printed_once_with_the_prefix(verb: str, tmp_path: Path) -> None:
    with (
        _unavailable_hub() as url,
        subprocess.Popen(
            [TAILRACE, verb, "hf:some/model:model.gguf"],
            env=environment() | {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path), "TAILRACE_PORT": "0"},
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(3)]
        process.kill()
    assert all(line.startswith("tailrace: ") for line in lines), lines
    assert [line for line in lines if "[Retry 1/5]" in line] == [lines[1]], lines


@contextlib.contextmanager
def _unavailable_hub() -> Iterator[str]:
    """A server that lists the file of a repository, and answers its download with 503."""

    class Unavailable(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, b'{"id":"some/model","siblings":[{"rfilename":"model.gguf"}]}')

        def do_HEAD(self) -> None:
            self._answer(503)

        def _answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Unavailable) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_damaged_file_is_detected(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    result = CliRunner().invoke(pull, [str(tmp_path / "model.gguf")])
    assert result.exit_code == 1
    assert "damaged" in result.stderr


def test_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    progress = terminal_progress(stream)
    progress.start("Fetching tiny", 2_000_000)
    for _ in range(100):
        progress.advance(20_000)
    progress.message("waiting")
    progress.done()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "Fetching tiny: 2.0 MB"
    assert "waiting" in lines
    assert lines[-1].startswith("Fetching tiny: 100 %, 2.0 MB, ")
    assert len(lines) <= 12
    assert all(line.isprintable() for line in lines)


def test_lines_when_the_size_is_not_known() -> None:
    stream = io.StringIO()
    progress = terminal_progress(stream)
    progress.start("Fetching tiny", None)
    progress.advance(20_000)
    progress.done()
    assert stream.getvalue() == "Fetching tiny\n"


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals there")
def test_a_bar_on_a_terminal() -> None:
    shown = on_a_terminal(_BAR, {"TERM": "xterm", "COLUMNS": "100"})
    assert "2.0/2.0 MB" in shown
    assert "\x1b[" in shown
    assert "[tiny]" in shown  # not taken for markup
    assert "before [bold]" in shown
    assert "between" in shown
    assert "\x1b[" not in on_a_terminal(_BAR, {"TERM": "dumb"})


def on_a_terminal(script: str, environment: dict[str, str]) -> str:
    import pty

    ours, theirs = pty.openpty()
    shown = bytearray()

    def drain() -> None:
        try:
            while part := os.read(ours, 4096):
                shown.extend(part)
        except OSError:
            pass  # how Linux says that nobody has the other end any more

    reader = threading.Thread(target=drain)
    reader.start()
    subprocess.run(
        [sys.executable, "-c", script], stderr=theirs, env=os.environ | environment, check=True, timeout=LONG_S
    )
    os.close(theirs)
    reader.join()
    os.close(ours)
    return shown.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to one process there")
def test_ctrl_c_reports_the_state(tmp_path: Path) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection and never answers
        silent.settimeout(LONG_S)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": url, "TAILRACE_HOME": str(tmp_path)}
        with subprocess.Popen(
            [sys.executable, "-c", _PULL],
            env=own | settings | {"NO_PROXY": "127.0.0.1"},
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            connection, _ = silent.accept()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=LONG_S)
            connection.close()
    assert process.returncode == 130
    assert errors.splitlines()[-1].startswith("Stopped. The partial download is not used as a model")
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".smollm2.lock"]
