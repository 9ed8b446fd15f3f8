from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.plugins.inferless.apps import STREAMING, UNARY, Make, Reader, apps, events_of, served
from tests.waiting import LONG_S, wait_until

from tailrace_plugins.inferless import app_class as model_module

HEX = "0123456789abcdef" * 2
ECHO = """
class InferlessPythonModel:
    def infer(self, inputs):
        return {"OUT": inputs["TEXT"], "length": len(inputs["TEXT"])}
"""
STREAM = """
class InferlessPythonModel:
    def infer(self, inputs, stream_output_handler):
        for word in inputs["TEXT"].split():
            stream_output_handler.send_streamed_output({"OUT": word})
        stream_output_handler.finalise_streamed_output()
"""
GATED = """
import threading

class InferlessPythonModel:
    def initialize(self):
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.running = self.most = 0
        self.seen = []

    def infer(self, inputs):
        self.running += 1
        self.most = max(self.most, self.running)
        self.seen.append(inputs["TEXT"])
        self.entered.release()
        self.gate.acquire()
        self.running -= 1
        return {"OUT": inputs["TEXT"]}
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with apps(tmp_path) as make:
        yield make


async def test_routes_of_server_and_model(make: Make) -> None:
    async with served(make(ECHO, UNARY, name="Echo")) as client:
        assert (await client.get("/v2")).json()["name"] == "tailrace"
        assert (await client.get("/v2/health/live")).json() == {"live": True}
        assert (await client.get("/v2/health/ready")).json() == {"ready": True}
        for name in ("Echo", f"Echo_{HEX}"):
            for path in (f"/v2/models/{name}", f"/v2/models/{name}/versions/1"):
                assert (await client.get(path)).json() == {
                    "name": name,
                    "versions": ["1"],
                    "platform": "tailrace",
                    "inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1]}],
                    "outputs": [],
                }
                assert (await client.get(f"{path}/ready")).json() == {"name": name, "ready": True}


@pytest.mark.parametrize("path", ["/v2/models/other", f"/v2/models/other_{HEX}", "/v2/models/Echo/versions/2", "/v3"])
async def test_unknown_paths_are_404(make: Make, path: str) -> None:
    async with served(make(ECHO, UNARY, name="Echo")) as client:
        for answer in (await client.get(path), await client.post(f"{path}/infer", json={"TEXT": "a"})):
            assert answer.status_code == 404
            assert list(answer.json()) == ["error"]


async def test_a_unary_answer_in_three_forms(make: Make) -> None:
    app = make(ECHO, UNARY, name="Echo")
    body = {"inputs": [{"name": "TEXT", "shape": [1], "data": ["Hello"], "datatype": "BYTES"}], "id": "7"}
    head = {"id": "7", "model_name": f"Echo_{HEX}", "model_version": "1"}
    async with served(app) as client:
        path = f"/v2/models/Echo_{HEX}/versions/1"
        assert (await client.post(f"{path}/infer", json=body)).json() == {
            **head,
            "outputs": [
                {"name": "OUT", "datatype": "BYTES", "shape": [1], "data": ["Hello"]},
                {"name": "length", "datatype": "INT64", "shape": [1], "data": [5]},
            ],
        }
        wanted = await client.post(f"{path}/infer", json={**body, "outputs": [{"name": "length"}]})
        assert [output["name"] for output in wanted.json()["outputs"]] == ["length"]
        missing = await client.post(f"{path}/infer", json={**body, "outputs": [{"name": "more"}]})
        assert missing.status_code == 400
        assert (await client.post(f"{path}/generate", json=body)).json() == {**head, "OUT": "Hello", "length": 5}
        events = await client.post(f"{path}/generate_stream", json={"parameters": {"TEXT": "Hello"}})
        assert events_of(events) == [{"OUT": "Hello", "length": 5}]
    example, sample = app.example()
    assert (example, sample) == ("/v2/models/Echo/generate", {"parameters": {"TEXT": "Hello"}})


async def test_a_streaming_app_only_streams(make: Make) -> None:
    app = make(STREAM, STREAMING, name="m")
    body = {"parameters": {"TEXT": "rivers bend"}}
    async with served(app) as client:
        for path, accept in (("generate_stream", "*/*"), ("infer", "text/event-stream")):
            answer = await client.post(f"/v2/models/m/{path}", json=body, headers={"accept": accept})
            assert events_of(answer) == [{"OUT": "rivers"}, {"OUT": "bend"}]
            head = '{"model_name":"m","model_version":"1",'
            assert answer.text == f'data: {head}"OUT":"rivers"}}\n\ndata: {head}"OUT":"bend"}}\n\n'
        for path in ("infer", "generate"):
            answer = await client.post(f"/v2/models/m/{path}", json=body)
            assert answer.status_code == 400
            assert "generate_stream" in answer.json()["error"]
    assert app.max_ongoing_requests == 101
    assert app.example()[0] == "/v2/models/m/generate_stream"


async def test_inputs_may_be_binary_tensors(make: Make) -> None:
    tensor = {"name": "TEXT", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 9}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    async with served(make(ECHO, UNARY, name="m")) as client:
        headers = {"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"}
        answer = await client.post("/v2/models/m/infer", content=head + b"\5\0\0\0river", headers=headers)
        plain = await client.post("/v2/models/m/infer", json={"TEXT": "river"})
        assert (answer.status_code, answer.json()) == (200, plain.json())


@pytest.mark.parametrize(
    ("sent", "headers", "status", "message"),
    [
        (b"{", {}, 400, "not valid JSON"),
        (b"[]", {}, 400, "must be a JSON object"),
        (b'{"TEXT": NaN}', {}, 400, "not valid JSON"),
        (b'{"TEXT": 8317}', {}, 400, "TEXT: expected a string."),
        (b"{}", {}, 400, "TEXT: this input is required."),
        (b'{"TEXT": "a", "stream": true}', {}, 400, "use generate_stream for a stream"),
        (b'{"TEXT": "a"}', {"content-type": "text/plain"}, 415, "application/json"),
        (b'{"TEXT": "a"}', {"inference-header-content-length": "14"}, 400, "Inference-Header-Content-Length"),
        (b" " * (64 * 2**20 + 1), {}, 413, "larger than"),
    ],
    ids=lambda value: "large" if isinstance(value, bytes) and len(value) > 99 else None,
)
async def test_a_wrong_request(make: Make, sent: bytes, headers: dict[str, str], status: int, message: str) -> None:
    async with served(make(ECHO, UNARY, name="m")) as client:
        answer = await client.post("/v2/models/m/generate", content=sent, headers=headers)
        assert answer.status_code == status
        assert message in answer.json()["error"]
        assert "8317" not in answer.text


async def test_a_wrong_method_is_an_error_of_this_wire(make: Make) -> None:
    async with served(make(ECHO, UNARY, name="m")) as client:
        answer = await client.get("/v2/models/m/infer")
        assert (answer.status_code, answer.json()) == (405, {"error": "Method Not Allowed."})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('8317')", "KeyError in infer; the app's log has details."),
        ("next(iter(()))", "RuntimeError in infer; the app's log has details."),
        ("raise SystemExit(3)", "SystemExit in infer; the app's log has details."),
        ("pass", "infer returned None; it should return a dict of outputs."),
        ("return 'text'", "The app should return a dict of outputs, not str."),
        ("return {'OUT': object()}", "OUT: a value of type object, which cannot be JSON."),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_an_infer_that_fails(make: Make, body: str, message: str, kind: str, caplog: Any) -> None:
    app = f"class InferlessPythonModel:\n    {kind} infer(self, inputs):\n        {body}"
    async with served(make(app, UNARY, name="m")) as client:
        for verb in ("infer", "generate", "generate_stream"):
            answer = await client.post(f"/v2/models/m/{verb}", json={"TEXT": "a"})
            assert (answer.status_code, answer.json()) == (500, {"error": message})
            assert 'inferless/model.py", line' not in caplog.text  # no frames of ours
            assert ("8317" in caplog.text) == ("8317" in body)
        assert (await client.get("/v2/health/ready")).status_code == 200


async def test_initialize_and_finalize_are_called_once_in_the_thread_of_infer(make: Make, tmp_path: Path) -> None:
    app = """
