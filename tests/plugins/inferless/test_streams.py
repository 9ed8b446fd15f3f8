"""Streaming apps, correct and incorrect ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from tests.plugins.inferless.apps import STREAMING, Make, Reader, apps, events_of, served
from tests.waiting import wait_until

from tailrace_plugins.inferless.app import InferlessApp

PATH = "/v2/models/m/generate_stream"
ASK = {"parameters": {"TEXT": "rivers"}}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with apps(tmp_path) as make:
        yield make


def app_of(make: Make, body: str, *, kind: str = "def", **how: Any) -> InferlessApp:
    """Return an app whose `infer` has this body, and calls its handler `h`."""
    start = "import asyncio, threading\n\nclass InferlessPythonModel:\n    seen = []\n\n"
    app = f"{start}    {kind} infer(self, inputs, h):\n{indent(body, ' ' * 8)}\n"
    return make(app, STREAMING, name="m", **how)


async def asked(app: InferlessApp, times: int = 1) -> list[Any]:
    async with served(app) as client:
        return [await client.post(PATH, json=ASK) for _ in range(times)]


SEND = "h.send_streamed_output"
END = "h.finalise_streamed_output()"
INCOMPLETE = {"finish": "incomplete"}
UNFINISHED = "infer returned without finalise_streamed_output; the client is told that the stream is incomplete"
WRONG: dict[str, tuple[str, list[dict[str, Any]], list[str]]] = {
    "nothing sent": (END, [], ["infer has sent nothing"]),
    "nothing done": ("pass", [INCOMPLETE], [UNFINISHED]),
    "returned": (
        "return {'OUT': 'a'}",
        [{"OUT": "a"}],
        ["infer returned its output instead of sending it: the stream has one event"],
    ),
    "sent and returned": (
        f"{SEND}({{'OUT': 'a'}}); return {{'OUT': 'b'}}",
        [{"OUT": "a"}, INCOMPLETE],
        ["infer returned a value after sending events: the value is ignored", UNFINISHED],
    ),
    "never finalised": (f"{SEND}({{'OUT': 'a'}})", [{"OUT": "a"}, INCOMPLETE], [UNFINISHED]),
    "error hidden": (
        f"try:\n    for n in '12x': {SEND}({{'OUT': int(n)}})\n    {END}\nexcept Exception: pass",
        [{"OUT": 1}, {"OUT": 2}, INCOMPLETE],
        [UNFINISHED],
    ),
    "finalised twice": (
        f"{SEND}({{'OUT': 'a'}}); {END}; {END}",
        [{"OUT": "a"}],
        ["the app finalises a stream twice"],
    ),
    "sent after the end": (
        f"{SEND}({{'OUT': 'a'}}); {END}; {SEND}({{'OUT': 'b'}}); {SEND}({{'OUT': 'c'}})",
        [{"OUT": "a"}],
        ["the app sends events after the end of the stream: they are ignored"],
    ),
    "other names": (
        f"{SEND}({{'OUT': 'a'}}); {SEND}({{'out': 'b'}}); {SEND}({{'OUT': 'c'}}); {SEND}({{'out': 'd'}}); {END}",
        [{"OUT": "a"}, {"out": "b"}, {"OUT": "c"}, {"out": "d"}],
        ["the outputs' names or types change between the events of a stream; clients may not expect it"],
    ),
    "other types": (
        f"{SEND}({{'OUT': 'a'}}); {SEND}({{'OUT': 1}}); {END}",
        [{"OUT": "a"}, {"OUT": 1}],
        ["the outputs' names or types change between the events of a stream; clients may not expect it"],
    ),
    "numpy and bytes": (
        f"import numpy; {SEND}({{'OUT': numpy.float64(0.5), 'n': numpy.int8(1), 'b': b'a'}}); {END}",
        [{"OUT": 0.5, "n": 1, "b": "a"}],
        [],
    ),
}


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("wrong", WRONG)
async def test_errors_of_apps_end_cleanly(make: Make, wrong: str, kind: str, caplog: Any) -> None:
    body, events, log = WRONG[wrong]
    with caplog.at_level(logging.WARNING, "tailrace.serve"):
        answers = await asked(app_of(make, body, kind=kind), times=2)
    for answer in answers:
        assert events_of(answer) == events
    assert [record.getMessage() for record in caplog.records] == log * 2


FAILS = {
    "raises": ("raise ValueError('8317')", "ValueError in infer; the app's log has details."),
    "exits": ("raise SystemExit('8317')", "SystemExit in infer; the app's log has details."),
    "sends what is no JSON": (
        f"{SEND}({{'OUT': 'a', 'more': object()}})",
        "more: a value of type object, which cannot be JSON.",
    ),
    "sends no dict": (f"{SEND}('text')", "The app should return a dict of outputs, not str."),
    "sends and hides that it failed": (
        f"try: {SEND}({{'OUT': float('inf')}})\nexcept Exception: pass\n{SEND}({{'OUT': 'after'}})",
        "OUT: inf is not a valid number in JSON.",
    ),
    "says that it failed": (f"h.fail('no more words'); {SEND}({{'OUT': 'after'}})", "no more words"),
    "is cancelled by itself": (
        "raise asyncio.CancelledError",
        "The app was stopped before its answer was complete.",
    ),
}


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("how", FAILS)
async def test_a_failure_before_the_first_event_is_a_status(make: Make, how: str, kind: str, caplog: Any) -> None:
    body, message = FAILS[how]
    app = app_of(make, body, kind=kind)
    for answer in await asked(app, times=2):
        assert (answer.status_code, answer.json()) == (500, {"error": message})
    assert ("8317" in caplog.text) == ("8317" in body)


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("how", FAILS)
async def test_a_failure_after_the_first_event_is_the_last_one(make: Make, how: str, kind: str, caplog: Any) -> None:
    body, message = FAILS[how]
    app = app_of(make, f"{SEND}({{'OUT': 'a'}})\n{body}", kind=kind)
    for answer in await asked(app, times=2):
        assert events_of(answer) == [{"OUT": "a"}, {"error": message, "retryable": False}]
        assert "8317" not in answer.text
    assert ("8317" in caplog.text) == ("8317" in body)


async def test_a_failure_after_the_end_is_only_logged(make: Make, caplog: Any) -> None:
    app = app_of(make, f"{SEND}({{'OUT': 'a'}}); h.finalise_streamed_output(); 1 / 0")
    (answer,) = await asked(app)
    assert events_of(answer) == [{"OUT": "a"}]
    assert "ZeroDivisionError" in caplog.text


async def test_sends_from_threads_of_the_app(make: Make) -> None:
    body = f"""
