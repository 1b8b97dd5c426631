"""One job's token, and connections without any, against the membership service while 20 honest jobs train.

    python benchmarks/coordinator_attack.py [--seconds 6] [--attack NAME ...]

The service is a process of its own with the limit of memory that the chart deploys (1 GiB), over TLS. The honest jobs
have two workers each: per step each worker stores a value, reads both, and deletes its own; workers also connect again.
The attacks run one after the other from another address, in a third process of low priority, so that what is measured
is the service and not the attacker's use of the machine. Bars: peak_mib <= 512, worst_latency_ms <= 200 (of one request
of an honest job, on a connection that it has), lost_steps 0, and the service never ends. worst_turn_ms is the CPU time
of the longest turn of the service's event loop: the part of a latency that no other program of the machine causes.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import logging
import os
import random
import re
import resource
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from common import print_conditions, print_result, written_certificates  # noqa: E402

from kfp_gpuquota.cluster.kubernetes.elasticjob.membership.service import serving  # noqa: E402
from kfp_gpuquota.cluster.kubernetes.shards.server import bound_tls_memory  # noqa: E402
from kfp_gpuquota.server.membership.service import MembershipService  # noqa: E402
from kfp_gpuquota.server.transport.tls import load_pair  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

MEMORY_BYTES: Final = 1 << 30
JOBS: Final = 20
STEP_S: Final = 0.25
LOST_S: Final = 5.0
SETTLE_S: Final = 2.0
ATTACKER: Final = "attacker"
ATTACKS_FROM: Final = "127.0.0.2"
HONEST_FROM: Final = "127.0.0.3"
BARS: Final = {"peak_mib": 512, "worst_latency_ms": 200, "lost_steps": 0}


# The service


class _Notices:
    """Counts the workers that the service wants killed."""

    def __init__(self) -> None:
        self.killed: list[str] = []

    def kill_requested(self, job_uid: str, worker: str, why: str) -> None:
        if job_uid != ATTACKER:
            print(f"killed {worker}: {why}", file=sys.stderr, flush=True)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


async def serve(folder: Path) -> None:
    """Serve 20 honest jobs and the attacker's."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    _before_others()
    bound_tls_memory()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_pair(context, (folder / "cert").read_bytes(), (folder / "key").read_bytes())
    service = MembershipService(_Notices())
    for uid in (*honest_jobs(), ATTACKER):
        first = 1000 if uid == ATTACKER else 1  # a job that was resized often has a space for each generation
        workers = [f"{uid}-{n}" for n in range(2)]
        service.open(uid, f"token-{uid}", first_generation=first, running=workers, worker_prefix=f"{uid}-")
    async with serving(service, 0, context) as port:
        print(port, flush=True)
        turns = Turns()
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps({"worst_turn_ms": turns.worst_ms()}), flush=True)


class Turns:
    """The CPU time of the event loop between two runs of a timer, which is that of its longest turn."""

    def __init__(self) -> None:
        self._loop, self._worst_s, self._before_s = asyncio.get_running_loop(), 0.0, time.thread_time()
        self._tick()

    def _tick(self) -> None:
        now_s = time.thread_time()
        self._worst_s, self._before_s = max(self._worst_s, now_s - self._before_s), now_s
        self._loop.call_later(0.001, self._tick)

    def worst_ms(self) -> float:
        """Return the longest one since the last call."""
        worst_s, self._worst_s = self._worst_s, 0.0
        return round(1e3 * worst_s, 1)


def _before_others() -> None:
    """Take precedence over other programs of the machine, where that is allowed: they are not what is measured."""
    with contextlib.suppress(PermissionError):
        os.nice(-10)


def honest_jobs() -> list[str]:
    """Return the uids of the jobs that train."""
    return [f"honest-{number}" for number in range(JOBS)]


# Requests


