"""`tailrace chat` with real servers: in pipes, at a terminal, and over connections that are cut."""

from __future__ import annotations

import asyncio
import hashlib
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.api.forks import run
from tests.api.oracle import Answer, chat_ids
from tests.api.process import TAILRACE, Server, environment
from tests.api.test_server_metrics import scrape
from tests.client.openai_server import OpenAIServer
from tests.http.certificates import write_certificate
from tests.plugins.terminal_chat.pty_process import terminal
from tests.processes import wait_ended
from tests.seeing import picture
from tests.waiting import until

from tailrace.images.reader import ImageReader
from tailrace.testing import Chaos, Flow, Line
from tailrace.types import Attachment, Image
from tailrace.wording import printable_text
from tailrace_outer.scripted.scripted_engine import read_ids
from tailrace_outer.scripted.texts import TEXTS

_COUNT = 40


def _command(url: str, *arguments: str) -> list[str]:
    return [TAILRACE, "chat", *(["--url", url] if url else []), *arguments]


def _run(url: str, *arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[bytes]:
    return run(_command(url, *arguments), environment() | variables, stdin=stdin.encode())


def _expected(prompt: str, count: int = _COUNT, seed: int = 7) -> bytes:
    text = printable_text(Answer(chat_ids(prompt), count, seed).text)
    return (text if text.endswith("\n") else text + "\n").encode()


def _asked(*more: str, count: int = _COUNT) -> list[str]:
    return ["--seed", "7", "--max-tokens", str(count), *more]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server("scripted:tokens_per_s=200").wait_ready()
    yield running
    running.close()


def test_in_a_pipe(server: Server) -> None:
    for arguments, stdin, prompt in (
        (["-"], "Hi.", "Hi."),
        ([], "Hi.\n", "Hi.\n"),
        (["scripted", "Say", "it."], "", "Say it."),
        (["scripted", "Look:", "-"], "a\nb", "Look:\n\na\nb"),
    ):
        ran = _run(server.url, *_asked(*arguments), stdin=stdin)
        assert (ran.returncode, ran.stderr) == (0, b"")
        assert ran.stdout == _expected(prompt)


@pytest.mark.deep
def test_an_output_that_is_not_utf_8(server: Server) -> None:
    ran = _run(server.url, *_asked("scripted", "Hi."), PYTHONIOENCODING="ascii")
    assert (ran.returncode, ran.stderr) == (0, b"")
    expected = _expected("Hi.").decode()
    assert not expected.isascii()
    assert ran.stdout == expected.encode("ascii", "replace")


def test_requests_that_are_refused(server: Server) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        free = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        for url, arguments, status, message in (
            (server.url, ["-"], 2, "The prompt is empty."),
            (server.url, ["another", "Hi."], 2, "This server has no such model. It has scripted."),
            (server.url, ["Why do rivers bend?", "Hi."], 2, "Give the model before the prompt"),
            (server.url, ["~ how long is it?"], 2, "Give the model before the prompt"),
            (free, ["scripted", "Hi."], 1, "Start one with `tailrace serve`"),
            ("ftp://x", ["scripted", "Hi."], 2, "An address should look like http://host:port"),
            ("http://a..b", ["scripted", "Hi."], 2, "An address should look like http://host:port"),
            ("http://xn--", ["scripted", "Hi."], 2, "An address should look like http://host:port"),
            ("http://me@x", ["scripted", "Hi."], 2, "The address must not contain a key."),
            (server.url, ["scripted", "x" * 70_000], 1, "tokens"),
        ):
            ran = _run(url, *arguments)
            assert ran.returncode == status, ran.stderr
            assert ran.stdout == b""
            assert ran.stderr.splitlines()[-1].startswith(b"tailrace: ")
            assert message in ran.stderr.decode()


@pytest.mark.deep
def test_a_key(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'records.sqlite'}"
    made = subprocess.run(
        [TAILRACE, "keys", "create", "alice", "--database", database],
        env=environment(), capture_output=True, text=True, check=True, timeout=50,
    )  # fmt: skip
    locked = Server("scripted", "--database", database).wait_ready()
    ran = _run(locked.url, *_asked("-"), stdin="Hi.", TAILRACE_KEY=made.stdout.strip())
    assert ran.stdout == _expected("Hi.")
    ran = _run(locked.url, "-", stdin="Hi.")
    assert ran.returncode == 1
    assert b"Set a key with --key or TAILRACE_KEY." in ran.stderr
    locked.close()


@pytest.mark.deep
def test_tls(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path, "one")
    locked = Server("scripted", "--tls-cert", str(certificate), "--tls-key", str(key))
    locked.listening = r"Listening on https://127\.0\.0\.1:([0-9]+)"
    url = locked.wait_ready().url.replace("http:", "https:")
    assert _run(url, *_asked("-"), stdin="Hi.", SSL_CERT_FILE=str(certificate)).stdout == _expected("Hi.")
    ran = _run(url, "-", stdin="Hi.")
    assert ran.returncode == 1
    assert b"a certificate that is not trusted; SSL_CERT_FILE" in ran.stderr
    locked.close()


def test_a_cut_connection_resumes_where_it_was(server: Server) -> None:
    cuts = [Line(to_client=Flow(end_after_bytes=2000, end="reset")), Line(to_client=Flow(end_after_bytes=1500))]
    with Chaos(server.port, cuts) as chaos:
        ran = _run(chaos.url, *_asked("-"), stdin="Hi.")
        num_connections = chaos.num_connections
    assert ran.returncode == 0
    assert ran.stdout == _expected("Hi.")
    assert b"trying to reconnect" in ran.stderr
    assert num_connections >= 3


@pytest.mark.deep
def test_a_long_prompt_at_a_terminal() -> None:
    """The scripted engine reads it in three seconds. The line is there from the first second to the first token."""
    slow = Server("scripted:prefill_tokens_per_s=100").wait_ready()
    with terminal("chat", "--url", slow.url, *_asked("scripted", "x" * 300, count=1)) as shown:
        shown.wait_for("reading the prompt: ")
        assert shown.wait() == 0
    slow.close()
    found = [int(text) for text in re.findall(r"reading the prompt: (\d+) % of 3\d\d tokens", shown.text)]
    assert found == sorted(found)
    assert found[0] >= 20  # not in the first second
    assert len(set(found)) > 2
    last = shown.raw.rpartition("reading the prompt")[2]
    assert "\x1b[2K" in last  # the line is erased


@pytest.mark.deep
def test_a_long_prompt_in_a_pipe() -> None:
    slow = Server("scripted:prefill_tokens_per_s=200").wait_ready()
    ran = _run(slow.url, *_asked("-", count=1), stdin="x" * 300)
    slow.close()
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert ran.stdout == _expected("x" * 300, 1)


def test_a_cut_connection_at_a_terminal(server: Server) -> None:
    cuts = [Line(to_client=Flow(end_after_bytes=2000, end="reset")), Line(to_client=Flow(end_after_bytes=1500))]
    with Chaos(server.port, cuts) as chaos, terminal("chat", "--url", chaos.url, *_asked("scripted", "Hi.")) as shown:
        assert shown.wait() == 0
        assert "trying to reconnect" in shown.text
        assert " ".join(shown.text.split()).endswith(" ".join(_expected("Hi.").decode().split()))


def test_messages_have_their_own_line(server: Server) -> None:
    cuts = [Line(to_client=Flow(end_after_bytes=2000, end="reset"))]
    asked = _asked("scripted", "Hi.")
    with Chaos(server.port, cuts) as chaos, terminal("chat", "--plain", "--url", chaos.url, *asked) as shown:
        assert shown.wait() == 0
    before, message, after = re.split(r"\r?\n(tailrace: [^\r\n]+ trying to reconnect …)\r?\n", shown.text)
    assert " ".join((before + after).split()) == " ".join(_expected("Hi.").decode().split()), message


@pytest.mark.deep
def test_an_unreachable_server_is_reported_once(tmp_path: Path) -> None:
    """The client tries to connect several times."""
    first = Server("scripted:tokens_per_s=100", "--data-dir", str(tmp_path)).wait_ready()
    with Chaos(first.port) as chaos:
        asking = subprocess.Popen(
            _command(chaos.url, *_asked("scripted", "Hi.", count=300)),
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        assert asking.stdout is not None
        asking.stdout.read(20)
        first.send_signal(signal.SIGKILL)
        first.wait()
        num_connections = chaos.num_connections
        until(lambda: chaos.num_connections >= num_connections + 3)
        second = Server("scripted:tokens_per_s=100", "--data-dir", str(tmp_path)).wait_ready()
        chaos.server_port = second.port
        _, errors = asking.communicate(timeout=50)
    assert asking.returncode == 0, errors
    assert errors.decode().splitlines().count("tailrace: the connection was lost; trying to reconnect …") == 1
    first.close()
    second.close()


def test_an_answer_survives_its_server(tmp_path: Path) -> None:
    count = 300
    first = Server("scripted:tokens_per_s=100", "--data-dir", str(tmp_path)).wait_ready()
    with Chaos(first.port) as chaos:
        asking = subprocess.Popen(
            _command(chaos.url, *_asked("scripted", "Hi.", count=count)),
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        assert asking.stdout is not None
        begun = asking.stdout.read(20)
        first.send_signal(signal.SIGKILL)
        first.wait()
        second = Server("scripted:tokens_per_s=100", "--data-dir", str(tmp_path)).wait_ready()
        chaos.server_port = second.port
        rest, errors = asking.communicate(timeout=50)
    assert asking.returncode == 0, errors
    assert begun + rest == _expected("Hi.", count)
    assert b"trying to reconnect" in errors
    first.close()
    second.close()


def test_ctrl_c_in_a_pipe_stops_the_answer(server: Server) -> None:
    asking = subprocess.Popen(
        _command(server.url, *_asked("scripted", "Hi.", count=60_000)),
        env=environment(), stdout=subprocess.PIPE, bufsize=0,
    )  # fmt: skip
    assert asking.stdout is not None
    asking.stdout.read(20)
    asking.send_signal(signal.SIGINT)
    asking.communicate(timeout=50)
    assert asking.returncode == 130
    until(lambda: scrape(server)["tgi_batch_current_size"] == 0)


def test_a_closed_pipe(server: Server) -> None:
    asking = subprocess.Popen(
        _command(server.url, *_asked("scripted", "Hi.", count=60_000)),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
    )  # fmt: skip
    assert asking.stdout is not None
    assert asking.stderr is not None
    asking.stdout.read(20)
    asking.stdout.close()
    assert asking.wait(50) == 141
    assert asking.stderr.read() == b""
    asking.stderr.close()


def test_control_characters_are_not_written() -> None:
    number = list(TEXTS).index("control characters")
    running = Server(f"scripted:text={number}").wait_ready()
    text = _run(running.url, "-", stdin="Hi.").stdout.decode()
    assert text == printable_text(TEXTS["control characters"]) + "\n"
    assert not [character for character in text if not character.isprintable() and character not in "\n\t\ufffd"]
    with terminal("chat", "--url", running.url, "scripted", "Hi.") as shown:
        assert shown.wait() == 0
        assert "\a" not in shown.raw
        assert "\N{SYMBOL FOR BELL}" in shown.text
    running.close()


def test_an_image_goes_with_the_next_question(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a picture.png").write_bytes(picture(1, 32, 32))
    digest = hashlib.sha256(_canonical(picture(1, 32, 32))).hexdigest()
    user, *text = chat_ids("What is in it?")
    seen = Answer(read_ids(((user,), Attachment(digest, "image/png", 1), tuple(text))), _COUNT, 7)
    with terminal("chat", "--url", server.url, *_asked(), TAILRACE_HOME=str(tmp_path)) as shown:
        shown.wait_for(">>>")
        shown.type("/image nowhere.png\r")
        shown.wait_for("the image cannot be read: No such file or directory.")
        shown.type("/image ~nobody-of-this-name/x.png\r")
        shown.wait_for("the image cannot be read: No such file or directory.", count=2)
        shown.type(f"/image {tmp_path}/a picture.png\r")
        shown.wait_for("The image goes with the next question.")
        shown.type("What is in it?\r")
        shown.wait_for(seen.text.split()[3])
        shown.type("/exit\r")
        assert shown.wait() == 0
        assert " ".join(printable_text(seen.text).split()[:4]) in " ".join(shown.text.split())


def _canonical(content: bytes) -> bytes:
    (image,) = asyncio.run(ImageReader().read((Image(content),), as_sent=False))
    return image.content


def test_a_conversation_at_a_terminal(server: Server, tmp_path: Path) -> None:
    with terminal("chat", "--url", server.url, "--max-tokens", "60000", TAILRACE_HOME=str(tmp_path)) as shown:
        shown.wait_for(">>>")
        shown.type("/model\r")
        shown.wait_for("The current one is scripted.")
        shown.type("/model other\r")
        shown.wait_for("this server has no such model. The server's models: scripted.")
        shown.type("/system Be brief.\r")
        shown.wait_for("The system message is set.")
        shown.type("/system\r")
        shown.wait_for("\nBe brief.")
        shown.type("Tell me a story.\r")
        until(lambda: len(shown.text.partition("Tell me a story.")[2]) > 200)
        shown.type("\x03")
        shown.wait_for("Stopped.")
        shown.type("/nothing\r")
        shown.wait_for("there is no such command")
        until(lambda: ">>>" in shown.text.partition("there is no such command")[2])
        shown.type("\x03")
        shown.wait_for("To exit, press Ctrl-D or type /exit.")
        shown.type("\x04")
        assert shown.wait() == 0
    history = tmp_path / "data" / "chat_history"
    assert "+Tell me a story." in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


def test_without_a_server_it_starts_one(server: Server) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        free = {"TAILRACE_PORT": str(nobody.getsockname()[1])}
        ran = _run("", *_asked("scripted:eos_after=0", "-"), stdin="Hi.", **free)
        assert ran.stdout == _expected("Hi."), ran.stderr
        assert b"Loading scripted" in ran.stderr
        ran = _run("", "nothing", "Hi.", **free)
        assert (ran.returncode, ran.stdout) == (1, b"")
        assert b"No model is called `nothing`" in ran.stderr
        assert b"the server for this chat did not start" in ran.stderr
        ran = _run("", "Why do rivers bend?", "-", stdin="Hi.", **free)
        assert ran.returncode == 2
        assert b"Give the model before the prompt" in ran.stderr
    ran = _run("", *_asked("-"), stdin="Hi.", TAILRACE_PORT=str(server.port))
    assert (ran.stdout, ran.stderr) == (_expected("Hi."), b"")


@pytest.mark.deep
def test_its_own_server_ends_with_it() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        asking = subprocess.Popen(
            [TAILRACE, "chat", "scripted:tokens_per_s=20", "Hi.", "--max-tokens", "60000"], bufsize=0,
            env=environment() | {"TAILRACE_PORT": str(nobody.getsockname()[1])}, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert asking.stdout is not None
        asking.stdout.read(5)
        family = psutil.Process(asking.pid).children(recursive=True)
        assert len(family) >= 2
        asking.kill()
        asking.communicate(timeout=50)
        wait_ended(family)


@pytest.mark.deep
def test_input_during_an_answer_is_for_the_next_line(server: Server) -> None:
    with terminal("chat", "--url", server.url, "--max-tokens", "400") as shown:
        shown.wait_for(">>>")
        shown.type("Tell me a story.\r")
        until(lambda: len(shown.text.partition("Tell me a story.")[2]) > 20)
        shown.type("/model\r\x04")
        assert shown.wait() == 0
        assert "The current one is scripted." in shown.text


@pytest.mark.deep
def test_a_server_that_is_not_tailrace() -> None:
    with OpenAIServer() as foreign:
        ran = _run(f"{foreign.url}/v1", "-", "--system", "Be brief.", stdin="Hi.", TAILRACE_KEY="sesame")
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"You said: Hi.\n", b"")
        asked = foreign.requests[-1]
        assert asked["model"] == "some-model"
        assert asked["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
        assert "temperature" not in asked
        assert foreign.keys == {"Bearer sesame"}
        for prompt, printed, errors in (
            ("break off", b"You said", b"has broken off its answer"),
            ("fail", b"You said", b"out of memory"),
            ("refuse", b"", b"no such thing"),
            ("in one piece", b"You said: in one piece", b""),
        ):
            ran = _run(foreign.url, "-", stdin=prompt)
            assert ran.stdout.strip() == printed
            assert errors in ran.stderr
            assert ran.returncode == (1 if errors else 0)


@pytest.mark.deep
def test_a_conversation_has_earlier_turns() -> None:
    with OpenAIServer() as foreign, terminal("chat", "--url", foreign.url) as shown:
        shown.wait_for(">>>")
        shown.type("One.\r")
        shown.wait_for("You said: One.")
        shown.wait_for(">>>", count=2)
        shown.type("Two.\r")
        shown.wait_for("You said: Two.")
        assert [turn["content"] for turn in foreign.requests[-1]["messages"]] == ["One.", "You said: One.", "Two."]
        shown.type("/new\r")
        shown.wait_for("Started a new conversation.")
        shown.type("Three.\r")
        shown.wait_for("You said: Three.")
        assert len(foreign.requests[-1]["messages"]) == 1
        shown.type("/exit\r")
        assert shown.wait() == 0
