"""Sends random grammars to a real server, to find those that crash or stall its engine.

    python bench/fuzz_grammars.py --minutes 20 --engine openvino|llamacpp|transformers|vllm

It starts `tailrace serve` with the engine. One client reads an endless stream. Others send regular expressions, JSON
schemas, choices, grammars in GBNF and structural tags in all fields that accept them. A finding is an answer with
status 500 or above, a broken stream, a new engine process, or an answer that does not conform. Findings are printed at
once as lines of JSON, with the grammars that were sent shortly before. The exit status is 1 if there are any.

Stalls are also printed and counted: between two tokens of the endless stream the engine used 0.2 s of processor time
(0.1 s on two cores) more than usual. Usual is the 99th percentile without grammars. On a busy machine the gaps in
seconds mean little, and so do stalls: a client that reads too late sees several tokens as one. So answers are compared
with regular expressions in processes of their own, because Python's may take minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import random
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil

from servers import serving
from tailrace_outer.measure.bench.load import percentile

_ATOMS = [
    "a",
    "b",
    "z",
    "é",
    "0",
    r"\d",
    r"\w",
    r"\s",
    ".",
    "[a-z]",
    "[^,]",
    r"[\w ]",
    "[ab]",
    r"\.",
    ",",
    r"\"",
    "\n",
    r"\\",
]
_RARE = [
    "\0",
    "\x01",
    "\x7f",
    "(?=a)",
    r"\1",
    r"\b",
    "[",
    "(",
    ")",
    "*",
    "{",
    "}",
    "^",
    "$",
    "[^\\s\\S]",
    "\\",
    "\ud7ff",
    "𝄞",
]
_COUNTS = ["", "", "", "*", "+", "?", "*?", "{2}", "{1,3}", "{0,8}", "{5,}", "{13}", "{16}", "{40}", "{64}"]
_KNOWN = [
    ".*z.{13}",
    "[ab]*a[ab]{16}",
    ".*a.{10}",
    "a\0b",
    r"(\w+\s?)+\.",
    "([^,]*,?)*;",
    "(a*)*b",
    "((a|b)*(a|b)*)*c",
    "(.|..|...)*x",
]
_FORMATS = ["date", "time", "date-time", "email", "uuid", "ipv4", "ipv6"]
_NAMES = ["a", "b b", "é", "title", "x" * 40, "name", "$ref", "0", "a'b", "{", "::=", "root", "r1"]
_VALUES: list[Any] = ["x", "", "a\0b", '"q"', "\\", "\n", 0, -1, 1.5, 1e300, 10**17, True, None, "𝄞", "::=", "[a]"]


def regex(rnd: random.Random, depth: int = 0) -> str:
    if depth == 0 and rnd.random() < 0.1:
        return rnd.choice(_KNOWN) + (rnd.choice(_ATOMS) if rnd.random() < 0.5 else "")
    parts = []
    for _ in range(rnd.choice((1, 1, 2, 3))):
        if depth < 4 and rnd.random() < 0.35:
            part = f"({rnd.choice(('', '?:'))}{regex(rnd, depth + 1)})"
        else:
            part = rnd.choice(_ATOMS if rnd.random() < 0.97 else _RARE)
        parts.append(part + rnd.choice(_COUNTS))
    text = "".join(parts)
    return f"{text}|{regex(rnd, depth + 1)}" if depth < 3 and rnd.random() < 0.2 else text


def schema(rnd: random.Random, depth: int = 0) -> Any:  # Any: JSON
    kinds = ["string", "pattern", "format", "length", "integer", "number", "boolean", "enum", "const", "any"]
    if depth < 4:
        kinds += ["object", "object", "array", "anyOf", "prefix", "types"]
        kinds += ["ref"] if depth else ["defs"]
    kind = rnd.choice(kinds)

    def inner() -> Any:  # Any: JSON
        return schema(rnd, depth + 1)

    if kind == "object":
        names = rnd.sample(_NAMES, rnd.randint(0, 5))
        found: dict[str, Any] = {"type": "object", "properties": {name: inner() for name in names}}
        found["required"] = [name for name in names if rnd.random() < 0.5]
        if rnd.random() < 0.3:
            found["additionalProperties"] = rnd.choice((True, False, inner()))
        return found
    if kind == "array":
        least = rnd.choice((0, 0, 1, 3, 64))
        return {"type": "array", "items": inner(), "minItems": least, "maxItems": least + rnd.choice((0, 1, 5))}
    low = rnd.choice((0, -5, 3, -(10**12), 999))
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "string": lambda: {"type": "string"},
        "pattern": lambda: {"type": "string", "pattern": regex(rnd, 1)},
        "format": lambda: {"type": "string", "format": rnd.choice(_FORMATS)},
        "length": lambda: {
            "type": "string",
            "minLength": rnd.choice((0, 2, 8)),
            "maxLength": rnd.choice((8, 9, 24, 48)),
        },
        "integer": lambda: {"type": "integer", "minimum": low, "maximum": low + rnd.choice((0, 1, 77, 10**11))},
        "number": lambda: {"type": "number"},
        "boolean": lambda: {"type": "boolean"},
        "enum": lambda: {"enum": rnd.sample(_VALUES, rnd.randint(1, 6))},
        "const": lambda: {"const": rnd.choice(_VALUES)},
        "any": dict,
        "anyOf": lambda: {"anyOf": [inner() for _ in range(rnd.randint(1, 4))]},
        "prefix": lambda: {"type": "array", "prefixItems": [inner() for _ in range(rnd.randint(1, 4))]},
        "types": lambda: {"type": rnd.sample(["object", "array", "string", "integer", "number", "null"], 3)},
        "ref": lambda: {"$ref": "#/$defs/d"},
        "defs": lambda: {"type": "array", "items": {"$ref": "#/$defs/d"}, "$defs": {"d": inner()}},
    }
    return made[kind]()


def rules(rnd: random.Random) -> str:
    """Return a grammar in GBNF."""
    names = ["root", "a", "b-c", "d"][: rnd.randint(1, 4)]

    def part(depth: int = 0) -> str:
        choice = rnd.randrange(6 if depth < 3 else 3)
        made: list[Callable[[], str]] = [
            lambda: json.dumps(rnd.choice(("x", "yes", "é", " ", '"', "\\", "\n", "", "long text"))),
            lambda: rnd.choice(("[a-z]", "[^,]", "[0-9a-fé]", "[\\n\\t]", ".")),
            lambda: rnd.choice((*names, "missing" if rnd.random() < 0.02 else "root")),
            lambda: f"({part(depth + 1)} | {part(depth + 1)})",
            lambda: f"{part(depth + 1)} {part(depth + 1)}",
            lambda: f"({part(depth + 1)}){rnd.choice(('*', '+', '?', '{2,4}', '{3}', '{0,40}'))}",
        ]
        return made[choice]()

    return "\n".join(f"{name} ::= {part()} | {part()}" for name in names)


def structural_tag(rnd: random.Random) -> dict[str, Any]:
    tags = [
        {
            "begin": f"<f{number}>",
            "content": rnd.choice(
                (
                    {"type": "json_schema", "json_schema": schema(rnd, 2)},
                    {"type": "regex", "pattern": regex(rnd, 2)},
                    {"type": "any_text"},
                )
            ),
            "end": rnd.choice(("</f>", ")", "\n")),
        }
        for number in range(rnd.randint(1, 3))
    ]
    given: dict[str, Any] = {"type": "triggered_tags", "triggers": ["<f"], "tags": tags}
    given |= {"at_least_one": rnd.random() < 0.5, "stop_after_first": rnd.random() < 0.5}
    return {"type": "structural_tag", "format": given}


def body(rnd: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a path and the fields of its body, one of which has a grammar."""
    choice = rnd.randrange(11)
    chat, text = "/v1/chat/completions", "/v1/completions"
    choices = [rnd.choice(("yes", "no", "a\0", "", "x" * 300, "a|b", "(", "é𝄞")) for _ in range(rnd.randint(1, 30))]
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema(rnd, 1)}}},
    }
    made: list[Callable[[], tuple[str, dict[str, Any]]]] = [
        lambda: (chat, {"guided_regex": regex(rnd)}),
        lambda: (chat, {"structured_outputs": {"regex": regex(rnd)}}),
        lambda: (text, {"guided_json": schema(rnd)}),
        lambda: (chat, {"guided_choice": choices}),
        lambda: (
            chat,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema(rnd)}}},
        ),
        lambda: (chat, {"response_format": {"type": "json_object"}}),
        lambda: (chat, {"tools": [tool], "tool_choice": "required"}),
        lambda: (chat, {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}}),
        lambda: (chat, {"guided_grammar": rules(rnd)}),
        lambda: (chat, {"response_format": structural_tag(rnd)}),
        lambda: (
            "/generate",
            {"parameters": {"grammar": {"type": "regex", "value": regex(rnd)}, "max_new_tokens": 40}},
        ),
    ]
    return made[choice]()


