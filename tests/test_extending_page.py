"""docs/extending.md: its package is in examples/, keeps the laws, and is served; faulty plugins are left out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent

import pytest
from tests.api.process import TAILRACE, Server, environment
from tests.apps.process import AppServer
from tests.waiting import LONG_S
from websockets.sync.client import connect

from tailrace.engines import OPTIONAL_SETTINGS, EngineSpec
from tailrace.testing import Law, check_engine, laws

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text("utf-8")
EXAMPLE = ROOT / "examples" / "parrot"
FILES: dict[str, str] = dict(
    re.findall(r"^`([\w/]+\.(?:py|toml))`:\n\n```(?:python|toml)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
)
SCRIPTS: list[str] = re.findall(r"(?<!`:\n\n)^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def install(site: Path, package: str, files: Mapping[str, str], points: Mapping[str, Mapping[str, str]]) -> None:
    """Install a package with its entry points, like pip."""
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    facts = site / f"{package.replace('-', '_')}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [
        line
        for group, named in points.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in named.items()))
    ]
    (facts / "entry_points.txt").write_text("\n".join([*lines, ""]))


def install_parrot(site: Path) -> None:
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    modules = {name: text for name, text in FILES.items() if name.endswith(".py")}
    install(site, project["name"], modules, project["entry-points"])


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory of packages for child processes."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)
    return directory


@pytest.fixture
def parrot(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the package of the page, for child processes and for this process."""
    install_parrot(site)
    monkeypatch.syspath_prepend(str(site))
    yield site
    for name in [name for name in sys.modules if name.partition(".")[0] == "tailrace_parrot"]:
        del sys.modules[name]


def test_the_page_shows_the_files_of_the_example() -> None:
    kept = {
        str(path.relative_to(EXAMPLE)): path.read_text()
        for path in EXAMPLE.rglob("*")
        if path.suffix in (".py", ".toml")
    }
    assert kept == FILES


def test_the_page_names_every_setting_of_only_some_engines() -> None:
    assert {f"--{name.replace('_', '-')}" for name in OPTIONAL_SETTINGS} <= set(re.findall(r"`(--[a-z-]+)`", PAGE))


def test_the_script_of_the_page(parrot: Path) -> None:
    (script,) = SCRIPTS
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG_S, check=False, env=environment()
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("law", laws, ids=str)
def test_the_engine_keeps_every_law_also_with_an_end_of_text(law: Law, parrot: Path) -> None:
    from tailrace_parrot.engine import ParrotEngine

    law(lambda: ParrotEngine(EngineSpec("parrot", context_tokens=256, eos_token_ids=(3,))), num_sequences=100)


def test_the_laws_find_an_engine_that_breaks_one(parrot: Path) -> None:
    from tailrace_parrot.engine import ParrotEngine

    class Deaf(ParrotEngine):
        def abort(self, sequence_id: int) -> None:
            pass

    with pytest.raises(AssertionError, match="abort_takes_one_step"):
        check_engine(lambda: Deaf(EngineSpec("parrot", context_tokens=256)), num_sequences=10)


def test_it_is_served(parrot: Path) -> None:
    with contextlib.closing(Server("scripted", "--engine", "parrot", "--journal", "memory")) as server:
        server.wait_ready()
        answer = server.post("/parrot", {"say": "Hi, you.", "max_tokens": 20})
        assert answer.headers["content-type"] == "application/x-ndjson"
        pieces = re.findall(r'\{"said": "(.*)"\}', answer.text)
        assert "".join(pieces) == "Hi, you."
        assert answer.text.endswith('{"tokens": 9}\n')
        followed = server.http.get(f"/v1/streams/{answer.headers['x-stream-id']}/events", headers={"accept": "*/*"})
        assert '"status":"done"' in followed.text
        refused = server.post("/parrot", {"say": "Hi", "max_tokens": 0})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
        assert server.http.get("/parrot/nothing").json()["error"]["code"] == "not_found"
        assert "/parrot" in server.http.get("/openapi.json").json()["paths"]
        with connect(f"ws://127.0.0.1:{server.port}/parrot") as socket:
            for prompt in ("Hello.", "Bye."):
                socket.send(prompt)
                assert "".join(iter(lambda: str(socket.recv()), "(silence)")) == prompt
        told = subprocess.run(
            [TAILRACE, "parrot", "--url", server.url, "Hello."],
            capture_output=True, text=True, timeout=LONG_S, check=True, env=environment(),
        )  # fmt: skip
        assert told.stdout.strip() == "Hello."
        talks = [{"parrot": ["Hello.", "Hello."]}]
        assert server.post("/v1/conversations/import", talks).json()["data"][0]["title"] == "Parrot"
        assert server.http.get("/v1/conversations/export?format=parrot").json() == talks
        again = server.post("/v1/completions", {"model": "default", "prompt": "ab", "max_tokens": 5})
        assert again.json()["choices"][0]["text"] == "ab"
        refused = server.post("/v1/completions", {"model": "default", "prompt": "ab", "logit_bias": {"5": 1}})
        assert refused.json()["error"]["param"] == "logit_bias"


