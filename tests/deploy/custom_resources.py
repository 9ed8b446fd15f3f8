"""Schemas of custom resources, which those of Kubernetes do not include. They have the fields that are used here, and
refuse all others.

*Source:* InferencePool of gateway-api-inference-extension (inference.networking.k8s.io/v1), ScaledObject of KEDA
(keda.sh/v1alpha1), RayService of KubeRay (ray.io/v1).
"""

from __future__ import annotations

from typing import Any

import jsonschema
import kubernetes_validate

__all__ = ["KINDS", "validate"]

Schema = dict[str, Any]  # Any: of JSON
_TEXT: Schema = {"type": "string", "minLength": 1}
_TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_NAME: Schema = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"}
_LABELS: Schema = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": {"type": "string", "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?$"},
}


def _object(required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def _list(items: Schema, *, most: int | None = None) -> Schema:
    return {"type": "array", "items": items, "minItems": 1} | ({"maxItems": most} if most else {})


def _resource(version: str, kind: str, spec: Schema) -> Schema:
    metadata = _object(("name",), name=_NAME, namespace=_NAME, labels=_LABELS)
    parts: dict[str, Schema] = {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": metadata}
    return _object(("apiVersion", "kind", "metadata", "spec"), **parts, spec=spec)


_numbered = _object(("number",), number=_PORT)
_group: Schema = {  # of pods in a Ray cluster; `template` is a pod's
    "groupName": _TEXT, "replicas": _COUNT, "minReplicas": _COUNT, "maxReplicas": _COUNT, "rayStartParams": _TEXTS,
    "template": {"type": "object"},
}  # fmt: skip
_head = {name: _group[name] for name in ("rayStartParams", "template")}

_SCHEMAS = {
    "InferencePool": _resource(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        _object(
            ("selector", "targetPorts", "endpointPickerRef"),
            selector=_object(("matchLabels",), matchLabels=_LABELS),
            targetPorts=_list(_numbered, most=8),
            # The port is needed because the picker is a Service.
            endpointPickerRef=_object(
                ("name", "port"),
                name=_NAME,
                port=_numbered,
                kind={"const": "Service"},
                failureMode={"enum": ["FailOpen", "FailClose"]},
            ),
        ),
    ),
    "ScaledObject": _resource(
        "keda.sh/v1alpha1",
        "ScaledObject",
        _object(
            ("scaleTargetRef", "triggers"),
            scaleTargetRef=_object(("name",), name=_NAME, kind=_TEXT, apiVersion=_TEXT),
            minReplicaCount=_COUNT,
            maxReplicaCount=_COUNT,
            pollingInterval=_COUNT,
            cooldownPeriod=_COUNT,
            # `behavior` is that of a HorizontalPodAutoscaler.
            advanced=_object(horizontalPodAutoscalerConfig=_object(behavior={"type": "object"})),
            triggers=_list(
                _object(
                    ("type", "metadata"),
                    type={"const": "prometheus"},
                    # All values are texts, also numbers.
                    metadata=_object(
                        ("serverAddress", "query", "threshold"),
                        serverAddress={"type": "string", "pattern": "^https?://"},
                        query=_TEXT,
                        threshold={"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"},
                    ),
                )
            ),
        ),
    ),
    "RayService": _resource(
        "ray.io/v1",
        "RayService",
        _object(
            ("rayClusterConfig",),
            serveConfigV2=_TEXT,
            rayClusterConfig=_object(
                ("headGroupSpec",),
                rayVersion=_TEXT,
                enableInTreeAutoscaling={"type": "boolean"},
                headGroupSpec=_object(("template",), **_head),
                workerGroupSpecs=_list(_object(("groupName", "minReplicas", "maxReplicas", "template"), **_group)),
            ),
        ),
    ),
}
KINDS = frozenset(_SCHEMAS)


def validate(manifest: dict[str, Any], version: str) -> None:
    """Validate a custom resource, and what it contains of Kubernetes' own resources, against this version's schemas.

    Raises: jsonschema.ValidationError, kubernetes_validate.ValidationError.
    """
    jsonschema.validate(manifest, _SCHEMAS[manifest["kind"]])
    for inner in _inner(manifest):
        kubernetes_validate.validate(inner, version, strict=True)


def _inner(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    spec, named = manifest["spec"], {"metadata": {"name": "inner"}}
    if manifest["kind"] == "ScaledObject":
        config = spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", {})
        target = {"apiVersion": "apps/v1", "kind": "Deployment"} | spec["scaleTargetRef"]
        whole = {"scaleTargetRef": target, "maxReplicas": spec.get("maxReplicaCount", 100), **config}
        return [{"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", **named, "spec": whole}]
    if manifest["kind"] == "RayService":
        cluster = spec["rayClusterConfig"]
        groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", ())]
        return [{"apiVersion": "v1", "kind": "Pod", **named, **group["template"]} for group in groups]
    return []