def send(number):
    for word in range(500):
        {SEND}({{"OUT": number * 1000 + word}})

threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
h.finalise_streamed_output()
"""
    (answer,) = await asked(app_of(make, body))
    sent = [event["OUT"] for event in events_of(answer)]
    for number in range(4):
        assert [one for one in sent if one // 1000 == number] == [number * 1000 + word for word in range(500)]


async def test_a_thread_that_dies_fails_the_stream_of_the_infer_that_waits_for_it(make: Make, caplog: Any) -> None:
    body = f"""
from queue import Queue
self.words = Queue()
is_sent = threading.Event()  # until then it would be a 500

def generate():
    self.words.put("a")
    is_sent.wait(10)
    raise MemoryError("8317")

threading.Thread(target=generate).start()
while (word := self.words.get()) is not None:
    {SEND}({{"OUT": word}})
    is_sent.set()
"""
    app = app_of(make, body)
    async with served(app) as client:
        answer = await client.post(PATH, json=ASK)
        message = "MemoryError in a thread that infer has started; the app's log has details."
        last = {"error": message, "retryable": False}
        assert events_of(answer) in ([{"OUT": "a"}, last], [{"error": message}])
        assert "8317" in caplog.text
        assert (await client.get("/v2/health/ready")).status_code == 503  # infer still waits
        app._loaded.instance.words.put(None)
        while (await client.get("/v2/health/ready")).status_code != 200:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("awaits", [True, False])
async def test_an_async_infer_may_await_its_sends_or_not(make: Make, awaits: bool) -> None:
    body = """
for number in range(1000):
    await h.send_streamed_output({"OUT": number})
    self.seen.append(len(h._events._items))
await h.finalise_streamed_output()
"""
    app = app_of(make, body if awaits else body.replace("await ", ""), kind="async def")
    async with served(app):
        answer = app._model.ask({"TEXT": "rivers"})
        assert (await anext(answer))["OUT"] == 0
        await wait_until(lambda: len(answer.events._items) >= (256 if awaits else 999))
        assert [item["OUT"] async for item in answer] == list(range(1, 1000))
    most = max(app._loaded.instance.seen)
    assert most <= 257 if awaits else most >= 999


async def test_a_sync_infer_may_have_a_loop_of_its_own(make: Make) -> None:
    body = f"""
async def run():
    await {SEND}({{"OUT": "a"}})
    await h.finalise_streamed_output()

asyncio.run(run())
"""
    (answer,) = await asked(app_of(make, body))
    assert events_of(answer) == [{"OUT": "a"}]


async def test_a_thread_waits_for_a_slow_reader(make: Make) -> None:
    body = f"""
