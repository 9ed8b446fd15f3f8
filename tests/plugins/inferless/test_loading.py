from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.plugins.inferless.apps import STREAMING, UNARY, Make, apps, events_of, served

from tailrace_plugins.inferless.app import load_app
from tailrace_plugins.inferless.inferless_errors import AppError
from tailrace_plugins.inferless.shim import REMOTE_NOTE

ECHO = """
class InferlessPythonModel:
    def initialize(self):
        pass

    def infer(self, inputs):
        return {"OUT": inputs["TEXT"]}
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with apps(tmp_path) as make:
        yield make


def test_a_folder_without_an_app(tmp_path: Path) -> None:
    with pytest.raises(AppError, match=r"there is no app\.py in this folder\.$"):
        load_app(tmp_path)


@pytest.mark.parametrize(
    ("app", "schema", "message"),
    [
        ("", UNARY, "app.py: there is no class InferlessPythonModel."),
        ("InferlessPythonModel = 1", UNARY, "app.py: there is no class InferlessPythonModel."),
        ("class InferlessPythonModel: pass", UNARY, "app.py: InferlessPythonModel has no method infer."),
        (
            ECHO,
            None,
            "app.py: there is neither an input_schema.py with an INPUT_SCHEMA nor a class with @inferless.request.",
        ),
        (
            ECHO,
            "IS_STREAMING_OUTPUT = False",
            "app.py: there is neither an input_schema.py with an INPUT_SCHEMA nor a class with",
        ),
        (ECHO, "INPUT_SCHEMA = {'TEXT': 1}", "input_schema.py: INPUT_SCHEMA['TEXT'] must be a dict, not int."),
        (ECHO, UNARY + "IS_STREAMING_OUTPUT = 'yes'", "input_schema.py: IS_STREAMING_OUTPUT must be True or False."),
        (ECHO, UNARY + "BATCH_SIZE = 2.5", "input_schema.py: BATCH_SIZE must be an integer above 0."),
        (ECHO, UNARY + "BATCH_WINDOW = -1", "input_schema.py: BATCH_WINDOW must be a number above 0."),
        (
            "class InferlessPythonModel:\n    def infer(self, inputs): yield inputs",
            STREAMING,
            "app.py: infer is a generator. It should call stream_output_handler.send_streamed_output instead of yield.",
        ),
        ("class InferlessPythonModel:\n    def infer(self): pass", UNARY, "app.py: infer should take inputs, and"),
        ("class InferlessPythonModel:\n    def infer(self, a, b, c): pass", UNARY, "app.py: infer should take inputs"),
        (
            "class InferlessPythonModel:\n    def infer(self, inputs, handler): pass",
            UNARY,
            "input_schema.py: infer takes a stream_output_handler, but IS_STREAMING_OUTPUT is not set to True.",
        ),
        (
            "import inferless\n@inferless.request\nclass Question: pass\n" + ECHO,
            None,
            "app.py: Question has @inferless.request, but is not a pydantic BaseModel.",
        ),
    ],
)
def test_invalid_apps_are_refused_with_one_sentence(make: Make, app: str, schema: str | None, message: str) -> None:
    with pytest.raises(AppError) as caught:
        make(app, schema)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("inferless.yaml", "name: [", "inferless.yaml: not valid YAML at line 1."),
        ("inferless.yaml", "- name", "inferless.yaml: the file must be a mapping of settings."),
        ("inferless.yaml", "name: a/b", "inferless.yaml: name must be a word."),
        ("inferless.yaml", "configuration: T4", "inferless.yaml: configuration must be a mapping of settings."),
        (
            "inferless-runtime-config.yaml",
            "build: {python_packages: {torch: 2}}",
            "inferless-runtime-config.yaml: build.python_packages must be a list.",
        ),
    ],
)
def test_settings_that_cannot_be_read(make: Make, file: str, text: str, message: str) -> None:
    with pytest.raises(AppError) as caught:
        make(ECHO, UNARY, files={file: text})
    assert str(caught.value) == message


def test_exceptions_of_the_app_are_not_changed(make: Make) -> None:
    with pytest.raises(ZeroDivisionError):
        make("1 / 0", UNARY)
    with pytest.raises(ZeroDivisionError):
        make(ECHO, "1 / 0")
    with pytest.raises(ZeroDivisionError):
        make("class InferlessPythonModel:\n    def __init__(self): 1 / 0\n    def infer(self, inputs): pass", UNARY)
    assert "app" not in sys.modules or not hasattr(sys.modules["app"], "nonsense")


def test_every_setting_without_effect_is_named(make: Make) -> None:
    app = make(
        ECHO,
        UNARY + "IS_BATCHED_INPUT = True",
        files={
            "inferless.yaml": """
version: 1.0.0
name: Echo
import_source: GIT
configuration:
  gpu_type: T4
  min_replica: 0
  custom_volume_id: ''
env: {GREETING: hello, PATH: nowhere}
secrets: [HF_TOKEN]
optional: {input_file_name: input.json}
server_port: 8000
""",
            "inferless-runtime-config.yaml": """
build:
  base_image: triton
  cuda_version: "12.4.1"
  system_packages: [libssl-dev]
  python_packages: ["torch==2.1.2", "a>1"]
  run: ["echo a", "echo b"]
