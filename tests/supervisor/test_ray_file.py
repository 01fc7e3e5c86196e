"""The file of a fleet on Ray: what is read from it, and what is refused before the cluster is asked."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from tables import table

from saccade.errors import StartupError
from saccade.release import installed_version
from saccade.supervisor.ray_fleet import FleetSpec, read_fleet

TOKEN = "/etc/saccade/worker.token"
EXAMPLE = Path(__file__).parents[2] / "deploy" / "ray" / "fleet.yaml"

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # Ray's own


def fleet(**arguments: object) -> FleetSpec:
    return read_fleet({"worker_token_file": TOKEN, **arguments})


def test_a_fleet_of_the_bundled_model_needs_a_token_alone() -> None:
    spec = fleet()
    assert [role.role for role in spec.roles] == ["both"]
    assert spec.worker_words(spec.roles[0], "10.0.0.1") == (
        *("--host", "10.0.0.1", "--port", "0", "--worker-token-file", TOKEN),
        *("--shutdown-timeout", "30.0", "--no-summary"),
    )


def test_each_role_has_its_flags_and_a_prefill_worker_its_address() -> None:  # F11
    spec = fleet(model="acme/model", shutdown_timeout=5, roles={"prefill": ["--max-model-len", "1k"], "decode": []})
    prefill, decode = (spec.worker_words(role, "fd00::1") for role in spec.roles)
    assert prefill[0] == decode[0] == "acme/model"
    assert prefill[prefill.index("--role") :] == (
        *("--role", "prefill", "--kv-transfer-bind", "[fd00::1]:0"),
        *("--max-model-len", "1k"),
    )
    assert decode[-2:] == ("--role", "decode")


@table(
    ("flags", "has_gpus", "resources"),
    [
        ([], False, {"CPU": 1}),
        ([], True, {"GPU": 1, "CPU": 1}),
        (["--tensor-parallel-size", "4"], True, {"GPU": 4, "CPU": 1}),
        (["-tp", "2", "--threads", "3"], False, {"CPU": 6}),
        (["--device", "cpu", "--threads", "8"], True, {"CPU": 8}),
        (["--device=cuda"], False, {"GPU": 1, "CPU": 1}),
    ],
)
def test_a_worker_takes_gpus_of_one_node_or_cpus(flags: list[str], has_gpus: bool, resources: dict[str, float]) -> None:
    (role,) = fleet(roles={"both": flags}).roles
    assert role.resources(has_gpus=has_gpus) == resources


@table(
    ("arguments", "said"),
    [
        ({"worker_token_file": None}, "args.worker_token_file must be a path from the root"),
        ({"worker_token_file": "worker.token"}, "args.worker_token_file must be a path from the root"),
        ({"model": 7}, "args.model must be text"),
        ({"release": 0.2}, "args.release must be text"),
        ({"shutdown_timeout": "5"}, "args.shutdown_timeout must be a number"),
        ({"shutdown_timeout": True}, "args.shutdown_timeout must be a number"),
        ({"shutdown_timeout": -1}, "args.shutdown_timeout must be a number"),
        ({"shutdown_timeout": float("inf")}, "args.shutdown_timeout must be a number"),
        ({"replicas": 2}, "args.replicas is not known"),
        ({"roles": {}}, "args.roles must name at least one"),
        ({"roles": ["both"]}, "args.roles must name at least one"),
        ({"roles": {"encode": []}}, "args.roles.encode is not a role"),
        ({"roles": {"both": "--dtype float32"}}, "args.roles.both must be a list of flags"),
        ({"roles": {"both": ["--max-num-seqs", 4]}}, "args.roles.both must be a list of flags"),
        ({"roles": {"both": ["--max-num-seq"]}}, "--max-num-seq"),
        ({"roles": {"both": ["--max-num-seqs", "four"]}}, "args.roles.both: "),
        ({"roles": {"both": ["--max-model-len", "1"]}}, "--max-model-len must be at least 2"),
        ({"roles": {"decode": ["-tp", "2"]}}, "--role decode needs a --tensor-parallel-size of 1"),
        ({"roles": {"both": ["--pipeline-parallel-size=2"]}}, "Pipeline parallelism is not supported"),
        ({"roles": {"both": ["-pp", "2"]}}, "Pipeline parallelism is not supported"),
        ({"roles": {"both": ["--enable-expert-parallel"]}}, "Expert parallelism is not supported"),
        ({"roles": {"both": ["--nnodes", "2"]}}, "A worker over several nodes is not supported"),
        ({"roles": {"both": ["--data-parallel-size", "2"]}}, "give `num_replicas`"),
        ({"roles": {"both": ["--role", "decode"]}}, "has --role, which the fleet sets"),
        ({"roles": {"both": ["--port=1"]}}, "has --port, which the fleet sets"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(StartupError) as caught:
        fleet(**arguments)
    assert said in caught.value.message


def test_a_node_with_another_release_is_refused() -> None:
    fleet().check_release()
    fleet(release=installed_version()).check_release()
    with pytest.raises(StartupError, match=r"the fleet's `release` is 9\.9\.9"):
        fleet(release="9.9.9").check_release()


def changed(**changes: object) -> dict[str, Any]:
    """The example, with *changes* to its application."""
    content: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    content["applications"][0] |= changes
    return content


@pytest.mark.ci
def test_the_example_is_a_file_for_ray_serve() -> None:  # F20
    ray_cluster = pytest.importorskip("saccade.supervisor.ray_cluster", reason="needs Ray: pip install 'ray[serve]'")
    schema = ray_cluster.read_file(EXAMPLE)
    (application,) = schema.applications
    assert {deployment.name for deployment in application.deployments} == {"prefill", "decode"}
    policy = next(one for one in application.deployments if one.name == "prefill").autoscaling_config["policy"]
    from ray.serve.config import AutoscalingConfig

    assert AutoscalingConfig(min_replicas=1, max_replicas=2, policy=policy).policy.get_policy()(
        **policy["policy_kwargs"]
    )


@pytest.mark.ci
@table(
    ("content", "said"),
    [
        ("[", "is not YAML"),
        ({"applications": [{"name": "a"}]}, "applications.0.import_path"),
        (changed() | {"proxy_location": "EveryNode"}, "needs `proxy_location: Disabled`"),
        (changed(import_path="acme.app:app"), "is not a fleet"),
        (changed(args={"worker_token_file": TOKEN, "roles": {"both": ["-pp", "2"]}}), "Pipeline parallelism"),
        (changed(args={"worker_token_file": TOKEN}), "has the deployment prefill, which is not in args.roles"),
        (changed(deployments=[{"name": "prefill", "num_replicas": "many"}]), "num_replicas"),
    ],
)
def test_a_file_that_is_no_fleet_is_refused(content: object, said: str, tmp_path: Path) -> None:
    ray_cluster = pytest.importorskip("saccade.supervisor.ray_cluster", reason="needs Ray: pip install 'ray[serve]'")
    path = tmp_path / "fleet.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(StartupError) as caught:
        ray_cluster.read_file(path)
    assert said in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    ray_cluster = pytest.importorskip("saccade.supervisor.ray_cluster", reason="needs Ray: pip install 'ray[serve]'")
    with pytest.raises(StartupError, match=r"missing\.yaml cannot be read"):
        ray_cluster.read_file(tmp_path / "missing.yaml")
