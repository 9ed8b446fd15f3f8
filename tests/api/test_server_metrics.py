"""`/metrics` of a real server: the names of TGI's and vLLM's dashboards, and correct values."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.api.process import Server
from tests.waiting import LONG_S
from websockets.sync.client import connect

Samples = dict[str, float]  # by name and labels, as they stand on the wire

# Those of TGI's router that say something about this server, and ours.
HISTOGRAMS = (
    "tgi_request_duration",
    "tgi_request_validation_duration",
    "tgi_request_queue_duration",
    "tgi_request_inference_duration",
    "tgi_request_mean_time_per_token_duration",
    "tgi_request_input_length",
    "tgi_request_generated_tokens",
    "tailrace_time_to_first_token_seconds",
)
GAUGES = (
    "tgi_request_count",
    "tgi_request_success",
    "tgi_queue_size",
    "tgi_batch_current_size",
    "tailrace_requests_waiting",
    "tailrace_requests_running",
    "tailrace_kv_cache_usage",
    "tailrace_servers",
    "tailrace_servers_other_models",
    "tailrace_clock_offset_seconds",
    "tailrace_streams",
    "tailrace_ready",
)
TGI = {"inputs": "Tell me of rivers.", "parameters": {"max_new_tokens": 12, "seed": 1}}


def scrape(server: Server) -> Samples:
    answer = server.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return samples(answer.text)


def samples(text: str) -> Samples:
    """With one model, series without its name are sums over it and over what has no model."""
    families = list(text_string_to_metric_families(text))
    series = [(sample.name, tuple(sorted(sample.labels.items()))) for family in families for sample in family.samples]
    assert len(series) == len(set(series))
    has_several = [name for name, _ in series].count("tailrace_ready") > 1
    found: Samples = {}
    for family in families:
        assert family.documentation
        for sample in family.samples:
            shown = {name: text for name, text in sample.labels.items() if name != "model" or has_several}
            labels = ",".join(f"{name}={text}" for name, text in sorted(shown.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            found[key] = found.get(key, 0) + sample.value
    return found


def grown(before: Samples, after: Samples) -> Samples:
    """Return TGI's new and changed values, without times, buckets and what is counted before an answer is complete."""
    return {
        name: value - before.get(name, 0)
        for name, value in after.items()
        if value != before.get(name, 0)
        and name.startswith("tgi_request_")
        and "_bucket" not in name
        and not any(part in name for part in ("max_new_tokens", "queue_duration", "mean_time"))
        and not name.endswith("duration_sum")
    }


def wait_for(server: Server, is_so: Callable[[Samples], bool], *, timeout_s: float = LONG_S) -> Samples:
    deadline_s = time.monotonic() + timeout_s
    while not is_so(found := scrape(server)):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.01)  # there is nothing to wait on: it is this question that is under test
    return found


def failures(reason: str, count: int = 1) -> Samples:
    return {"tgi_request_count": count, f"tgi_request_failure{{err={reason}}}": count}


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    """A slow server with one sequence at a time and one slot in the queue."""
    source = "scripted:tokens_per_s=50"
    flags = ("--max-sequences", "1", "--max-concurrent-requests", "2")
    with contextlib.closing(Server(source, *flags)) as running:
        yield running.wait_ready()


def test_tgis_names_exist_before_the_first_request(serve: Callable[..., Server]) -> None:
    found = scrape(serve())
    for name in HISTOGRAMS:
        assert found[f"{name}_count"] == found[f"{name}_sum"] == 0
    for name in GAUGES:
        assert found[name] == (1 if name in ("tailrace_ready", "tailrace_servers") else 0)


def test_buckets_are_those_of_tgi(server: Server) -> None:
    found = scrape(server)
    for name in HISTOGRAMS:
        bounds = [key.removesuffix("}").partition("le=")[2] for key in found if key.startswith(f"{name}_bucket")]
        assert bounds[-1] == "+Inf"
        if name.endswith("duration"):
            assert [float(bound) for bound in bounds[:-1]] == pytest.approx([0.0001 * 1.5**k for k in range(1, 36)])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", TGI),
        ("/generate_stream", TGI),
        ("/v1/completions", {"prompt": TGI["inputs"], "max_tokens": 12}),
        ("/v1/completions", {"prompt": TGI["inputs"], "max_tokens": 12, "stream": True}),
    ],
)
def test_an_answer_is_counted_once(server: Server, path: str, body: object) -> None:
    before = scrape(server)
    assert server.post(path, body).status_code == 200
    after = scrape(server)
    counts = {
        f"{name}_count": 1.0
        for name in HISTOGRAMS
        if name.startswith("tgi") and "queue" not in name and "mean" not in name
    }
    sums = {"tgi_request_input_length_sum": 18, "tgi_request_generated_tokens_sum": 12}
    assert grown(before, after) == counts | sums | {
        "tgi_request_count": 1, "tgi_request_success": 1
    }  # fmt: skip


