"""A replica ends with Ray's process on its node."""

import subprocess
import sys

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), flush=True)
"""
CHILD = """
import sys, time
from saccade.supervisor import ray_node
ray_node.LOOK_SECONDS = 0.01
ray_node.end_with_node()
print("watches", flush=True)
time.sleep(600)
"""


def test_a_replica_without_its_node_ends() -> None:
    """The child has the pipe, too: its end is seen when both have gone."""
    parent = [sys.executable, "-c", PARENT, CHILD]
    done = subprocess.run(parent, capture_output=True, text=True, timeout=60)
    assert done.stdout == "watches\n"
    assert "Ray has ended on this node" in done.stderr
