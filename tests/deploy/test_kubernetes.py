"""The manifests are valid, their flags are Saccade's, and what must fit together does. No cluster runs here."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from saccade.cli.main import make_app
from saccade.gateway.app import HOST
from saccade.gateway.config import SourceConfig
from saccade.gateway.workers.sources import check_dns_url
from saccade.transport.credentials import TOO_OPEN

pytestmark = pytest.mark.ci


ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
VERSIONS = ("1.34", "1.37")
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}
MANIFESTS = {
    (manifest["kind"], manifest["metadata"]["name"]): manifest
    for file in sorted(FOLDER.glob("*.yaml"))
    for manifest in yaml.safe_load_all(file.read_text())
}
DEPLOYMENTS = ("saccade-gateway", "saccade-worker")


def pod(name: str) -> Any:
    return MANIFESTS["Deployment", name]["spec"]["template"]["spec"]


def container(name: str) -> Any:
    (one,) = pod(name)["containers"]
    return one


def arguments(name: str) -> dict[str, Any]:
    """What our program makes of a container's arguments, the fields of its groups of flags included."""
    _, bound, _ = make_app(None).parse_args(container(name)["args"], exit_on_error=False, print_error=False)
    given = dict(bound.arguments)
    for group in [value for value in given.values() if hasattr(value, "__dataclass_fields__")]:
        given |= vars(group)
    return given


def num_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def volume(name: str, volume_name: str) -> Any:
    return next(one for one in pod(name)["volumes"] if one["name"] == volume_name)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", MANIFESTS.values(), ids="-".join)
def test_manifest_is_valid(manifest: Any, version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_invalid_manifest_is_detected() -> None:
    wrong = {**MANIFESTS["Service", "saccade"], "spec": {"ports": [{"port": "many"}], "selectors": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_flags_exist_and_fit_the_pod(name: str) -> None:
    given, one, spec = arguments(name), container(name), pod(name)
    (port,) = one["ports"]
    group = given.get("access") or given["server"]
    assert (group.host, group.port) == ("0.0.0.0", port["containerPort"])
    drain_seconds = given["shutdown_timeout" if "access" in given else "shutdown_timeout_seconds"]
    pause_seconds = one["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > drain_seconds + pause_seconds
    token = given["worker_token_file"]
    (mount,) = (one for one in one["volumeMounts"] if token.is_relative_to(one["mountPath"]))
    secret = volume(name, mount["name"])["secret"]
    assert not secret["defaultMode"] & TOO_OPEN
    assert spec["securityContext"]["fsGroup"]


def test_shared_memory_is_as_large_as_the_flag_says() -> None:
    shm = volume("saccade-gateway", "shm")["emptyDir"]
    wanted = arguments("saccade-gateway")["shared_memory_bytes"]
    assert shm["medium"] == "Memory"
    assert (
        wanted < num_bytes(shm["sizeLimit"]) < num_bytes(container("saccade-gateway")["resources"]["limits"]["memory"])
    )
    mounts = {one["name"]: one["mountPath"] for name in DEPLOYMENTS for one in container(name)["volumeMounts"]}
    assert mounts["shm"] == "/dev/shm"


def test_the_gateway_finds_the_workers() -> None:
    (url,) = arguments("saccade-gateway")["sources"].dns
    check_dns_url(url)
    service = MANIFESTS["Service", re.sub(r"^grpc://|:\d+$", "", url)]["spec"]
    assert service["clusterIP"] == "None"  # headless: the name leads to the pods, not to one address before them
    (port,) = service["ports"]
    assert url.endswith(f":{port['port']}")
    assert port["port"] == container("saccade-worker")["ports"][0]["containerPort"]
    assert port["targetPort"] == container("saccade-worker")["ports"][0]["name"]
    # Worker and gateway have the same secret, and the gateway drops a worker before that stops.
    secrets = {volume(name, "token")["secret"]["secretName"] for name in DEPLOYMENTS}
    assert len(secrets) == 1
    assert SourceConfig().drain_seconds >= arguments("saccade-worker")["shutdown_timeout"]


@pytest.mark.parametrize("kind", ["Service", "Deployment", "NetworkPolicy", "PodDisruptionBudget"])
def test_selectors_match_the_pods(kind: str) -> None:
    labels = [MANIFESTS["Deployment", name]["spec"]["template"]["metadata"]["labels"] for name in DEPLOYMENTS]
    for (one, _), manifest in MANIFESTS.items():
        if one == kind:
            spec = manifest["spec"]
            selector = spec.get("selector") or spec["podSelector"]
            assert selector.get("matchLabels", selector) in labels


def test_probes_ask_for_served_paths() -> None:
    operations = (ROOT / "docs" / "operations.md").read_text()
    one = container("saccade-gateway")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert f"`{one[probe]['httpGet']['path']}`" in operations
        assert one[probe]["httpGet"]["port"] == one["ports"][0]["name"]
    assert container("saccade-worker")["readinessProbe"]["grpc"]["port"] == 9000
    # A worker whose engine restarts is not ready, and must not be killed for it.
    assert "grpc" not in container("saccade-worker")["livenessProbe"]
    assert HOST == "127.0.0.1"  # the admin port needs no policy: no other pod reaches it


def test_autoscaler_metrics_exist() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "src" / "saccade").rglob("*.py"))
    scaled = set()
    for (kind, _), manifest in MANIFESTS.items():
        if kind == "HorizontalPodAutoscaler":
            scaled.add(manifest["spec"]["scaleTargetRef"]["name"])
            for metric in manifest["spec"]["metrics"]:
                (named,) = (value for name, value in metric.items() if name != "type")
                assert f'"{named["metric"]["name"]}"' in sources
    assert scaled == set(DEPLOYMENTS)
    assert all("replicas" not in MANIFESTS["Deployment", name]["spec"] for name in DEPLOYMENTS)


def test_only_gateways_reach_workers() -> None:
    policy = MANIFESTS["NetworkPolicy", "saccade-worker"]["spec"]
    (rule,) = policy["ingress"]
    (source,) = rule["from"]
    assert source["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    assert policy["egress"] == []
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