class Http:
    """One connection that is opened when needed."""

    def __init__(self, folder: Path, job: str, token: str = "", *, source: str = ATTACKS_FROM) -> None:
        self._source = source
        self._port = int((folder / "port").read_text())
        self._context = _context(folder)
        self._job, self._token = job, token or f"token-{job}"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the connection's ends."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(
                "127.0.0.1", self._port, ssl=self._context, ssl_handshake_timeout=30, local_addr=(self._source, 0)
            )
        return self._streams

    def head(self, path: str, *more: str) -> bytes:
        """Return the head of a request to this job's part of the service."""
        lines = [f"POST /v1/membership/{self._job}/{path} HTTP/1.1", "Host: x", f"Authorization: Bearer {self._token}"]
        return "\r\n".join([*lines, *more, "", ""]).encode()

    async def store(self, operation: str, generation: int = 1, **fields: object) -> tuple[int, bytes]:
        """Ask the rendezvous store; return status and body."""
        return await self.send(f"store/{generation}/{operation}", json.dumps(fields).encode())

    async def send(self, path: str, body: bytes, *more: str) -> tuple[int, bytes]:
        """Send a request and return its answer."""
        reader, writer = await self.open()
        writer.write(self.head(path, f"Content-Length: {len(body)}", *more) + body)
        await writer.drain()
        return await answer(reader)

    def close(self) -> None:
        """Drop the connection."""
        if self._streams:
            self._streams[1].transport.abort()
        self._streams = None


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read one answer with a length, or in chunks."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if found := re.search(rb"(?i)content-length: (\d+)", head):
        return status, await reader.readexactly(int(found[1]))
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return status, body


_CONTEXTS: dict[Path, ssl.SSLContext] = {}


def _context(folder: Path) -> ssl.SSLContext:
    if folder not in _CONTEXTS:
        _CONTEXTS[folder] = ssl.create_default_context(cafile=str(folder / "ca"))
    return _CONTEXTS[folder]


def chunk(*events: dict[str, Any]) -> bytes:
    """Return events as lines, each a chunk of a body."""
    lines = [json.dumps(event).encode() + b"\n" for event in events]
    return b"".join(b"%x\r\n%s\r\n" % (len(line), line) for line in lines)


# Honest jobs


class Honest:
    """Two workers of one job, with the figures of all their requests."""

    def __init__(self, folder: Path, job: str) -> None:
        self._folder, self._job = folder, job
        self.latencies: list[float] = []
        self.connects: list[float] = []
        self.lost = self.steps = 0

    async def run(self) -> None:
        """Train until cancelled."""
        generation: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        orders = (self._orders(n, generation) for n in range(2))
        await asyncio.gather(*orders, self._train(generation), self._connect_again(generation))

    async def _connect_again(self, agreed: asyncio.Future[int]) -> None:
        """Open a connection now and then, as a worker's thread does for a new generation."""
        generation = await agreed
        while True:
            await asyncio.sleep(1.0 + random.random())
            http, started = Http(self._folder, self._job, source=HONEST_FROM), time.perf_counter()
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
                await http.store("count", generation)
            self.connects.append(time.perf_counter() - started)
            http.close()

    async def _orders(self, rank: int, generation: asyncio.Future[int]) -> None:
        """Stay connected, as a worker does; a connection that breaks costs a step."""
        worker, adopted, members = f"{self._job}-{rank}", 0, [f"{self._job}-{n}" for n in range(2)]
        while True:
            http = Http(self._folder, self._job, source=HONEST_FROM)
            try:
                reader, writer = await http.open()
                writer.write(http.head(f"workers/{worker}?incarnation={worker}", "Transfer-Encoding: chunked"))
                hello: list[dict[str, Any]] = [{"event": "WorkerJoined"}, {"event": "WorkerReady"}]
                if adopted:
                    hello = [{"event": "WorkerReconnected", "generation": adopted, "members": members, "step": 1}]
                writer.write(chunk(*({**one, "worker": worker} for one in hello)))
                await reader.readuntil(b"\r\n\r\n")
                beating = asyncio.create_task(_beat(writer, worker))
                try:
                    while line := await reader.readline():
                        if line.startswith(b"{") and (order := json.loads(line)).get("generation", 0) > adopted:
                            adopted = order["generation"]
                            event = {"event": "GenerationAdopted", "generation": adopted, "step": 0}
                            writer.write(chunk({**event, "worker": worker, "members": members}))
                            if not generation.done():
                                generation.set_result(adopted)
                finally:
                    beating.cancel()
            except (OSError, asyncio.IncompleteReadError, ValueError):
                pass
            self.lost += 1
            http.close()
            await asyncio.sleep(0.5)

    async def _train(self, agreed: asyncio.Future[int]) -> None:
        generation = await agreed
        workers = [Http(self._folder, self._job, source=HONEST_FROM) for _ in range(2)]
        while True:
            started = time.perf_counter()
            self.steps += 1
            try:
                async with asyncio.timeout(LOST_S):
                    await asyncio.gather(*(self._step(http, n, generation) for n, http in enumerate(workers)))
            except (OSError, asyncio.IncompleteReadError, ValueError, TimeoutError):
                self.lost += 1
                for http in workers:
                    http.close()
                self._note(time.perf_counter() - started)
            await asyncio.sleep(max(0.0, STEP_S - (time.perf_counter() - started)))

    async def _step(self, http: Http, rank: int, generation: int) -> None:
        keys = [f"{self.steps}/{n}" for n in range(2)]
        value = base64.b64encode(b"x" * 200).decode()
        for operation, fields in (
            ("set", {"key": keys[rank], "value": value}),
            ("get", {"keys": keys, "timeout_s": LOST_S}),
        ):
            started = time.perf_counter()
            status, body = await http.store(operation, generation, **fields)
            self._note(time.perf_counter() - started)
            if status != 200:
                raise ValueError(f"{status}: {body[:200]!r}")
        if self.steps > 2:
            await http.store("delete", generation, key=f"{self.steps - 2}/{rank}")

    def _note(self, seconds: float) -> None:
        self.latencies.append(seconds)


