"""Apps with another interpreter and other packages than the server."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.apps.process import AppServer, write

from tailrace_outer.apps.interpreters import NEEDED, InterpreterError, find_interpreter
from tailrace_outer.apps.targets import PlanError, plan_of

_APP = """
import sys
from tailrace import serve


@serve.deployment
class Where:
    async def __call__(self, request):
        async def parts():
            yield sys.prefix
        return serve.stream(parts())


app = Where.bind()
"""


def _environment(path: Path, *, with_ours: bool) -> Path:
    """Return an environment, either without packages or with those of the tests."""
    venv.create(path, symlinks=True)
    if with_ours:
        place = path / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        (place / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return path


@pytest.mark.deep
def test_an_app_runs_with_the_named_interpreter(tmp_path: Path, run: Callable[..., AppServer]) -> None:
    """The interpreter is given as a directory for one app, and in a file for one of two apps."""
    environment = _environment(tmp_path / "env", with_ours=True)
    write(tmp_path, "where.py", _APP)
    server = run("where:app", "--python", str(environment)).wait_ready()
    assert str(environment) in server.http.get("/").text
    plan = f"""
applications:
  - {{name: there, route_prefix: /there, import_path: "where:app",
      runtime_env: {{py_executable: "{environment}/bin/python"}}}}
  - {{name: here, route_prefix: /here, import_path: "where:app"}}
"""
    (tmp_path / "apps.yaml").write_text(plan)
    server = run("apps.yaml").wait_ready()
    assert str(environment) in server.http.get("/there").text
    assert str(environment) not in server.http.get("/here").text


def test_an_interpreter_without_packages_is_refused_with_the_command(tmp_path: Path) -> None:
    environment = _environment(tmp_path / "env", with_ours=False)
    python = environment / "bin" / "python"
    with pytest.raises(InterpreterError) as refused:
        find_interpreter(str(environment))
    install = f"{python} -m pip install {' '.join(NEEDED)}"
    assert str(refused.value) == f"{python} lacks packages that every app needs. Install them there: {install}"


def test_an_interpreter_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = _environment(tmp_path / "env", with_ours=True)
    monkeypatch.setenv("PATH", str(environment / "bin"))
    assert find_interpreter("python3") == str(environment / "bin" / "python3")


def test_a_command_is_refused_as_an_interpreter() -> None:
    with pytest.raises(InterpreterError, match="'uv run' is not the path of a Python interpreter"):
        find_interpreter("uv run")


def test_a_package_that_does_not_fit_is_named(tmp_path: Path) -> None:
    environment = _environment(tmp_path / "env", with_ours=True)
    place = environment / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages" / "starlette"
    place.mkdir()
    (place / "__init__.py").touch()
    with pytest.raises(InterpreterError, match=r"cannot run apps: .*starlette"):
        find_interpreter(str(environment))


def test_an_interpreter_of_a_file_is_refused_on_ray(tmp_path: Path) -> None:
    app = "{import_path: 'where:app', runtime_env: {py_executable: nowhere}}"
    path = write(tmp_path, "apps.yaml", f"applications: [{app}]")
    with pytest.raises(PlanError, match=r"py_executable is not supported with --on ray"):
        plan_of(
            str(path), [], directory=str(tmp_path), route_prefix="/", name="default", concurrency=1,
            log_level="warning", on_ray=True,
        )  # fmt: skip


def test_a_folder_is_loaded_by_a_package_that_the_interpreter_does_not_have(tmp_path: Path) -> None:
    package, folder = tmp_path / "elsewhere" / "kinds", tmp_path / "folder"
    for directory in (package, folder):
        directory.mkdir(parents=True)
    write(package, "__init__.py", "")
    loader = """
        from tailrace import serve
        from tailrace.serve.folders import FolderApp

        def load_folder(folder, *, concurrency, queue_s):
            return FolderApp(serve.deployment(name=folder.name)(type("App", (), {})).bind(), [str(concurrency)])
        """
    write(package, "loading.py", loader)
    program = f"""
from tailrace_outer.apps.target import load
from tailrace_outer.serve.boot import AppTarget, FolderKind

kind = FolderKind("a folder", "kinds.loading:load_folder", {str(package)!r})
app, notes = load(AppTarget({str(folder)!r}, directory={str(folder)!r}, kind=kind, concurrency=3, python="another"))
print(app.deployment.name, *notes)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "folder 3\n"


def test_invalid_interpreters_are_refused(tmp_path: Path, run: Callable[..., AppServer]) -> None:
    write(tmp_path, "where.py", _APP)
    for given, told in (("nowhere", "No such file"), ("/bin/false", "cannot run apps"), (".", "No such file")):
        server = run("where:app", "--python", given)
        assert server.wait() == 2
        assert told in server.log


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_an_app_with_old_pins(tmp_path: Path, run: Callable[..., AppServer]) -> None:
    """These pins of an Inferless app cannot be installed beside tailrace: they need another huggingface-hub."""
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=120)
    pins = ["transformers==4.41.1", "huggingface-hub<0.24", "fastapi==0.111.0", "starlette<0.38"]
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *pins, *(name for name in NEEDED if name != "starlette")], check=True, timeout=600)
    write(
        tmp_path,
        "old.py",
        """
        import huggingface_hub, starlette, transformers
        from fastapi import FastAPI
        from fastapi.responses import StreamingResponse
        from tailrace import serve

        web = FastAPI()


        @serve.deployment
        @serve.ingress(web)
        class Old:
            @serve.batch(max_batch_size=2)
            async def versions(self, packages):
                for _ in range(2):
                    yield [package.__version__ for package in packages]

            @web.get("/{name}")
            async def version(self, name: str):
                return StreamingResponse(self.versions(globals()[name]), media_type="text/plain")

            @web.get("/stream/{name}")
            async def stream(self, name: str):
                return serve.stream(self.versions(globals()[name]))


        app = Old.bind()
        """,
    )
    os.environ.pop("PYTHONPATH", None)
    server = run("old:app", "--python", str(environment), "--resumable").wait_ready(timeout_s=120)
    answer = server.http.get("/transformers")
    assert answer.text == "4.41.1" * 2
    assert server.http.get(answer.headers["location"], params={"after": 6}).text == "4.41.1"
    assert server.http.get("/huggingface_hub").text.startswith("0.2")
    assert '{"text":"0.37' in server.http.get("/stream/starlette").text