@pytest.mark.deep
def test_its_memory_is_kept_in_the_journal_and_with_its_limit(parrot: Path, tmp_path: Path) -> None:
    flags = ("--data-dir", str(tmp_path / "data"), "--parrot-phrases", "2")
    text = {"content-type": "text/plain"}
    for phrase, known in (("one", ["one"]), ("two", ["one", "two"]), ("three", ["one", "two"])):
        with contextlib.closing(Server("scripted", *flags)) as server:
            server.wait_ready()
            assert server.http.post("/phrases", content=phrase).json() == known
            assert server.http.post("/v1/durable/a", content=phrase, headers=text).status_code == 404  # notes are apart


@pytest.mark.deep
def test_its_memory_of_an_owner_is_forgotten(parrot: Path, tmp_path: Path) -> None:
    flags = ("--data-dir", str(tmp_path / "data"), "--database", f"sqlite:///{tmp_path / 'records.sqlite'}")
    keys = [
        subprocess.run(
            [TAILRACE, "keys", "create", "--json", *words, *flags[2:]],
            capture_output=True, text=True, timeout=LONG_S, check=True, env=environment(),
        ).stdout
        for words in (("me",), ("root", "--scope", "admin"))
    ]  # fmt: skip
    mine, root = ({"authorization": f"Bearer {json.loads(key)['token']}"} for key in keys)
    with contextlib.closing(Server("scripted", *flags)) as server:
        server.wait_ready()
        assert server.http.post("/phrases", content="one").status_code == 401
        assert server.http.post("/phrases", content="one", headers=mine).json() == ["one"]
        deleted = server.http.delete("/v1/admin/owners/me", headers=root).json()["deleted"]
        assert (deleted["parrot_phrases"], deleted["durable_streams"]) == (1, 0)


def test_auto_takes_no_engine_of_another_package(parrot: Path) -> None:
    with contextlib.closing(Server("scripted", "--journal", "memory")) as server:
        server.wait_ready()
        assert "into scripted" in server.log


def test_a_setting_that_the_engine_does_not_use_is_refused(parrot: Path) -> None:
    assert "The engine parrot does not support --threads." in _errors_of("--engine", "parrot", "--threads", "2")


def test_its_place_serves(parrot: Path) -> None:
    ran = subprocess.run(
        [TAILRACE, "serve", "scripted", "--on", "parrot", "--times", "2", "--port", "7000"],
        capture_output=True, text=True, timeout=LONG_S, check=True, env=environment(),
    )  # fmt: skip
    assert ran.stderr == "scripted on port 7000\n" * 2
    assert "the parrot knows one model." in _errors_of("--on", "parrot", "--model", "b=scripted")
    assert "--times needs --on parrot." in _errors_of("--times", "2")
    assert "Create a key" in _errors_of("--on", "parrot", "--host", "0.0.0.0")


def test_a_place_with_an_option_of_the_server_is_left_out(site: Path) -> None:
    source = """
        import click

        from tailrace.cli.commands import ServePlace

        PLACE = ServePlace("odd", "", "odd:serve", (click.Option(["--host"]),))
    """
    install(site, "odd", {"odd.py": dedent(source)}, {"tailrace.places": {"odd": "odd:PLACE"}})
    errors = _errors_of("--on", "odd")
    assert "odd of the package odd is left out: `tailrace serve` has the option --host already." in errors


@pytest.mark.deep
def test_its_folders_are_served(parrot: Path, tmp_path: Path) -> None:
    (tmp_path / "polly").mkdir()
    (tmp_path / "polly" / "parrot.txt").write_text("Hello.")
    with contextlib.closing(AppServer("./polly", "--port", "0", "--concurrency", "2", directory=tmp_path)) as server:
        server.wait_ready()
        assert server.http.get("/").text == "Hello."
        assert "The parrot knows one text." in server.log
    (tmp_path / "polly" / "parrot.txt").write_text("")
    with contextlib.closing(AppServer("./polly", "--port", "0", directory=tmp_path)) as server:
        server.wait_line("parrot.txt is empty.")