async def _beat(writer: asyncio.StreamWriter, worker: str) -> None:
    while True:
        await asyncio.sleep(1.0)
        writer.write(chunk({"event": "WorkerHeard", "worker": worker}))


async def train(folder: Path) -> None:
    """Train all honest jobs; answer each line of the input with the figures since the line before."""
    bound_tls_memory()
    _before_others()
    jobs = [Honest(folder, uid) for uid in honest_jobs()]
    tasks = [asyncio.create_task(job.run()) for job in jobs]
    while await asyncio.to_thread(sys.stdin.readline):
        latencies = sorted(one for job in jobs for one in job.latencies) or [0.0]
        figures = {
            "worst_latency_ms": round(1e3 * latencies[-1], 1),
            "p99_latency_ms": round(1e3 * latencies[len(latencies) * 99 // 100], 1),
            "worst_connect_ms": round(1e3 * max((one for job in jobs for one in job.connects), default=0.0), 1),
            "lost_steps": sum(job.lost for job in jobs) + sum(task.done() for task in tasks),
            "steps": sum(job.steps for job in jobs),
        }
        for job in jobs:
            job.latencies, job.connects, job.lost = [], [], 0
        print(json.dumps(figures), flush=True)


# Attacks: each runs until it is cancelled. With the token of one job, except where it says otherwise.

MIB: Final = 1 << 20


async def repeatedly(count: int, action: Callable[[int], Awaitable[object]]) -> None:
    """Run `count` loops of the action, whatever it raises."""

    async def loop(number: int) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError, TimeoutError):
                await action(number)
            await asyncio.sleep(0.001)

    await asyncio.gather(*(loop(number) for number in range(count)))


async def fresh(http: Http, path: str, body: bytes) -> None:
    """Send one request, and drop the connection."""
    try:
        await http.send(path, body)
    finally:
        http.close()


async def get_of_one_large_value_many_times(folder: Path) -> None:
    """A request of 16 KiB names one key 4,000 times."""
    http = Http(folder, ATTACKER)
    await http.store("set", key="k", value=base64.b64encode(b"x" * 700_000).decode())
    body = json.dumps({"keys": ["k"] * 4000}).encode()
    connections = [Http(folder, ATTACKER) for _ in range(4)]
    await repeatedly(4, lambda number: fresh(connections[number], "store/1/get", body))


async def gets_whose_answers_are_not_read(folder: Path) -> None:
    """Large answers that wait in the service."""
    setter = Http(folder, ATTACKER)
    for number in range(60):
        await setter.store("set", key=f"k{number}", value=base64.b64encode(b"x" * 700_000).decode())

    async def ask(_: int) -> None:
        http = Http(folder, ATTACKER)
        _reader, writer = await http.open()
        assert isinstance(writer.transport, asyncio.ReadTransport)
        writer.transport.pause_reading()
        body = json.dumps({"keys": [f"k{number}" for number in range(60)]}).encode()
        writer.write(http.head("store/1/get", f"Content-Length: {len(body)}") + body)
        await asyncio.sleep(3)
        http.close()

    await repeatedly(200, ask)


async def waits_of_many_keys(folder: Path) -> None:
    """200 waits of 1 MiB of keys each, and sets that could wake them."""

    body = json.dumps({"keys": ["absent"] * 100_000, "timeout_s": 300}).encode()

    async def wait(_: int) -> None:
        await fresh(Http(folder, ATTACKER), "store/1/wait", body)

    setter = Http(folder, ATTACKER)
    await asyncio.gather(repeatedly(200, wait), repeatedly(1, lambda _: setter.store("set", key="other", value="eA==")))


async def waits_of_distinct_keys(folder: Path) -> None:
    """As many waits as fit, of distinct keys, each of which is set and deleted."""

    async def wait(number: int) -> None:
        await fresh(Http(folder, ATTACKER), "store/1/wait", bodies[number])

    keys = [f"{n}" for n in range(4000)]
    bodies = [json.dumps({"keys": [*keys, f"absent{number}"], "timeout_s": 300}).encode() for number in range(300)]
    setter = Http(folder, ATTACKER)
    for n in range(4000):
        await setter.store("set", key=f"{n}", value="")

    async def toggle(_: int) -> None:
        await setter.store("delete", key="0")
        await setter.store("set", key="0", value="")

    await asyncio.gather(repeatedly(300, wait), repeatedly(1, toggle))


async def silent_connections(folder: Path) -> None:
    """Without a token: 6,000 connections that never begin their handshake."""
    port = int((folder / "port").read_text())

    async def connect(_: int) -> None:
        _reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(ATTACKS_FROM, 0))
        await asyncio.sleep(60)
        writer.close()

    await repeatedly(6000, connect)


