"""The Helm chart, rendered by Helm's own library and checked against Kubernetes' schemas.

`TAILRACE_REGENERATE=1` writes the manifests in deploy/kubernetes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests.api.process import TAILRACE
from tests.api.test_server_metrics import GAUGES
from tests.deploy import custom_resources, helm
from tests.waiting import LONG_S

from tailrace.settings import Settings, settings_table

_DEPLOY = Path(__file__).parents[2] / "deploy"
_VERSIONS = ("1.29", "1.37")  # the oldest one that the chart allows, and the newest one with schemas

Manifest = dict[str, Any]  # Any: of YAML

_SHARED: dict[str, Any] = {
    "journal": {"redisUrl": {"secretName": "tailrace-redis"}},
    "database": {"secretName": "tailrace-postgresql"},
}
# By file in deploy/kubernetes: the values that it is rendered with.
_RENDERED: dict[str, dict[str, Any]] = {
    "one-server": {},
    "shared-journal": {**_SHARED, "models": {"size": "20Gi"}},
    "shared-journal-hpa": {**_SHARED, "autoscaling": {"enabled": True}},
    "shared-journal-keda": {**_SHARED, "keda": {"enabled": True}},
    "inference-pool": {**_SHARED, "inferencePool": {"enabled": True}, "publicMetrics": True},
}


@pytest.fixture(scope="module", autouse=True)
def _helm() -> Iterator[None]:
    yield
    helm.close()


def _render(values: dict[str, Any], *, name: str = "tailrace", namespace: str = "default") -> str:
    files = helm.render(values, name, namespace)
    parts = [text.strip() for path, text in sorted(files.items()) if path.endswith(".yaml") and text.strip()]
    return "---\n" + "\n---\n".join(parts) + "\n"


def _manifests(values: dict[str, Any], **release: str) -> list[Manifest]:
    return [manifest for manifest in yaml.safe_load_all(_render(values, **release)) if manifest]


def _one(manifests: list[Manifest], *kinds: str) -> Manifest:
    (found,) = (manifest for manifest in manifests if manifest["kind"] in kinds)
    return found


def _pod(manifests: list[Manifest]) -> Manifest:
    pod: Manifest = _one(manifests, "Deployment", "StatefulSet")["spec"]["template"]["spec"]
    return pod


def _env(pod: Manifest) -> dict[str, Manifest]:
    return {row["name"]: row for row in pod["containers"][0]["env"]}


def test_helm_finds_nothing_to_complain_about() -> None:
    found = helm.lint()
    assert not found["errors"]
    assert [message["error"] for message in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("name", _RENDERED)
def test_the_rendered_manifests_are_current(name: str) -> None:
    path, text = _DEPLOY / "kubernetes" / f"{name}.yaml", _render(_RENDERED[name])
    if os.environ.get("TAILRACE_REGENERATE"):
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize("version", _VERSIONS)
@pytest.mark.parametrize("name", _RENDERED)
def test_manifests_are_valid(name: str, version: str) -> None:
    for manifest in _manifests(_RENDERED[name], name="my-release", namespace="models"):
        _validate(manifest, version)


def _validate(manifest: Manifest, version: str) -> None:
    if manifest["kind"] in custom_resources.KINDS:
        custom_resources.validate(manifest, version)
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_every_kind_is_validated() -> None:
    kinds = {manifest["kind"] for values in _RENDERED.values() for manifest in _manifests(values)}
    assert kinds >= {
        "ConfigMap", "Deployment", "HorizontalPodAutoscaler", "InferencePool", "NetworkPolicy", "PodDisruptionBudget",
        "ScaledObject", "Service", "StatefulSet",
    }  # fmt: skip


def _set(value: object, *path: str | int) -> Callable[[Manifest], None]:
    def change(manifest: Manifest) -> None:
        inner: Any = manifest  # YAML
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value

    return change


_POD = ("spec", "template", "spec", "containers", 0)
_BEHAVIOR = ("spec", "advanced", "horizontalPodAutoscalerConfig", "behavior")


@pytest.mark.parametrize(
    ("name", "kind", "change"),
    [
        ("one-server", "StatefulSet", _set({}, *_POD, "redinessProbe")),
        ("one-server", "NetworkPolicy", _set([{"port": []}], "spec", "ingress")),
        ("shared-journal", "PodDisruptionBudget", _set([1], "spec", "maxUnavailable")),
        ("shared-journal-hpa", "HorizontalPodAutoscaler", _set("many", "spec", "maxReplicas")),
        ("shared-journal-keda", "ScaledObject", _set(4, "spec", "triggers", 0, "metadata", "threshold")),
        ("shared-journal-keda", "ScaledObject", _set(2, "spec", "minReplicas")),
        ("shared-journal-keda", "ScaledObject", _set("long", *_BEHAVIOR, "scaleDown", "stabilizationWindowSeconds")),
        ("inference-pool", "InferencePool", _set({"name": "picker"}, "spec", "endpointPickerRef")),
        ("inference-pool", "InferencePool", _set(8000, "spec", "targetPortNumber")),
    ],
)
def test_the_schemas_find_a_mistake(name: str, kind: str, change: Callable[[Manifest], None]) -> None:
    manifest = _one(_manifests(_RENDERED[name]), kind)
    _validate(manifest, _VERSIONS[-1])
    change(manifest)
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
        _validate(manifest, _VERSIONS[-1])


def test_the_picker_has_the_plugins_that_its_profiles_name() -> None:
    """Its configuration has no schema of its own."""
    configured = _one(_manifests(_RENDERED["inference-pool"]), "ConfigMap")["data"]["config.yaml"]
    config = yaml.safe_load(configured)
    assert (config["apiVersion"], config["kind"]) == ("llm-d.ai/v1alpha1", "EndpointPickerConfig")
    plugins = {plugin.get("name", plugin["type"]) for plugin in config["plugins"]}
    (profile,) = config["schedulingProfiles"]
    (source,) = config["dataLayer"]["sources"]
    named = {row["pluginRef"] for row in (*profile["plugins"], source, *source["extractors"])}
    assert named == plugins


@pytest.mark.parametrize("values", [{"drainSeconds": 300, "preStopSeconds": 10}, {**_SHARED, "drainSeconds": 0}])
def test_the_grace_period_is_longer_than_draining(values: dict[str, Any]) -> None:
    pod = _pod(_manifests(values))
    (server,) = pod["containers"]
    sleep_s = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert sleep_s == values.get("preStopSeconds", 5)
    assert _env(pod)["TAILRACE_DRAIN_S"]["value"] == str(values["drainSeconds"])
    assert pod["terminationGracePeriodSeconds"] >= sleep_s + values["drainSeconds"] + 10


def test_without_a_shared_journal_there_is_one_server_with_a_volume() -> None:
    manifests = _manifests({"replicas": 7})
    server = _one(manifests, "Deployment", "StatefulSet")
    assert (server["kind"], server["spec"]["replicas"]) == ("StatefulSet", 1)
    assert server["spec"]["volumeClaimTemplates"]
    assert "TAILRACE_JOURNAL" not in _env(_pod(manifests))


def test_further_volumes() -> None:
    volume = {"name": "certificates", "secret": {"secretName": "redis-ca"}}
    mount = {"name": "certificates", "mountPath": "/certificates", "readOnly": True}
    manifests = _manifests({"extraVolumes": [volume], "extraVolumeMounts": [mount]})
    for manifest in manifests:
        kubernetes_validate.validate(manifest, _VERSIONS[-1], strict=True)
    pod = _pod(manifests)
    assert volume in pod["volumes"]
    containers = pod["containers"] + pod["initContainers"]
    assert len(containers) == 2
    assert all(mount in container["volumeMounts"] for container in containers)


def test_with_a_shared_journal_there_are_many() -> None:
    manifests = _manifests({**_SHARED, "replicas": 7})
    server = _one(manifests, "Deployment", "StatefulSet")
    assert (server["kind"], server["spec"]["replicas"]) == ("Deployment", 7)
    env = _env(_pod(manifests))
    for name, secret in (("TAILRACE_JOURNAL", "tailrace-redis"), ("TAILRACE_DATABASE", "tailrace-postgresql")):
        assert env[name]["valueFrom"]["secretKeyRef"] == {"name": secret, "key": "url"}
    assert _one(manifests, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize("name", _RENDERED)
def test_containers_have_no_rights(name: str) -> None:
    pod = _pod(_manifests(_RENDERED[name]))
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
        }  # fmt: skip
        assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("name", _RENDERED)
def test_the_server_knows_every_variable(name: str) -> None:
    known = {row.variable for row in settings_table()} | {"TAILRACE_HOME"}
    pod = _pod(_manifests(_RENDERED[name]))
    assert not pod["enableServiceLinks"]  # variables such as TAILRACE_PORT=tcp://…
    assert set(_env(pod)) <= known


@pytest.mark.deep
def test_the_commands_and_probes_of_one_server_work(tmp_path: Path) -> None:
    """The first start creates a key, the second one none. The server answers its probes at the pod's address."""
    pod = _pod(_manifests({"model": "scripted", "drainSeconds": 1}))
    (first,), (server,) = pod["initContainers"], pod["containers"]

    def here(text: str) -> str:
        return text.replace("/var/lib/tailrace", str(tmp_path))

    def variables(container: Manifest) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {"PATH": path} | {row["name"]: here(row["value"]) for row in container["env"]}

    for _ in range(2):
        command = [*first["command"], here(first["args"][0])]
        subprocess.run(command, env=variables(first), check=True, timeout=LONG_S)
        made = json.loads((tmp_path / "first-key").read_text())
        assert sorted(made["scopes"]) == ["admin", "generate", "metrics", "read"]
    assert (tmp_path / "first-key").stat().st_mode & 0o77 == 0
    process = subprocess.Popen(
        [TAILRACE, *server["args"]], env=variables(server) | {"TAILRACE_PORT": "0"}, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        ports = (re.search(r"Listening on http://\S+:(\d+)", line) for line in process.stderr)
        port = next(found[1] for found in ports if found)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                host = {"host": "10.1.2.3:8000"}  # of the pod
                assert client.get(server[probe]["httpGet"]["path"], headers=host).status_code == 200
            key = {"authorization": f"Bearer {made['token']}", "host": "tailrace.default.svc"}
            metrics = client.get("/metrics", headers=key).text
            assert re.search(r"^tailrace_ready\{model=.*\} 1\.0$", metrics, re.MULTILINE)
            assert "\nvllm:num_requests_waiting{" in metrics
            assert client.get("/metrics", headers=key | {"host": "evil.example"}).status_code == 403
    finally:
        process.terminate()
        process.communicate(timeout=LONG_S)
    assert process.returncode == 0


def test_names_of_the_service_are_allowed_hosts() -> None:
    pod = _pod(_manifests({"allowedHosts": ["chat.example"]}, name="mine", namespace="models"))
    hosts = _env(pod)["TAILRACE_ALLOWED_HOSTS"]["value"]
    assert hosts == "mine,mine.models,mine.models.svc,mine.models.svc.cluster.local,chat.example"
    Settings(allowed_hosts=hosts)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"journal": {"redisUrl": {"secretName": "redis"}}}, "they need one database"),
        ({"autoscaling": {"enabled": True}}, "need journal.redisUrl"),
        ({"keda": {"enabled": True}}, "need journal.redisUrl"),
        ({**_SHARED, "keda": {"enabled": True}, "autoscaling": {"enabled": True}}, "enable one of them"),
        ({**_SHARED, "inferencePool": {"enabled": True}}, "needs publicMetrics"),
    ],
)
def test_values_that_contradict_each_other(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=message):
        _render(values)


def test_values_of_the_wrong_type() -> None:
    with pytest.raises(helm.HelmError, match="drainSeconds"):
        helm.validate({"drainSeconds": "long"})


def test_metrics_that_pickers_and_autoscalers_read_exist() -> None:
    text = "".join(_render(values) for values in _RENDERED.values())
    names = set(re.findall(r"\btailrace_[a-z_]+", text))
    assert names == {"tailrace_requests_waiting", "tailrace_requests_running", "tailrace_kv_cache_usage"}
    assert names <= set(GAUGES)
