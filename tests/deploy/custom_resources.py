"""Checks resources that Kubernetes does not define.

The schemas have the fields that our manifests use, as these projects' CustomResourceDefinitions have them: KEDA 2.20,
the Gateway API 1 and its inference extension 1.6, KubeRay 1.7, and the Prometheus operator's v1. A field that is not
here is an error, so that a slip of the pen is found without a cluster.
"""

from typing import Any

import jsonschema

NAME = {"type": "string", "minLength": 1, "maxLength": 253}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
COUNT = {"type": "integer", "minimum": 0}
LABELS = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string", "maxLength": 63}}


def fields(required: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object with only these fields."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def items(schema: Any, most: int) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1, "maxItems": most}


TRIGGER = fields(
    "type metadata",
    type={"const": "prometheus"},
    # KEDA takes only strings; an unknown name would be ignored.
    metadata=fields(
        "serverAddress query threshold",
        serverAddress={"type": "string", "pattern": "^https?://"},
        query={"type": "string", "minLength": 1},
        threshold={"type": "string", "pattern": r"^\d+$"},
        ignoreNullValues={"enum": ["true", "false"]},
    ),
)
SCALED_OBJECT = fields(
    "scaleTargetRef triggers",
    scaleTargetRef=fields("name", name=NAME, apiVersion=NAME, kind=NAME),
    minReplicaCount=COUNT,
    maxReplicaCount={"type": "integer", "minimum": 1},
    fallback=fields(
        "failureThreshold replicas",
        failureThreshold=COUNT,
        replicas=COUNT,
        behavior={"enum": ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]},
    ),
    # Its `behavior` is that of Kubernetes' own autoscaler.
    advanced=fields("", horizontalPodAutoscalerConfig=fields("", behavior={"type": "object"})),
    triggers=items(TRIGGER, 100),
)
INFERENCE_POOL = fields(
    "selector targetPorts",
    selector=fields("matchLabels", matchLabels=LABELS),
    targetPorts=items(fields("number", number=PORT), 8),
    # `port` is required for a Service, which is the default kind.
    endpointPickerRef=fields(
        "name port",
        name=NAME,
        port=fields("number", number=PORT),
        failureMode={"enum": ["FailOpen", "FailClose"]},
    ),
)
HTTP_ROUTE = fields(
    "parentRefs rules",
    parentRefs=items(fields("name", name=NAME), 32),
    rules=items(
        fields("backendRefs", backendRefs=items(fields("name", group=NAME, kind=NAME, name=NAME, port=PORT), 16)), 16
    ),
)
SERVICE_MONITOR = fields(
    "selector endpoints",
    jobLabel=NAME,
    selector=fields("matchLabels", matchLabels=LABELS),
    endpoints=items(
        fields(
            "",
            port=NAME,
            path={"type": "string"},
            interval={"type": "string", "pattern": r"^\d+[smh]$"},
            authorization=fields("", credentials=fields("key", name=NAME, key=NAME)),
        ),
        100,
    ),
)
RAY_GROUP = {
    "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
    # A pod, which Kubernetes has a schema of.
    "template": fields("spec", metadata=fields("", labels=LABELS), spec={"type": "object"}),
}
RAY_SERVICE = fields(
    "rayClusterConfig",
    serveConfigV2={"type": "string"},
    rayClusterConfig=fields(
        "headGroupSpec",
        rayVersion={"type": "string"},
        enableInTreeAutoscaling={"type": "boolean"},
        headGroupSpec=fields("template", **RAY_GROUP),
        workerGroupSpecs=items(
            fields(
                "groupName template", groupName=NAME, replicas=COUNT, minReplicas=COUNT, maxReplicas=COUNT, **RAY_GROUP
            ),
            100,
        ),
    ),
)
SPECS = {
    ("ray.io/v1", "RayService"): RAY_SERVICE,
    ("keda.sh/v1alpha1", "ScaledObject"): SCALED_OBJECT,
    ("inference.networking.k8s.io/v1", "InferencePool"): INFERENCE_POOL,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): HTTP_ROUTE,
    ("monitoring.coreos.com/v1", "ServiceMonitor"): SERVICE_MONITOR,
}


def validate_custom_resource(manifest: Any) -> bool:
    """Return False if *manifest* is a kind of Kubernetes itself. Raises ValidationError for a field that is wrong."""
    spec = SPECS.get((manifest["apiVersion"], manifest["kind"]))
    if spec is None:
        return False
    metadata = fields("name", name=NAME, labels=LABELS)
    jsonschema.validate(
        manifest, fields("apiVersion kind metadata spec", apiVersion=NAME, kind=NAME, metadata=metadata, spec=spec)
    )
    return True
