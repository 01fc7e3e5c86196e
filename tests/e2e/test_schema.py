"""The server does what its /openapi.json says, whatever it is sent: schemathesis, a client we did not write."""

import subprocess
import sys
from pathlib import Path

from server import Server

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_schemathesis(tiny_server: Server) -> None:
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{tiny_server.url}/openapi.json"]
    done = subprocess.run(
        [*command, "--checks", CHECKS, "--max-examples", "10", "--seed", "1", "--no-color"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:]
