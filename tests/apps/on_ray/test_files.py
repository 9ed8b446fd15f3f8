"""The files of `tailrace new ray`."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any  # YAML

import kubernetes_validate
import pytest
import yaml
from tests.apps.on_ray.cluster import ray_python
from tests.deploy import custom_resources

from tailrace_outer.apps.on_ray.spec import ServerSpec

ROOT = Path(__file__).parents[3]
FILES = ROOT / "examples" / "ray"


def _service() -> dict[str, Any]:
    service: dict[str, Any] = yaml.safe_load((FILES / "rayservice.yaml").read_text())
    return service


def _configs() -> list[dict[str, Any]]:
    return [yaml.safe_load((FILES / "serve.yaml").read_text()), yaml.safe_load(_service()["spec"]["serveConfigV2"])]


def test_the_arguments_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_JOURNAL", "redis://redis:6379/0")
    monkeypatch.delenv("TAILRACE_DATABASE", raising=False)
    for config in _configs():
        (app,) = config["applications"]
        spec = ServerSpec.of_args(app["args"])
        assert spec.settings.host == config["http_options"]["host"]
        module, _, name = app["import_path"].partition(":")
        assert callable(getattr(__import__(module, fromlist=[name]), name))


def test_the_manifest_is_valid() -> None:
    """With the pods in it."""
    custom_resources.validate(_service(), "1.37")
    service = _service()
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["terminationGrace"] = 150
    with pytest.raises(kubernetes_validate.ValidationError):
        custom_resources.validate(service, "1.37")


def test_the_manifest_fits_its_own_config() -> None:
    service = _service()
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    (app,) = _configs()[1]["applications"]
    cluster = service["spec"]["rayClusterConfig"]
    (declared,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["ray"]
    assert f">={cluster['rayVersion'].rpartition('.')[0]}," in declared
    (workers,) = cluster["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    args, settings = app["args"], app["args"]["settings"]
    assert pod["terminationGracePeriodSeconds"] > settings["drain_s"]
    assert f"{workers['minReplicas']}-{workers['maxReplicas']}" == args["replicas"]  # one replica a pod
    assert int(pod["containers"][0]["resources"]["requests"]["cpu"]) == settings["threads"]
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert {port["name"]: port["containerPort"] for port in head["ports"]}["serve"] == 8000
    for container in (head, pod["containers"][0]):
        assert {row["name"] for row in container["env"]} == {"TAILRACE_JOURNAL", "TAILRACE_DATABASE"}


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_ray_accepts_the_configs() -> None:
    script = (
        "import json, sys; from ray.serve.schema import ServeDeploySchema as S; [S(**c) for c in json.load(sys.stdin)]"
    )
    subprocess.run(
        [str(ray_python()), "-c", script], input=json.dumps(_configs()), text=True, check=True, capture_output=True
    )
