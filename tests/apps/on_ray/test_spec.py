"""The arguments of a Serve config file, and the options of `tailrace serve` on Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tailrace.cli import main
from tailrace_outer.apps.on_ray.scaling import by_requests
from tailrace_outer.apps.on_ray.spec import ServerSpec, read_replicas

_JOURNAL = "redis://127.0.0.1:6379/0"


def _args(**args: Any) -> dict[str, Any]:
    return {"settings": {"journal": _JOURNAL}, **args}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JOURNAL", "DATABASE"):
        monkeypatch.delenv(f"TAILRACE_{name}", raising=False)


def test_the_arguments_of_a_file() -> None:
    spec = ServerSpec.of_args(
        {
            "models": {"chat": "smollm2", "big": "/models/big.gguf"},
            "model_settings": {"big": {"engine": "llamacpp"}},
            "settings": {"journal": _JOURNAL, "drain_s": 120, "threads": 4},
            "replicas": "2-8",
            "target_requests": 4,
            "autoscaling": {"upscale_delay_s": 1},
        }
    )
    assert (spec.first, spec.named) == (None, ("chat=smollm2", "big=/models/big.gguf"))
    assert spec.own == {"big": {"engine": "llamacpp"}}
    assert (spec.replicas, spec.target_requests, spec.autoscaling) == ((2, 8), 4, {"upscale_delay_s": 1})
    assert (spec.settings.drain_s, spec.num_cpus, spec.num_gpus) == (120, 4, 0)


def test_what_is_not_given_has_defaults() -> None:
    spec = ServerSpec.of_args(_args())
    assert (spec.first, spec.named, spec.replicas) == ("smollm2", (), (1, 1))


def test_urls_with_passwords_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_JOURNAL", "rediss://:secret@redis/0")
    assert ServerSpec.of_args({}).settings.journal == "rediss://:secret@redis/0"
    assert ServerSpec.of_args(_args()).settings.journal == _JOURNAL


@pytest.mark.parametrize(
    ("settings", "num_gpus"),
    [
        ({"engine": "vllm", "gpus": 2}, 2),
        ({"engine": "vllm", "device": "CPU"}, 0),
        ({"device": "cuda:0"}, 1),
        ({"device": "GPU.0"}, 1),
        ({"device": "cpu"}, 0),
    ],
)
def test_gpus(settings: dict[str, Any], num_gpus: int) -> None:
    assert ServerSpec.of_args({"settings": {"journal": _JOURNAL, **settings}}).num_gpus == num_gpus


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "on Ray, --journal must be the URL of a Redis"),
        ({"settings": {"journal": "memory"}}, "on Ray, --journal must be the URL of a Redis"),
        (_args(modell="smollm2"), "args has no field modell. Did you mean model?"),
        (_args(model=3), "args.model should be text."),
        (_args(models=["smollm2"]), "args.models should be a mapping."),
        (_args(models={"chat": 1}), "args.models should be a mapping of names to sources."),
        (_args(replicas="4-2"), "args.replicas takes a number"),
        (_args(replicas=True), "args.replicas takes a number"),
        (_args(replicas="2-8", target_requests=0), "args.target_requests should be a whole number, at least 1."),
        (_args(settings={"drain": 1}), "args.settings.drain is not a setting."),
        (_args(settings={"drain_s": "long"}), "args.settings.drain_s should be a number."),
        (_args(settings={"load": "never"}), "args.settings.load should be one of first, all."),
        (_args(settings={"journal": _JOURNAL, "tls_cert": "x"}), "--tls-cert cannot be used on Ray"),
        (_args(model_settings={"chat": {"port": 1}}), "args.model_settings.chat.port is not a setting of a model."),
        (_args(target_requests=4), "args.target_requests needs a range in args.replicas, such as 2-8."),
        (_args(replicas=2, autoscaling={"upscale_delay_s": 1}), "args.autoscaling needs a range in args.replicas"),
        (_args(replicas="2-8", autoscaling=3), "args.autoscaling should be a mapping."),
    ],
)
def test_bad_arguments_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the message is checked
        ServerSpec.of_args(args)
    assert message in str(refused.value)


@pytest.mark.parametrize(("text", "numbers"), [("1", (1, 1)), ("2-8", (2, 8)), ("3-3", (3, 3))])
def test_numbers_of_replicas(text: str, numbers: tuple[int, int]) -> None:
    assert read_replicas(text) == numbers


@pytest.mark.parametrize("text", ["", "0", "0-2", "3-2", "-1", "1.5", "two", "2-", "99999", "²"])
def test_bad_numbers_of_replicas(text: str) -> None:
    with pytest.raises(ValueError, match="takes a number from 1 to 1000"):
        read_replicas(text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--on", "ray"], "on Ray, --journal must be the URL of a Redis"),
        (["--on", "ray", "--journal", "memory"], "on Ray, --journal must be the URL of a Redis"),
        (["--on", "ray", "--journal", _JOURNAL, "--write-s", "1"], "--write-s cannot be used on Ray"),
        (["--on", "ray", "--replicas", "0"], "takes a number from 1 to 1000, such as 2, or a range, such as 2-8."),
        (["--on", "ray", "--journal", _JOURNAL, "--target-requests", "2"], "--target-requests needs a range in --rep"),
        (["--replicas", "2"], "--replicas needs --on ray"),
        (["--target-requests", "2"], "--target-requests needs --on ray"),
    ],
)
def test_bad_options_are_refused_in_one_line(flags: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["serve", "scripted", *flags])
    assert result.exit_code == 2
    assert message in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tls-cert", "x", "--tls-key", "y"], "--tls-cert cannot be used on Ray"),
        (["--drain-s", "60"], "--drain-s cannot be used on Ray: its proxies and the options of deployments apply."),
        (["--database", "sqlite:///keys.sqlite"], "--database cannot be used on Ray"),
        (["--lease-s", "3"], "--lease-s needs the URL of a Redis in --journal on Ray"),
        (["--host", "192.0.2.1"], "on Ray, no keys are checked for your own code"),
        (["--resumable"], "--resumable cannot be used with --on ray."),
    ],
)
def test_options_of_apps_that_mean_nothing_on_ray_are_refused(flags: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "web.py").write_text("async def app(scope, receive, send): ...")
    result = CliRunner().invoke(main, ["run", "web:app", "-d", str(tmp_path), "--on", "ray", *flags])
    assert result.exit_code in (1, 2)
    assert message in result.stderr.splitlines()[-1]


class _Context:
    """What Ray hands to a policy."""

    def __init__(self, requests: dict[str, float], *, queued: float = 0.0) -> None:
        self.aggregated_metrics = {"requests": requests} if requests else {}
        self.total_queued_requests = queued
        self.target_num_replicas = 7
        self.config = self

    def get_target_ongoing_requests(self) -> float:
        return 8.0


@pytest.mark.parametrize(
    ("context", "num_replicas"),
    [
        (_Context({"a": 8.0, "b": 4.0}), 1.5),
        (_Context({"a": 0.0}), 0.0),
        (_Context({"a": 8.0}, queued=8.0), 2.0),
        (_Context({}), 7),  # nothing is known: no change
    ],
)
def test_scaling(context: Any, num_replicas: float) -> None:
    assert by_requests(context) == (num_replicas, {})
