"""`tailrace keys` with running servers."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anthropic
import httpx
import huggingface_hub
import ollama
import openai
import pytest
from anthropic.types import MessageParam
from click.testing import CliRunner, Result
from huggingface_hub.errors import ValidationError
from tests.api.process import TAILRACE, Server, environment
from tests.apps.process import AppServer, write
from tests.waiting import LONG_S

from tailrace.cli import main

_CHAT = [{"role": "user", "content": "Hi."}]


def _keys(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["keys", *arguments, "--database", url])


def _token(url: str, *arguments: str) -> str:
    made = _keys(url, "create", *arguments)
    assert made.exit_code == 0, made.stderr
    return made.stdout.strip()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('keys') / 'records.sqlite'}"


@pytest.fixture(scope="module")
def token(url: str) -> str:
    return _token(url, "alice")


@pytest.fixture(scope="module")
def server(url: str, token: str) -> Iterator[Server]:
    running = Server("scripted:tokens_per_s=100", "--database", url)
    yield running.wait_ready()
    running.close()


def _wait(until: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not until():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def _status(server: Server, token: str) -> int:
    return httpx.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {token}"}).status_code


def _ask_openai(url: str, key: str) -> object:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        return client.completions.create(model="default", prompt="Hi.", max_tokens=3)


def _ask_anthropic(url: str, key: str) -> object:
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        messages: list[MessageParam] = [{"role": "user", "content": "Hi."}]
        return client.messages.create(model="default", messages=messages, max_tokens=3)


def _ask_hub(url: str, key: str) -> object:
    with huggingface_hub.InferenceClient(url, token=key) as client:
        return client.text_generation("Hi.", max_new_tokens=3)


def _ask_ollama(url: str, key: str) -> object:
    with ollama.Client(url, headers={"Authorization": f"Bearer {key}"}) as client:
        return client.chat("default", _CHAT, options={"num_predict": 3})


@pytest.mark.parametrize(
    ("ask", "refusal"),
    [
        (_ask_openai, openai.AuthenticationError),
        (_ask_anthropic, anthropic.AuthenticationError),
        (_ask_hub, ValidationError),
        (_ask_ollama, ollama.ResponseError),
    ],
)
def test_clients_of_other_apis_send_a_key(
    server: Server, token: str, ask: Callable[[str, str], object], refusal: type[Exception]
) -> None:
    ask(server.url, token)
    with pytest.raises(refusal, match="not valid") as refused:
        ask(server.url, "tr_" + "a" * 12 + "_" + "b" * 43)
    assert "bbbb" not in str(refused.value)


def test_a_running_server_sees_new_and_revoked_keys(server: Server, url: str) -> None:
    made = _token(url, "bob", "--name", "laptop", "--expires", "30d")
    _wait(lambda: _status(server, made) == 200)
    ended: list[str] = []

    def follow() -> None:
        body = {"messages": _CHAT, "max_tokens": 60_000, "stream": True}
        headers = {"authorization": f"Bearer {made}"}
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=LONG_S
        ) as answer:
            begun.set()
            ended.extend(answer.iter_lines())

    begun = threading.Event()
    following = threading.Thread(target=follow)
    following.start()
    assert begun.wait(LONG_S)
    shown = _keys(url, "revoke", made, "--json")  # whoever has the whole key need not look for its id
    assert json.loads(shown.stdout)["state"] == "revoked"
    following.join(LONG_S)
    assert not following.is_alive()
    assert "key_revoked" in "".join(ended)
    assert ended[-2:] == ["data: [DONE]", ""]
    assert _status(server, made) == 401


def test_rotated(server: Server, url: str) -> None:
    made = _token(url, "carol")
    turned = _keys(url, "rotate", made, "--grace", "0s").stdout.strip()
    assert turned.split("_")[1] == made.split("_")[1]
    _wait(lambda: _status(server, turned) == 200)
    assert _status(server, made) == 401


def test_listed_and_shown(url: str, token: str) -> None:
    listed = json.loads(_keys(url, "list", "--owner", "alice", "--json").stdout)
    assert [(key["owner"], key["state"], key["scopes"]) for key in listed] == [
        ("alice", "active", ["generate", "read"])
    ]
    for shown in (_keys(url, "show", listed[0]["id"]).stdout, _keys(url, "list").stdout):
        assert listed[0]["id"] in shown
        assert token.split("_", 2)[2] not in shown


def test_limits_are_listed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'records.sqlite'}"
    _token(url, "alice", "--tokens-per-minute", "20000", "--streams-at-once", "4")
    _token(url, "bob")
    assert _keys(url, "limit", "--owner", "bob", "--requests-per-minute", "60").exit_code == 0
    listed = _keys(url, "list")
    bobs, alices = (line.rstrip() for line in listed.stdout.splitlines()[-2:])
    assert alices.endswith("active  tokens per minute 20000, streams at once 4")
    assert bobs.endswith("active")
    assert listed.stderr == "Owner bob, with all keys together: requests per minute 60.\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("show", "abcdefghjkmn"), 1, "There is no key with this id."),
        (("create", "anonymous"), 2, "An owner's name"),
        (("create", "a", "--scope", "all"), 2, "A scope must be generate, read, admin, metrics"),
        (("create", "a", "--expires", "soon"), 2, "'soon' is not a duration of at most 100 years"),
        (("create", "a", "--expires", "0d"), 2, "must be valid for some time"),
        (("rotate", "abcdefghjkmn", "--grace", "-1d"), 2, "is not a duration"),
    ],
)
def test_mistakes(url: str, arguments: tuple[str, ...], status: int, message: str) -> None:
    result = _keys(url, *arguments)
    assert result.exit_code == status
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_name_with_control_characters_is_shown_harmless(url: str) -> None:
    """A terminal would run them as commands."""
    _keys(url, "create", "a", "--name", "one\x1b[31mtwo")
    listed = _keys(url, "list").stdout
    assert "\x1b" not in listed
    assert re.search(r"one.\[31mtwo .* 20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ ", listed)  # and no date is cut


def test_a_missing_database() -> None:
    result = _keys("postgresql+psycopg://me:hunter2@127.0.0.1:1/x", "list")
    assert result.exit_code == 1
    assert "cannot be used" in result.stderr
    assert "hunter2" not in result.output


@pytest.mark.parametrize("verb", [("serve", "scripted"), ("run", "bot:app")])
def test_without_keys_a_server_listens_only_on_loopback(verb: tuple[str, str], tmp_path: Path) -> None:
    write(tmp_path, "bot.py", "async def app(scope, receive, send): ...")
    database = f"sqlite:///{tmp_path / 'records.sqlite'}"
    command = [TAILRACE, *verb, "--port", "0", "--host", "0.0.0.0", "--database", database]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("tailrace: there are no keys")
    assert "tailrace keys create" in ran.stderr
    assert not (tmp_path / "records.sqlite").exists()  # servers record requests as soon as there is a database


@pytest.mark.parametrize("words", [("list",), ("show", "abcdefghjkmn"), ("revoke", "abcdefghjkmn")])
def test_looking_for_a_key_creates_no_database(tmp_path: Path, words: tuple[str, ...]) -> None:
    result = _keys(f"sqlite:///{tmp_path / 'records.sqlite'}", *words)
    assert "There are no keys" in result.stderr
    assert not list(tmp_path.iterdir())


def test_with_a_key_or_insecure_it_listens_everywhere(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'records.sqlite'}"
    for flags in (["--insecure"], []):
        running = Server("scripted", "--host", "0.0.0.0", "--database", database, *flags)
        running.listening = r"Page to chat on:  http://127\.0\.0\.1:([0-9]+)/"
        running.wait_ready()
        assert ("can use the server" in running.log) == bool(flags)
        assert httpx.get(f"{running.url}/v1/models").status_code == (200 if flags else 401)
        running.close()
        _token(database, "alice")


def test_apps_need_keys_too(tmp_path: Path, url: str, token: str) -> None:
    write(
        tmp_path,
        "bot.py",
        """
        from fastapi import FastAPI
        app = FastAPI()

        @app.get("/")
        def say() -> str:
            return "Hello."
        """,
    )
    running = AppServer("bot:app", "--database", url, directory=tmp_path).wait_ready()
    for path, status in (("/", 401), ("/nowhere", 401), ("/-/routes", 401), ("/-/metrics", 401), ("/-/healthz", 200)):
        assert httpx.get(running.url + path).status_code == status, path
    assert httpx.get(running.url, headers={"authorization": f"Bearer {token}"}).json() == "Hello."
    running.close()
