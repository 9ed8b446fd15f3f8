"""Measures the page: the longest tasks of its main thread during a long answer with code and tables, then nodes and
memory in a conversation with many such answers.

    python -m bench.page [--tokens 10000] [--tokens-per-s 200] [--turns 50] [--turn-tokens 2000]

A fake upstream server generates the text, and a real Chromium shows the page. Long tasks and frames include time in
which other processes used the processor; the trace has the processor time of each task.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import shutil
import time
from collections.abc import Iterator
from typing import Any

from playwright.async_api import Browser, async_playwright
from tests.api.process import Server
from tests.browser.tab import Tab
from tests.engines.fake_upstream import SSE, FakeUpstream, UpstreamRequest, chat_chunk, done

_CATEGORIES = ["toplevel", "devtools.timeline", "v8", "__metadata"]
_FLAGS = ["--no-sandbox", "--disable-gpu", "--no-proxy-server"]
_PROSE = "Rivers **bend** where the `bank` is soft, and [run](https://example.com) on.\n\n"
_CODE = (
    """```python
def meander(width: float, slope: float) -> list[float]:
    \"\"\"Where the river goes next.\"\"\"
    points = [width * step for step in range(20)]  # metres
    return [point * slope + 0.5 for point in points if point > 3]

"""
    + "\n".join(f"value_{number} = meander({number}.5, {number}) + ['text {number}', None]" for number in range(400))
    + "\n```\n\n"
)
_TABLE = (
    "| river | length | mouth | basin |\n|---|---|---|---|\n"
    + "".join(f"| River {number} | {number * 7} km | *sea* {number} | `{number}` |\n" for number in range(250))
    + "\n"
)
_OBSERVE_LONG_TASKS = """() => {
    window.longTasks = []; // of the answer, not of the page's start
    const began_ms = performance.now();
    const durations = (list) => list.getEntries().filter((one) => one.startTime >= began_ms).map((one) => one.duration);
    new PerformanceObserver((list) => longTasks.push(...durations(list))).observe({ type: "longtask", buffered: true });
    window.longFrames = [];
    const fileOf = (script) => `${script.sourceURL.split("/").at(-1)} ${script.sourceFunctionName} ${script.invoker}`;
    new PerformanceObserver((list) => longFrames.push(...list.getEntries().map((frame) => ({
        ms: Math.round(frame.duration), at_s: Math.round(frame.startTime / 100) / 10,
        layout_ms: Math.round(frame.startTime + frame.duration - (frame.styleAndLayoutStart || frame.startTime)),
        scripts: frame.scripts.map((script) => `${fileOf(script)}: ${Math.round(script.duration)} ms`),
    })))).observe({ type: "long-animation-frame", buffered: true });
}"""
_SCROLL_UP = """async () => {
    while (chat.scrollTop > 0) {
        chat.scrollBy(0, -600);
        await new Promise((resolve) => requestAnimationFrame(resolve));
    }
}"""
_PAGE_FACTS = """() => ({
    nodes: document.querySelectorAll("*").length,
    characters: document.querySelector(".answer:last-child .text")?.textContent.length ?? 0,
    longest: Math.max(0, ...longTasks), count: longTasks.length,
})"""


def _tokens(count: int) -> Iterator[str]:
    """Yield pieces of four characters, which is the usual length of tokens in code."""
    text = itertools.chain.from_iterable(itertools.cycle((_PROSE, _CODE, _PROSE, _TABLE)))
    for _ in range(count):
        yield "".join(itertools.islice(text, 4))


def _answer(request: UpstreamRequest, count: int, rate: float) -> bytes:
    request.sock.sendall(SSE)
    began_s = time.monotonic()
    for number, token in enumerate(_tokens(count)):
        request.sock.sendall(chat_chunk({"content": token}))
        time.sleep(max(0.0, began_s + number / rate - time.monotonic()))
    return chat_chunk({}, "stop") + done((10, count))


