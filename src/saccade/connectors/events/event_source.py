"""Where an engine publishes its cache events."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saccade.errors import StartupError
from saccade.transport.named_addresses import on_host_of_worker

OTHER_HOST = (
    "its --kv-events-config names an endpoint of another host or kind; it must be tcp:// with `*` or with the host of "
    "the worker's address, as in tcp://*:5557"
)


@dataclass(frozen=True)
class EventSource:
    """The ZeroMQ endpoints and the topic at which one engine (a data-parallel rank of a worker) publishes."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""

    def of_rank(self, rank: int) -> "EventSource":
        """Return where *rank* publishes if this is rank 0: each rank has its own port, the first plus its number."""
        replay = self.replay_endpoint and _at_rank(self.replay_endpoint, rank)
        return EventSource(_at_rank(self.endpoint, rank), replay, self.topic)


def event_source(host: str, config: Mapping[str, Any]) -> EventSource | None:
    """Return where a worker on *host* publishes by its *config*, that of `--kv-events-config`.

    Return None if it publishes nothing. Raises StartupError if it names another host or kind of socket.
    """
    endpoint, replay, topic = (config.get(name) for name in ("endpoint", "replay_endpoint", "topic"))
    is_on = config.get("enable_kv_cache_events", True) and config.get("publisher") in (None, "zmq")
    if not is_on or not isinstance(endpoint, str):
        return None
    return EventSource(
        _reachable(endpoint, host), _reachable(replay, host) if isinstance(replay, str) else None, str(topic or "")
    )


def _reachable(endpoint: str, host: str) -> str:
    reachable = on_host_of_worker(endpoint, host)
    if reachable is None:
        raise StartupError(OTHER_HOST)
    return reachable


def _at_rank(endpoint: str, rank: int) -> str:
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"
