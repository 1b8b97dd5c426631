"""A process that uses memory of a simulated device: `hog.py DEVICE COMMANDS`, one command a line on its input.

take MIB | give MIB | fork MIB (a child with an empty environment takes it) | deaf (ignores SIGTERM) | listen DIRECTORY.
Each is answered by a line: what it holds now, or "full".
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from elastic_runtime.process.simulated_memory import SimulatedDevice, SimulatedOutOfMemoryError


def main() -> None:
    device = SimulatedDevice(sys.argv[1])
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        try:
            obey(device, command, argument)
            print(device.used_mib, flush=True)
        except SimulatedOutOfMemoryError:
            print("full", flush=True)


def obey(device: SimulatedDevice, command: str, argument: str) -> None:
    match command:
        case "take":
            device.allocate(int(argument))
        case "give":
            device.release(int(argument))
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "fork":
            script = "import sys; from elastic_runtime.process.simulated_memory import SimulatedDevice as D\n"
            script += "D(sys.argv[1]).allocate(int(sys.argv[2])); print(0, flush=True); sys.stdin.read()"
            if os.fork() == 0:
                os.execve(sys.executable, [sys.executable, "-c", script, sys.argv[1], argument], {})
        case "listen":
            threading.Thread(target=listen, args=(device, Path(argument)), daemon=True).start()


def listen(device: SimulatedDevice, directory: Path) -> None:
    """Follow the limit, use all of it and report it, as a trainer does at each step."""
    follows: int | None = None
    while True:
        temporary = directory / "usage.json.new"
        temporary.write_text(json.dumps({"follows_mib": follows, "wanted_mib": None}))
        temporary.replace(directory / "usage.json")
        limit = directory / "limit.json"
        if limit.exists():
            follows = json.loads(limit.read_text())["limit_mib"]
            change = follows - device.used_mib
            device.allocate(change) if change > 0 else device.release(-change)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
