"""A training whose workers' ports another user connects to: it ends at its true step, with the true model."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.effort import soaked
from tests.polling import until
from tests.security.other_user import as_root, open_to_everybody, run, start

if TYPE_CHECKING:
    from kfp_gpuquota.api import Job
    from tests.conftest import EmbeddedCluster

STEPS = 60
TRAINING = """
import pathlib, resource, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import elastic_runtime

if int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
torch.set_num_threads(1)
gate = pathlib.Path(sys.argv[1])
job = elastic_runtime.init(global_batch_size=4)
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(TensorDataset(torch.ones(240, 1)), batch_size=4)
model, optimizer, loader = job.prepare(model, optimizer, loader)
for epoch in job.epochs(1):
    for (x,) in loader:
        job.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
        while job.step >= 20 and not gate.exists():
            time.sleep(0.02)
print("weight", float(model.weight), "after", job.step)
"""

FLOOD = """
held = []
for port in map(int, sys.argv[2:]):
    for _ in range(int(sys.argv[1])):
        try:
            held.append(socket.create_connection(("127.0.0.1", port), timeout=2))
            held[-1].sendall(b"\\x00" * 64)
        except OSError as error:
            pass
print("connected", len(held), flush=True)
time.sleep(1)
"""


def listening_ports(pid: int) -> list[int]:
    links = set[str]()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            links.add(str(link.readlink()))
    inodes = {found[1] for link in links if (found := re.match(r"socket:\[(\d+)]", link))}
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()]
    own = [row[1].split(":") for row in rows[1:] if row[3] == "0A" and row[9] in inodes]
    assert {address for address, _ in own} <= {"0100007F"}  # loopback
    return [int(port, 16) for _, port in own]


def trains(job: Job) -> bool:
    return job.status.progress is not None and job.status.progress.step > 0 and job.status.progress.workers == 2


@pytest.mark.slow
@as_root
@pytest.mark.parametrize(("connections", "open_files"), [pytest.param(50, 0, marks=soaked), (300, 128)])
def test_connections_of_another_user_neither_end_a_training_nor_change_its_result(
    embedded_cluster: EmbeddedCluster, tmp_path: Path, connections: int, open_files: int
) -> None:
    script, gate = tmp_path / "training.py", tmp_path / "gate"
    script.write_text(TRAINING)
    embedded_cluster.project("team-a", 2)
    command = (sys.executable, str(script), str(gate), str(open_files))
    embedded_cluster.submit("train", *command, gpus=2, gpus_per_worker=1, min_gpus=1)
    workers = embedded_cluster.wait_for("train", trains).status.workers
    ports = until(lambda: [port for worker in workers for port in listening_ports(worker.pid or 0)])
    assert run(FLOOD, connections, *ports).startswith("connected")
    gate.touch()
    job = embedded_cluster.wait_for("train", lambda job: job.status.phase.final)
    assert job.status.phase == "Succeeded", job.status
    log = embedded_cluster.client.read_log("team-a", "train").text.decode()
    assert f"weight {float(-STEPS)} after {STEPS}" in log


WATCH = """
seen, held = set(), []
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    time.sleep(0.002)
    for row in open("/proc/net/tcp").read().splitlines()[1:]:
        fields = row.split()
        port = int(fields[1].split(":")[1], 16)
        if fields[3] == "0A" and port not in seen and fields[7] == "0":
            seen.add(port)
            try:
                held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                held[-1].sendall(bytes(range(64)))
            except OSError:
                pass
print("connected", len(held), flush=True)
"""


@as_root
def test_another_user_who_connects_to_each_new_port_at_once_does_not_take_part(
    embedded_cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    script, gate = tmp_path / "training.py", tmp_path / "gate"
    script.write_text(TRAINING)
    gate.touch()
    embedded_cluster.project("team-a", 2)
    with start(WATCH, 60) as intruder:
        embedded_cluster.submit("train", sys.executable, str(script), str(gate), "0", gpus=2, gpus_per_worker=1)
        job = embedded_cluster.wait_for("train", lambda job: job.status.phase.final)
        intruder.kill()
    assert job.status.phase == "Succeeded", job.status
    assert job.status.generation == 1, "connections that are part of no pair end no generation"
    log = embedded_cluster.client.read_log("team-a", "train").text.decode()
    assert f"weight {float(-STEPS)} after {STEPS}" in log


SHARDED = """
import pathlib, sys, time
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
import elastic_runtime

