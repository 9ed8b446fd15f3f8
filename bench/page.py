"""Measures the page during a long answer with code and tables: the longest tasks of its main thread, nodes and memory.

    python -m bench.page [--tokens 10000] [--tokens-per-s 200]

A fake upstream server generates the text, and a real Chromium shows the page. `longtask` entries include time in which
other processes used the processor; the trace has the processor time of each task.
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

from playwright.async_api import async_playwright
from tests.api.process import Server
from tests.browser.tab import Tab
from tests.engines.fake_upstream import SSE, Asked, FakeUpstream, chat_chunk, done

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
    window.longTasks = [];
    new PerformanceObserver((list) => longTasks.push(...list.getEntries().map(({ duration }) => duration)))
        .observe({ type: "longtask", buffered: true });
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


def _answer(request: Asked, count: int, rate: float) -> bytes:
    request.sock.sendall(SSE)
    began_s = time.monotonic()
    for number, token in enumerate(_tokens(count)):
        request.sock.sendall(chat_chunk({"content": token}))
        time.sleep(max(0.0, began_s + number / rate - time.monotonic()))
    return chat_chunk({}, "stop") + done((10, count))


def _longest_tasks(trace: bytes) -> list[float]:
    """Return the processor times of the longest tasks of the page's main thread, in ms."""
    events = json.loads(trace)["traceEvents"]
    main_threads = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    tasks = [event.get("tdur", 0) / 1000 for event in events if (event["pid"], event["tid"]) in main_threads]
    return [round(task, 1) for task in sorted(tasks, reverse=True)[:10]]


async def _measure(count: int, rate: float) -> None:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with (
        FakeUpstream(lambda request: _answer(request, count, rate), models={"data": [{"id": "text"}]}) as upstream,
        contextlib.closing(Server(f"openai:{upstream.url}/v1", "--context-tokens", "100000")) as server,
    ):
        server.wait_ready()
        async with (
            async_playwright() as playwright,
            await playwright.chromium.launch(executable_path=path, args=_FLAGS) as browser,
            await browser.new_context(viewport={"width": 1200, "height": 800}) as context,
        ):
            tab = await Tab.open(context, server.url)
            await tab.page.evaluate(_OBSERVE_LONG_TASKS)
            await browser.start_tracing(page=tab.page, categories=["toplevel", "__metadata"])
            devtools = await context.new_cdp_session(tab.page)
            await tab.send("Tell me all.")
            mood = ""
            while mood not in ("ended", "failed"):
                await asyncio.sleep(5)
                await devtools.send("HeapProfiler.collectGarbage")
                heap = await devtools.send("Runtime.getHeapUsage")
                mood = await tab.page.evaluate("document.querySelector('.answer:last-child')?.dataset.mood")
                facts = await tab.page.evaluate(_PAGE_FACTS)
                print(json.dumps({**facts, "heap_mb": round(heap["usedSize"] / 1e6, 1), "mood": mood}), flush=True)
            await tab.wait_end()
            longest = _longest_tasks(await browser.stop_tracing())
            print("processor time of the longest tasks, ms:", longest)
            print("tasks over 50 ms:", await tab.page.evaluate("longTasks"))
            print(await tab.state())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--tokens-per-s", type=float, default=200.0)
    options = parser.parse_args()
    asyncio.run(_measure(options.tokens, options.tokens_per_s))