_STALL_S = 0.2
_LONG_GAP_S = 0.2
_CHECK_S = 2  # processor time to compare one answer with its regular expression
_CHECK = f"""
import re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({_CHECK_S}, {_CHECK_S}))
sys.exit(re.fullmatch(sys.argv[1], sys.argv[2], re.ASCII) is None)
"""


class Fuzz:
    def __init__(self, url: str, pid: int, seed: int) -> None:
        self.url, self.pid, self.rnd = url, pid, random.Random(seed)
        self.gaps_s: list[float] = []
        self.cpu_s: list[float] = []  # processor time of the engine between the same tokens
        self.usual_s = 0.0
        self.statuses: collections.Counter[int] = collections.Counter()
        self.recent: collections.deque[tuple[float, str]] = collections.deque(maxlen=40)
        self.findings = 0
        self.num_stalls = 0
        self.num_unchecked = 0
        self.worker = self._worker()

    def _worker(self) -> int:
        for child in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.Error):
                if "tailrace.engines.worker" in child.cmdline():
                    return child.pid
        return 0

    def _cpu_s(self) -> float:
        try:
            times = psutil.Process(self.worker).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def report_finding(self, what: str, **more: Any) -> None:  # Any: JSON
        self.findings += 1
        print(json.dumps({"finding": what, **more}), flush=True)

    async def read_endlessly(self, client: httpx.AsyncClient, deadline_s: float) -> None:
        while time.monotonic() < deadline_s:
            last = last_cpu = 0.0
            request = {"prompt": "Once upon a time", "max_tokens": 400, "stream": True, "ignore_eos": True}
            try:
                async with client.stream("POST", self.url + "/v1/completions", json=request) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith('data: {"error"'):
                            self.report_finding("the endless stream failed", line=line[:200], recent=self._grammars())
                        if not line.startswith("data: {"):
                            continue
                        now, cpu = time.monotonic(), self._cpu_s()
                        if last and cpu >= last_cpu:
                            self.gaps_s.append(now - last)
                            self.cpu_s.append(cpu - last_cpu)
                            if self.usual_s and cpu - last_cpu > self.usual_s + _STALL_S:
                                self.num_stalls += 1
                                stall = {"stall_cpu_s": round(cpu - last_cpu, 2), "recent": self._grammars()}
                                print(json.dumps(stall), flush=True)
                        last, last_cpu = now, cpu
            except httpx.HTTPError as error:
                self.report_finding("the endless stream broke off", error=repr(error), recent=self._grammars())

    def _grammars(self) -> list[str]:
        return [text for at, text in self.recent if time.monotonic() - at < 3][-6:]

    async def sender(self, client: httpx.AsyncClient, deadline_s: float) -> None:
        while time.monotonic() < deadline_s:
            path, fields = body(self.rnd)
            request: dict[str, Any] = {"max_tokens": 40, "temperature": self.rnd.choice((0, 1)), **fields}
            request |= {"messages": [{"role": "user", "content": "go"}]} if "chat" in path else {"prompt": "go"}
            if path == "/generate":
                request = {"inputs": "go", **fields}
            self.recent.append((time.monotonic(), json.dumps(fields)[:600]))
            try:
                answer = await client.post(self.url + path, json=request)
            except httpx.HTTPError as error:
                self.report_finding("no answer", error=repr(error), fields=fields)
                continue
            self.statuses[answer.status_code] += 1
            if answer.status_code >= 500 or (answer.status_code == 422 and path != "/generate"):
                self.report_finding("a bad status", status=answer.status_code, text=answer.text[:300], fields=fields)
            if answer.status_code == 200:
                await self._check(fields, answer.json())
            if (worker := self._worker()) != self.worker:
                self.report_finding("a new engine process", fields=fields, recent=self._grammars())
                self.worker = worker

    async def _check(self, fields: dict[str, Any], answer: dict[str, Any]) -> None:
        choice = answer["choices"][0] if "choices" in answer else {}
        if choice.get("finish_reason") != "stop":
            return
        text = choice.get("text", choice.get("message", {}).get("content"))
        pattern = fields.get("guided_regex") or fields.get("structured_outputs", {}).get("regex")
        if isinstance(pattern, str) and isinstance(text, str):
            plain = re.sub(r"^\^|(?<!\\)\$$", "", pattern)
            if "\n" not in text and not await self._matches(plain, text):
                self.report_finding("the answer does not conform", fields=fields, text=text)
        elif "guided_json" in fields or fields.get("response_format", {}).get("type") in ("json_schema", "json_object"):
            try:
                json.loads(text)
            except ValueError:
                self.report_finding("the answer is not JSON", fields=fields, text=text)

    async def _matches(self, regex: str, text: str) -> bool:
        """Return whether a text matches; also if that takes too long to find out."""
        if "\0" in regex + text:
            return re.fullmatch(regex, text, re.ASCII) is not None
        checking = await asyncio.create_subprocess_exec(sys.executable, "-Ic", _CHECK, regex, text)
        status = await checking.wait()
        self.num_unchecked += status < 0
        return status != 1


