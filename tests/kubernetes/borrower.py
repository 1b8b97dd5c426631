"""What a test's container runs: `borrower.py listen`, or `take PART` of its GPU, or `waste PART` in a child.

It uses the simulated devices that its variables name, and says what it holds; with `listen` it follows its limit.
"""

import os
import sys
import time
from pathlib import Path

from elastic_runtime.process.simulated_memory import SimulatedDevice
from tests.fractions.hog import listen


def main() -> None:
    device = SimulatedDevice(os.environ["ELASTIC_SIMULATED_DEVICES"].split(":")[0])
    print(f"on {os.environ['NVIDIA_VISIBLE_DEVICES']}", flush=True)
    match sys.argv[1:]:
        case ["listen"]:
            listen(device, Path(os.environ["ELASTIC_MEMORY_DIR"]))
        case ["take", part]:
            device.allocate(int(float(part) * device.total_mib))
        case ["waste", part]:
            child = os.fork()
            if child:
                _, status = os.waitpid(child, 0)
                print(f"child ended by signal {os.WTERMSIG(status)}", flush=True)
            else:
                SimulatedDevice(device.directory).allocate(int(float(part) * device.total_mib))
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