import pathlib, threading

class InferlessPythonModel:
    def initialize(self):
        self.seen = [("initialize", threading.get_ident())]

    def infer(self, inputs):
        self.seen.append(("infer", threading.get_ident()))
        return {"OUT": "a"}

    def finalize(self, args):
        assert args is None
        self.seen.append(("finalize", threading.get_ident()))
        pathlib.Path(__file__).with_name("seen").write_text(repr(self.seen))
"""
    async with served(make(app, UNARY, name="m")) as client:
        await client.post("/v2/models/m/generate", json={"TEXT": "a"})
    seen = eval((tmp_path / "seen").read_text())  # what it has written just now
    assert [what for what, _ in seen] == ["initialize", "infer", "finalize"]
    assert len({thread for _, thread in seen}) == 1


async def test_async_methods_run_on_the_event_loop(make: Make, tmp_path: Path) -> None:
    app = """
import asyncio, pathlib

class InferlessPythonModel:
    async def initialize(self):
        self.loop = asyncio.get_running_loop()

    async def infer(self, inputs):
        await asyncio.sleep(0)
        return {"OUT": asyncio.get_running_loop() is self.loop}

    async def finalize(self):
        pathlib.Path(__file__).with_name("seen").write_text("finalized")
"""
    async with served(make(app, UNARY, name="m")) as client:
        answer = await client.post("/v2/models/m/generate", json={"TEXT": "a"})
    assert answer.json()["OUT"] is True
    assert (tmp_path / "seen").read_text() == "finalized"


async def test_an_initialize_that_fails_fails_the_startup(make: Make) -> None:
    app = ECHO + "    def initialize(self):\n        raise RuntimeError('no weights')"
    with pytest.raises(RuntimeError, match="no weights"):
        async with served(make(app, UNARY)):
            pass


async def test_a_finalize_that_fails_is_logged(make: Make, caplog: Any) -> None:
    async with served(make(ECHO + "    def finalize(self):\n        raise RuntimeError('still busy')", UNARY)):
        pass
    assert "still busy" in caplog.text


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_the_number_of_concurrent_requests_is_limited(make: Make, concurrency: int) -> None:
    app = make(GATED, UNARY, name="m", concurrency=concurrency)
    instance = app._loaded.instance
    async with served(app) as client, asyncio.TaskGroup() as asking:
        asked = [
            asking.create_task(client.post("/v2/models/m/generate", json={"TEXT": str(number)})) for number in range(4)
        ]
        for _ in range(concurrency):
            await asyncio.to_thread(instance.entered.acquire, timeout=LONG_S)
        assert len(instance.seen) == concurrency
        instance.gate.release(4)
        assert [(await one).json()["OUT"] for one in asked] == ["0", "1", "2", "3"]
    assert instance.most <= concurrency
    assert sorted(instance.seen) == ["0", "1", "2", "3"]


async def test_a_full_queue_refuses(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "_MAX_WAITING", 1)
    app = make(GATED, UNARY, name="m")
    instance = app._loaded.instance
    async with served(app) as client, asyncio.TaskGroup() as asking:
        first = asking.create_task(client.post("/v2/models/m/generate", json={"TEXT": "1"}))
        await asyncio.to_thread(instance.entered.acquire, timeout=LONG_S)
        second = asking.create_task(client.post("/v2/models/m/generate", json={"TEXT": "2"}))
        await wait_until(lambda: len(app._model._pending) >= 2)
        for verb in ("infer", "generate_stream"):
            refused = await client.post(f"/v2/models/m/{verb}", json={"TEXT": "3"})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert list(refused.json()) == ["error"]
        instance.gate.release(2)
        assert [(await one).status_code for one in (first, second)] == [200, 200]
    assert instance.seen == ["1", "2"]


async def test_a_request_cancelled_while_waiting_never_starts(make: Make) -> None:
    app = make(GATED, UNARY, name="m")
    instance = app._loaded.instance
    async with served(app) as client, asyncio.TaskGroup() as asking:
        first = asking.create_task(client.post("/v2/models/m/generate", json={"TEXT": "1"}))
        await asyncio.to_thread(instance.entered.acquire, timeout=LONG_S)
        leaving = Reader(app, "/v2/models/m/generate", {"TEXT": "2"})
        await wait_until(lambda: len(app._model._pending) >= 2)
        await leaving.leave()
        instance.gate.release(2)
        assert (await first).json()["OUT"] == "1"
        assert (await client.post("/v2/models/m/generate", json={"TEXT": "3"})).json()["OUT"] == "3"
    assert instance.seen == ["1", "3"]


BATCHING = """
class InferlessPythonModel:
    sizes = []

    def infer(self, inputs):
        self.sizes.append(len(inputs))
        if any(one["TEXT"] == "short" for one in inputs):
            return []
        return [{"OUT": one["TEXT"].upper()} for one in inputs]
