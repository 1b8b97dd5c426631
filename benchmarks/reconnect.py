"""Simulated workers over real TLS against membership shards as processes of their own: see `controller.py`.

The generator is the leader of the shards, as a controller is, and starts two processes that hold the workers' ends.
Each worker speaks the protocol of `elastic_runtime.membership.coordinator_client`: it reconnects at once, then after
pauses that double from 50 ms to 1 s, reports its generation, and sends a heartbeat each second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import written_certificates
from kwok_bench import REPOSITORY, cpu_s

from kfp_gpuquota.cluster.kubernetes.elasticjob.membership.reporting import LIMITS
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_builder import token_of
from kfp_gpuquota.cluster.kubernetes.shards.messages import shard_of
from kfp_gpuquota.cluster.kubernetes.shards.server import ControlEndpoint, bound_tls_memory, serving
from kfp_gpuquota.cluster.kubernetes.shards.shard_jobs import ShardJobs
from kfp_gpuquota.cluster.kubernetes.shards.sharded_membership import ShardedMembership
from kfp_gpuquota.server.transport.tls import load_pair

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from kfp_gpuquota.api import Progress
    from kfp_gpuquota.membership import AnnounceCommit

KEY = b"benchmark"
CLIENTS = 2
DEADLINE_S = 300.0
SETTLE_S = 12.0
"""More than the limit on silence: by then every worker counts as continuously responsive."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, HEARTBEAT_S = 0.05, 1.0, 1.0


class Notices:
    """What the shards report: kills are what matters."""

    def __init__(self, shards: int, authority: bytes) -> None:
        self._shards, self.authority = shards, authority
        self.killed: list[str] = []
        self.committed: dict[str, int] = {}

    def shard_of(self, uid: str) -> int:
        """Return the number of the job's shard."""
        return shard_of(uid, self._shards)

    def reopen(self, uid: str) -> None:
        """Not expected."""

    def generation_reserved(self, job_uid: str, generation: int) -> None:
        """All numbers are stored."""

    def generation_committed(self, job_uid: str, commit: AnnounceCommit) -> None:
        """Note what is in force."""
        self.committed[job_uid] = len(commit.members) if commit.complete else 0

    def worker_released(self, job_uid: str, worker: str, step: int) -> None:
        """Not expected."""

    def kill_requested(self, job_uid: str, worker: str, why: str) -> None:
        """A healthy worker is to be ended: that is a failure."""
        self.killed.append(f"{job_uid} {worker}: {why}")

    def progress_reported(self, job_uid: str, worker: str, progress: Progress) -> None:
        """Not sent."""

    def training_finished(self, job_uid: str, worker: str, step: int) -> None:
        """Not sent."""