def test_help_shows_its_command(parrot: Path) -> None:
    shown = subprocess.run(
        [TAILRACE, "--help"], capture_output=True, text=True, timeout=LONG_S, check=True, env=environment()
    )
    assert re.search(r"^  parrot +Say something to the parrot of a server\.$", shown.stdout, re.M), shown.stdout


def test_doctor_shows_it(parrot: Path) -> None:
    ran = subprocess.run(
        [TAILRACE, "doctor", "scripted", "--quick"], capture_output=True, text=True, timeout=LONG_S, check=True,
        env=environment(),
    )  # fmt: skip
    assert re.search(r"^  parrot +1\.0 +runs scripted$", ran.stdout, re.M), ran.stdout


_ODD = """
from tailrace.dialects import WIRES, Generate, Operation, Wire, encode_error
from tailrace.engines import Kind

kind = dict(text="", formats=("gguf",), cls="odd:Engine")
openvino = Kind("openvino", **kind)
another = Kind("else", **kind)
formats = Kind("formats", **{**kind, "formats": ("onnx",)})
settings = Kind("settings", settings=("speed",), **kind)
no_class = Kind("no_class", **{**kind, "cls": "odd"})
not_one = object()
no_formats = Kind("no_formats", **{**kind, "formats": 3})
eager = Kind("eager", preference=1, **{**kind, "formats": ("scripted",)})  # which `auto` never takes


def wire(name, path="/odd", method="POST", only_with=None, **more):
    operation = Operation(method, path, Generate(print), "", only_with=only_with)
    return Wire(name, "", (operation,), **{"encode_error": encode_error, **more})


native = wire("native")
ours = wire("ours", "/v1/streams/{x}/events")
metrics = wire("metrics", "/metrics")
swallows = wire("swallows", "/{rest:path}")
any_name = wire("any_name", "/{name}")
relative = wire("relative", "odd")
broad = wire("broad", prefix="/v1")
says_nothing = wire("says_nothing", encode_error=lambda error: (400, b"no"))
wrong_status = wire("wrong_status", encode_error=lambda error: (200, b"{}"))
fits = wire("fits", "/fits")
twice = wire("twice", "/fits")
told_apart = wire("told_apart", "/generate", only_with="odd")
told_as_another = wire("told_as_another", "/", only_with="prompt")
same_socket = wire("same_socket", "/other", sockets={"/v1/ws": print})
welcomes = wire("welcomes", "/", "GET", only_with="odd")
"""
_LEFT_OUT = {
    "tailrace.engines": {
        "openvino": "tailrace has one with this name",
        "differs": "odd:another has another name than its entry point",
        "formats": "it has unknown formats: onnx",
        "settings": "it has unknown settings: speed",
        "no_class": "'odd' is not module:class",
        "no_formats": "odd:no_formats does not fit (TypeError",
        "not_one": "odd:not_one is not a Kind",
        "missing": "odd:missing could not be loaded (AttributeError: module 'odd' has no attribute 'missing')",
        "raises": "raises could not be loaded (ValueError: no such luck)",
        "leaves": "leaves could not be loaded (SystemExit: 3)",
    },
    "tailrace.wires": {
        "native": "tailrace has one with this name",
        "ours": "its path /v1/streams/{x}/events conflicts with /v1/streams/{stream_id}/events",
        "metrics": "its path /metrics conflicts with /metrics",
        "swallows": "its path /{rest:path} conflicts with /",
        "any_name": "its path /{name} conflicts with /",
        "relative": "'odd' is not a path",
        "broad": "its prefix '/v1' is also the prefix of other paths",
        "says_nothing": "odd:says_nothing does not fit (",
        "wrong_status": "encode_error does not return the status of an error and a JSON object",
        "twice": "its path /fits conflicts with /fits",
        "told_as_another": "its path / conflicts with /",
        "welcomes": "its path / conflicts with /",
        "same_socket": "there is another WebSocket at /v1/ws",
        "plain": "tailrace has one with this name",
    },
}
_ELSEWHERE = {"differs": "odd:another", "raises": "raises", "leaves": "leaves"}


