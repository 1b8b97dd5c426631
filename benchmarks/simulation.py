"""Random histories of the real engine in simulated time (tests/simulation): how many, how fast, what they violate.

Last line: JSON with histories, violations, histories_per_s.

Usage: python benchmarks/simulation.py [--histories 2000] [--first SEED]
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import print_conditions, print_result

from tests.simulation.histories import from_seed
from tests.simulation.running import play


def main() -> None:
    """Play the histories, and print each violation with its seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    print_conditions("random histories of the engine in simulated time", histories=options.histories)
    logging.getLogger("kfp_gpuquota").propagate = False  # what the simulated faults cause
    violations, began = 0, time.perf_counter()
    for seed in range(options.first, options.first + options.histories):
        try:
            play(from_seed(seed))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other histories are played
            violations += 1
            print(f"seed {seed}: {error}")
    took_s = time.perf_counter() - began
    print_result(
        histories=options.histories, violations=violations, histories_per_s=round(options.histories / took_s, 1)
    )


if __name__ == "__main__":
    main()
