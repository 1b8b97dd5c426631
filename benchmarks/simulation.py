"""Random histories of the real engine in simulated time (tests/simulation): how many, how fast, what they violate.

Each history is played by the embedded cluster, every second one (`--kubernetes-every 2`) by the controller of
Kubernetes as well. Last line: JSON with histories, violations, histories_per_s, and how many each kind has played.

Usage: python benchmarks/simulation.py [--histories 2000] [--first SEED] [--kubernetes-every N]
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import print_conditions, print_result

from tests.simulation import kubernetes
from tests.simulation.histories import hard_history
from tests.simulation.running import play

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.histories import History


def main() -> None:
    """Play the histories, and print each violation with its seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kubernetes-every", type=int, default=2, help="the controller plays one in N; 0: none")
    options = parser.parse_args()
    print_conditions("random histories of the engine in simulated time", histories=options.histories)
    logging.getLogger("kfp_gpuquota").propagate = False  # what the simulated faults cause
    violations, began = 0, time.perf_counter()
    played = {"embedded": 0, "kubernetes": 0}
    for seed in range(options.first, options.first + options.histories):
        history = hard_history(seed)
        kinds: dict[str, Callable[[History], object]] = {"embedded": play}
        if options.kubernetes_every and seed % options.kubernetes_every == 0:
            kinds["kubernetes"] = kubernetes.play
        for kind, playing in kinds.items():
            played[kind] += 1
            try:
                playing(history)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other histories are played
                violations += 1
                print(f"seed {seed} on {kind}: {str(error)[:2000]}", flush=True)
    took_s = time.perf_counter() - began
    print_result(
        histories=options.histories,
        violations=violations,
        histories_per_s=round(sum(played.values()) / took_s, 1),
        **played,
    )


if __name__ == "__main__":
    main()