def test_a_faulty_plugin_is_left_out_with_a_log_line(site: Path) -> None:
    points = {
        group: {name: _ELSEWHERE.get(name, f"odd:{name}") for name in reasons} for group, reasons in _LEFT_OUT.items()
    }
    points["tailrace.engines"] |= {"eager": "odd:eager"}
    points["tailrace.wires"] |= {"fits": "odd:fits", "told_apart": "odd:told_apart"}
    modules = {
        "odd.py": _ODD,
        "raises.py": "raise ValueError('no such luck')",
        "leaves.py": "import sys; sys.exit(3)",
    }
    install(site, "odd", modules, points)
    with contextlib.closing(Server("scripted", "--journal", "memory")) as server:
        server.wait_ready()
        for group, reasons in _LEFT_OUT.items():
            for name, reason in reasons.items():
                server.wait_line(f"^tailrace: {group}: {name} of the package odd is left out: {re.escape(reason)}")
        assert "Traceback" not in server.log
        paths = server.http.get("/openapi.json").json()["paths"]
        assert "/fits" in paths
        assert set(paths["/generate"]["post"]["tags"]) == {"tgi", "told_apart"}
        assert not {"/odd", "/{rest}", "/{name}"} & set(paths)
        assert server.http.get("/v1/models").json()["data"][0]["id"] == "scripted"
        assert server.http.get("/metrics").status_code == 200


_FOLDERS_LEFT_OUT = {
    "no_function": "'nowhere' is not module:function",
    "no_package": "there is no package nowhere",
    "not_one": "odd:not_one is not an AppFolder",
    "same_file": "inferless has the file app.py, too",
}


def test_a_faulty_kind_of_folder_is_left_out(site: Path, tmp_path: Path) -> None:
    source = """
        from tailrace.serve.folders import AppFolder

        no_function = AppFolder("no_function", "", "a.txt", "nowhere")
        no_package = AppFolder("no_package", "", "b.txt", "nowhere:load")
        not_one = object()
        same_file = AppFolder("same_file", "", "app.py", "email:load")
        """
    points = {"tailrace.app_folders": {name: f"odd:{name}" for name in _FOLDERS_LEFT_OUT}}
    install(site, "odd", {"odd.py": dedent(source)}, points)
    with contextlib.closing(AppServer(".", "--port", "0", directory=tmp_path)) as server:
        assert server.wait() == 2
    for name, reason in _FOLDERS_LEFT_OUT.items():
        assert f"tailrace.app_folders: {name} of the package odd is left out: {reason}." in server.log
    assert "is a folder without app.py." in server.log


def _errors_of(*flags: str) -> str:
    """Return stderr of a server that cannot start with these flags."""
    ran = subprocess.run(
        [TAILRACE, "serve", "scripted", "--port", "0", *flags],
        capture_output=True, text=True, timeout=LONG_S, check=False, env=environment(),
    )  # fmt: skip
    assert ran.returncode in (1, 2)
    assert "Traceback" not in ran.stderr
    return ran.stderr


def test_two_packages_with_one_name(site: Path) -> None:
    for package in ("first", "second"):
        source = _ODD.replace('Kind("else"', f'Kind("same", packages=("{package}_library",)')
        install(site, package, {f"{package}.py": source}, {"tailrace.engines": {"same": f"{package}:another"}})
    errors = _errors_of("--engine", "same")
    assert "same of the package second is left out: another package has one with this name" in errors


def test_naming_an_engine_that_was_left_out(site: Path) -> None:
    install(site, "raises", {"raises.py": "raise ValueError('no')"}, {"tailrace.engines": {"raises": "raises:x"}})
    errors = _errors_of("--engine", "raises")
    assert "raises of the package raises is left out: raises:x could not be loaded (ValueError: no)" in errors
    assert "'raises' is not one of 'auto', 'openvino'" in errors


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('no library')", "ImportError: no library"),
        ("class Engine:\n    def __init__(self, spec): raise RuntimeError('no memory')", "RuntimeError: no memory"),
        ("", "has no attribute 'Engine'"),
    ],
)
def test_an_engine_that_cannot_load_its_model(source: str, reason: str, site: Path) -> None:
    kind = 'from tailrace.engines import Kind\nKIND = Kind("bad", "", formats=("scripted",), cls="bad_engine:Engine")'
    install(site, "bad", {"bad.py": kind, "bad_engine.py": source}, {"tailrace.engines": {"bad": "bad:KIND"}})
    assert reason in _errors_of("--engine", "bad")


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_pip_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(EXAMPLE)],
        check=True, timeout=240,
    )  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", str(target))
    with contextlib.closing(Server("scripted", "--engine", "parrot", "--journal", "memory")) as server:
        server.wait_ready()
        assert '"said"' in server.post("/parrot", {"say": "Hi"}).text
