"""The overlays for a state database, for KEDA and for a pool of the Gateway API fit the program, the base and the pages."""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import jsonschema
import promql_parser
import pytest
from custom_resources import validate_custom_resource
from kustomize import render
from manifests import FOLDER, MANIFESTS, OVERLAYS, PAGES, ROOT, arguments, container, pod, volume
from tables import table

from saccade.gateway.state.settings import POSTGRES
from saccade.transport.credentials import TOO_OPEN

pytestmark = pytest.mark.ci

STATE, KEDA, POOL = (OVERLAYS[name] for name in ("state", "keda", "pool"))
SERVE = POOL["Deployment", "saccade-serve"]["spec"]["template"]


def test_gateways_share_one_database_and_one_key() -> None:
    given = arguments("saccade-gateway", STATE)
    assert given["location"].startswith(POSTGRES)
    state = volume("saccade-gateway", "state", STATE)["secret"]
    [mount] = [one for one in container("saccade-gateway", STATE)["volumeMounts"] if one["name"] == "state"]
    folder = PurePosixPath(mount["mountPath"])
    # A container's user reads it by its group; a gateway refuses a key that others may read.
    assert not state["defaultMode"] & TOO_OPEN
    assert pod("saccade-gateway", STATE)["securityContext"]["fsGroup"]
    paths = {str(folder / one["path"]): one["key"] for one in state["items"]}
    assert paths[str(given["key_file"])] == "state.key"
    # The page's command makes the secret, and its URL names the mounted certificate.
    [command] = re.findall(rf"kubectl create secret generic {state['secretName']} (.*)\n", PAGES)
    assert set(re.findall(r"--from-(?:literal|file)=([\w.]+)=", command)) == {"url", *paths.values()}
    [authority] = re.findall(r"sslrootcert=([^'\s]+)", command)
    assert authority in paths


def test_gateways_reach_the_database() -> None:
    [rule] = STATE["NetworkPolicy", "saccade-gateway-state"]["spec"]["egress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 5432}]
    # The image has the database's library.
    [extras] = re.findall(r'"\.\[([\w,]+)', (ROOT / "deploy" / "docker" / "install").read_text())
    assert "postgresql" in extras.split(",")


def targets(manifest: Mapping[str, Any]) -> set[tuple[str, str]]:
    """The metrics of an autoscaler of the base, and their values for each pod."""
    sources = [metric[metric["type"].lower()] for metric in manifest["spec"]["metrics"]]
    return {(one["metric"]["name"], one["target"]["averageValue"]) for one in sources}


@table("name", ["saccade-gateway", "saccade-worker"])
def test_keda_has_the_targets_of_the_base(name: str) -> None:
    base, scaled = MANIFESTS["HorizontalPodAutoscaler", name], KEDA["ScaledObject", name]["spec"]
    assert ("HorizontalPodAutoscaler", name) not in KEDA
    assert scaled["scaleTargetRef"]["name"] == base["spec"]["scaleTargetRef"]["name"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (
        base["spec"]["minReplicas"],
        base["spec"]["maxReplicas"],
    )
    assert scaled["fallback"]["replicas"] >= scaled["minReplicaCount"]
    behavior = scaled.get("advanced", {}).get("horizontalPodAutoscalerConfig", {}).get("behavior")
    assert behavior == base["spec"].get("behavior")
    found = set()
    for trigger in scaled["triggers"]:
        expression: Any = promql_parser.parse(trigger["metadata"]["query"])
        while not isinstance(expression, promql_parser.VectorSelector):
            expression = expression.expr
        found.add((expression.name, trigger["metadata"]["threshold"]))
    assert found == targets(base)


def test_the_pool_has_the_servers_pods_and_port() -> None:
    pool = POOL["InferencePool", "saccade"]["spec"]
    assert pool["selector"]["matchLabels"].items() <= SERVE["metadata"]["labels"].items()
    assert [one["number"] for one in pool["targetPorts"]] == [
        port["containerPort"] for port in container("saccade-serve", POOL)["ports"]
    ]
    [rule] = POOL["HTTPRoute", "saccade"]["spec"]["rules"]
    [backend] = rule["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", "saccade")
    assert backend["group"] == "inference.networking.k8s.io"


def test_the_pools_servers_fit_their_pods() -> None:
    given, one, spec = arguments("saccade-serve", POOL), container("saccade-serve", POOL), pod("saccade-serve", POOL)
    assert (given["server"].host, given["server"].port) == ("0.0.0.0", 8000)
    assert given["metrics_without_key"]  # an endpoint picker sends none
    pause_seconds = one["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > given["shutdown_timeout_seconds"] + pause_seconds
    page = (ROOT / "docs" / "api" / "health.md").read_text()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert f"`{one[probe]['httpGet']['path']}`" in page


@table(
    "overlay, key, path, value",
    [
        ("keda", ("ScaledObject", "saccade-worker"), ("spec", "triggers", 0, "metadata", "threshold"), 32768),
        ("keda", ("ScaledObject", "saccade-worker"), ("spec", "minReplicas"), 2),
        ("pool", ("InferencePool", "saccade"), ("spec", "targetPorts", 0, "number"), 0),
        ("pool", ("InferencePool", "saccade"), ("spec", "extensionRef"), {"name": "saccade-epp"}),
    ],
)
def test_a_wrong_custom_resource_is_detected(
    overlay: str, key: tuple[str, str], path: tuple[str | int, ...], value: Any
) -> None:
    manifest = render(FOLDER / "overlays" / overlay)[key]
    *way, last = path
    target = manifest
    for step in way:
        target = target[step]
    target[last] = value
    with pytest.raises(jsonschema.ValidationError):
        validate_custom_resource(manifest)