"""


@pytest.mark.parametrize("kind", ["def infer", "async def infer"])
async def test_batches_are_lists_in_and_out(make: Make, kind: str) -> None:
    schema = UNARY + "BATCH_SIZE = 3\nBATCH_WINDOW = 60_000\n"  # so that only a full batch is run
    app = make(BATCHING.replace("def infer", kind), schema, name="m")
    async with served(app) as client:
        asked = [client.post("/v2/models/m/generate", json={"TEXT": text}) for text in "abc"]
        answers = await asyncio.gather(*asked)
        assert [answer.json()["OUT"] for answer in answers] == ["A", "B", "C"]
        asked = [client.post("/v2/models/m/generate", json={"TEXT": text}) for text in ("a", "b", "short")]
        for answer in await asyncio.gather(*asked):
            message = "infer got a batch of 3 and must return a list of that length, not a list of 0."
            assert (answer.status_code, answer.json()) == (500, {"error": message})
    assert app._loaded.instance.sizes == [3, 3]


async def test_a_batch_keeps_its_turn_without_clients(make: Make) -> None:
    app = make(GATED.replace('inputs["TEXT"]', "len(inputs)").replace('return {"OUT": len(inputs)}', "return inputs"),
               UNARY + "BATCH_SIZE = 2\nBATCH_WINDOW = 1\n", name="m")  # fmt: skip
    instance = app._loaded.instance
    async with served(app) as client, asyncio.TaskGroup() as asking:
        leaving = Reader(app, "/v2/models/m/generate", {"TEXT": "1"})
        await asyncio.to_thread(instance.entered.acquire, timeout=LONG_S)
        await leaving.leave()
        asked = asking.create_task(client.post("/v2/models/m/generate", json={"TEXT": "2"}))
        await wait_until(lambda: len(app._model._pending) >= 2)
        await asyncio.sleep(0.05)  # longer than the window; were the turn given away, it would be taken now
        assert len(instance.seen) == 1
        instance.gate.release(2)
        assert (await asked).json()["TEXT"] == "2"
    assert instance.most == 1


async def test_a_batch_that_does_not_begin_in_time_is_refused(make: Make) -> None:
    app = make(GATED.replace('inputs["TEXT"]', "len(inputs)").replace('return {"OUT": len(inputs)}', "return inputs"),
               UNARY + "BATCH_SIZE = 1\nBATCH_WINDOW = 1\n", name="m", queue_s=1)  # fmt: skip
    instance = app._loaded.instance
    async with served(app) as client, asyncio.TaskGroup() as asking:
        first = asking.create_task(client.post("/v2/models/m/generate", json={"TEXT": "1"}))
        await asyncio.to_thread(instance.entered.acquire, timeout=LONG_S)
        refused = await client.post("/v2/models/m/generate", json={"TEXT": "2"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.json() == {"error": "The app was not free within 1 s."}
        instance.gate.release()
        assert (await first).json()["TEXT"] == "1"  # it had begun: it may take longer than that
    assert len(instance.seen) == 1


async def test_a_thread_that_dies_fails_a_unary_answer_too(make: Make, caplog: Any) -> None:
    app = make(
        """
