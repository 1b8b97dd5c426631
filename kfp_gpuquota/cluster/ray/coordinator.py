"""The membership service of one training as a program: orders on stdin, notices on stdout, both as JSON lines.

    python -m kfp_gpuquota.cluster.ray.coordinator --address 10.0.0.7

For trainings on a Ray cluster without our daemon. `elastic_runtime.integrations.ray` starts it: that package imports
nothing of this one, so the two have a protocol in common and no code. It ends when stdin does. Workers are served over
TLS at `address`, each with the token of its job.

Nothing is stored: the program ends with the training, and with it the numbers of its generations.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kfp_gpuquota.cluster.ray.membership import serving
from kfp_gpuquota.errors import GpuQuotaError
from kfp_gpuquota.server.membership.service import MembershipService

if TYPE_CHECKING:
    from kfp_gpuquota.api import Progress
    from kfp_gpuquota.membership import AnnounceCommit


class Open(msgspec.Struct, frozen=True, tag_field="order", tag="open"):
    """Serve a job, whose first generation has `min_workers` at least."""

    job: str
    token: str
    min_workers: int


class Target(msgspec.Struct, frozen=True, tag_field="order", tag="target"):
    """The job should have these workers."""

    job: str
    workers: list[str]


class Gone(msgspec.Struct, frozen=True, tag_field="order", tag="gone"):
    """A worker's process has ended; `finished`: its training loop came to its end."""

    job: str
    worker: str
    finished: bool = False


class Close(msgspec.Struct, frozen=True, tag_field="order", tag="close"):
    """Serve the job no longer."""

    job: str


Order = Open | Target | Gone | Close


class PrintedNotices:
    """Writes each notice of the service to stdout."""

    def send(self, notice: str, **fields: Any) -> None:
        """Write one line."""
        sys.stdout.buffer.write(msgspec.json.encode({"notice": notice, **fields}) + b"\n")
        sys.stdout.buffer.flush()

    def generation_reserved(self, job_uid: str, generation: int) -> None:
        """Store nothing: no other coordinator follows this one."""

    def generation_committed(self, job_uid: str, commit: AnnounceCommit) -> None:
        """Write which workers train now."""
        self.send("committed", job=job_uid, **msgspec.to_builtins(commit))

    def worker_released(self, job_uid: str, worker: str, step: int) -> None:
        """Write which worker leaves."""
        self.send("released", job=job_uid, worker=worker, step=step)

    def kill_requested(self, job_uid: str, worker: str, why: str) -> None:
        """Write which worker's process must be ended."""
        self.send("kill", job=job_uid, worker=worker, why=why)

    def progress_reported(self, job_uid: str, worker: str, progress: Progress) -> None:
        """Write nothing: the loop reports its metrics to Ray Train."""

    def training_finished(self, job_uid: str, worker: str, step: int) -> None:
        """Write that a worker applied the last step."""
        self.send("finished", job=job_uid, worker=worker, step=step)


def carry_out(service: MembershipService, order: Order) -> None:
    """Carry out one order. What concerns a job that is closed is ignored."""
    match order:
        case Open():
            service.open(order.job, order.token, min_workers=order.min_workers)
        case Target() if service.is_open(order.job):
            service.set_target(order.job, order.workers)
        case Gone():
            service.worker_exited(order.job, order.worker, finished=order.finished)
        case Close():
            service.close(order.job)
        case _:
            pass


async def serve(address: str) -> None:
    """Serve until stdin ends."""
    notices = PrintedNotices()
    service = MembershipService(notices)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    with tempfile.TemporaryDirectory(prefix="coordinator-") as directory:
        async with serving(service, address, 0, Path(directory) / "membership.json") as coordinates:
            notices.send("serving", **msgspec.to_builtins(coordinates))
            ticking = service.lifespan(None)  # type: ignore[arg-type]  # the application is not used
            await anext(ticking)
            while line := await reader.readline():
                carry_out(service, msgspec.json.decode(line, type=Order))
            await anext(ticking, None)


def main() -> None:
    """Run it; exit code 1 with one sentence where the address cannot be served."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--address", required=True, help="where workers reach it: this machine's in the Ray cluster")
    try:
        asyncio.run(serve(parser.parse_args().address))
    except GpuQuotaError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