""",
        },
    )
    assert app.name == "Echo"
    assert app.notes == [
        "inferless.yaml: gpu_type, min_replica, server_port have no effect: the app runs on this machine as it is.",
        "inferless.yaml: input_file_name has no effect.",
        "inferless.yaml: secrets are not fetched: set those that the app needs in the environment (HF_TOKEN).",
        "inferless-runtime-config.yaml: python_packages are left to you: "
        f"{sys.executable} -m pip install torch==2.1.2 'a>1' "
        "(where that conflicts with tailrace: into an environment of their own, given as --python)",
        "inferless-runtime-config.yaml: system_packages are left to you: apt-get install libssl-dev",
        "inferless-runtime-config.yaml: run is left to you: echo a && echo b",
        "inferless-runtime-config.yaml: base_image, cuda_version have no effect: "
        "no image is built; the app uses the packages of this machine.",
        "input_schema.py: IS_BATCHED_INPUT has no effect: "
        "inputs are accepted with and without a leading 1 in their shape.",
    ]
    assert os.environ["GREETING"] == "hello"
    assert os.environ["PATH"] != "nowhere"


def test_the_name_of_an_app_is_given_or_that_of_its_folder(make: Make, tmp_path: Path) -> None:
    assert make(ECHO, UNARY).name == tmp_path.name
    assert make(ECHO, UNARY, name="other").name == "other"
    assert make(ECHO, UNARY).notes == []


async def test_an_app_may_import_files_of_its_folder(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "beside_the_app", raising=False)
    app = "import beside_the_app\nfrom input_schema import INPUT_SCHEMA\n" + ECHO.replace(
        'inputs["TEXT"]', "beside_the_app.shout(inputs['TEXT'])"
    )
    files = {"beside_the_app.py": "def shout(text): return text.upper()"}
    async with served(make(app, UNARY, files=files, name="m")) as client:
        answer = await client.post("/v2/models/m/generate", json={"TEXT": "hello"})
    assert answer.json()["OUT"] == "HELLO"


PYDANTIC = """
import inferless
from typing import Optional
from pydantic import BaseModel, Field


@inferless.config
class Configuration(BaseModel):
    is_streaming_output: bool = True
    my_own_setting: int = 3


@inferless.request
class Question(BaseModel):
    prompt: str = Field(default="Why?")
    seed: Optional[int] = None


@inferless.response()
class Answered(BaseModel):
    generated: str = Field(default="")


class InferlessPythonModel:
    async def infer(self, asked: Question, stream_output_handler) -> Answered:
        await stream_output_handler.send_streamed_output(Answered(generated=asked.prompt))
        await stream_output_handler.send_streamed_output({"generated": str(asked.seed)})
        await stream_output_handler.finalise_streamed_output()
"""


@pytest.mark.parametrize(
    "app",
    [
        PYDANTIC,
        PYDANTIC.replace("@inferless.config", "@inferless.config()"),
        PYDANTIC.replace("import inferless", "from inferless import config as c, request as r, response as s")
        .replace("@inferless.config", "@c")
        .replace("@inferless.request", "@r")
        .replace("@inferless.response", "@s"),
    ],
    ids=["bare", "called", "imported-by-name"],
)
async def test_apps_with_pydantic_models(make: Make, app: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IS_STREAMING_OUTPUT", "0")  # is not the app's
    async with served(make(app, None, name="m")) as client:
        answer = await client.post("/v2/models/m/generate_stream", json={"parameters": {"seed": 3}})
        assert events_of(answer) == [{"generated": "Why?"}, {"generated": "3"}]
        shown = (await client.get("/v2/models/m")).json()
        assert shown["inputs"] == [
            {"name": "prompt", "datatype": "BYTES", "shape": [1]},
            {"name": "seed", "datatype": "INT64", "shape": [1]},
        ]
        assert shown["outputs"] == [{"name": "generated", "datatype": "BYTES", "shape": [1]}]
        refused = await client.post("/v2/models/m/generate_stream", json={"seed": "8317"})
        assert (refused.status_code, refused.json()) == (
            400,
            {"error": "seed: expected an integer from -9223372036854775808 to 9223372036854775807."},
        )
    assert os.environ["MY_OWN_SETTING"] == "3"


def test_streaming_may_be_declared_with_pydantic_models(make: Make) -> None:
    app = PYDANTIC.replace("is_streaming_output: bool = True", "") + "\nIS_STREAMING_OUTPUT = True\n"
    assert make(app, None).is_streaming


async def test_remote_execution_does_not_change_functions(make: Make) -> None:
    app = """
import inferless

remote = inferless.Cls(gpu="T4")

class InferlessPythonModel:
    @remote.load
    def initialize(self):
        self.greeting = "Hello "

    @remote.infer
    def infer(self, inputs):
        return {"OUT": shout(self.greeting + inputs["TEXT"])}

@inferless.method(gpu="T4")
def shout(text):
    return text.upper()

@inferless.local_entry_point
def main(arguments):
    raise AssertionError
"""
    app_ = make(app, UNARY, name="m")
    assert app_.notes == [REMOTE_NOTE]
    async with served(app_) as client:
        answer = await client.post("/v2/models/m/generate", json={"TEXT": "you"})
    assert answer.json()["OUT"] == "HELLO YOU"


def test_the_real_package_is_not_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("inferless")
    real.marker = "real"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "inferless", real)
    make("import inferless\nassert inferless.marker == 'real'\n" + ECHO, UNARY)


def test_batches_are_not_for_streams(make: Make) -> None:
    app = make("class InferlessPythonModel:\n    def infer(self, inputs, h): pass", STREAMING + "BATCH_SIZE = 4")
    assert app.notes == ["input_schema.py: BATCH_SIZE has no effect on a streaming app: its requests are not batched."]