import queue, threading

class InferlessPythonModel:
    words = queue.Queue()

    def infer(self, inputs):
        threading.Thread(target=self.generate).start()
        return {"OUT": self.words.get()}

    def generate(self):
        raise MemoryError("8317")
""",
        UNARY,
        name="m",
    )
    async with served(app) as client:
        answer = await client.post("/v2/models/m/generate", json={"TEXT": "a"})
        message = "MemoryError in a thread that infer has started; the app's log has details."
        assert (answer.status_code, answer.json()) == (500, {"error": message})
        assert "8317" in caplog.text
        assert (await client.get("/v2/models/m/ready")).status_code == 503
        app._loaded.instance.words.put("a")


async def test_a_batch_is_run_when_its_window_is_over(make: Make) -> None:
    app = make(BATCHING, UNARY + "BATCH_SIZE = 3\nBATCH_WINDOW = 1\n", name="m")
    async with served(app) as client:
        assert (await client.post("/v2/models/m/generate", json={"TEXT": "a"})).json()["OUT"] == "A"
    assert app._loaded.instance.sizes == [1]


async def test_a_hanging_call_does_not_prevent_the_stop(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(model_module, "_GRACE_S", 0.01)
    app = make(GATED, UNARY, name="m")
    instance = app._loaded.instance
    with caplog.at_level(logging.WARNING):
        async with served(app) as client:
            asked = asyncio.create_task(client.post("/v2/models/m/generate", json={"TEXT": "1"}))
            await asyncio.to_thread(instance.entered.acquire, timeout=LONG_S)
    answer = await asked
    assert (answer.status_code, answer.json()) == (500, {"error": "The app is shutting down."})
    assert "finalize is not called" in caplog.text
    instance.gate.release()
