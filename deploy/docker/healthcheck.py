"""Exit with 0 if a server is ready, else with 1: healthcheck.py [ADDRESS].

ADDRESS is the root of a gateway, by default that of this container, or a worker's grpc://HOST:PORT or unix:/path.
"""

import os
import sys
import urllib.request

SECONDS = 4.0


def is_ready(address: str) -> bool:
    """Return whether the server at *address* takes requests."""
    if address.startswith("http"):
        try:
            with urllib.request.urlopen(f"{address}/ready", timeout=SECONDS) as answer:  # noqa: S310  it is http
                return bool(answer.status == 200)
        except OSError:
            return False
    import grpc
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
    from grpc_health.v1.health_pb2_grpc import HealthStub

    with grpc.insecure_channel(address.removeprefix("grpc://")) as channel:
        try:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=SECONDS)
        except grpc.RpcError:
            return False
    return bool(answer.status == HealthCheckResponse.SERVING)


if __name__ == "__main__":
    here = f"http://127.0.0.1:{os.environ.get('SACCADE_PORT', '8000')}"
    sys.exit(not is_ready(sys.argv[1] if len(sys.argv) > 1 else here))
