"""A fleet on Ray as its file describes it: the arguments of `saccade.supervisor.ray_app:app`, checked.

Nothing here imports Ray, so that a machine without it can check a file.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from cyclopts import App, CycloptsError

from saccade.engine.config import EngineConfig, EngineSettings, SplitSettings
from saccade.errors import StartupError
from saccade.protocol.description import Role
from saccade.release import installed_version

DIRECTORY: Final = "directory"
"""The deployment that lists the workers; the others are called as their roles."""

ROLES: Final[tuple[Role, ...]] = get_args(Role)

SETTLE_SECONDS: Final = 5.0
"""How long a worker that has left the directory still takes requests.

Gateways need less to hear of it, and of the worker that replaces it.
"""

KILL_SECONDS: Final = 10.0
"""A worker that has not ended this long after its shutdown_timeout is killed."""

_FLEETS_OWN: Final = {
    "--role": "the role is the name under `roles`",
    "--host": "a worker listens on the address of its node",
    "--port": "a worker takes any free port",
    "--uds": "a worker listens on the address of its node",
    "--kv-transfer-bind": "a prefill worker takes any free port of its node",
    "--worker-token-file": "give `worker_token_file` next to `roles`",
    "--shutdown-timeout": "give `shutdown_timeout` next to `roles`",
}
_ONE_NODE: Final = (
    "A worker's processes share one node: use --tensor-parallel-size up to the GPUs of a node, and more replicas."
)
_NOT_THERE: Final = {
    "--pipeline-parallel-size": f"Pipeline parallelism is not supported. {_ONE_NODE}",
    "-pp": f"Pipeline parallelism is not supported. {_ONE_NODE}",
    "--enable-expert-parallel": f"Expert parallelism is not supported. {_ONE_NODE}",
    "-ep": f"Expert parallelism is not supported. {_ONE_NODE}",
    "--nnodes": f"A worker over several nodes is not supported. {_ONE_NODE}",
    "--data-parallel-size": "Replicas take requests in parallel: give `num_replicas` of the role's deployment.",
    "-dp": "Replicas take requests in parallel: give `num_replicas` of the role's deployment.",
}


@dataclass(frozen=True)
class RoleSpec:
    """A role's workers: the words of `saccade worker` that are theirs, as given and as understood."""

    role: Role
    words: tuple[str, ...]
    engine: EngineSettings

    def resources(self, *, has_gpus: bool) -> dict[str, float]:
        """Return a worker's resources in Ray's terms: a GPU for each of its processes, or else their CPU threads."""
        size = self.engine.tensor_parallel_size
        if self.engine.device == "cuda" or (has_gpus and self.engine.device == "auto"):
            return {"GPU": size, "CPU": 1}
        return {"CPU": size * (self.engine.threads or 1)}


@dataclass(frozen=True)
class FleetSpec:
    """A fleet: the model, the token's file on every node, the seconds of a drain, and the roles.

    A *model* of None is the bundled one. If *release* is not None, every node must have it.
    """

    model: str | None
    worker_token_file: str
    shutdown_timeout: float
    release: str | None
    roles: tuple[RoleSpec, ...]

    @property
    def stop_seconds(self) -> float:
        """How long a worker may take to end after SIGTERM."""
        return self.shutdown_timeout + KILL_SECONDS

    def worker_words(self, role: RoleSpec, host: str) -> tuple[str, ...]:
        """Return the words of `saccade worker` for a worker of *role* on the node with the address *host*."""
        address = f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
        split = ("--role", role.role) if role.role != "both" else ()
        transfer = ("--kv-transfer-bind", f"{address}:0") if role.role == "prefill" else ()
        return (
            *(() if self.model is None else (self.model,)),
            *("--host", host, "--port", "0", "--worker-token-file", self.worker_token_file),
            *("--shutdown-timeout", str(self.shutdown_timeout), "--no-summary"),
            *split,
            *transfer,
            *role.words,
        )

    def check_release(self) -> None:
        """Raise StartupError unless this node has the fleet's release."""
        if self.release is not None and self.release != (installed := installed_version()):
            raise StartupError(f"This node has Saccade {installed}, and the fleet's `release` is {self.release}.")


def read_fleet(arguments: Mapping[str, object]) -> FleetSpec:
    """Return the fleet that *arguments* describe. Raises StartupError, which names the argument."""
    for name in arguments:
        if name not in ("model", "worker_token_file", "shutdown_timeout", "release", "roles"):
            raise StartupError(
                f"args.{name} is not known: there are model, worker_token_file, shutdown_timeout, release and roles."
            )
    token_file = _read_text(arguments, "worker_token_file")
    if token_file is None or not Path(token_file).is_absolute():
        raise StartupError("args.worker_token_file must be a path from the root, which every node has.")
    seconds = arguments.get("shutdown_timeout", 30.0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise StartupError("args.shutdown_timeout must be a number of seconds, at least 0.")
    roles = arguments.get("roles", {"both": []})
    if not isinstance(roles, dict) or not roles:
        raise StartupError("args.roles must name at least one of both, prefill and decode, each with a list of flags.")
    return FleetSpec(
        model=_read_text(arguments, "model"),
        worker_token_file=token_file,
        shutdown_timeout=float(seconds),
        release=_read_text(arguments, "release"),
        roles=tuple(_read_role(name, words) for name, words in roles.items()),
    )


def _read_text(arguments: Mapping[str, object], name: str) -> str | None:
    value = arguments.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise StartupError(f"args.{name} must be text: put it in quotes.")
    return value


def _read_role(name: object, words: object) -> RoleSpec:
    role = next((one for one in ROLES if one == name), None)
    if role is None:
        raise StartupError(f"args.roles.{name} is not a role: a worker is both, prefill or decode.")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise StartupError(
            f'args.roles.{role} must be a list of flags of `saccade worker`, such as ["--max-model-len", "32k"].'
        )
    for word in words:
        flag = word.partition("=")[0]
        if flag in _NOT_THERE:
            raise StartupError(f"args.roles.{role} has {flag}. {_NOT_THERE[flag]}")
        if flag in _FLEETS_OWN:
            raise StartupError(f"args.roles.{role} has {flag}, which the fleet sets: {_FLEETS_OWN[flag]}.")
    return RoleSpec(role, tuple(words), _read_engine(role, words))


def _read_engine(role: Role, words: Sequence[str]) -> EngineSettings:
    """Return the settings that *words* give. Raises StartupError for settings that cannot work with any model."""
    parser = App(help_flags=(), version_flags=(), result_action="return_value")

    @parser.default
    def read(*, engine: EngineSettings = EngineSettings(), log_level: str = "INFO") -> EngineSettings:
        return engine

    try:
        engine: EngineSettings = parser(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise StartupError(f"args.roles.{role}: {error}") from error
    EngineConfig(model_dir="", model="", **vars(engine) | vars(SplitSettings(role=role))).check()
    return engine
