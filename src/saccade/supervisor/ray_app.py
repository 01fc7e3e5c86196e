"""The application that Ray Serve builds for a fleet: a deployment for each role, and the directory of the workers.

A file for `saccade fleet apply`, `serve deploy` or KubeRay names it as `import_path: saccade.supervisor.ray_app:app`.
"""

from typing import Any

import ray
from ray import serve

from saccade.supervisor.ray_directory import Directory
from saccade.supervisor.ray_fleet import DIRECTORY, SETTLE_SECONDS, FleetSpec, RoleSpec, read_fleet
from saccade.supervisor.ray_node import end_with_node
from saccade.supervisor.ray_worker import RayWorker


class DirectoryReplica(Directory):
    """The directory in a process of its own."""

    def __init__(self, *roles: object) -> None:
        end_with_node()
        super().__init__(*roles)


def app(args: dict[str, Any]) -> serve.Application:
    """Return the application of the fleet that *args* describe. Raises StartupError."""
    spec = read_fleet(args)
    has_gpus = bool(ray.cluster_resources().get("GPU"))
    roles = [_deployment(spec, role, role.resources(has_gpus=has_gpus)).bind(spec, role) for role in spec.roles]
    directory = serve.deployment(
        DirectoryReplica, name=DIRECTORY, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}
    )
    # An application has what its first deployment is bound to.
    return directory.bind(*roles)


def _deployment(spec: FleetSpec, role: RoleSpec, resources: dict[str, float]) -> serve.Deployment:
    """Return the deployment of *role*. Its replicas have their *resources* on one node."""
    return serve.deployment(
        RayWorker,
        name=role.role,
        ray_actor_options={"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0)},
        placement_group_bundles=[resources],
        placement_group_strategy="STRICT_PACK",
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=SETTLE_SECONDS + spec.stop_seconds + 5.0,
    )