async def half_handshakes(folder: Path) -> None:
    """Without a token: the first bytes of a handshake, and no more."""
    port = int((folder / "port").read_text())
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        _context(folder).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1").do_handshake()
    hello = outgoing.read()

    async def connect(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(ATTACKS_FROM, 0))
        writer.write(hello if number % 2 else hello[:100])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30):
                while await reader.read(4096):
                    pass
        writer.transport.abort()

    await repeatedly(2000, connect)


async def handshakes_without_a_request(folder: Path) -> None:
    """Without a token: complete handshakes, then a head that never ends."""

    async def connect(_: int) -> None:
        http = Http(folder, ATTACKER, "wrong")
        _reader, writer = await http.open()
        writer.write(b"POST /v1/membership/attacker/store/1/set HTTP/1.1\r\n")
        for number in range(120):
            writer.write(b"X-%d: %s\r\n" % (number, b"a" * 8000))
            await writer.drain()
        await asyncio.sleep(20)
        http.close()

    await repeatedly(300, connect)


async def refused_workers(folder: Path) -> None:
    """New worker ids whose first message is refused."""
    numbers = iter(range(1 << 40))

    async def connect(number: int) -> None:
        http = connections[number]
        try:
            await http.send(f"workers/{ATTACKER}-{next(numbers)}{'x' * 4000}?incarnation={'y' * 3000}", b"{}\n")
        except BaseException:
            http.close()
            raise

    connections = [Http(folder, ATTACKER) for _ in range(16)]
    await repeatedly(16, connect)


async def accepted_workers(folder: Path) -> None:
    """New worker ids that are accepted, as many as the service takes."""
    numbers = iter(range(1 << 40))

    async def connect(number: int) -> None:
        worker = f"{ATTACKER}-{next(numbers)}{'x' * 3000}"
        http = connections[number]
        try:
            await http.send(
                f"workers/{worker}?incarnation=1",
                json.dumps({"event": "WorkerJoined", "worker": worker}).encode() + b"\n",
            )
        except BaseException:
            http.close()
            raise

    connections = [Http(folder, ATTACKER) for _ in range(16)]
    await repeatedly(16, connect)


