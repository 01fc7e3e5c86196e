"""The manifests of the base and of every overlay are valid, their flags are Saccade's, and what must fit together does.

No cluster runs here.
"""

import re

import kubernetes_validate
import pytest
import yaml
from custom_resources import validate_custom_resource
from manifests import FOLDER, MANIFESTS, OVERLAYS, PAGES, ROOT, arguments, container, num_bytes, pod, secret_of, volume
from tables import table

from saccade.fleet.settings import SourceConfig
from saccade.fleet.sources import check_dns_url
from saccade.gateway.app import HOST
from saccade.transport.credentials import TOO_OPEN

pytestmark = pytest.mark.ci

VERSIONS = ("1.34", "1.37")
ALL = [(name, manifest) for name, rendered in {"base": MANIFESTS, **OVERLAYS}.items() for manifest in rendered.values()]
DEPLOYMENTS = ("saccade-gateway", "saccade-worker")
LEAST = {"HorizontalPodAutoscaler": "minReplicas", "ScaledObject": "minReplicaCount"}


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid(version: str) -> None:
    for _, manifest in ALL:
        if not validate_custom_resource(manifest):
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


SELECTING = ("Service", "Deployment", "NetworkPolicy", "PodDisruptionBudget")


def test_selectors_match_the_pods() -> None:
    for rendered in (MANIFESTS, *OVERLAYS.values()):
        deployments = [one for (kind, _), one in rendered.items() if kind == "Deployment"]
        labels = [one["spec"]["template"]["metadata"]["labels"].items() for one in deployments]
        for (kind, _), manifest in rendered.items():
            if kind in SELECTING:
                spec = manifest["spec"]
                selector = spec.get("selector") or spec["podSelector"]
                matching = [of_pod for of_pod in labels if selector.get("matchLabels", selector).items() <= of_pod]
                assert matching
                assert len(matching) == 1 or kind != "Deployment"  # no deployment takes another one's pods
    for name in DEPLOYMENTS:
        (spread,) = pod(name)["topologySpreadConstraints"]
        assert spread["labelSelector"] == MANIFESTS["Deployment", name]["spec"]["selector"]


def test_probes_ask_for_served_paths() -> None:
    page = (ROOT / "docs" / "api" / "health.md").read_text()
    one = container("saccade-gateway")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert f"`{one[probe]['httpGet']['path']}`" in page
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


def test_nodes_with_gpus_take_workers_and_give_them_up_one_by_one() -> None:
    (resource,) = (name for name in container("saccade-worker")["resources"]["limits"] if name != "memory")
    assert any(one["key"] == resource and one["operator"] == "Exists" for one in pod("saccade-worker")["tolerations"])
    assert MANIFESTS["PodDisruptionBudget", "saccade-worker"]["spec"]["maxUnavailable"] == 1


@table("rendered", ["base", *OVERLAYS])
def test_no_rollout_takes_the_only_ready_pod(rendered: str) -> None:
    """A surge adds one before, or another one is kept by the number of replicas."""
    manifests = OVERLAYS.get(rendered, MANIFESTS)
    least = {
        manifest["spec"]["scaleTargetRef"]["name"]: manifest["spec"][LEAST[kind]]
        for (kind, _), manifest in manifests.items()
        if kind in LEAST
    }
    for (kind, name), manifest in manifests.items():
        if kind == "Deployment" and name.startswith("saccade-"):
            taken = manifest["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"]
            assert least.get(name, manifest["spec"].get("replicas")) > taken, name


def test_the_admin_port_is_open_to_the_pod_alone_and_has_a_key_of_its_own() -> None:
    given = arguments("saccade-gateway")
    assert given["admin_port"] == 8001
    assert given["admin_port"] not in [port["containerPort"] for port in container("saccade-gateway")["ports"]]
    keys = [secret_of("saccade-gateway", f"SACCADE_{kind}_KEY") for kind in ("API", "ADMIN")]
    for key in keys:
        assert f"kubectl create secret generic {key['name']} --from-literal={key['key']}=" in PAGES
    assert keys[0] != keys[1]
    assert "kubectl port-forward deployment/saccade-gateway 8001" in PAGES


def test_over_ipv6_both_listen_on_every_address() -> None:
    for name in DEPLOYMENTS:
        given = arguments(name, OVERLAYS["ipv6"])
        assert (given.get("access") or given["server"]).host == "::"


def test_decode_workers_reach_prefill_workers_at_the_port_of_transfers() -> None:
    split = OVERLAYS["split"]
    prefill, decode = (arguments(name, split)["split"] for name in ("saccade-worker", "saccade-decode"))
    assert (prefill.role, decode.role) == ("prefill", "decode")
    assert (prefill.bind(), decode.bind()) == ("10.0.0.5:9100", None)
    environment = {one["name"]: one for one in container("saccade-worker", split)["env"]}
    assert environment["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    policy = split["NetworkPolicy", "saccade-worker"]["spec"]
    (calls, transfers), (pull,) = policy["ingress"], policy["egress"]
    assert calls["ports"] == [{"protocol": "TCP", "port": 9000}]
    for rule, side, role in ((transfers, "from", "decode"), (pull, "to", "prefill")):
        assert rule["ports"] == [{"protocol": "TCP", "port": 9100}]
        (peer,) = rule[side]
        assert peer["podSelector"]["matchLabels"]["saccade-role"] == role
    # Both run the same model alike: what else differs is a role's own.
    words = [set(container(name, split)["args"]) for name in ("saccade-worker", "saccade-decode")]
    assert {word.split("=")[0] for word in words[0] ^ words[1]} == {
        "--role",
        "--kv-transfer-bind",
        "--tensor-parallel-size",
    }


def test_gateways_reach_the_servers_of_other_engines() -> None:
    engines = OVERLAYS["engines"]
    urls = arguments("saccade-gateway", engines)["sources"].dns
    for url in urls:
        check_dns_url(url)
    rules = engines["NetworkPolicy", "saccade-gateway-engines"]["spec"]["egress"]
    ports = {port["port"] for port in rules[0]["ports"]}
    assert int(urls[-1].rsplit(":", 1)[1]) in ports
    for rule in rules:
        assert all(f":{port['port']}" in PAGES for port in rule["ports"])


def test_the_monitor_scrapes_gateways_as_the_alerts_expect() -> None:
    monitor = OVERLAYS["monitoring"]["ServiceMonitor", "saccade"]["spec"]
    service = MANIFESTS["Service", "saccade"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    # The metrics of tenants, which the dashboard and an alert read, need the key.
    assert endpoint["authorization"]["credentials"] == secret_of("saccade-gateway", "SACCADE_API_KEY")
    # `up{job="saccade"}` of the alerts.
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "saccade"


def test_the_adapter_offers_the_metrics_of_the_autoscalers() -> None:
    values = yaml.safe_load((FOLDER / "overlays" / "monitoring" / "adapter-values.yaml").read_text())
    offered = {kind: {rule["name"]["as"] for rule in rules} for kind, rules in values["rules"].items()}
    for (kind, _), manifest in MANIFESTS.items():
        if kind == "HorizontalPodAutoscaler":
            for metric in manifest["spec"]["metrics"]:
                source = {"Pods": "custom", "External": "external"}[metric["type"]]
                assert metric[metric["type"].lower()]["metric"]["name"] in offered[source]
