"""Applies, shows and deletes fleets on a Ray cluster, from one of its nodes, and lists their workers.

It gives Ray Serve's controller the file that `serve deploy` sends to Ray's dashboard, so that it needs no dashboard.
"""

import logging
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import yaml
from pydantic import ValidationError
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ReplicaState, ServeDeploySchema

from saccade.errors import StartupError
from saccade.supervisor.ray_directory import Listing
from saccade.supervisor.ray_fleet import DIRECTORY, read_fleet
from saccade.transport.wire import target

IMPORT_PATH = "saccade.supervisor.ray_app:app"
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 5.0
SCHEME = "grpc://"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoleStatus:
    """A role: how many of its replicas serve, and how many there are, with those that start or stop."""

    role: str
    num_running: int
    num_replicas: int
    message: str


@dataclass(frozen=True)
class FleetStatus:
    """A fleet: the *name* of its application, and its *state* and *message* in Ray Serve's words."""

    name: str
    state: str
    message: str
    roles: tuple[RoleStatus, ...]

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being started or stopped for a new file."""
        return self.state not in (ApplicationStatus.NOT_STARTED, ApplicationStatus.DEPLOYING)

    @property
    def is_running(self) -> bool:
        """Whether the fleet is as its file wants it."""
        return bool(self.state == ApplicationStatus.RUNNING)


def join(address: str) -> None:
    """Connect to the cluster at *address*, HOST:PORT or auto, unless connected. Raises StartupError."""
    if ray.is_initialized():
        return
    try:
        if address != "auto":
            # Ray itself would retry for minutes if nobody listens.
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        ray.init(
            address=address, namespace="saccade", log_to_driver=False, configure_logging=False, logging_level="ERROR"
        )
    except (RayError, OSError, ValueError, RuntimeError) as error:
        raise StartupError(
            f"There is no Ray cluster at {address}: start one with `ray start --head`, and pass its HOST:PORT as --ray."
        ) from error


def read_file(path: Path) -> ServeDeploySchema:
    """Return the fleets that the file at *path* describes. Raises StartupError, which names what is wrong."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}.") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise StartupError(f"{path} is not YAML.") from error
    try:
        schema = ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        raise StartupError(f"{path} is not a file for Ray Serve: {place or 'the whole'}: {fault['msg']}.") from error
    if str(schema.proxy_location.value) != "Disabled":
        raise StartupError(f"{path} needs `proxy_location: Disabled`: requests go to gateways, not through Ray Serve.")
    for application in schema.applications:
        if application.import_path != IMPORT_PATH:
            raise StartupError(
                f"{path} has the application {application.name}, which is not a fleet: its import_path is not "
                f"{IMPORT_PATH}. Use `serve deploy` for a file with other applications."
            )
        _check_application(path, application)
    return schema


def _check_application(path: Path, application: Any) -> None:
    """Raise StartupError for a fleet that cannot work, before its cluster is asked."""
    place = f"{path}, application {application.name}"
    try:
        roles = {role.role for role in read_fleet(application.args).roles}
    except StartupError as error:
        raise StartupError(f"{place}: {error.message}") from error
    for deployment in application.deployments:
        if deployment.name not in {*roles, DIRECTORY}:
            raise StartupError(f"{place} has the deployment {deployment.name}, which is not in args.roles.")


def apply(schema: ServeDeploySchema) -> None:
    """Make the cluster's fleets those of *schema*; returns at once. Raises StartupError if others would end."""
    names = {application.name for application in schema.applications}
    others = sorted(set(serve.status().applications) - names)
    if others:
        raise StartupError(
            f"Ray Serve on this cluster has {', '.join(others)} too, and a file describes all that it has: add it to "
            "the file, or delete it first."
        )
    serve.start(proxy_location="Disabled")
    _get_global_client().deploy_apps(schema)


def statuses() -> Iterator[FleetStatus]:
    """Yield the status of every application that has a directory."""
    for name, application in serve.status().applications.items():
        deployments = application.deployments
        if deployments and DIRECTORY not in deployments:
            continue
        roles = tuple(
            RoleStatus(
                role,
                deployment.replica_states.get(ReplicaState.RUNNING, 0),
                sum(deployment.replica_states.values()),
                deployment.message,
            )
            for role, deployment in deployments.items()
            if role != DIRECTORY
        )
        yield FleetStatus(name, application.status.value, application.message, roles)


def delete(name: str) -> bool:
    """Delete the fleet *name*, whose workers drain, and return at once; False if there is none."""
    if name not in serve.status().applications:
        return False
    serve.delete(name, _blocking=False)
    return True


def shut_down_if_empty() -> None:
    """End Ray Serve on the cluster if it has no application."""
    if not serve.status().applications:
        serve.shutdown()


def list_workers(address: str, name: str) -> Listing | None:
    """Return the workers of the fleet *name* on the cluster at *address*; None if its directory does not answer now.

    If there is no such fleet, the listing is complete and empty. Raises StartupError if there is no cluster.
    """
    join(address)
    try:
        if name not in serve.status().applications:
            return Listing({}, complete=True)
        handle: Any = serve.get_deployment_handle(DIRECTORY, name)
        urls, complete = handle.list_workers.remote().result(timeout_s=ANSWER_SECONDS)
    except (RayServeException, TimeoutError):
        return None
    except RayError:
        # Serve may have been ended and started again. Only a new connection looks for its controller again.
        ray.shutdown()
        return None
    return Listing({role: addresses(listed) for role, listed in urls.items()}, complete)


def addresses(listed: Iterable[object]) -> tuple[str, ...]:
    """Return those of *listed* that are workers' addresses and fit on a line of the file of workers."""
    urls = []
    for one in listed:
        if not isinstance(one, str) or not one.startswith(SCHEME) or not one.isprintable() or " " in one:
            logger.error("the directory lists something that is not an address of a worker")
            continue
        try:
            target(one)
        except StartupError as error:
            logger.error("the directory lists an address that is none: %s", error.message)
            continue
        urls.append(one)
    return tuple(urls)