def _longest_tasks(trace: bytes) -> list[str]:
    """Return the longest tasks of the page's main thread by processor time, and what took more than 3 ms in them."""
    events = json.loads(trace)["traceEvents"]
    main_threads = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    own = [event for event in events if (event["pid"], event["tid"]) in main_threads and event.get("tdur", 0) > 3000]
    tasks = sorted((event for event in own if "toplevel" in event["cat"]), key=lambda event: -event["tdur"])
    told = []
    for task in tasks[:10]:
        end = task["ts"] + task["dur"]
        parts = [event for event in own if event is not task and task["ts"] <= event["ts"] < end]
        names = [f"{_name(event)} {event['tdur'] / 1000:.1f}" for event in parts]
        told.append(f"{task['tdur'] / 1000:.1f} ms at {(task['ts'] - _beginning(own)) / 1e6:.1f} s: {', '.join(names)}")
    return told


def _beginning(events: list[dict[str, Any]]) -> float:  # Any: of JSON
    return float(min((event["ts"] for event in events), default=0.0))


def _name(event: dict[str, Any]) -> str:  # Any: of JSON
    call = event.get("args", {}).get("data", {})
    place = f" {call.get('url', '').rpartition('/')[2]}:{call.get('functionName', '')}" if "url" in call else ""
    return f"{event['name']}{place}"


async def _measure(options: argparse.Namespace) -> None:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with (
        FakeUpstream(
            lambda request: _answer(request, options.tokens, options.tokens_per_s), models={"data": [{"id": "text"}]}
        ) as upstream,
        contextlib.closing(Server(f"openai:{upstream.url}/v1", "--context-tokens", "100000")) as server,
    ):
        server.wait_ready()
        async with (
            async_playwright() as playwright,
            await playwright.chromium.launch(executable_path=path, args=_FLAGS) as browser,
            await browser.new_context(viewport={"width": 1200, "height": 800}) as context,
        ):
            await _measure_stream(browser, await Tab.open(context, server.url))
            made = server.post("/v1/conversations", {"items": _items(options.turns, options.turn_tokens)}).json()
            await _measure_conversation(await Tab.open(context, f"{server.url}/#{made['id']}"))


async def _measure_stream(browser: Browser, tab: Tab) -> None:
    await tab.page.evaluate(_OBSERVE_LONG_TASKS)
    await browser.start_tracing(page=tab.page, categories=_CATEGORIES)
    await tab.send("Tell me all.")
    mood = ""
    while mood not in ("ended", "failed"):
        await asyncio.sleep(5)
        mood = await tab.page.evaluate("document.querySelector('.answer:last-child')?.dataset.mood")
        print(json.dumps({**await tab.page.evaluate(_PAGE_FACTS), "mood": mood}), flush=True)
    await tab.wait_end()
    print("the longest tasks, by processor time:")
    for task in _longest_tasks(await browser.stop_tracing()):
        print(task)
    print("long frames:")
    for frame in await tab.page.evaluate("longFrames"):
        print(json.dumps(frame))
    print("tasks over 50 ms during the answer:", await tab.page.evaluate("longTasks"))
    print(await tab.state())
    await tab.page.close()


def _items(num_turns: int, num_tokens: int) -> list[dict[str, str]]:
    """Return questions, and answers of `num_tokens`."""
    text = "".join(_tokens(num_tokens))
    return [
        {"role": role, "content": said}
        for _ in range(num_turns)
        for role, said in (("user", "And?"), ("assistant", text))
    ]


async def _measure_conversation(tab: Tab) -> None:
    """Measure at the end of the conversation, at its beginning after scrolling through all of it, and at the end."""
    devtools = await tab.page.context.new_cdp_session(tab.page)

    async def tell(where: str) -> None:
        await asyncio.sleep(2)
        await devtools.send("HeapProfiler.collectGarbage")
        heap = await devtools.send("Runtime.getHeapUsage")
        nodes = await tab.page.evaluate("document.querySelectorAll('*').length")
        print(json.dumps({"at": where, "nodes": nodes, "heap_mb": round(heap["usedSize"] / 1e6, 1)}), flush=True)

    await tab.wait_end()
    await tell("the end")
    await tab.page.evaluate(_SCROLL_UP)
    await tell("the beginning")
    await tab.page.evaluate("chat.scrollTo(0, chat.scrollHeight)")
    await tell("the end again")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--tokens-per-s", type=float, default=200.0)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--turn-tokens", type=int, default=2000)
    asyncio.run(_measure(parser.parse_args()))
