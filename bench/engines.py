"""Compares tailrace with each engine's own server, with the same weights, in one run.

    python bench/engines.py --gguf FILE --huggingface DIRECTORY [--transformers PATH] [--vllm-python PATH]
                            [--before PYTHON] [--output JSON] [--plot SVG]

FILE and DIRECTORY have the same model (tests/checkpoints.py makes the directory from the file). An engine's own server
(llama.cpp's is the one in xllamacpp) and tailrace with that engine run together, with memory for the same number of
tokens. They are measured in turns, so that a slow phase of the machine affects both. The load is the same for all: POST
/v1/completions, streamed, greedy, 128 tokens, at 1 to 32 streams, in several rounds. The answers state their numbers of
tokens; where one does not, the model's tokenizer counts them in the text. Times are those of received bytes.
`transformers serve` refuses ignore_eos, so its answers may be shorter. With --before, the default engine of an earlier
version is measured too, in turns with llama.cpp's server and this version.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from machine import this_machine
from tailrace_outer.measure.bench.load import percentile

FIRST_PORT = 8987
LOADS = (1, 2, 4, 8, 16, 32)
PAUSE_S = 0.5  # for the cleanup of the server that was measured before
SLOTS, SLOT_TOKENS = 32, 512  # llama.cpp's server divides its memory into slots

LLAMA_SERVER = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.port = int(sys.argv[2])
params.n_parallel = int(sys.argv[3])
params.n_ctx = int(sys.argv[4])
params.verbosity = -1
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
time.sleep(100_000)
"""


@dataclass(frozen=True)
class Line:
    """One server at one load: medians over the rounds."""

    server: str
    streams: int
    tokens_per_s: float
    first_p50_s: float
    first_p99_s: float


@dataclass
class Answer:
    start_s: float
    first_s: float = 0.0
    raw: bytes = b""


async def send_request(port: int, body: dict[str, object]) -> Answer:
    """Send a request on a new connection. The answer is parsed after the measurement, to use little time during it."""
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = Answer(time.perf_counter())
    writer.write(head.encode() + content)
    pieces = []
    while piece := await reader.read(1 << 16):
        pieces.append(piece)
        if not answer.first_s and b"data: {" in piece:
            answer.first_s = time.perf_counter() - answer.start_s
    writer.close()
    answer.raw = b"".join(pieces)
    return answer


def num_tokens_of(answer: Answer, tokenizer: Tokenizer) -> int:
    """Return the number of tokens that a streamed answer states, or else the number in its text."""
    text = []
    for line in answer.raw.decode("utf-8", "replace").splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            if usage := event.get("usage"):
                return int(usage["completion_tokens"])
            text += [choice.get("text") or "" for choice in event.get("choices", [])]
    return len(tokenizer.encode("".join(text)).ids)


@dataclass(frozen=True)
class Server:
    name: str
    model: str  # its name on the wire
    port: int
    command: list[str]
    environment: dict[str, str]