for number in range(1000):
    {SEND}({{"OUT": number}})
    self.seen.append(number)
{END}
"""
    app = app_of(make, body)
    async with served(app):
        answer = app._model.ask({"TEXT": "rivers"})
        assert (await anext(answer))["OUT"] == 0
        seen = app._loaded.instance.seen
        await wait_until(lambda: len(answer.events._items) >= 256)
        assert len(seen) <= 257  # it was read 1, and 256 wait
        assert [item["OUT"] async for item in answer] == list(range(1, 1000))


async def test_a_thread_stops_waiting_for_a_reader_that_left(make: Make) -> None:
    app = app_of(make, f"while True: {SEND}({{'OUT': 'a'}})")
    async with served(app):
        answer = app._model.ask({"TEXT": "rivers"})
        await anext(answer)
        await wait_until(lambda: len(answer.events._items) >= 256)
        await answer.aclose()
        await wait_until(lambda: not app._model._pending)
        assert [item async for item in answer] == []


async def test_an_async_infer_that_never_awaits_waits_for_a_full_queue(make: Make) -> None:
    body = f"for number in range(10_000):\n    {SEND}({{'OUT': number}})\n    self.seen.append(number)\n{END}"
    app = app_of(make, body, kind="async def")
    async with served(app):
        answer = app._model.ask({"TEXT": "rivers"})
        assert (await anext(answer))["OUT"] == 0
        await wait_until(lambda: len(answer.events._items) >= 8_191)  # it may have been full before the first was read
        assert len(app._loaded.instance.seen) <= 8_193
        assert [item["OUT"] async for item in answer] == list(range(1, 10_000))


async def test_an_app_that_continues_after_its_stream_failed_is_stopped(make: Make) -> None:
    app = app_of(make, f"h.fail('no more words')\nwhile True: {SEND}({{'OUT': 'a'}})")
    async with served(app) as client:
        answer = await client.post(PATH, json=ASK)
        assert (answer.status_code, answer.json()) == (500, {"error": "no more words"})
        await wait_until(lambda: not app._model._pending)


async def test_events_after_the_return_of_infer_are_ignored(make: Make, caplog: Any) -> None:
    body = f"""
def send():
    self.go.wait()
    {SEND}({{"OUT": "b"}})

self.go = threading.Event()
self.thread = threading.Thread(target=send)
self.thread.start()
{SEND}({{"OUT": "a"}})
"""
    app = app_of(make, body)
    async with served(app) as client:
        assert events_of(await client.post(PATH, json=ASK)) == [{"OUT": "a"}, INCOMPLETE]
        app._loaded.instance.go.set()
        await asyncio.to_thread(app._loaded.instance.thread.join)
    assert [record.getMessage() for record in caplog.records] == [
        UNFINISHED,
        "the app sends events after the end of the stream: they are ignored",
    ]


ENDLESS = {
    "a loop that sends": ("def", f"while True: {SEND}({{'OUT': 'a'}})"),
    "a loop that hides what is raised": (
        "def",
        f"while True:\n    try: {SEND}({{'OUT': 'a'}})\n    except Exception: pass",
    ),
    "a loop that looks": ("def", f"while not h.cancelled: {SEND}({{'OUT': 'a'}})"),
    "an async loop": ("async def", f"while True: await {SEND}({{'OUT': 'a'}})"),
    "an async wait": ("async def", f"await {SEND}({{'OUT': 'a'}})\nawait asyncio.Event().wait()"),
    "an async wait after work in a thread": (
        "async def",
        f"await asyncio.to_thread(len, '')\nawait {SEND}({{'OUT': 'a'}})\nawait asyncio.Event().wait()",
    ),
    "a thread that sends": (
        "def",
        f"def send():\n    while True: {SEND}({{'OUT': 'a'}})\n"
        "thread = threading.Thread(target=send); thread.start(); thread.join()",
    ),
    "a loop beside a thread that never ends": (
        "def",
        f"threading.Thread(target=threading.Event().wait, daemon=True).start()\nwhile True: {SEND}({{'OUT': 'a'}})",
    ),
}


@pytest.mark.parametrize("app", ENDLESS)
async def test_an_infer_without_end_ends_when_the_client_has_left(make: Make, app: str, caplog: Any) -> None:
    kind, body = ENDLESS[app]
    indented = indent(body, "    ")
    served_app = app_of(make, f"try:\n{indented}\nfinally:\n    self.seen.append(h.cancelled)", kind=kind)
    async with served(served_app):
        for _ in range(2):
            reader = Reader(served_app, PATH, ASK)
            assert (await reader.event())["OUT"] == "a"
            await reader.leave()
        await wait_until(lambda: not served_app._model._pending)
        assert served_app._loaded.instance.seen == [True, True]
    assert caplog.records == []


async def test_a_send_without_a_reader_raises_once_finalised_it_does_not(make: Make) -> None:
    body = f"""
{SEND}({{"OUT": "a"}})
h.finalise_streamed_output()
self.go = threading.Event()
self.go.wait()
{SEND}({{"OUT": "b"}})
self.seen.append("came through")
"""
    app = app_of(make, body)
    async with served(app):
        reader = Reader(app, PATH, ASK)
        assert (await reader.event())["OUT"] == "a"
        await reader.leave()
        await wait_until(lambda: hasattr(app._loaded.instance, "go"))
        app._loaded.instance.go.set()
        await wait_until(lambda: not app._model._pending)
    assert app._loaded.instance.seen == ["came through"]


# An app in the manner of the page's, with fakes for what it imports.

FAKES = {
    "torch": "",
    "awq": """