def test_durations_are_consistent(paced: Server) -> None:
    """Twelve tokens at a hundred a second take a tenth of a second, and the other phases take almost no time."""
    before = scrape(paced)
    begun_s = time.monotonic()
    assert paced.post("/generate", TGI).status_code == 200
    took_s = time.monotonic() - begun_s
    after = scrape(paced)

    def seconds(name: str) -> float:
        return after[f"{name}_sum"] - before[f"{name}_sum"]

    whole_s = seconds("tgi_request_duration")
    parts = ("validation", "queue", "inference")
    assert 0.1 < whole_s < took_s
    assert sum(seconds(f"tgi_request_{part}_duration") for part in parts) == pytest.approx(whole_s)
    mean_s = seconds("tgi_request_mean_time_per_token_duration")
    assert 0 < mean_s * 11 < seconds("tgi_request_inference_duration")
    assert 0 < seconds("tailrace_time_to_first_token_seconds") < whole_s


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": ""}),
        ("/generate", {"inputs": "Hi", "parameters": {"temperature": -1}}),
        ("/generate", {"inputs": "x" * 200_000}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"model": "other", "messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi", "previous_response_id": "resp_x"}),
    ],
)
def test_a_refusal_is_a_failed_validation(server: Server, path: str, body: object) -> None:
    before = scrape(server)
    assert server.post(path, body).status_code >= 400
    assert grown(before, scrape(server)) == failures("validation")


def test_a_sequence_that_fails_is_a_failed_generation(serve: Callable[..., Server]) -> None:
    server = serve("scripted:fault_after=2")
    before = scrape(server)
    server.post("/v1/completions", {"prompt": "Hi <|fail|>", "max_tokens": 9})
    assert grown(before, scrape(server)) == failures("generation")


def test_queue_batch_and_refused_requests(narrow: Server) -> None:
    before = scrape(narrow)
    assert (before["tgi_queue_size"], before["tgi_batch_current_size"]) == (0, 0)
    first, second = (narrow.create({"prompt": "Long.", "max_tokens": 3000}) for _ in range(2))
    found = scrape(narrow)
    assert (found["tgi_queue_size"], found["tgi_batch_current_size"]) == (1, 1)
    assert (found["tailrace_requests_waiting"], found["tailrace_requests_running"]) == (1, 1)
    assert 3000 / 65_536 < found["tailrace_kv_cache_usage"] < 3100 / 65_536
    with ThreadPoolExecutor(2) as pool:
        assert [answer.status_code for answer in pool.map(lambda _: narrow.post("/generate", TGI), range(2))] == [
            429
        ] * 2
    found = scrape(narrow)
    assert found["tgi_request_failure{err=overloaded}"] == 2
    narrow.post(f"/v1/streams/{first}/cancel", {})
    found = wait_for(narrow, lambda found: found["tgi_queue_size"] == 0)
    assert found["tgi_batch_current_size"] == 1
    narrow.post(f"/v1/streams/{second}/cancel", {})
    found = wait_for(narrow, lambda found: found["tgi_batch_current_size"] == 0)
    assert grown(before, found) == {
        "tgi_request_count": 4,
        "tgi_request_failure{err=overloaded}": 2,
        "tgi_request_failure{err=dropped}": 2,
    }


def test_a_client_that_leaves_is_counted_as_dropped(narrow: Server) -> None:
    before = scrape(narrow)
    with narrow.wire() as wire:
        wire.send("POST", "/generate_stream", {"inputs": "Long.", "parameters": {"max_new_tokens": 3000}})
        assert wire.head() == 200
        assert wire.chunk()
        assert scrape(narrow)["tgi_batch_current_size"] == 1
    found = wait_for(narrow, lambda found: found["tgi_batch_current_size"] == 0)
    assert grown(before, found) == failures("dropped")