async def _run(engine: str, model: str, minutes: float, seed: int) -> int:
    with serving(model, "--engine", engine) as server:
        fuzz = Fuzz(server.url, server.process.pid, seed)
        async with httpx.AsyncClient(timeout=600) as client:
            await fuzz.read_endlessly(client, time.monotonic() + 15)
            fuzz.usual_s = percentile(fuzz.cpu_s, 0.99)
            fuzz.gaps_s.clear()
            fuzz.cpu_s.clear()
            deadline_s = time.monotonic() + 60 * minutes
            await asyncio.gather(
                fuzz.read_endlessly(client, deadline_s), *(fuzz.sender(client, deadline_s) for _ in range(4))
            )
        report = {
            "engine": engine,
            "minutes": minutes,
            "requests": fuzz.statuses.total(),
            "statuses": dict(fuzz.statuses),
            "findings": fuzz.findings,
            "answers_not_checked": fuzz.num_unchecked,
            "stalls": fuzz.num_stalls,
            "usual_cpu_s": round(fuzz.usual_s, 3),
            "cpu_max_s": round(max(fuzz.cpu_s), 3),
            "gap_p50_s": round(percentile(fuzz.gaps_s, 0.5), 3),
            "gap_p99_s": round(percentile(fuzz.gaps_s, 0.99), 3),
            "gap_max_s": round(max(fuzz.gaps_s), 3),
            "gaps_over_0.2_s": sum(gap > _LONG_GAP_S for gap in fuzz.gaps_s),
        }
        print(json.dumps(report), flush=True)
    return 1 if fuzz.findings else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the grammars of a real engine.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--engine", choices=("openvino", "llamacpp", "transformers", "vllm"), default="openvino")
    parser.add_argument("--model", default="smollm2", help="as for serve; transformers and vllm need a directory")
    parser.add_argument("--seed", type=int, default=0)
    request = parser.parse_args()
    return asyncio.run(_run(request.engine, request.model, request.minutes, request.seed))


if __name__ == "__main__":
    sys.exit(main())
