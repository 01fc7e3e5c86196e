"""The manifest for KubeRay has the fleet of the file for Ray Serve, and its pods are valid and have what it names."""

import re
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from custom_resources import validate_custom_resource
from manifests import ROOT, arguments_of

from saccade.supervisor.ray_fleet import SETTLE_SECONDS, read_fleet
from saccade.transport.credentials import TOO_OPEN

pytestmark = pytest.mark.ci

FLEET = yaml.safe_load((ROOT / "deploy" / "ray" / "fleet.yaml").read_text())
GATEWAYS, SERVICE = yaml.safe_load_all((ROOT / "deploy" / "ray" / "rayservice.yaml").read_text())
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
[GROUP] = CLUSTER["workerGroupSpecs"]


def test_kuberay_gets_the_same_file() -> None:
    assert yaml.safe_load(SERVICE["spec"]["serveConfigV2"]) == FLEET


@pytest.mark.parametrize("version", ["1.34", "1.37"])
def test_the_service_and_its_pods_are_valid(version: str) -> None:
    assert validate_custom_resource(SERVICE)
    kubernetes_validate.validate(GATEWAYS, version, strict=True)
    for group in (CLUSTER["headGroupSpec"], GROUP):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(pod, version, strict=True)


def test_pods_have_the_release_of_ray_that_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [release] = re.findall(r"ray\[serve\]>=([\d.]+),", " ".join(project["optional-dependencies"]["ray"]))
    assert CLUSTER["rayVersion"].startswith(f"{release}.")


def test_pods_of_workers_have_what_the_fleet_names() -> None:
    spec: Any = GROUP["template"]["spec"]
    [container] = spec["containers"]
    [application] = FLEET["applications"]
    fleet = read_fleet(application["args"])
    paths = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
    for named in (fleet.model, fleet.worker_token_file):
        assert any(Path(str(named)).is_relative_to(path) for path in paths)
    [secret] = [one["secret"] for one in spec["volumes"] if "secret" in one]
    assert not secret["defaultMode"] & TOO_OPEN
    assert spec["securityContext"]["fsGroup"]
    assert spec["terminationGracePeriodSeconds"] > fleet.stop_seconds + SETTLE_SECONDS
    # Without one of its own, a pod is ready when Ray Serve's proxy is, which is off.
    assert FLEET["proxy_location"] == "Disabled"
    assert container["readinessProbe"]["httpGet"]["port"] != 8000


def test_the_heads_gateway_follows_the_fleet() -> None:
    template = CLUSTER["headGroupSpec"]["template"]
    head, watch, gateway = template["spec"]["containers"]
    words = [*gateway["args"], *watch["command"][1:]]
    given = arguments_of(gateway["args"])
    assert given["server"].port == gateway["ports"][0]["containerPort"] == 8000
    assert f"{given['sources'].file}" in words
    assert arguments_of(watch["command"][1:])["workers_file"] == given["sources"].file
    # A driver finds its node by these folders, and its processes by their ids.
    assert template["spec"]["shareProcessNamespace"]
    mounts = [{mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]} for one in (head, watch)]
    assert all(mounts[0][path] == mounts[1][path] for path in ("/tmp/ray", "/dev/shm"))
    assert GATEWAYS["spec"]["selector"] == template["metadata"]["labels"]


def test_each_replica_finds_a_gpu() -> None:
    [application] = FLEET["applications"]
    least = most = 0
    for deployment in application["deployments"]:
        scaling = deployment.get("autoscaling_config", {})
        least += scaling.get("min_replicas", deployment.get("num_replicas"))
        most += scaling.get("max_replicas", deployment.get("num_replicas"))
    [container] = GROUP["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert (GROUP["minReplicas"], GROUP["maxReplicas"]) == (least, most)
    assert CLUSTER["enableInTreeAutoscaling"]