import itertools

class Model:
    def generate(self, inputs, streamer, **settings):
        assert settings == {"max_new_tokens": 1024}
        prompt = inputs.messages[-1]["content"]
        for number in range(int(prompt) if prompt.isdigit() else 3):
            streamer.put(f"{prompt}{number} ")
        streamer.end()

class AutoAWQForCausalLM:
    @staticmethod
    def from_quantized(name, fuse_layers, version):
        assert (name, version) == ("a/cook-AWQ", "GEMV")
        return Model()
""",
    "transformers": '''
from queue import Queue

pipeline = None

class Chat:
    def __init__(self, messages):
        self.messages = messages

    def cuda(self):
        return self

class AutoTokenizer:
    @classmethod
    def from_pretrained(cls, name):
        return cls()

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, return_tensors):
        return Chat(messages)

class TextIteratorStreamer:
    """Like the real one: a queue without a bound, which says where an answer ends."""

    def __init__(self, tokenizer, skip_prompt, skip_special_tokens):
        self.queue = Queue()

    def put(self, text):
        self.queue.put(text)

    def end(self):
        self.queue.put(None)

    def __iter__(self):
        return self

    def __next__(self):
        text = self.queue.get()
        if text is None:
            raise StopIteration
        return text
''',
}
SCHEMA = """
INPUT_SCHEMA = {"TEXT": {"datatype": "STRING", "shape": [1], "required": True, "example": ["What is for dinner?"]}}
IS_STREAMING_OUTPUT = True
"""
# In the manner of the vendor's page: one streamer for all requests, a thread for each, text under OUT.
APP = """
from threading import Thread

from awq import AutoAWQForCausalLM
from transformers import AutoTokenizer, TextIteratorStreamer


class InferlessPythonModel:
    def initialize(self):
        self.network = AutoAWQForCausalLM.from_quantized("a/cook-AWQ", fuse_layers=False, version="GEMV")
        self.words = AutoTokenizer.from_pretrained("a/cook-AWQ")
        self.pieces = TextIteratorStreamer(self.words, skip_prompt=True, skip_special_tokens=True)

    def infer(self, inputs, stream_output_handler):
        asked = [{"role": "system", "content": "You cook."}, {"role": "user", "content": inputs["TEXT"]}]
        prompt = self.words.apply_chat_template(
            asked, tokenize=True, add_generation_prompt=True, return_tensors="pt"
        ).cuda()
        cook = Thread(
            target=self.network.generate, kwargs={"inputs": prompt, "streamer": self.pieces, "max_new_tokens": 1024}
        )
        cook.start()
        for piece in self.pieces:
            stream_output_handler.send_streamed_output({"OUT": piece})
        cook.join()
        stream_output_handler.finalise_streamed_output()

    def finalize(self, args):
        self.network = None
"""


@pytest.fixture
def page(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InferlessApp:
    import sys

    libraries = tmp_path / "libraries"
    libraries.mkdir()
    monkeypatch.syspath_prepend(str(libraries))
    for name, text in FAKES.items():
        (libraries / f"{name}.py").write_text(text)
        for module in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, module)
    app = make(APP, SCHEMA, name="m")
    for name in FAKES:
        sys.modules.pop(name, None)  # the real ones are for others to import
    return app


async def test_an_app_as_on_the_vendors_page(page: InferlessApp) -> None:
    async with served(page) as client:
        answers = await asyncio.gather(
            *(client.post(PATH, json={"parameters": {"TEXT": text}}) for text in ("egg", "ham", "jam"))
        )
    for text, answer in zip(("egg", "ham", "jam"), answers, strict=True):  # its streamer is shared, and not mixed up
        assert events_of(answer) == [{"OUT": f"{text}{number} "} for number in range(3)]
    assert page._loaded.instance.network is None


async def test_events_of_a_disconnected_client_do_not_reach_the_next(page: InferlessApp) -> None:
    async with served(page) as client:
        leaving = Reader(page, PATH, {"parameters": {"TEXT": "1024"}})
        assert (await leaving.event())["OUT"] == "10240 "
        await leaving.leave()
        answer = await client.post(PATH, json={"parameters": {"TEXT": "egg"}})
    assert events_of(answer) == [{"OUT": f"egg{number} "} for number in range(3)]
