"""A real Prometheus reads a real server: every query of our dashboards has an answer, and so have those of the
dashboards that vLLM and TGI publish. promtool tests the alerts."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.api.process import Server
from tests.api.test_server_metrics import scrape
from tests.missing import skip_missing
from tests.testing.redis_server import free_port
from tests.waiting import LONG_S, until

_DEPLOY = Path(__file__).parents[2] / "deploy"
_BOARDS = sorted((_DEPLOY / "grafana").glob("*.json"))

# What examples/online_serving/prometheus_grafana/grafana.json of vLLM 0.9 to 0.15 asks for, without its histograms.
_OF_VLLM = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc",
    "rate(vllm:prompt_tokens_total[10s])", "rate(vllm:generation_tokens_total[10s])",
    "sum by (finished_reason) (increase(vllm:request_success_total[10s]))",
    "rate(vllm:request_queue_time_seconds_sum[10s])", "rate(vllm:request_prefill_time_seconds_sum[10s])",
    "rate(vllm:request_decode_time_seconds_sum[10s])", "sum by (le) (increase(vllm:request_prompt_tokens_bucket[10s]))",
    "sum by (le) (increase(vllm:request_generation_tokens_bucket[10s]))",
    "rate(vllm:request_max_num_generation_tokens_sum[10s])",
)  # fmt: skip
_HISTOGRAMS_OF_VLLM = (
    "vllm:e2e_request_latency_seconds", "vllm:time_to_first_token_seconds", "vllm:time_per_output_token_seconds",
    "vllm:inter_token_latency_seconds",
)  # fmt: skip
# What assets/tgi_grafana.json of TGI 3.3.7 asks for, without the parts of its batches that no engine here has.
_OF_TGI = (
    "count(tgi_request_count)", "sum(increase(tgi_request_success[10s]))",
    "sum(increase(tgi_request_failure[10s])) by (err)", "sum(tgi_queue_size)", "avg(tgi_batch_current_size)",
    "avg(tgi_batch_current_max_tokens)",
)  # fmt: skip
_HISTOGRAMS_OF_TGI = (
    "tgi_request_duration", "tgi_request_queue_duration", "tgi_request_mean_time_per_token_duration",
    "tgi_request_generated_tokens", "tgi_request_input_length", "tgi_batch_inference_duration",
    "tgi_batch_forward_duration",
)  # fmt: skip


class _Prometheus:
    def __init__(self, port: int) -> None:
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LONG_S, trust_env=False)

    def ask(self, query: str) -> list[float]:
        """Return the values of a query, without those that are no number. Raises: AssertionError if it is refused."""
        answer = self.http.get("/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", answer
        values = [float(one["value"][1]) for one in answer["data"]["result"]]
        return [value for value in values if not math.isnan(value)]

    def is_up(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/-/ready").status_code == 200
        return False

    def alerts(self) -> list[dict[str, Any]]:  # Any: of JSON
        rules = self.http.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in rules for rule in group["rules"]]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Prometheus]:
    """A Prometheus that has seen a server with answers, refusals, resumes, a lost engine and unread tokens."""
    if shutil.which("prometheus") is None:
        skip_missing("prometheus")
    directory = tmp_path_factory.mktemp("prometheus")
    with contextlib.closing(Server("scripted:tokens_per_s=200", "--metrics-as", "vllm,tgi")) as server:
        server.wait_ready()
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(_DEPLOY / "prometheus" / "tailrace.rules.yaml")],
            "scrape_configs": [{"job_name": "tailrace", "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}]}],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        command = [
            "prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            prometheus = _Prometheus(port)
            try:
                until(prometheus.is_up)
                _use(server)
                until(lambda: bool(prometheus.ask("count_over_time(tailrace_ready[1m]) > 3")))
                _use(server)
                until(lambda: prometheus.ask("sum(tailrace_follows_total)") == [2])
                yield prometheus
            finally:
                prometheus.http.close()
                process.terminate()


def _use(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    assert server.post("/v1/chat/completions", chat).status_code == 200
    assert server.post("/v1/chat/completions", {**chat, "audio": {"voice": "x"}}).status_code == 200
    assert server.post("/v1/chat/completions", {**chat, "temperature": -1}).status_code == 400
    unread = server.create({"prompt": "Hi", "max_tokens": 5})
    server.wait_state(unread, "done")
    long = server.create({"prompt": "Hi", "max_tokens": 3000})
    before = scrape(server)["tailrace_replay_silence_seconds_count"]
    until(lambda: scrape(server)["tailrace_requests_running"] == 1)
    server.worker().kill()
    until(lambda: scrape(server)["tailrace_replay_silence_seconds_count"] > before)
    server.post(f"/v1/streams/{long}/cancel", {})
    server.wait_state(long, "cancelled")
    assert server.http.get(f"/v1/streams/{unread}/events?after=1").status_code == 200


def _queries(board: Path) -> list[str]:
    panels = json.loads(board.read_text("utf-8"))["panels"]
    return [
        target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
        for panel in panels
        for target in panel["targets"]
    ]


@pytest.mark.parametrize("board", _BOARDS, ids=lambda board: board.stem)
def test_every_query_of_a_dashboard_has_an_answer(watched: _Prometheus, board: Path) -> None:
    empty = [query for query in _queries(board) if not watched.ask(query)]
    # Without keys, there are no series of keys; without several models, the label is empty.
    assert [query for query in empty if "tailrace_key_" not in query] == []


def test_the_dashboards_of_vllm_and_tgi_show_figures(watched: _Prometheus) -> None:
    histograms = (*_HISTOGRAMS_OF_VLLM, *_HISTOGRAMS_OF_TGI)
    queries = [f"histogram_quantile(0.5, sum by (le) (rate({name}_bucket[1m]))) > 0" for name in histograms]
    queries += [query.replace("[10s]", "[1m]") for query in (*_OF_VLLM, *_OF_TGI)]
    assert [query for query in queries if not watched.ask(query)] == []


def test_the_alerts_run(watched: _Prometheus) -> None:
    until(lambda: all(rule["health"] != "unknown" for rule in watched.alerts()))
    assert {rule["health"] for rule in watched.alerts()} == {"ok"}


@pytest.mark.parametrize(
    "words",
    [
        ("test", "rules", "prometheus/tailrace.rules.test.yaml"),
        ("check", "config", "--syntax-only", "compose/prometheus.yaml"),
    ],
    ids=lambda words: words[1],
)
def test_promtool_finds_nothing(words: tuple[str, ...]) -> None:
    if shutil.which("promtool") is None:
        skip_missing("prometheus")
    done = subprocess.run(["promtool", *words], cwd=_DEPLOY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_both_ways() -> None:
    rules = yaml.safe_load((_DEPLOY / "prometheus" / "tailrace.rules.yaml").read_text())
    tests = yaml.safe_load((_DEPLOY / "prometheus" / "tailrace.rules.test.yaml").read_text())["tests"]
    names = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    for is_firing, test in ((True, tests[0]), (False, tests[1])):
        checks = test["alert_rule_test"]
        assert [check["alertname"] for check in checks] == names
        assert all(bool(check["exp_alerts"]) is is_firing for check in checks)