async def events_without_pause(folder: Path) -> None:
    """Connected workers that send events as fast as they can: other members, failures, progress."""
    members = [f"{ATTACKER}-{n}" for n in range(800)]

    async def connect(number: int) -> None:
        worker = f"{ATTACKER}-{number}"
        http = Http(folder, ATTACKER)
        reader, writer = await http.open()
        reading = asyncio.create_task(_discard(reader))
        try:
            writer.write(http.head(f"workers/{worker}?incarnation=1", "Transfer-Encoding: chunked"))
            writer.write(chunk({"event": "WorkerJoined", "worker": worker}, {"event": "WorkerReady", "worker": worker}))
            metrics = {f"m{n}{'x' * 200}": 1.0 for n in range(400)}
            events = chunk(
                *({"event": "CollectiveFailed", "worker": worker, "generation": 1, "why": "y" * 500},) * 20,
                *({"event": "WorkerReconnected", "worker": worker, "generation": 1, "members": members},) * 2,
                *({"event": "PreparationFailed", "worker": worker, "generation": g} for g in range(8)),
                {
                    "event": "ProgressReported",
                    "worker": worker,
                    "step": 1,
                    "metrics": metrics,
                },
            )
            while not writer.transport.is_closing():
                writer.write(events)
                await writer.drain()
        finally:
            http.close()
            reading.cancel()

    await repeatedly(32, connect)