class Shard:
    """One shard's process."""

    def __init__(self, folder: Path, number: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "serve", str(folder)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
        )
        assert self.process.stdout
        self.url = f"https://127.0.0.1:{int(self.process.stdout.readline())}"
        self.number = number

    def cpu_s(self) -> float:
        """CPU time used so far."""
        return cpu_s(self.process.pid)

    def resident_kib(self) -> int:
        """Its memory now, resident and its own."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"RssAnon:\s+(\d+)", status)[0])

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(30)


class Clients:
    """One process that holds workers' ends: it takes commands as lines, and answers each with a line."""

    def __init__(self, folder: Path, workers: list[dict[str, Any]]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "clients", str(folder)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )
        self.ask(json.dumps(workers))

    def send(self, command: str) -> None:
        """Send a command."""
        assert self._process.stdin
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Return the answer to the last command."""
        assert self._process.stdout
        return json.loads(self._process.stdout.readline())

    def ask(self, command: str) -> Any:
        """Send a command and return its answer."""
        self.send(command)
        return self.answer()

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(30)


async def reconnect(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Connect all workers, break all connections at once, and wait until all are back."""
    material = written_certificates(folder)
    with contextlib.ExitStack() as stack:
        shards = [Shard(folder, number) for number in range(options.shards)]
        for shard in shards:
            stack.callback(shard.stop)
        uids = [f"job-{number:04}" for number in range(options.workers // options.job_size)]
        workers = [
            {
                "job": uid,
                "id": f"{uid}-{index}",
                "url": shards[shard_of(uid, len(shards))].url,
                "size": options.job_size,
            }
            for uid in uids
            for index in range(options.job_size)
        ]
        notices = Notices(len(shards), material.trusted)
        membership = ShardedMembership(notices, notices, [shard.url for shard in shards], KEY, 1)
        async with membership.serving():
            for uid in uids:
                ids = [f"{uid}-{index}" for index in range(options.job_size)]
                membership.open(
                    uid, "", min_workers=options.job_size, first_generation=1, running=ids, limits=LIMITS, trained=(),
                    worker_prefix=f"{uid}-", attempt=1, stored=1_000_000,
                )  # fmt: skip
            async with asyncio.timeout(60):
                while membership.connected < len(shards):
                    await asyncio.sleep(0.05)
            empty = sum(shard.resident_kib() for shard in shards)
            started = time.perf_counter()
            parts = [workers[n::CLIENTS] for n in range(CLIENTS)]
            clients = [await asyncio.to_thread(Clients, folder, part) for part in parts]
            for one in clients:
                stack.callback(one.stop)
            await all_connected(clients)
            async with asyncio.timeout(DEADLINE_S):
                while sum(notices.committed.values()) < len(workers):
                    await asyncio.sleep(0.1)
            first = time.perf_counter() - started
            await asyncio.sleep(SETTLE_S)
            idle = await used_by(shards, asyncio.sleep(5.0))
            held = sum(shard.resident_kib() for shard in shards)
            before, started = sum(shard.cpu_s() for shard in shards), time.perf_counter()
            for one in clients:
                one.send("break")
            await asyncio.gather(*(asyncio.to_thread(one.answer) for one in clients))
            await all_connected(clients)
            seconds = time.perf_counter() - started
            used = sum(shard.cpu_s() for shard in shards) - before
            await asyncio.sleep(SETTLE_S)  # a kill would come after the limit on silence
            still = [one.ask("connected") for one in clients]
    return {
        "seconds": round(seconds, 2),
        "cpu_ms_per_worker": round(1000 * used / len(workers), 2),
        "kib_per_worker": round((held - empty) / len(workers), 1),
        "killed": len(notices.killed),
        "workers": len(workers),
        "shards": len(shards),
        "connected_after": sum(still),
        "first_connect_s": round(first, 2),
        "idle_percent_of_a_core": round(20 * idle, 1),
    }


async def used_by(shards: list[Shard], action: Any) -> float:
    """CPU seconds of the shards during the action."""
    before = sum(shard.cpu_s() for shard in shards)
    await action
    return sum(shard.cpu_s() for shard in shards) - before


async def all_connected(clients: Iterable[Clients]) -> None:
    """Return when every worker has an answer on its connection."""
    async with asyncio.timeout(DEADLINE_S):
        for one in clients:
            await asyncio.to_thread(one.ask, "all")


# The shard's process


async def serve(folder: Path) -> None:
    """Serve until terminated."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_pair(context, (folder / "cert").read_bytes(), (folder / "key").read_bytes())
    jobs = ShardJobs(KEY, LIMITS)
    async with serving(jobs, ControlEndpoint(jobs), 0, context) as port:
        print(port, flush=True)
        await asyncio.Event().wait()


# The workers' process


class Worker:
    """One worker's end, as `elastic_runtime.membership.coordinator_client` has it."""

    def __init__(self, about: dict[str, Any], context: ssl.SSLContext, back: asyncio.Condition) -> None:
        self.id, self._job, self._size = about["id"], about["job"], about["size"]
        self._port = int(about["url"].rpartition(":")[2])
        self._context, self._back = context, back
        self._generation, self._members = 0, [f"{self._job}-{index}" for index in range(self._size)]
        self._transport: asyncio.WriteTransport | None = None
        self.connected = False

    async def run(self) -> None:
        """Stay connected."""
        pause = FIRST_PAUSE_S
        while True:
            try:
                await self._converse()
                pause = FIRST_PAUSE_S
            except (OSError, asyncio.IncompleteReadError, ValueError):
                pass
            self.connected, self._transport = False, None
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def cut(self) -> None:
        """Break the connection without a word."""
        self.connected = False
        if self._transport is not None:
            self._transport.abort()

    async def _converse(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._context, limit=1 << 16)
        beating = None
        try:
            self._transport = writer.transport
            path = f"/v1/membership/{self._job}/workers/{self.id}?incarnation={self.id}"
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token_of(self._job, KEY)}\r\n"
            writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            self._say(writer, *self._standing())
            status = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in status.split(b"\r\n")[0]:
                raise ValueError(status)
            beating = asyncio.create_task(self._beat(writer))
            while line := await reader.readline():
                if line.startswith(b"{"):
                    self._obey(writer, json.loads(line))
                elif not self.connected and line == b"1\r\n":
                    await self._is_back()
        finally:
            if beating is not None:
                beating.cancel()
            writer.close()

    def _standing(self) -> list[dict[str, Any]]:
        if not self._generation:
            return [{"event": "WorkerJoined"}, {"event": "WorkerReady"}]
        known = {"generation": self._generation, "members": self._members, "step": 1}
        return [{"event": "WorkerReconnected", **known}]

    def _say(self, writer: asyncio.StreamWriter, *events: dict[str, Any]) -> None:
        lines = [json.dumps({**event, "worker": self.id}).encode() + b"\n" for event in events]
        writer.write(b"".join(b"%x\r\n%s\r\n" % (len(line), line) for line in lines))

    def _obey(self, writer: asyncio.StreamWriter, order: dict[str, Any]) -> None:
        if order["order"] == "Recover" and order["generation"] > self._generation:
            self._generation, self._members = order["generation"], order["members"]
            self._say(writer, {"event": "GenerationAdopted", "generation": self._generation, "step": 0})

    async def _is_back(self) -> None:
        self.connected = True
        async with self._back:
            self._back.notify_all()

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(random.random() * HEARTBEAT_S)
        while True:
            self._say(writer, {"event": "WorkerHeard"})
            await asyncio.sleep(HEARTBEAT_S)


async def hold(folder: Path) -> None:
    """Hold workers' ends, and do as is asked on the standard input."""
    bound_tls_memory()
    context = ssl.create_default_context(cafile=str(folder / "ca"))
    back = asyncio.Condition()
    asked = await asyncio.to_thread(sys.stdin.readline)
    workers = [Worker(about, context, back) for about in json.loads(asked)]
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    print(json.dumps(len(tasks)), flush=True)
    while command := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if command == "break":
            for worker in workers:
                worker.cut()
        elif command == "all":
            while not all(worker.connected for worker in workers):
                await asyncio.sleep(0.05)
        print(json.dumps(sum(worker.connected for worker in workers)), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    programs = {"serve": serve, "clients": hold}
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(programs[sys.argv[1]](Path(sys.argv[2])))