def test_clients_cannot_create_series(server: Server) -> None:
    """No label contains a value that clients choose: paths, methods, models, users or error messages."""
    server.post("/generate", {"inputs": ""})
    server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "what": 1})
    before = set(scrape(server))
    names = [f"kanarienvogel{number}" for number in range(20)]
    for name in names:
        server.http.get(f"/{name}")
        server.http.get(f"/v1/models/{name}")
        server.http.get(f"/metrics?name[]={name}&{name}={name}")
        server.http.request(name.upper(), "/generate")
        chat = {"messages": [{"role": "user", "content": name}], "user": name, name: name, "max_tokens": 1}
        for model in (name, "scripted"):
            server.post("/v1/chat/completions", {**chat, "model": model}, X_Request_Id=name, User_Agent=name)
        server.post("/generate", {"inputs": "Hi", "parameters": {"grammar": {"type": name, "value": name}}})
        server.post(f"/v2/models/{name}/generate", {"text_input": name})
    answer = server.http.get("/metrics").text
    assert "kanarienvogel" not in answer.lower()
    assert set(scrape(server)) == before
    assert len(before) < 1000


def test_sockets_count_like_requests(server: Server) -> None:
    before = scrape(server)
    with connect(f"ws://127.0.0.1:{server.port}/v1/ws", proxy=None) as socket:
        socket.send(json.dumps({"type": "create", "prompt": "Tell me of rivers.", "max_tokens": 3}))
        while json.loads(socket.recv(LONG_S))["type"] != "done":
            pass
        socket.send(json.dumps({"type": "create", "prompt": "x" * 70_000}))
        assert json.loads(socket.recv(LONG_S))["type"] == "refused"
    with connect(f"ws://127.0.0.1:{server.port}/", proxy=None) as socket:
        socket.send("Tell me of rivers.")
        while socket.recv(LONG_S) != "<<Response Finished>>":
            pass
    found = grown(before, scrape(server))
    assert found["tgi_request_count"] == 3
    assert found["tgi_request_success"] == 2
    assert found["tgi_request_failure{err=validation}"] == 1


def test_other_requests_are_not_counted(server: Server) -> None:
    before = scrape(server)
    for path in ("/metrics", "/health", "/info", "/v1/models", "/openapi.json"):
        assert server.http.get(path).status_code == 200
    assert server.http.post("/metrics").status_code == 405
    assert grown(before, scrape(server)) == {}


_OF_MODEL = "engine=0,model_name=scripted"


def test_names_of_vllm() -> None:
    """These are the names that llm-d's endpoint picker and autoscalers read, and the times that dashboards show."""
    flags = ("--max-sequences", "1", "--metrics-as", "vllm", "--kv-tokens", "8192")
    with contextlib.closing(Server("scripted:tokens_per_s=50", *flags)) as server:
        server.wait_ready()
        found = scrape(server)
        assert not [name for name in found if name.startswith("tgi_")]
        assert found["vllm:cache_config_info{block_size=1,engine=0,model_name=scripted,num_gpu_blocks=8192}"] == 1
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "generation_tokens_total"):
            assert found[f"vllm:{name}{{{_OF_MODEL}}}"] == 0
        assert server.post("/generate", TGI).status_code == 200
        streams = [server.create({"prompt": "Long.", "max_tokens": 3000}) for _ in range(2)]
        found = scrape(server)
        running, waiting = (found[f"vllm:num_requests_{state}{{{_OF_MODEL}}}"] for state in ("running", "waiting"))
        assert (running, waiting) == (1, 1)
        assert 3000 / 8192 < found[f"vllm:kv_cache_usage_perc{{{_OF_MODEL}}}"] < 3100 / 8192
        assert found[f"vllm:generation_tokens_total{{{_OF_MODEL}}}"] >= 12
        assert found[f"vllm:prompt_tokens_total{{{_OF_MODEL}}}"] == 18
        for name in ("e2e_request_latency", "request_decode_time", "request_inference_time"):
            assert found[f"vllm:{name}_seconds_count{{{_OF_MODEL}}}"] == 1
        assert found["vllm:e2e_request_latency_seconds_bucket{engine=0,le=+Inf,model_name=scripted}"] == 1
        for stream in streams:
            server.post(f"/v1/streams/{stream}/cancel", {})


def test_vllms_names_of_several_models() -> None:
    flags = ("--model", "two=scripted", "--load", "all", "--metrics-as", "vllm,tgi")
    with contextlib.closing(Server("--model=one=scripted", *flags)) as server:
        server.wait_ready()
        found = scrape(server)
        for model in ("one", "two"):
            assert found[f"vllm:num_requests_running{{engine=0,model_name={model}}}"] == 0
            assert found[f"vllm:e2e_request_latency_seconds_count{{engine=0,model_name={model}}}"] == 0
            assert found[f"tgi_queue_size{{model={model}}}"] == 0
