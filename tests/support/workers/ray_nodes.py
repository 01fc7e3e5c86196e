"""A Ray cluster of three nodes on this machine: a head without CPUs, and two that run workers. It ends with stdin.

A line of JSON on stdout says its address and the process ids of the two nodes.
"""

import json
import os
import sys

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from ray.cluster_utils import Cluster  # it reads the environment when it is imported

OBJECTS = {"object_store_memory": 100 << 20}


def main(num_cpus: int) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False} | OBJECTS)
    try:
        nodes = [cluster.add_node(num_cpus=num_cpus, **OBJECTS) for _ in range(2)]
        pids = [node.all_processes["raylet"][0].process.pid for node in nodes]
        print(json.dumps({"address": cluster.address, "nodes": pids}), flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
