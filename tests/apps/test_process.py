"""Messages of a process whose code cannot be imported or constructed: one line, and the user's traceback."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest
from tests.apps.process import write
from tests.processes import wait_ended

from tailrace_outer.apps.process import BootError, ReplicaProcess
from tailrace_outer.serve.boot import AppTarget, Assignment, Failed

_DEPLOYMENT = """
from tailrace import serve

@serve.deployment
class Bot:
    def __init__(self, word="hello"):
        self.word = word

    def __call__(self, request):
        return self.word

app = Bot.bind()
number = 5

def build(args: dict):
    return Bot.bind(args["word"])

def bare():
    return Bot.bind()

def nothing(args):
    pass
"""

_MODULES = {
    "bot": _DEPLOYMENT,
    "needs": "import soundfile_of_nobody.reader",
    "needs_cv": "import sys\nsys.modules['cv2'] = None\nimport cv2",
    "broken": "def f(:\n    pass\n",
    "raises": "def prepare():\n    return {}['weights']\n\nprepare()\n",
    "leaves": "raise SystemExit(3)",
    "constructor": """
        from tailrace import serve

        @serve.deployment
        class Bot:
            def __init__(self):
                raise ValueError("there are no weights\\nin any of these places")

        app = Bot.bind()
        """,
    "startup": """
        import contextlib
        from starlette.applications import Starlette

        @contextlib.asynccontextmanager
        async def lifespan(app):
            raise RuntimeError("there is no database")
            yield

        app = Starlette(lifespan=lifespan)
        """,
    "script": """
        from tailrace import serve

        @serve.deployment
        class Bot: ...

        serve.run(Bot.bind())
        """,
    "options": """
        from tailrace import serve

        @serve.deployment(num_replicas=0)
        class Bot: ...
        """,
    "unbound": """
        from tailrace import serve

        @serve.deployment
        class Bot:
            def __init__(self, word, *, n=1): ...

        app, full = Bot.bind(), Bot.bind("x", m=2)
        """,
    "counter": """
        from tailrace import serve

        @serve.deployment(user_config={"a": 1})
        class Counter:
            def reconfigure(self, config):
                self.b = config["b"]

        app = Counter.bind()
        """,
    "teller": """
        import tailrace
        from tailrace import serve

        @serve.deployment
        class Teller:
            def __init__(self):
                self.model = tailrace.engine("smolm2")

        @serve.deployment
        class Awaiting:
            async def __init__(self):
                self.model = await tailrace.engine("smolm2")

        @serve.deployment
        class Setting:
            def __init__(self):
                self.model = tailrace.engine("scripted", max_sequence=2)

        app, awaited, setting = Teller.bind(), Awaiting.bind(), Setting.bind()
        """,
    "config": """
        from tailrace import serve

        @serve.deployment(user_config={"a": 1})
        class Bot: ...

        app = Bot.bind()
        """,
}

_INSTALL = f"Try: {sys.executable} -m pip install"

# what is run, what its last line says, and what stands in the user's traceback
_FAILURES = {
    "no module": ("nosuch:app", "There is no module nosuch in DIRECTORY. Set its directory with --app-dir.", ""),
    "no package around it": ("nosuch.bot:app", "There is no module nosuch in DIRECTORY.", ""),
    "no app": ("bot:number", "bot:number is not an app, but of type int. It should be the result of .bind(…)", ""),
    "a builder of nothing": ("bot:nothing", "bot:nothing is not an app, but of type NoneType.", ""),
    "arguments of one that is bound": ("bot:app words=x", "bot:app is bound already, so nothing takes words.", ""),
    "arguments of one to be bound": ("bot:Bot words=x", "bot:Bot is a deployment, so nothing takes words.", ""),
    "arguments of a web app": ("startup:app words=x", "startup:app is an ASGI app, so nothing takes words.", ""),
    "bound without an argument": ("unbound:app", "Its constructor takes (word, n=1): pass these to .bind(…).", ""),
    "not bound": ("unbound:Bot", "Bot: missing a required argument: 'word'. Its constructor takes", ""),
    "bound with too much": ("unbound:full", "Bot: got an unexpected keyword argument 'm'. Its constructor takes", ""),
    "a reconfigure": ("counter:app", "reconfigure of Counter raised KeyError: 'b'", 'config["b"]'),
    "arguments for nobody": ("bot:bare word=x", "bare takes no arguments.", ""),
    "an argument missing": ("bot:build other=x", "importing bot:build raised KeyError: 'word'", 'args["word"]'),
    "a package missing": ("needs:app", f"{_INSTALL} soundfile_of_nobody", "import soundfile_of_nobody.reader"),
    "a package of another name": ("needs_cv:app", f"{_INSTALL} opencv-python", "import cv2"),
    "no Python": ("broken:app", "importing broken:app raised SyntaxError: ", "def f(:"),
    "an exception": ("raises:app", "importing raises:app raised KeyError: 'weights'", "in prepare"),
    "an exit": ("leaves:app", "importing leaves:app raised SystemExit: 3", "raise SystemExit(3)"),
    "a constructor": ("constructor:app", "constructing Bot raised ValueError: there are no weights", "any of these"),
    "a startup": ("startup:app", "the startup of app raised RuntimeError: there is no database", "in lifespan"),
    "a script": ("script:app", 'if __name__ == "__main__":', "serve.run(Bot.bind())"),
    "an option": ("options:app", "raised ValueError: num_replicas should be at least 1.", "num_replicas=0"),
    "a config for nobody": ("config:app", "Bot has a user_config but no method reconfigure to take it.", ""),
    "an unknown deployment": ("bot:app Bat", "The app has no deployment Bat; it has Bot.", ""),
    "an override that is none": ("bot:app Bot", "Bot: max_ongoing_requests should be a whole number.", ""),
    # Last, for the process keeps in mind which models it has asked for.
    "a setting": ("teller:setting", "no setting max_sequence. Did you mean max_sequences?", "max_sequence=2"),
    "a model": ("teller:app", "ModelError: No model is called `smolm2`. Did you mean", 'tailrace.engine("smolm2")'),
    "an awaited model": ("teller:awaited", "No model is called `smolm2`. Did you mean", 'tailrace.engine("smolm2")'),
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Failed]:
    """Return the failures of one process that imports all modules, and becomes each deployment that can be imported."""
    directory = tmp_path_factory.mktemp("apps")
    for name, source in _MODULES.items():
        write(directory, f"{name}.py", source)
    found = asyncio.run(_collect(directory))
    return {
        what: Failed(failed.message.replace(str(directory), "DIRECTORY"), failed.traceback)
        for what, failed in found.items()
    }


async def _collect(directory: Path) -> dict[str, Failed]:
    found = {}
    replica = await ReplicaProcess.start(lambda channel, kind, head: None)
    for what, (words, _, _) in _FAILURES.items():
        target, *given = words.split()
        arguments = dict(word.split("=") for word in given if "=" in word)
        overrides = tuple({"name": name, "max_ongoing_requests": "many"} for name in given if "=" not in name)
        try:
            described = await replica.describe(
                AppTarget(target, directory=str(directory), arguments=arguments, overrides=overrides), within_s=40
            )
            (part,) = described.parts.values()
            await replica.become(Assignment(part.options.name, part.options), within_s=40)
        except BootError as error:
            found[what] = Failed(error.message, error.traceback)
    await replica.kill()
    return found


@pytest.mark.parametrize("what", _FAILURES)
def test_a_failing_start_is_an_error_of_one_line(what: str, failures: dict[str, Failed]) -> None:
    _, line, shown = _FAILURES[what]
    failed = failures[what]
    assert line in failed.message
    assert "\n" not in failed.message
    assert shown in failed.traceback
    assert bool(failed.traceback) == bool(shown)
    for ours in ("site-packages", "/tailrace/", "importlib", "asyncio", "concurrent"):
        assert ours not in failed.traceback


async def test_a_process_that_dies_or_hangs_while_importing(tmp_path: Path) -> None:
    write(tmp_path, "dies.py", "import os\nos._exit(7)")
    write(tmp_path, "sleeps.py", "import time\ntime.sleep(60)")
    for target, within_s, line in (
        ("dies:app", 40.0, "importing dies:app ended its process: exit status 7."),
        ("sleeps:app", 0.5, "importing sleeps:app took longer than 0.5 s."),
    ):
        replica = await ReplicaProcess.start(lambda channel, kind, head: None)
        with pytest.raises(BootError) as failed:
            await replica.describe(AppTarget(target, directory=str(tmp_path)), within_s=within_s)
        assert failed.value.message == line
        await replica.kill()
        assert replica.process.returncode is not None


async def test_its_child_processes_end_with_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        "starts.py",
        """
        import subprocess
        from tailrace import serve

        @serve.deployment
        class Bot:
            def __init__(self):
                subprocess.Popen(["sleep", "600"])

        app = Bot.bind()
        """,
    )
    replica = await ReplicaProcess.start(lambda channel, kind, head: None)
    described = await replica.describe(AppTarget("starts:app", directory=str(tmp_path)), within_s=40)
    (part,) = described.parts.values()
    await replica.become(Assignment(part.options.name, part.options), within_s=40)
    family = psutil.Process(replica.process.pid).children()
    assert "sleep" in {process.name() for process in family}
    await replica.kill()
    wait_ended(family)
