"""Traces and metrics of real servers, as a real collector gets them."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.api.process import Server
from tests.api.test_server_metrics import scrape
from tests.waiting import until

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.proto")

from tests.plugins.otlp.collector import Receiver, attributes_of

_TRACE, _PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
_TRACEPARENT = f"00-{_TRACE}-{_PARENT}-01"
_CHAT = {"messages": [{"role": "user", "content": "A secret."}], "max_tokens": 5, "seed": 1}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    with contextlib.closing(Receiver()) as running:
        yield running


def _serving(receiver: Receiver, *flags: str) -> contextlib.closing[Server]:
    server = Server("scripted:tokens_per_s=100", "--otlp", receiver.address, *flags)
    return contextlib.closing(server.wait_ready())


def _exporter(server: Server) -> psutil.Process:
    """Return the process that exports the traces of a server, when it runs."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = [
            child
            for child in psutil.Process(server.process.pid).children()
            if child.status() != psutil.STATUS_ZOMBIE and "tailrace_plugins.otlp.exporter" in child.cmdline()
        ]
        return bool(found)

    until(is_there)
    (exporter,) = found
    return exporter


def test_a_request_is_one_trace_with_a_span_a_phase(receiver: Receiver) -> None:
    with _serving(receiver) as server:
        answer = server.post("/v1/chat/completions", _CHAT, traceparent=_TRACEPARENT)
        assert answer.status_code == 200
        until(lambda: bool(receiver.named("chat scripted")) and len(receiver.metrics) == 3)
    (root,) = receiver.named("chat scripted")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (_TRACE, _PARENT)
    assert answer.headers["traceparent"] == f"00-{_TRACE}-{root.span_id.hex()}-01"
    assert root.kind == root.SPAN_KIND_SERVER
    found = attributes_of(root.attributes)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == "scripted"
    assert found["gen_ai.usage.output_tokens"] == found["gen_ai.request.max_tokens"] == 5
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert found["tailrace.wire"] == "openai"
    phases = [receiver.named(name)[0] for name in ("queue", "prefill", "decode")]
    for phase, after in zip(phases, [*phases[1:], None], strict=True):
        assert (phase.trace_id, phase.parent_span_id) == (root.trace_id, root.span_id)
        assert after is None or abs(phase.end_time_unix_nano - after.start_time_unix_nano) < 1e8
    assert b"secret" not in b"".join(span.SerializeToString() for span in receiver.spans)
    assert receiver.services == {"tailrace"}
    assert receiver.instances == {f"{socket.gethostname()}:{server.process.pid}"}
    assert receiver.metrics == {
        "gen_ai.server.request.duration": 1,
        "gen_ai.server.time_to_first_token": 1,
        "gen_ai.server.time_per_output_token": 1,
    }


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=river,deployment.environment.name=test"}, "river"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=river", "OTEL_SERVICE_NAME": "mill"}, "mill"),
    ],
)
def test_variables_of_the_sdk_name_the_service(
    receiver: Receiver, variables: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with _serving(receiver) as server:
        server.post("/v1/chat/completions", _CHAT)
        until(lambda: bool(receiver.named("chat scripted")))
    assert receiver.services == {name}


def test_a_collector_without_metrics_gets_none(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    with _serving(receiver) as server:
        server.post("/v1/chat/completions", _CHAT)
        until(lambda: bool(receiver.named("chat scripted")))
    assert not receiver.metrics


def test_text_is_sent_only_if_asked_for(receiver: Receiver) -> None:
    with _serving(receiver, "--otlp-text") as server:
        text = server.post("/v1/chat/completions", _CHAT).json()["choices"][0]["message"]["content"]
        until(lambda: bool(receiver.named("chat scripted")))
        server.post("/v1/completions", {"prompt": "long " * 5000, "max_tokens": 1})
        until(lambda: bool(receiver.named("text_completion scripted")))
    found = attributes_of(receiver.named("chat scripted")[0].attributes)
    assert "A secret." in str(found["gen_ai.input.messages"])
    assert text[:3] in str(found["gen_ai.output.messages"])
    found = attributes_of(receiver.named("text_completion scripted")[0].attributes)
    assert 16_000 < len(str(found["gen_ai.input.messages"])) < 17_000


@pytest.mark.deep
def test_a_row_that_waits_again_does_not_decode(receiver: Receiver) -> None:
    with _serving(receiver, "--max-sequences", "1") as server:
        row = server.create({"prompt": "Long.", "max_tokens": 300}, x_tailrace_priority="background")
        until(lambda: bool(server.state(row)["text"]))
        server.post("/v1/completions", {"prompt": "Live.", "max_tokens": 3})
        until(lambda: server.state(row)["status"] == "done")
        until(lambda: len(receiver.named("decode")) == 3)
    root = next(span for span in receiver.spans if attributes_of(span.attributes).get("tailrace.stream.id") == row)
    spans = [span for span in receiver.spans if span.parent_span_id == root.span_id]
    named = [span.name for span in sorted(spans, key=lambda span: span.start_time_unix_nano)]
    assert named == ["queue", "prefill", "decode", "queue", "decode"]


def test_refused_and_unsampled_requests(receiver: Receiver) -> None:
    with _serving(receiver) as server:
        assert server.post("/v1/chat/completions", _CHAT, traceparent=f"00-{_TRACE}-{_PARENT}-00").status_code == 200
        for wrong in (f"00-{'0' * 32}-{_PARENT}-01", "x", f"01-{_TRACE}-{_PARENT}-01-more"):
            assert (
                server.post("/v1/chat/completions", {**_CHAT, "temperature": -1}, traceparent=wrong).status_code == 400
            )
        until(lambda: len(receiver.named("refuse scripted")) == 3)
    assert receiver.named("chat scripted") == []
    for refused in receiver.named("refuse scripted"):
        assert attributes_of(refused.attributes)["error.type"] == "invalid_request"
        assert not refused.parent_span_id


@pytest.mark.deep
def test_a_lost_engine_is_a_link_and_a_resume_is_a_span(receiver: Receiver) -> None:
    with _serving(receiver) as server:
        stream = server.create({"prompt": "Long.", "max_tokens": 3000}, traceparent=_TRACEPARENT)
        until(lambda: scrape(server)["tailrace_tokens_total{phase=decode}"] > 3)
        server.worker().kill()
        until(lambda: bool(receiver.named("replay")))
        with server.wire() as wire:
            wire.send(
                "GET", f"/v1/streams/{stream}/events?after=1", headers={"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
            )
            assert wire.head() == 200
        until(lambda: bool(receiver.named("resume scripted")))
        server.post(f"/v1/streams/{stream}/cancel", {})
        until(lambda: bool(receiver.named("text_completion scripted")))
    (root,) = receiver.named("text_completion scripted")
    first, second = sorted(receiver.named("decode"), key=lambda span: span.start_time_unix_nano)
    (replay,) = receiver.named("replay")
    assert [link.span_id for link in second.links] == [first.span_id]
    assert first.end_time_unix_nano <= replay.end_time_unix_nano <= second.end_time_unix_nano
    assert attributes_of(root.attributes)["tailrace.continuity"] == "replayed"
    (resume,) = receiver.named("resume scripted")
    assert (resume.trace_id.hex(), resume.parent_span_id.hex()) == ("1" * 32, "2" * 16)
    assert [(link.trace_id, link.span_id) for link in resume.links] == [(root.trace_id, root.span_id)]


def test_a_stream_of_a_dead_server_goes_on_in_its_trace(receiver: Receiver, tmp_path: Path) -> None:
    flags = ("--data-dir", str(tmp_path))
    with _serving(receiver, *flags) as server:
        answer = server.post("/v1/streams", {"prompt": "Long.", "max_tokens": 3000}, traceparent=_TRACEPARENT)
        until(lambda: scrape(server)["tailrace_tokens_total{phase=decode}"] > 3)
        until(lambda: bool(receiver.named("prefill")))
        server.send_signal(signal.SIGKILL)
        server.wait()
    with _serving(receiver, *flags) as server:
        until(lambda: bool(receiver.named("replay")))
        server.post(f"/v1/streams/{answer.json()['id']}/cancel", {})
        until(lambda: bool(receiver.named("text_completion scripted")))
    (root,) = receiver.named("text_completion scripted")
    first = answer.headers["traceparent"].split("-")[2]
    assert root.trace_id.hex() == _TRACE
    assert root.span_id.hex() != first
    assert [link.span_id.hex() for link in root.links] == [first]
    assert first in {span.parent_span_id.hex() for span in receiver.named("prefill")}


def test_the_exporter_of_a_killed_server_sends_what_it_has_and_ends(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    with _serving(receiver) as server:
        server.post("/v1/chat/completions", _CHAT)
        exporter = _exporter(server)
        until(lambda: len(receiver.metrics) == 3)  # it has the request
        assert not receiver.spans
        server.send_signal(signal.SIGKILL)
        server.wait()
        until(lambda: not exporter.is_running() or exporter.status() == psutil.STATUS_ZOMBIE)
    assert sorted(span.name for span in receiver.spans) == ["chat scripted", "decode", "prefill", "queue"]


def test_a_dead_exporter_is_replaced(receiver: Receiver) -> None:
    with _serving(receiver) as server:
        first = _exporter(server)
        first.kill()
        until(lambda: "takes none: spans are dropped" in server.log or not server.post("/v1/chat/completions", _CHAT))
        assert _exporter(server).pid != first.pid
        until(lambda: bool(server.post("/v1/chat/completions", _CHAT) and receiver.named("chat scripted")))
    assert "The process that exports traces has ended (-9). Another one is started." in server.log


@pytest.mark.deep
def test_an_exporter_that_does_not_keep_up_costs_spans_and_no_requests(receiver: Receiver) -> None:
    with _serving(receiver, "--otlp-text") as server:
        server.post("/v1/chat/completions", _CHAT)
        until(lambda: bool(receiver.named("chat scripted")))
        exporter = _exporter(server)
        exporter.suspend()
        long = {"prompt": "é" * 16_000, "max_tokens": 1}
        until(lambda: "spans are dropped" in server.log or not server.post("/v1/completions", long))
        exporter.resume()
        until(lambda: "takes spans again." in server.log or not server.post("/v1/chat/completions", _CHAT))


def test_without_a_collector_the_server_serves_and_stops() -> None:
    with contextlib.closing(Server("scripted", "--otlp", "http://127.0.0.1:9")) as server:
        assert server.wait_ready().post("/v1/chat/completions", _CHAT).status_code == 200


def test_a_wrong_address_is_refused_at_the_start() -> None:
    with contextlib.closing(Server("scripted", "--otlp", "collector:4318")) as server:
        assert server.wait() != 0
        assert "--otlp takes an address such as http://127.0.0.1:4318." in server.log