async def _discard(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


async def many_generations(folder: Path) -> None:
    """Requests to the stores of all generations that might exist, and to others."""
    connections = [Http(folder, ATTACKER) for _ in range(16)]
    numbers = iter(range(1 << 40))

    async def ask(number: int) -> None:
        generation = next(numbers) % 3000
        await connections[number].store("set", generation, key="k", value=base64.b64encode(b"x" * 100_000).decode())

    await repeatedly(16, ask)


async def a_full_store(folder: Path) -> None:
    """Keys and values up to the limits, with appends to the largest value."""
    connections = [Http(folder, ATTACKER) for _ in range(16)]
    numbers = iter(range(1 << 40))
    large = base64.b64encode(b"x" * 700_000).decode()

    async def ask(number: int) -> None:
        if number % 2:
            await connections[number].store("append", key="large", value=large)
        else:
            await connections[number].store("set", keys=[f"{next(numbers)}" for _ in range(5000)], values=[""] * 5000)

    await repeatedly(16, ask)


async def deep_json(folder: Path) -> None:
    """Nested lists as bodies and as events."""
    connections = [Http(folder, ATTACKER) for _ in range(8)]
    body = b'{"keys": ' + b"[" * 400_000 + b"]" * 400_000 + b"}"
    event = b'{"event": "WorkerJoined", "worker": ' + b"[" * 30_000 + b"]" * 30_000 + b"}\n"

    async def ask(number: int) -> None:
        if number % 2:
            await connections[number].send("store/1/set", body)
        else:
            http = Http(folder, ATTACKER)
            await http.send(f"workers/{ATTACKER}-0?incarnation=1", event)
            http.close()

    await repeatedly(8, ask)


async def slow_bodies(folder: Path) -> None:
    """Bodies of 1 MiB whose last byte never comes."""

    async def ask(_: int) -> None:
        http = Http(folder, ATTACKER)
        _reader, writer = await http.open()
        writer.write(http.head("store/1/set", f"Content-Length: {MIB - 1000}") + b" " * (MIB - 2000))
        await asyncio.sleep(25)
        http.close()

    await repeatedly(1000, ask)


async def compressed_bodies(folder: Path) -> None:
    """100 MiB of zeros in 100 KiB."""
    packed = zlib.compress(b"0" * (100 * MIB), 9)

    async def ask(_: int) -> None:
        http = Http(folder, ATTACKER)
        try:
            await http.send("store/1/set", packed, "Content-Encoding: deflate")
        finally:
            http.close()

    await repeatedly(16, ask)


async def pipelined_requests(folder: Path) -> None:
    """Requests that do not wait for their answers."""

    async def ask(_: int) -> None:
        http = Http(folder, ATTACKER)
        try:
            _reader, writer = await http.open()
            one = http.head("store/1/count", "Content-Length: 2") + b"{}"
            while not writer.transport.is_closing():
                writer.write(one * 200)
                await writer.drain()
        finally:
            http.close()

    await repeatedly(8, ask)


async def reconnect_storm(folder: Path) -> None:
    """Workers that connect, say who they are, and leave, without a pause."""

    async def connect(number: int) -> None:
        http = Http(folder, ATTACKER)
        try:
            worker = f"{ATTACKER}-{number % 2}"
            hello = json.dumps({"event": "WorkerJoined", "worker": worker}).encode() + b"\n"
            await http.send(f"workers/{worker}?incarnation=1", hello)
        finally:
            http.close()

    await repeatedly(64, connect)


ATTACKS: Final = (
    get_of_one_large_value_many_times, gets_whose_answers_are_not_read, waits_of_many_keys, waits_of_distinct_keys,
    silent_connections, half_handshakes, handshakes_without_a_request, refused_workers, accepted_workers,
    events_without_pause, many_generations, a_full_store, deep_json, slow_bodies, compressed_bodies, pipelined_requests,
    reconnect_storm,
)  # fmt: skip


async def attack(folder: Path, name: str) -> None:
    """Run one attack until terminated."""
    bound_tls_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    os.nice(5)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # of refused connections it writes much
    print("begins", flush=True)
    await next(one for one in ATTACKS if one.__name__ == name)(folder)


# The measurement


class Service:
    """The service's process."""

    def __init__(self, folder: Path) -> None:
        self.process = program("serve", folder)
        assert self.process.stdout
        (folder / "port").write_text(self.process.stdout.readline())

    @property
    def ended(self) -> bool:
        """Return whether it has ended."""
        return self.process.poll() is not None

    def peak_mib(self) -> int:
        """Return the most memory that it has held since the last call."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) >> 10


def program(*arguments: object) -> subprocess.Popen[str]:
    """Start a process of this file."""
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def measure(folder: Path, names: list[str], seconds: float, show: Callable[[str], None] = print) -> dict[str, Any]:
    """Return the figures over all attacks."""
    written_certificates(folder)
    service = Service(folder)
    trainers = program("train", folder)
    found: dict[str, dict[str, Any]] = {}
    try:
        for name in ("start", "quiet", *names):
            attacker = None if name in {"start", "quiet"} else program("attack", folder, name)
            if attacker is not None and attacker.stdout is not None:
                attacker.stdout.readline()
            time.sleep(seconds)
            if attacker is not None:
                attacker.send_signal(signal.SIGKILL)
                attacker.wait()
            time.sleep(SETTLE_S if attacker else 0.0)
            of_service = {} if service.ended else {"peak_mib": service.peak_mib(), **ask(service.process)}
            found[name] = {"peak_mib": 0, "worst_turn_ms": 0.0, **of_service, **ask(trainers)}
            show(f"{name}: {found[name]}")
            if service.ended:
                break
    finally:
        for process in (trainers, service.process):
            process.kill()
            process.wait()
    attacks = {name: one for name, one in found.items() if name not in {"start", "quiet"}}
    return {
        **{
            key: max((one[key] for one in attacks.values()), default=0)
            for key in (*BARS, "worst_connect_ms", "worst_turn_ms")
        },
        "lost_steps": sum(one["lost_steps"] for one in attacks.values()),
        "steps": attacks[list(attacks)[-1]]["steps"],
        "ended": len(attacks) < len(names) or service.process.returncode != -signal.SIGKILL,
        "quiet_latency_ms": found["quiet"]["worst_latency_ms"],
        "attacks": len(attacks),
    }


def ask(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the figures since the last call."""
    assert process.stdin
    assert process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def main() -> None:
    """Measure, and print the figures as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [one.__name__ for one in ATTACKS]
    parser.add_argument("--attack", action="append", choices=names, help="only this one; may be repeated")
    parser.add_argument("--seconds", type=float, default=6.0, help="the duration of each attack")
    options = parser.parse_args()
    print_conditions("attacks on the membership service", jobs=JOBS, memory_limit_mib=MEMORY_BYTES >> 20, bars=BARS)
    with tempfile.TemporaryDirectory() as folder:
        print_result(**measure(Path(folder), options.attack or names, options.seconds))


if __name__ == "__main__":
    programs: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {"serve": serve, "train": train, "attack": attack}
    if len(sys.argv) > 1 and sys.argv[1] in programs:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(programs[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:]))
    else:
        main()
