"""The settings of a fleet: where workers come from, how one is chosen, and how many requests each gets."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from saccade.config import FLAT, NO_FLAG, LocalPath, Many, NotNegative, Seconds, Size
from saccade.fleet.cost import OFFLOADED_SHARE, RECOMPUTE_WEIGHT, Policy


@FLAT
@dataclass(frozen=True)
class DispatchLimits:
    """How many requests workers get at a time, how many wait for them, and how often a request is sent again."""

    max_retries: Annotated[Size, Parameter(name="--routing-retries")] = 1
    "Times that a request is sent to another worker if one fails before the first token."
    worker_queue: Annotated[Size, Parameter(name="--max-worker-queue")] = 64
    "Requests that a worker gets beyond its --max-num-seqs; more wait in the gateway until any worker is free."
    max_waiting: Annotated[Size, Parameter(name="--max-waiting-requests")] = 256
    "Requests for a model that wait in the gateway for a worker; more get 429."
    wait_seconds: Annotated[Seconds, Parameter(name="--max-waiting-seconds")] = 30.0
    "Seconds that a request waits for a worker before it gets 429."
    disaggregation_min_tokens: Annotated[Size, Parameter(name="--disaggregation-min-tokens")] = 0
    "A decode worker that lacks fewer tokens of a prompt serves it alone, without a prefill worker; 0 never does."
    num_processes: Annotated[int, NO_FLAG] = 1
    "Processes of the gateway, each of which sends a worker its part."
    lone_worker_queue: Annotated[int | None, NO_FLAG] = None
    "As *worker_queue*, for a worker that is alone; None if it gets everything."
    client_share: Annotated[float, NO_FLAG] = 1.0
    "The part of the waiting places that one tenant may have, of those that others leave."
    takes_priorities: Annotated[bool, NO_FLAG] = False
    "Whether requests of a lower priority begin first, among those of the same tenant."


DEFAULT_LIMITS = DispatchLimits()


@Parameter(name="*", group=Group("Routing", sort_key=2))
@dataclass(frozen=True)
class RoutingSettings:
    """How a worker is chosen if several serve a model, and what happens if one is busy or fails."""

    routing_policy: Policy = "auto"
    "How a worker is chosen; auto is cost if a worker's caches are known or assumed, else least_load."
    routing_temperature: NotNegative = 0.0
    "0 takes the worker of the least cost; over 0 one is drawn, and with more, workers of higher cost are more likely."
    routing_recompute_weight: NotNegative = RECOMPUTE_WEIGHT
    "What a token that a worker must compute for a prompt weighs in the cost, against one that the prompt waits for."
    routing_offloaded_share: Annotated[float, Parameter(validator=Number(gte=0, lte=1))] = OFFLOADED_SHARE
    "Part of a token's cost that a copy in a worker's CPU memory saves, from 0 to 1; a token in its KV cache saves all."
    routing_index_bytes: Size = 512 << 20
    "Bytes of memory for what the workers' caches hold, about 160 for each KV block of the fleet; 0 follows no cache."
    routing_assumptions: bool = True
    "Take a worker that does not report its caches to hold what was sent there in the last 120 seconds."
    dispatch: DispatchLimits = DEFAULT_LIMITS
    assume_same_release: Many = ()
    "A model whose workers share its work although they report different releases; may be given many times."


@FLAT
@dataclass(frozen=True)
class SourceConfig:
    """Where workers come from in addition to --worker-url, and how they are changed while the gateway runs."""

    file: Annotated[LocalPath | None, Parameter(name="--workers-file")] = None
    "A file of further workers, one URL a line, # for comments; it is watched while the gateway runs."
    dns: Annotated[Many, Parameter(name="--worker-dns")] = ()
    "A worker at every address of a name, such as grpc://workers.internal:9000; may be given many times."
    drain_seconds: Annotated[Seconds, Parameter(name="--worker-drain-timeout")] = 300.0
    "Seconds that the requests of a worker that is removed get to finish."
    traffic_file: Annotated[LocalPath | None, Parameter(name="--traffic-file")] = None
    "A JSON file that keeps what PATCH /workers sets, and that all processes of the gateway follow."

    def __bool__(self) -> bool:
        return self.file is not None or bool(self.dns)


NO_SOURCES = SourceConfig()
