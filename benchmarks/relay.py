"""How fast files travel between a step's launcher and its workers where no volume is shared.

    python benchmarks/relay.py [--mib 1024]

A launcher's relay in this process, a worker's client in another, over loopback: one file down (an input) and one up (an
output), from and to memory-backed files if /dev/shm has space. mb_per_s is the slower of the two; peak_mib is the
growth of the relay's memory while it serves them, beside what Python takes.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from common import print_conditions, print_result

from kfp_gpuquota.dsl.launcher.relay import Relay
from kfp_gpuquota.dsl.launcher.staging import Staging

WORKER = """
import sys, time, resource
from kfp_gpuquota.dsl.worker.remote import RelayClient
mount, source, copy, place, size = sys.argv[1:]
client = RelayClient(mount)
began = time.perf_counter()
client.download(source, copy, int(size), 0o644)
down = time.perf_counter()
client.upload(copy, place)
up = time.perf_counter()
print(down - began, up - down, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the file (default 1024)")
    mib = parser.parse_args().mib
    print_conditions("relay of a step's files, loopback", mib=mib)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        down_s, up_s, worker_mib, relay_mib = measure(Path(directory), mib)
    megabytes = mib * 1.048576
    print(
        f"down {megabytes / down_s:.0f} MB/s, up {megabytes / up_s:.0f} MB/s, worker's memory {worker_mib} MiB in all"
    )
    print_result(mb_per_s=round(megabytes / max(down_s, up_s)), peak_mib=round(relay_mib, 1), worker_mib=worker_mib)


def measure(root: Path, mib: int) -> tuple[float, float, int, float]:
    """(seconds down, seconds up, the worker's MiB, the relay's growth in MiB)."""
    source = root / "data"
    piece = bytes(range(256)) * 4096
    with source.open("wb") as file:
        for _ in range(mib):
            file.write(piece)
    outputs = {"outputFile": str(root / "out" / "executor_output.json")}
    step = {"inputs": {"artifacts": {"data": {"artifacts": [{"uri": str(source)}]}}}, "outputs": outputs}
    staging = Staging(step, "job")
    staging.create(["true"], {})
    relay = Relay(step, staging, "127.0.0.1")
    (root / "url").write_text(relay.url)
    (root / "token").write_text(relay.token)
    (root / "ca.crt").write_text(relay.authority)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    place = staging.directories()[0] / "w0" / "data"
    answer = subprocess.run(
        [sys.executable, "-c", WORKER, str(root), str(source), str(root / "copy"), str(place), str(mib << 20)],
        capture_output=True,
        text=True,
        check=True,
    )
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    relay.close()
    down_s, up_s, worker_mib = answer.stdout.split()
    return float(down_s), float(up_s), int(worker_mib), grown


if __name__ == "__main__":
    main()
