"""The address of TokenSpeed's wire, and who may call it."""

from dataclasses import dataclass

from saccade.errors import StartupError
from saccade.loopback import binds_to_loopback
from saccade.tracing.tracer import NO_TRACES, TraceSettings
from saccade.whole_numbers import read_port


@dataclass(frozen=True)
class TokenSpeedPort:
    """Where TokenSpeed's wire is served (*bind*, as `host:port`), and what its callers may do.

    *is_open* allows an address that other machines can reach, although the wire cannot authenticate callers.
    *kv_events* shows callers the token ids of blocks, which are the prompts. *tracing* applies to callers' requests.
    """

    bind: str
    is_open: bool = False
    kv_events: bool = False
    tracing: TraceSettings = NO_TRACES

    def check(self) -> None:
        """Raise StartupError if *bind* is malformed, or if strangers could call although *is_open* is not set."""
        host, _, port = self.bind.rpartition(":")
        if not host or read_port(port) is None:
            raise StartupError(f"--serve-tokenspeed takes HOST:PORT, as in 127.0.0.1:50051, not {self.bind!r}.")
        if not self.is_open and not binds_to_loopback(self.bind):
            raise StartupError(
                f"--serve-tokenspeed {self.bind} can be called from other machines, and this wire has no credentials. "
                "Listen on a loopback address; or, in a network where every machine may use the model, add "
                "--serve-tokenspeed-to-anyone."
            )

    def remark(self, address: str) -> str:
        """Return the warning for the operator of a worker that listens at *address*."""
        if binds_to_loopback(self.bind):
            return f"TokenSpeed's wire is served at {address}: every user of this machine may use the model there"
        return (
            f"TokenSpeed's wire is served at {address}: everyone who can reach it may use the model there, unencrypted "
            "and without credentials"
        )
