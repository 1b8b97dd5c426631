"""Reviews at a steady rate at a webhook process's own port, and how long each takes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import ssl
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import aiohttp

from benchmarks.kwok_bench import REPOSITORY
from kfp_gpuquota.cluster.kubernetes import labels, webhook
from kfp_gpuquota.cluster.kubernetes.connection import Connection
from kfp_gpuquota.cluster.kubernetes.kubeconfig import from_file
from tools.devcluster.layout import free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

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

    async def once(self) -> None:
        """One review."""
        due = time.perf_counter()
        async with self._session.post(self._url, data=self._body) as answer:
            assert json.loads(await answer.read())["response"]["allowed"]
        self.seconds.append(time.perf_counter() - due)

    def begin(self) -> None:
        """Begin; what was measured before is forgotten."""
        self.seconds.clear()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            call = asyncio.create_task(self.once())
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            await asyncio.sleep(1 / RATE_PER_S)

    def end(self) -> dict[str, Any]:
        """End, and return the times in ms."""
        assert self._task is not None
        self._task.cancel()
        ordered = sorted(self.seconds)
        at = {"p50_ms": 0.50, "p99_ms": 0.99}
        found = {name: round(1000 * ordered[int(part * (len(ordered) - 1))], 1) for name, part in at.items()}
        return {**found, "max_ms": round(1000 * ordered[-1], 1), "reviews": len(ordered)}


@contextlib.asynccontextmanager
async def beside(kubeconfig: Path) -> AsyncIterator[Load]:
    """A load on a webhook process of its own, beside the controller's.

    The times are taken in the generator's event loop, which is busy with the burst: they are upper bounds.
    """
    port = free_ports().api
    arguments = [f"--kubeconfig={kubeconfig}", "--reviews-only", f"--webhook-port={port}"]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "kfp_gpuquota.cluster.kubernetes", *arguments], cwd=REPOSITORY, stderr=output
        )
        try:
            async with Connection(from_file(kubeconfig)) as api:
                authority = await _authority(api)
            context = ssl.create_default_context(cadata=authority)
            connector = aiohttp.TCPConnector(ssl=context, limit=8)
            async with aiohttp.ClientSession(connector=connector) as session:
                load = Load(f"https://127.0.0.1:{port}{webhook.PATH}", session)
                await _until_served(load)
                yield load
        finally:
            process.terminate()
            process.wait(30)


async def _authority(api: Connection) -> str:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(Exception):
                secret = json.loads(await api.call("GET", SECRET))
                return re.sub(r"\r", "", base64.b64decode(secret["data"]["ca.crt"]).decode())
            await asyncio.sleep(0.2)


async def _until_served(load: Load) -> None:
    async with asyncio.timeout(60):
        while not load.seconds:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                await load.once()
            await asyncio.sleep(0.1)