torch.set_num_threads(1)
gate = pathlib.Path(sys.argv[1])
job = elastic_runtime.init(global_batch_size=4, checkpoint_every_s=0.2)
model = torch.nn.Linear(1, 6, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=6.0)
loader = DataLoader(TensorDataset(torch.ones(40, 1)), batch_size=4)
shard = lambda part, mesh: fully_shard(part, mesh=mesh)
model, optimizer, loader = job.prepare(model, optimizer, loader, shard=shard)
for epoch in job.epochs(10**9):
    for (x,) in loader:
        job.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
    if job.all_reduce(torch.tensor(float(gate.exists()))) > 0:
        break
print("weights", *sorted(set(model.weight.full_tensor().flatten().tolist())), "after", job.step)
"""

INTRUDE = """
def tried(name, action):
    try:
        action()
    except OSError:
        return
    print("reached", name, flush=True)

for path in sys.argv[1:]:
    tried(path, lambda: os.scandir(path) if os.path.isdir(path) else open(path, "rb"))
    tried(path, lambda: socket.socket(socket.AF_UNIX).connect(path))
for row in open("/proc/net/unix").read().splitlines()[1:]:
    name = row.split()[-1]
    if "gpuquota" in name or name.startswith(sys.argv[1]):
        tried(name, lambda: socket.socket(socket.AF_UNIX).connect(name.replace("@", chr(0), 1)))
print("ended", flush=True)
"""


def size_of(job: Job) -> int:
    return (job.status.progress.workers if job.status.progress else None) or 0


@pytest.mark.slow
@as_root
def test_another_user_gets_no_part_of_a_sharded_training_through_a_change_of_size(
    embedded_cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    """Shards move over connections whose pairs are verified; checkpoints are files of their user."""
    script, gate = tmp_path / "training.py", tmp_path / "gate"
    script.write_text(SHARDED)
    open_to_everybody(embedded_cluster.home.root)
    for team in ("team-a", "team-b"):
        embedded_cluster.project(team, 1)
    with start(WATCH, 120) as intruder:
        command = (sys.executable, str(script), str(gate))
        embedded_cluster.submit("train", *command, gpus=2, gpus_per_worker=1, min_gpus=1)
        running = embedded_cluster.wait_for("train", trains)
        ports = until(lambda: [port for worker in running.status.workers for port in listening_ports(worker.pid or 0)])
        assert run(FLOOD, 20, *ports).startswith("connected")
        checkpoints = embedded_cluster.home.checkpoints(running.uid)
        until(lambda: [path for path in checkpoints.rglob("*") if path.is_file()], "a checkpoint")
        found = [path for path in embedded_cluster.home.root.rglob("*") if not path.is_symlink()]
        assert run(INTRUDE, embedded_cluster.home.root, *found) == "ended"
        embedded_cluster.submit("other", "sleep", "infinity", project="team-b")
        smaller = embedded_cluster.wait_for("train", lambda job: size_of(job) == 1)
        embedded_cluster.client.delete_job("team-b", "other")
        embedded_cluster.wait_for("train", lambda job: size_of(job) == 2)
        gate.touch()
        job = embedded_cluster.wait_for("train", lambda job: job.status.phase.final)
        intruder.kill()
    assert job.status.phase == "Succeeded", job.status
    assert smaller.status.generation >= 2
    log = embedded_cluster.client.read_log("team-a", "train").text.decode()
    assert (ended := re.search(r"weights -(\d+)\.0 after (\d+)$", log, re.MULTILINE)), log
    assert ended[1] == ended[2], "each step was applied once"
    assert "a worker was lost" not in log
