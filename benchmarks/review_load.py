"""Reviews at a steady rate at a webhook process's own port, and how long each takes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from kwok_bench import REPOSITORY

from kfp_gpuquota.cluster.kubernetes.admission import server
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError, Connection
from kfp_gpuquota.cluster.kubernetes.client.http.credentials import from_file
from kfp_gpuquota.cluster.kubernetes.objects import labels
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RATE_PER_S = 50.0
SECRET = "/api/v1/namespaces/gpuquota-system/secrets/gpuquota-webhook"


def review() -> bytes:
    """A pod that asks for one GPU."""
    container = {"name": "main", "image": "none", "resources": {"limits": {labels.GPU_RESOURCE: "1"}}}
    pod = {"metadata": {"name": "p", "namespace": "team-a"}, "spec": {"containers": [container]}}
    user = {"username": "alice", "groups": ["system:authenticated"]}
    request = {"uid": "1", "operation": "CREATE", "namespace": "team-a", "userInfo": user, "object": pod}
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()


class Load:
    """Reviews that are due at fixed times: one that is late delays no other, and its wait counts."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session
        self._body = review()
        self.seconds: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def once(self, due: float | None = None) -> None:
        """One review."""
        due = time.perf_counter() if due is None else due
        async with self._session.post(self._url, data=self._body) as answer:
            assert json.loads(await answer.read())["response"]["allowed"]
        self.seconds.append(time.perf_counter() - due)

    def begin(self) -> None:
        """Begin; what was measured before is forgotten."""
        self.seconds.clear()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        due = time.perf_counter()
        while True:
            call = asyncio.create_task(self.once(due))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            due += 1 / RATE_PER_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    async def end(self) -> dict[str, Any]:
        """End, and return the times in ms."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(*self._calls)
        ordered = sorted(self.seconds)
        at = {"p50_ms": 0.50, "p99_ms": 0.99}
        found = {name: round(1000 * ordered[int(part * (len(ordered) - 1))], 1) for name, part in at.items()}
        return {**found, "max_ms": round(1000 * ordered[-1], 1), "reviews": len(ordered)}


class Generator:
    """The load as a process of its own, so that a busy benchmark does not count as a slow webhook."""

    def __init__(self, url: str, authority: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, url, str(authority)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def ask(self, command: str) -> Any:
        """Send `begin` or `end` and return the answer."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return json.loads(await asyncio.to_thread(self._process.stdout.readline))

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(30)


@contextlib.asynccontextmanager
async def beside(kubeconfig: Path) -> AsyncIterator[Generator]:
    """A load on a webhook process of its own, beside the controller's; it answers by the time that this is entered."""
    port = free_port()
    arguments = [f"--kubeconfig={kubeconfig}", "--reviews-only", f"--webhook-port={port}"]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "kfp_gpuquota.cluster.kubernetes", *arguments], cwd=REPOSITORY, stderr=output
        )
        generator = None
        try:
            async with Connection(from_file(kubeconfig)) as api:
                (Path(folder) / "ca.crt").write_bytes(await _authority(api))
            generator = Generator(f"https://127.0.0.1:{port}{server.PATH}", Path(folder) / "ca.crt")
            await generator.ask("await")
            yield generator
        finally:
            if generator is not None:
                generator.stop()
            process.terminate()
            process.wait(30)


async def _authority(api: Connection) -> bytes:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(ApiError):
                secret = json.loads(await api.call("GET", SECRET))
                return base64.b64decode(secret["data"]["ca.crt"])
            await asyncio.sleep(0.2)


async def generate(url: str, authority: Path) -> None:
    """The generator's process: commands come on the standard input."""
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(authority)), limit=8)
    async with aiohttp.ClientSession(connector=connector) as session:
        load = Load(url, session)
        while command := (await asyncio.to_thread(sys.stdin.readline)).strip():
            answer: object = None
            if command == "await":
                await _until_served(load)
            elif command == "begin":
                load.begin()
            else:
                answer = await load.end()
            print(json.dumps(answer), flush=True)


async def _until_served(load: Load) -> None:
    async with asyncio.timeout(60):
        while not load.seconds:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                await load.once()
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(generate(sys.argv[1], Path(sys.argv[2])))
