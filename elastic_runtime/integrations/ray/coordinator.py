"""The coordinator of one training: a program of `kfp_gpuquota`, started and spoken to by JSON lines.

This package imports nothing of `kfp_gpuquota`, so that a training image needs torch only; the program is what the two
have in common. It ends with its stdin, however this process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from elastic_runtime.errors import RunError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PROGRAM = "kfp_gpuquota.cluster.ray.coordinator"
END_S = 5.0


class CoordinatorProcess:
    """The running program. `url` and `authority` (PEM) are for its workers."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, authority: str) -> None:
        self._process, self.url, self.authority = process, url, authority

    @classmethod
    async def start(cls, address: str) -> CoordinatorProcess:
        """Start it; workers reach it at `address`. RunError with what it wrote where it does not start."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", PROGRAM, "--address", address,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, limit=1 << 24,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        line = await process.stdout.readline()
        if not line:
            why = (await process.stderr.read()).decode(errors="replace").strip().rpartition("\n")[2]
            await process.wait()
            raise RunError(
                f"the coordinator of the training did not start ({why}); install: pip install 'kfp-gpuquota[ray-train]'"
            )
        serving = json.loads(line)
        return cls(process, serving["url"], serving["authority"])

    def send(self, order: str, **fields: object) -> None:
        """Send an order. RunError where the program has ended."""
        assert self._process.stdin is not None
        if self._process.returncode is not None or self._process.stdin.is_closing():
            raise RunError(f"the coordinator of the training has ended with {self._process.returncode}")
        self._process.stdin.write(json.dumps({"order": order, **fields}).encode() + b"\n")

    async def notices(self) -> AsyncIterator[dict[str, Any]]:
        """Yield its notices until it ends."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            yield json.loads(line)

    async def stop(self) -> None:
        """End it, and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
