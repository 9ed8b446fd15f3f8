"""SIGHUP: settings that may change are in use at once, others are named, and a file that is wrong changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import signal
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.api.process import Server
from tests.cli.test_config_file import ran
from tests.waiting import until, wait_until

from tailrace.api.lifecycle import open_server
from tailrace.api.reload import Given, Reread
from tailrace.assembly.source import find_source
from tailrace.dialects import native
from tailrace.errors import UnknownModel
from tailrace.extensions import Setting
from tailrace.models import NoProgress
from tailrace.settings import Settings, settings_of, settings_table
from tailrace.transport.listening import Uvicorn
from tailrace.types import GenerateRequest, Sampling

_CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


class _Configured:
    """A server with a file of settings."""

    def __init__(self, file: Path, text: str, *flags: str) -> None:
        self.file = file
        file.write_text(text)
        self.server = Server(f"--config={file}", *flags).wait_ready()

    def reload(self, text: str) -> str:
        """Change the file, and return what the server says about it."""

        def said() -> list[str]:
            return [line for line in self.server.log.splitlines() if "read again" in line]

        num_before = len(said())
        self.file.write_text(text)
        self.server.send_signal(signal.SIGHUP)
        until(lambda: len(said()) > num_before)
        return said()[-1].removeprefix("tailrace: ")


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[_Configured]:
    one = _Configured(
        tmp_path / "tailrace.toml",
        'model = "scripted:tokens_per_s=50"\nmax-concurrent-requests = 9\n',
        "--log-level=error",
    )
    with contextlib.closing(one.server):
        yield one


def test_a_new_limit_is_in_use_while_a_stream_goes_on(configured: _Configured) -> None:
    server, model = configured.server, configured.file.read_text().splitlines()[0]
    stream = server.create({"prompt": "Long.", "max_tokens": 3000})
    with server.wire() as reader:
        reader.send("GET", f"/v1/streams/{stream}/events")
        assert reader.head() == 200
        said = configured.reload(f"{model}\nmax-concurrent-requests = 1\n")
        assert said == "The settings were read again; in use: max-concurrent-requests."
        assert server.post("/v1/chat/completions", _CHAT).status_code == 429

        said = configured.reload(
            f"{model}\nallowed-hosts = 'llm.example'\nallowed-origins = 'https://app.example'\nbody-bytes = 200\n"
            "strict = true\naccess-log = true\n"
        )
        assert said.endswith(
            "in use: max-concurrent-requests, strict, body-bytes, allowed-hosts, allowed-origins, access-log."
        )
        there = {"host": "llm.example", "origin": "https://app.example"}
        answer = server.post("/v1/chat/completions", _CHAT, **there)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert server.post("/v1/chat/completions", {**_CHAT, "audio": {}}).status_code == 400
        assert server.post("/v1/chat/completions", {**_CHAT, "user": "x" * 200}).status_code == 413
        server.wait_line("POST /v1/chat/completions 413")

        assert server.state(stream)["status"] == "running"
        server.post(f"/v1/streams/{stream}/cancel", {})
        events, is_complete = reader.rest()
        assert is_complete
        assert b'"status":"cancelled"' in events
    configured.reload(f"{model}\n")
    assert server.post("/v1/chat/completions", _CHAT, host="llm.example").status_code == 403
    assert "access-control-allow-origin" not in server.post("/v1/chat/completions", _CHAT).headers


def test_a_file_that_is_wrong_changes_nothing(configured: _Configured) -> None:
    before = configured.file.read_text()
    said = configured.reload(before.replace("9", "1").replace("max-", "most-"))
    checked = ran("config", "--check", "--config", str(configured.file))
    assert checked.exit_code == 2
    words = checked.stderr.splitlines()[-1].removeprefix("tailrace: ")
    assert "most-concurrent-requests is not a setting" in words
    assert said == f"The settings were not read again, and nothing has changed: {words}"
    said = configured.reload(before + "allowed-hosts = 'http://x'\n")
    assert "--allowed-hosts takes names without scheme" in said
    configured.file.unlink()
    assert configured.reload(before) == "The settings were read again; nothing has changed."


def test_a_setting_that_needs_a_restart_is_named_until_then(configured: _Configured) -> None:
    before = configured.file.read_text()
    said = configured.reload(before + "kv-tokens = 4096\nport = 1\n")  # the port has a flag, which goes before it
    assert said == "The settings were read again; restart to use: kv-tokens."
    said = configured.reload(before + "kv-tokens = 4096\nqueue-s = 1\n")
    assert said == "The settings were read again; in use: queue-s; restart to use: kv-tokens."
    said = configured.reload(before.replace("scripted:", "scripted:text=2,"))
    assert said == "The settings were read again; in use: queue-s; restart to use: model."


def test_settings_of_single_models(tmp_path: Path) -> None:
    def text(most: int, kv_tokens: int, more: str = "", everywhere: int = 9) -> str:
        one = f"[models.one]\nsource = 'scripted'\ndefault-max-tokens = {most}\nkv-tokens = {kv_tokens}\n"
        return f"default-max-tokens = {everywhere}\n{one}[models.two]\nsource = 'scripted'\n{more}"

    def lengths() -> list[int]:
        bodies = ({"messages": _CHAT["messages"], "model": name} for name in ("one", "two"))
        answers = [server.post("/v1/chat/completions", body).json() for body in bodies]
        return [answer["usage"]["completion_tokens"] for answer in answers]

    configured = _Configured(tmp_path / "tailrace.toml", text(5, 1000))
    with contextlib.closing(configured.server) as server:
        assert lengths() == [5, 9]
        said = configured.reload(text(6, 2000, "[models.three]\nsource = 'scripted'\n"))
        assert said.endswith(
            "; in use: models.one.default-max-tokens; added: models.three; restart to use: models.one.kv-tokens."
        )
        assert lengths() == [6, 9]
        said = configured.reload(text(6, 1000, everywhere=3))
        assert said.endswith("again; in use: default-max-tokens; removed: models.three.")
        assert lengths() == [6, 3]


def test_a_new_time_for_streams_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "tailrace.toml"
    configured = _Configured(file, "model = 'scripted:tokens_per_s=50'\nshutdown-delay-s = 60\n")
    with contextlib.closing(configured.server) as server:
        server.create({"prompt": "Long.", "max_tokens": 3000})
        configured.reload("model = 'scripted:tokens_per_s=50'\nshutdown-delay-s = 0.25\n")
        server.send_signal(signal.SIGTERM)
        server.wait_line(r"Stopping; 1 stream has 0\.45 s to finish\.")


def test_an_idle_model_is_unloaded_after_a_new_time(tmp_path: Path) -> None:
    file = tmp_path / "tailrace.toml"
    configured = _Configured(file, "model = 'scripted'\n")
    with contextlib.closing(configured.server) as server:
        configured.reload("model = 'scripted'\nidle-unload-s = 0.01\n")
        server.wait_line(r"scripted is unloaded after 0\.01 s without a stream")


async def test_a_model_is_idle_from_its_loading_on(tmp_path: Path) -> None:
    """Also if it could not be unloaded then."""
    source = await asyncio.to_thread(find_source, "scripted", NoProgress())
    async with open_server(source, Settings(journal="memory"), data_path=tmp_path) as running:
        models, began_s = running.service.models, time.monotonic()
        models.unload(models.first)
        await models.load(models.first)
        assert models.first.generator.used_s > began_s


# No copies

_LEAVES = (str, bytes, int, float, type, type(None), types.ModuleType, types.CodeType, types.BuiltinFunctionType)
_SKIPPED = (*_LEAVES, asyncio.AbstractEventLoop, types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)


def _own_value(row: Setting, number: int) -> Any:  # Any: of the setting's type
    """Return a value that nothing else has; None if there is none."""
    if row.kind is int:
        return max(int(row.least), 70_000) + number
    if row.kind is float:
        return max(row.least, 1_000.0) + number + 0.0625
    template = {"prompt_template": "{prompt} ", "allowed_origins": "https://"}.get(row.name, "")
    return None if row.choices or row.kind is bool else f"{template}own{number}.example"


def _parts(one: object) -> list[object]:
    """Return what an object refers to, without what belongs to its module or its class."""
    if isinstance(one, types.FunctionType):
        return [*(one.__closure__ or ()), *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
    return gc.get_referents(one)


def _holders(root: object, values: dict[object, str]) -> dict[str, set[str]]:
    """Return the classes of the objects that hold these values, by the names of the values."""
    found: dict[str, set[str]] = {}
    seen, waiting = {id(root)}, [(root, "")]
    kept = []  # so that no id is used twice
    while waiting:
        one, owner = waiting.pop()
        owner = owner if type(one).__module__ == "builtins" or isinstance(one, Settings) else type(one).__name__
        for part in _parts(one):
            if isinstance(part, (str, int, float)) and part in values:
                found.setdefault(values[part], set()).add(owner)
            if id(part) not in seen and not isinstance(part, _SKIPPED):
                seen.add(id(part))
                kept.append(part)
                waiting.append((part, owner))
    return found


async def test_nobody_keeps_a_copy_of_a_setting_that_may_change(tmp_path: Path) -> None:
    rows = [row for row in settings_table() if row.reloads]
    own = {row.name: value for number, row in enumerate(rows) if (value := _own_value(row, number)) is not None}
    fixed = {"database": f"sqlite:///{tmp_path}/records.sqlite", "journal": "memory"}
    if importlib.util.find_spec("mcp") is not None:
        fixed["mcp_hosts"] = "tools.example"  # opens what has these limits
    before, after = settings_of(fixed | own), settings_of(fixed)
    source = await asyncio.to_thread(find_source, "scripted", NoProgress())
    values = {value: name for name, value in own.items()}
    async with open_server(source, before, data_path=tmp_path) as running, asyncio.TaskGroup() as group:
        door = Uvicorn(running.app, before, native.encode_error)
        running.server.on_reload(door.use)
        held = _holders((running, door), values)
        assert held.keys() == own.keys()
        assert {"Gate", "Limits", "Supervisor", "Edge", "BodyBudget", "Connections"} <= set().union(*held.values())
        reread = Reread(Given(before, {}, {}), lambda known: (Given(after, {}, {}), []))
        running_again = group.create_task(reread.run(running.server, running.service))
        reread.requested.set()
        await wait_until(lambda: running.server.settings.queue_s == after.queue_s)
        assert _holders((running, door), values) == {}
        running_again.cancel()


# Models

_ONE, _TWO = (
    "[models.one]\nsource = 'scripted:tokens_per_s=50'\n",
    "[models.two]\nsource = 'scripted:tokens_per_s=50'\n",
)


@pytest.fixture
def several(tmp_path: Path) -> Iterator[_Configured]:
    one = _Configured(tmp_path / "tailrace.toml", _ONE)
    with contextlib.closing(one.server):
        yield one


def _asked(server: Server, model: str) -> int:
    return server.post("/v1/chat/completions", {**_CHAT, "model": model}).status_code


def _listed(server: Server) -> list[str]:
    return [model["id"] for model in server.http.get("/v1/models").json()["data"]]


def test_a_new_model_is_served_at_once(several: _Configured) -> None:
    server = several.server
    assert _asked(server, "two") == 404
    said = several.reload(f"load = 'all'\n{_ONE}{_TWO}default-max-tokens = 4\n[models.two.adapters]\n")
    assert said.startswith("The settings were not read again, and nothing has changed: ")
    assert _listed(server) == ["one"]
    assert several.reload(f"{_ONE}{_TWO}default-max-tokens = 4\n") == "The settings were read again; added: models.two."
    assert _listed(server) == ["one", "two"]
    answer = server.post("/v1/chat/completions", {"messages": _CHAT["messages"], "model": "two"})
    assert answer.json()["usage"]["completion_tokens"] == 4
    metrics = server.http.get("/metrics").text
    assert 'tailrace_ready{model="two"} 1.0' in metrics
    assert 'tailrace_answers_total{finish_reason="length",model="two"} 1.0' in metrics
    assert several.reload(f"{_ONE}{_TWO}default-max-tokens = 5\n").endswith("in use: models.two.default-max-tokens.")


def test_a_new_model_is_loaded_with_the_others(several: _Configured) -> None:
    several.reload(f"load = 'all'\n{_ONE}{_TWO}")
    several.server.wait_line("two was loaded in")


def test_a_model_that_is_removed_answers_what_it_has_begun(several: _Configured) -> None:
    server = several.server
    several.reload(_ONE + _TWO)
    stream = server.create({"prompt": "Long.", "max_tokens": 3000, "model": "two"})
    assert several.reload(_ONE) == "The settings were read again; removed: models.two."
    assert _asked(server, "two") == 404
    assert _listed(server) == ["one"]
    states = {model["id"]: model["state"] for model in server.http.get("/v1/admin/models").json()["data"]}
    assert states == {"one": "ready", "two": "leaving"}
    assert server.state(stream)["status"] == "running"
    said = several.reload(_ONE + _TWO.replace("50", "60"))
    assert said.endswith("read again; still in use, so try again later: models.two.")
    server.post(f"/v1/streams/{stream}/cancel", {})
    server.wait_line("two is unloaded since it is served no more")
    until(lambda: 'tailrace_ready{model="two"}' not in server.http.get("/metrics").text)
    assert server.state(stream)["status"] == "cancelled"
    assert several.reload(_ONE + _TWO.replace("50", "60")).endswith("added: models.two.")
    assert _asked(server, "two") == 200


def test_a_model_that_comes_back_before_it_has_left_stays(several: _Configured) -> None:
    server = several.server
    several.reload(_ONE + _TWO)
    stream = server.create({"prompt": "Long.", "max_tokens": 3000, "model": "two"})
    several.reload(_ONE)
    assert several.reload(f"{_ONE}{_TWO}default-max-tokens = 4\n").endswith("again; added: models.two.")
    answer = server.post("/v1/chat/completions", {"messages": _CHAT["messages"], "model": "two"})
    assert answer.json()["usage"]["completion_tokens"] == 4
    server.post(f"/v1/streams/{stream}/cancel", {})
    assert several.reload(f"{_ONE}{_TWO}default-max-tokens = 5\n").endswith("in use: models.two.default-max-tokens.")
    assert "unloaded" not in server.log


async def test_a_request_that_comes_too_late_finds_no_model(tmp_path: Path) -> None:
    """It was there when the request arrived. What it has answered keeps its own tokens."""
    found = await asyncio.to_thread(find_source, "scripted", NoProgress())
    first, second = (replace(found, card=replace(found.card, name=name)) for name in ("one", "two"))
    async with open_server(first, Settings(journal="memory"), data_path=tmp_path) as running:
        models = running.service.models
        (served,) = await running.service.prepare([second], running.server.settings)
        assert models.add(served)
        await models.load(served)
        run = await served.generator.create(GenerateRequest(prompts=("Hi",), sampling=Sampling(max_tokens=2)))
        await wait_until(lambda: run.log.end is not None)
        models.give_up(served)
        await wait_until(lambda: list(models) == [models.first])
        with pytest.raises(UnknownModel):
            await models.load(served)
        assert models.of(run.log) is served
        assert models.generators == [models.first.generator]


def test_the_first_model_stays_until_a_restart(several: _Configured) -> None:
    said = several.reload(_TWO)
    assert said == "The settings were read again; added: models.two; restart to use: models.one."
    assert _listed(several.server) == ["one", "two"]
    assert several.reload(_TWO + _ONE).endswith("again; restart to use: models.two as the first model.")


@pytest.mark.parametrize(
    ("added", "reason"),
    [
        ("[models.two]\nsource = 'smolm2'\n", "two: "),
        ("[models.three]\nkv-tokens = 4096\n", "three"),
        (f"{_TWO}context-tokens = 70_000\n", "two: --context-tokens must be at most 65536"),
        (f"{_TWO}engine = 'llamacpp'\n", "two"),
        (
            f"{_TWO}adapter = 'three=.'\n[models.three]\nsource = 'scripted'\n",
            "The adapter three has the name of another",
        ),
        (
            f"{_TWO}adapter = 'x=.'\n[models.three]\nsource = 'scripted'\nadapter = 'x=.'\n",
            "The adapter x has the name",
        ),
    ],
)
def test_a_new_model_that_cannot_be_served_changes_nothing(several: _Configured, added: str, reason: str) -> None:
    said = several.reload(f"queue-s = 1\n{_ONE}{added}")
    assert said.startswith("The settings were not read again, and nothing has changed: ")
    assert reason in said
    assert _listed(several.server) == ["one"]
    assert several.reload(f"queue-s = 1\n{_ONE}").endswith("again; in use: queue-s.")


async def test_settings_of_a_model_that_may_not_change_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its own scale needs the adapter, which is gone from the file, too."""
    source = await asyncio.to_thread(find_source, "scripted", NoProgress())
    before = settings_of({"journal": "memory", "kv_tokens": 4096})
    given = Given(before, {}, {"models.scripted": "scripted"})
    wanted = Given(settings_of({"journal": "memory", "queue_s": 5.0}), {}, {})
    async with open_server(source, before, data_path=tmp_path) as running:
        reread = Reread(given, lambda known: (wanted, []))
        running_again = asyncio.create_task(reread.run(running.server, running.service))
        reread.requested.set()
        await wait_until(lambda: "read again" in caplog.text)
        assert "in use: queue-s; restart to use: kv-tokens, models.scripted." in caplog.text
        (served,) = running.service.models
        assert (served.settings.queue_s, served.settings.kv_tokens) == (5.0, 4096)
        running_again.cancel()


def test_only_what_may_change_is_taken() -> None:
    numbers = {row.name: _own_value(row, 1) for row in settings_table() if row.kind in (int, float)}
    others = settings_of({**numbers, "adapter": "a", "draft": "b"})
    taken = Settings().taking(others)
    for row in settings_table():
        assert taken.value_of(row) == (others if row.reloads else Settings()).value_of(row), row.name
