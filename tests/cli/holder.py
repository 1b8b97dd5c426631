"""A job's process that holds memory of its simulated GPU: `take MIB` and stay, or `listen` and use what it may."""

import json
import os
import sys
import time
from pathlib import Path

from elastic_runtime.process.simulated_memory import SimulatedDevice

device = SimulatedDevice(os.environ["ELASTIC_SIMULATED_DEVICES"])
if sys.argv[1] == "take":
    device.allocate(int(sys.argv[2]))
    time.sleep(3600)
directory = Path(os.environ["ELASTIC_MEMORY_DIR"])
follows = None
while True:
    (directory / "usage.new").write_text(json.dumps({"follows_mib": follows}))
    (directory / "usage.new").replace(directory / "usage.json")
    if (directory / "limit.json").exists():
        follows = json.loads((directory / "limit.json").read_text())["limit_mib"]
        change = follows - device.used_mib
        device.allocate(change) if change > 0 else device.release(-change)
    time.sleep(0.05)
