"""Announces to Ray that this node ends soon, and waits for its actors to leave: `python -m ....ray.leave --within 45`.

It is the hook that a container of KubeRay runs before it is stopped (`lifecycle.preStop`). ElasticTorchTrainer
continues without the workers of a node that drains, from one training step to the next; Ray places nothing new there.
Ray has no public function for this; `ray drain-node` is hidden, and needs an id that a hook does not have.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Final

import ray
from ray._private.state import state
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2

POLL_S: Final = 0.2


def drain(address: str, node_id: str, within_s: float) -> None:
    """Ask Ray to drain the node, which ends after `within_s` seconds. Raises RuntimeError if Ray refuses."""
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + within_s) * 1000)
    accepted, why = GcsClient(address=address).drain_node(node_id, reason, "its GPUs are released", deadline_ms)
    if not accepted:
        raise RuntimeError(f"Ray does not drain node {node_id}: {why}")


def is_empty(node_id: str) -> bool:
    """Return whether no actor lives on the node.

    Its resources say less: the bundle of a placement group stays reserved on a node that drains.
    """
    living = state.actor_table(None, actor_state_name="ALIVE").values()
    return all(actor["Address"]["NodeID"] != node_id for actor in living)


def leave(within_s: float) -> bool:
    """Drain the node of this process; return whether its actors have left within `within_s` seconds."""
    node_id = ray.get_runtime_context().get_node_id()
    drain(ray.get_runtime_context().gcs_address, node_id, within_s)
    end = time.monotonic() + within_s
    while not is_empty(node_id):
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_S)
    return True


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description="Drain this node of Ray, and wait for its actors to leave.")
    parser.add_argument("--within", type=float, default=45.0, metavar="SECONDS", help="wait at most this long (45)")
    parser.add_argument("--address", default="auto", help="HOST:PORT of Ray's head; default: the cluster of this node")
    options = parser.parse_args()
    ray.init(address=options.address, log_to_driver=False, logging_level="ERROR")
    left = leave(options.within)
    print("its actors have left" if left else f"its actors have not left within {options.within:g} s", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()