async def measure(
    servers: list[Server], tokenizer: Tokenizer, loads: list[int], rounds: int, max_tokens: int
) -> list[Line]:
    """Measure running servers in turns."""
    number = 0

    def body(server: Server) -> dict[str, object]:
        nonlocal number
        number += 1
        return {
            "model": server.model,
            "prompt": f"{number}. A story about a river, a dog and a mill:",
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | ({} if server.name == "transformers serve" else {"ignore_eos": True})

    lines = []
    for server in servers:
        await asyncio.gather(*(send_request(server.port, body(server)) for _ in range(2)))
    for streams in loads:
        measurements: dict[str, list[tuple[float, float, float]]] = {server.name: [] for server in servers}
        for _ in range(rounds):
            for server in servers:
                await asyncio.sleep(PAUSE_S)
                start_s = time.perf_counter()
                answers = await asyncio.gather(*(send_request(server.port, body(server)) for _ in range(streams)))
                wall_s = time.perf_counter() - start_s
                num_tokens = sum(num_tokens_of(answer, tokenizer) for answer in answers)
                if not num_tokens:
                    raise SystemExit(f"{server.name} gave nothing: {answers[0].raw[:500]!r}")
                firsts = [answer.first_s for answer in answers]
                worst = percentile(firsts, 0.99)
                measurements[server.name].append((num_tokens / wall_s, statistics.median(firsts), worst))
        for name, rows in measurements.items():
            line = Line(name, streams, *(round(statistics.median(of), 4) for of in zip(*rows, strict=True)))
            print(json.dumps(asdict(line)), flush=True)
            lines.append(line)
    return lines


@contextmanager
def running(server: Server) -> Iterator[None]:
    """Start a server, and wait until it answers. At the end, stop it with its children."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            server.command, stdout=output, stderr=output, env=os.environ | server.environment, start_new_session=True
        )
        try:
            for _ in range(600):
                if process.poll() is not None:
                    break
                try:
                    url = f"http://127.0.0.1:{server.port}/v1/models"
                    httpx.get(url, timeout=2, trust_env=False).raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(0.5)
            else:
                process.kill()
            if process.poll() is not None:
                output.seek(0)
                raise SystemExit(f"{server.name} did not start:\n{output.read().decode(errors='replace')[-3000:]}")
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def groups(options: argparse.Namespace) -> Iterator[list[Server]]:
    """Yield the groups of servers that are measured in turns."""
    first, second, third, fourth = (str(FIRST_PORT + index) for index in range(4))

    def our_server(python: object, engine: str, path: Path, port: str, *flags: str) -> Server:
        more = ["--engine", engine, "--port", port, "--journal", options.journal, *flags]
        command = [str(python), "-m", "tailrace", "serve", str(path), *more]
        name = path.stem if path.suffix == ".gguf" else path.name
        return Server(f"tailrace, {engine}", name, int(port), command, {"VLLM_CPU_KVCACHE_SPACE": "2"})

    if options.gguf:
        path, name, here = options.gguf, options.gguf.stem, sys.executable
        as_much = ["--context-tokens", str(SLOT_TOKENS), "--kv-tokens", str(SLOTS * SLOT_TOKENS)]
        own = [here, "-c", LLAMA_SERVER, str(path), first, str(SLOTS), str(SLOTS * SLOT_TOKENS)]
        before = our_server(options.before, "openvino", path, fourth) if options.before else None
        yield [
            Server("llama.cpp's server", name, int(first), own, {}),
            our_server(here, "llamacpp", path, second, *as_much, "--max-sequences", str(SLOTS)),
            our_server(here, "openvino", path, third),
            *([replace(before, name="tailrace before, openvino")] if before else []),
        ]
    path = options.huggingface
    dtype = ["--dtype", options.dtype]
    if options.transformers:
        own = [str(options.transformers), "serve", str(path), "--port", first, "--continuous-batching", *dtype]
        cache = {"HF_HUB_CACHE": str(path.parent)}  # it needs a directory to list its models
        yield [
            Server("transformers serve", str(path), int(first), own, cache),
            our_server(sys.executable, "transformers", path, second, *dtype),
        ]
    if options.vllm_python:
        own = [str(options.vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), *dtype]
        own += ["--served-model-name", path.name, "--max-model-len", "8192", "--port", first]
        share = str(options.gpu_memory)
        own += ["--gpu-memory-utilization", share] if options.gpu_memory else []
        ours = ["--gpu-memory", share] if options.gpu_memory else []
        most = str(max(map(int, options.streams.split(","))))
        ours += ["--max-sequences", most, "--max-concurrent-requests", most]  # vLLM's own defaults are more
        yield [
            Server("vLLM's server", path.name, int(first), own, {"VLLM_CPU_KVCACHE_SPACE": "2"}),
            our_server(options.vllm_python, "vllm", path, second, *dtype, *ours),
        ]


def plot(lines: list[Line], path: Path) -> None:
    """Write an SVG: tokens per second by number of streams, one line for each server."""
    names = list(dict.fromkeys(line.server for line in lines))
    loads = sorted({line.streams for line in lines})
    colours = ["#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5"]
    largest = max(line.tokens_per_s for line in lines)
    left, top, width, height = 60, 20, 420, 300

    def point(line: Line) -> str:
        x = left + width * loads.index(line.streams) / (len(loads) - 1)
        return f"{x:.0f},{top + height * (1 - line.tokens_per_s / largest):.0f}"

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="720" height="370" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = top + height * (1 - share)
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.0f}" text-anchor="end">{largest * share:.0f}</text>')
    for index, load in enumerate(loads):
        x = left + width * index / (len(loads) - 1)
        parts.append(f'<text x="{x:.0f}" y="{top + height + 18}" text-anchor="middle">{load}</text>')
    parts.append(
        f'<text x="{left + width / 2:.0f}" y="{top + height + 38}" text-anchor="middle">streams at once</text>'
    )
    parts.append(
        f'<text x="14" y="{top + height / 2:.0f}" transform="rotate(-90 14 {top + height / 2:.0f})">tokens/s</text>'
    )
    for index, name in enumerate(names):
        points = " ".join(point(line) for line in lines if line.server == name)
        dash = "" if name.startswith("tailrace") else ' stroke-dasharray="5 4"'
        colour = colours[index % len(colours)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        y = top + 10 + 20 * index
        parts.append(f'<line x1="500" x2="524" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="532" y="{y + 4}">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Each engine behind tailrace against its own server.")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--huggingface", type=Path, required=True, help="the model's directory; its tokenizer is used")
    parser.add_argument("--transformers", type=Path, help="the command `transformers`, installed with its server")
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--gpu-memory", type=float, default=0.0, help="share of a GPU's memory for each vLLM")
    parser.add_argument("--before", type=Path, help="the interpreter of an environment with an earlier version")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--journal", default="disk", choices=["disk", "memory"])
    parser.add_argument("--streams", default=",".join(map(str, LOADS)), help="numbers of streams at once, with commas")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    loads = [int(load) for load in options.streams.split(",")]
    tokenizer = Tokenizer.from_file(str(options.huggingface / "tokenizer.json"))
    lines: list[Line] = []
    for servers in groups(options):
        with contextlib.ExitStack() as up:
            for server in servers:
                up.enter_context(running(server))
            lines += asyncio.run(measure(servers, tokenizer, loads, options.rounds, options.max_tokens))
    if options.output:
        machine = this_machine() | {"dtype": options.dtype}
        measurements = {"machine": machine, "max_tokens": options.max_tokens, "lines": [asdict(line) for line in lines]}
        options.output.write_text(json.dumps(measurements, indent=2) + "\n")
    if options.plot:
        plot(lines, options.plot)


if __name__ == "__main__":
    main()
