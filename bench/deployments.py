"""Compares the tutorial's bots on Ray Serve and on tailrace, and a bot of a dozen lines that uses `tailrace.engine`.

    python bench/deployments.py CHECKPOINT --ray-python PATH [--output FILE]

CHECKPOINT is a Hugging Face directory of SmolLM2-135M-Instruct whose generation_config.json ends answers after 40
tokens (tests/checkpoints.py makes one). PATH is a Python that has tailrace, Ray Serve, torch and transformers. For each
server and 1, 4 and 16 clients it measures the tokens per second of all clients together, and the median and the largest
time to the first text. Prompts differ, so that nothing is cached. The model's tokenizer counts the tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from machine import this_machine
from tailrace.system.child import stop

ROOT = Path(__file__).parent.parent
BOTS = ROOT / "tests" / "apps" / "bots"
PORT = 8977
BEGINNINGS = [
    "Once upon a time",
    "The old man and",
    "In the city of",
    "A long journey to",
    "The history of",
    "My dog and",
]

BRIEF = """
import tailrace
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from tailrace import serve

web = FastAPI()


@serve.deployment
@serve.ingress(web)
class Brief:
    def __init__(self):
        self.model = tailrace.engine("smollm2")

    @web.post("/")
    async def answer(self, prompt: str):
        text = self.model.stream(prompt, max_tokens=40, temperature=0.0)
        return StreamingResponse(await text, media_type="text/plain")


app = Brief.bind()
"""


@dataclass
class Row:
    server: str
    num_clients: int
    num_requests: int
    tokens_per_s: float
    first_s: float  # median
    worst_first_s: float


async def measure(name: str, num_clients: int, num_each: int, tokenizer: Any) -> Row:  # Any: the library has no types
    firsts: list[float] = []
    texts: list[str] = []

    async def one(http: httpx.AsyncClient, prompt: str) -> None:
        start_s = time.monotonic()
        text, first_s = "", None
        async with http.stream("POST", "/", params={"prompt": prompt}) as answer:
            answer.raise_for_status()
            async for piece in answer.aiter_text():
                if piece and first_s is None:
                    first_s = time.monotonic() - start_s
                text += piece
        firsts.append(first_s if first_s is not None else time.monotonic() - start_s)
        texts.append(text)

    async def client(number: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=600, trust_env=False) as http:
            for nth in range(num_each):
                await one(http, f"{BEGINNINGS[(number + nth) % len(BEGINNINGS)]} {number * 10 + nth} years ago")

    start_s = time.monotonic()
    await asyncio.gather(*(client(number) for number in range(num_clients)))
    seconds = time.monotonic() - start_s
    num_tokens = sum(len(tokenizer.encode(text).ids) for text in texts)
    return Row(name, num_clients, len(texts), num_tokens / seconds, statistics.median(firsts), max(firsts))


def wait_ready(process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 240
    while time.monotonic() < deadline_s:
        assert process.poll() is None, "the server has ended"
        try:
            if httpx.get(f"http://127.0.0.1:{PORT}/-/healthz", trust_env=False, timeout=5).status_code == 200:
                break
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    httpx.post(f"http://127.0.0.1:{PORT}/?prompt=Warm up, and", trust_env=False, timeout=240)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--ray-python", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(options.checkpoint / "tokenizer.json"))
    run_command = [str(Path(sys.executable).parent / "tailrace"), "run"]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        apps = Path(folder)
        for bot in ("textbot", "batchbot"):
            shutil.copy(BOTS / f"{bot}.py", apps / f"{bot}.py")
            source = (BOTS / f"{bot}.py").read_text().replace("from tailrace import serve", "from ray import serve")
            (apps / f"ray_{bot}.py").write_text(source)
        (apps / "brief.py").write_text(BRIEF)
        servers = []
        if options.ray_python:
            for bot in ("textbot", "batchbot"):
                start = (
                    "import sys; sys.path.insert(0, '.'); from ray import serve; import importlib, time; "
                    f"serve.start(http_options={{'host': '127.0.0.1', 'port': {PORT}}}); "
                    f"serve.run(importlib.import_module('ray_{bot}').app); time.sleep(100000)"
                )
                servers.append((f"{bot}, Ray Serve", [str(options.ray_python), "-c", start]))
        flags = ["--port", str(PORT), "--journal", "memory"]
        servers += [(f"{bot}, tailrace", [*run_command, f"{bot}:app", *flags]) for bot in ("textbot", "batchbot")]
        servers += [("a dozen lines, tailrace", [*run_command, "brief:app", *flags])]
        # One thread, as in Ray's replicas: two threads on two busy cores may take ten times as long.
        threads = {"OMP_NUM_THREADS": "1"}
        environment = os.environ | threads | {"CHECKPOINT": str(options.checkpoint.resolve()), "PYTHONPATH": str(apps)}
        for name, command in servers:
            process = subprocess.Popen(
                command, cwd=apps, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            try:
                wait_ready(process)
                for num_clients in options.clients:
                    num_each = 1 if "batchbot" in name else 2
                    rows.append(asyncio.run(measure(name, num_clients, num_each, tokenizer)))
                    print(json.dumps(asdict(rows[-1])), flush=True)
            finally:
                stop(process, within_s=30)
                if "Ray" in name:
                    subprocess.run([str(options.ray_python.parent / "ray"), "stop", "--force"], capture_output=True)
    if options.output:
        found = {"machine": this_machine(), "rows": [asdict(row) for row in rows]}
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
