"""The actor that runs one training: its coordinator, its attempts, its reports and checkpoints, its result.

Its coordinator is a program of `kfp_gpuquota`, started and spoken to by JSON lines.

This package imports nothing of `kfp_gpuquota`, so that a training image needs torch only; the program is what the two
have in common. It ends with its stdin, however this process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.fs
import ray
from ray.train import Result, UserCallback

from elastic_runtime.errors import RunError
from elastic_runtime.integrations.ray.first_checkpoint import FirstCheckpoint
from elastic_runtime.integrations.ray.group import End, Group, Shape
from elastic_runtime.integrations.ray.ray_internals import (
    CheckpointManager,
    ControllerError,
    TrainingFailedError,
    TrainingReport,
    TrainRunContext,
    WorkerGroupError,
    report_index,
    result_of,
)
from elastic_runtime.integrations.ray.reports import Point, Reports
from elastic_runtime.integrations.ray.worker import Task
from elastic_runtime.sharded.files import whole_ones

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from elastic_runtime.integrations.ray.unmodified.driver import LoopOptions

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


NAMESPACE = "elastic_runtime"
UNLIMITED = -1

_log = logging.getLogger("ray.train.elastic_runtime")


class Controller:
    """One training. Its methods run in one event loop; it ends with the program that called `fit`."""

    def __init__(
        self, run: TrainRunContext, shape: Shape, functions: tuple[Any, ...], shards: Any, options: LoopOptions
    ) -> None:
        self._run, self._shape, self._functions, self._shards = run, shape, functions, shards
        self._options = options
        self._first = FirstCheckpoint(run.run_config.storage_context, run.run_id)
        self._first_checkpoint: Any = None  # with which the attempt began
        config = run.run_config
        self._storage = config.storage_context
        self._checkpoints = CheckpointManager(config.checkpoint_config, self._storage)
        self._callbacks = [callback for callback in config.callbacks if isinstance(callback, UserCallback)]
        self._coordinator: CoordinatorProcess | None = None
        self._group: Group | None = None
        self._reports: Reports[TrainingReport] = Reports()
        self._directories: dict[Point, str] = {}
        self._workers = 0
        self._most = shape.most
        self._job = self._token = ""
        self._size = 0
        self._epoch = self._batch = 0  # of an unmodified loop: the epoch that is trained, the batch of a worker

    async def run(self) -> Result:
        """Run the training to its end, with the attempts that its FailureConfig allows."""
        error: TrainingFailedError | None = None
        value, listening = None, None
        try:
            self._coordinator = await CoordinatorProcess.start(str(ray.util.get_node_ip_address()))
            listening = asyncio.create_task(self._listen(self._coordinator))
            error, value = await self._attempts()
        except RunError as failure:
            error = ControllerError(failure)
        finally:
            if listening:
                listening.cancel()
            if self._coordinator:
                await self._coordinator.stop()
            self._first.drop()
            self._drop_own_checkpoints()
        result = result_of(self._checkpoints, self._storage, error)
        result.return_value = value
        return result

    async def _attempts(self) -> tuple[TrainingFailedError | None, Any]:
        allowed, failures = self._run.run_config.failure_config.max_failures, 0
        while True:
            end = await self._attempt(failures)
            if not end.errors:
                return None, end.value
            if -1 in end.errors:
                return ControllerError(end.errors[-1]), None
            for callback in self._callbacks:
                callback.after_exception(run_context=self._run, worker_exceptions=end.errors)
            failures += 1
            error = WorkerGroupError(end.text, end.errors)
            if allowed != UNLIMITED and failures > allowed:
                return error, None
            _log.warning("attempt %d has failed, and the training is started again: %s", failures, error)

    async def _attempt(self, number: int) -> End:
        assert self._coordinator is not None
        self._job, self._token = f"{self._run.run_id}-{number}", secrets.token_hex(16)
        self._reports = Reports(self._reports.last if self._continues() else None)
        self._directories, self._size, self._epoch, self._batch = {}, 0, 0, 0
        newest = self._checkpoints.latest_checkpoint_result
        self._first_checkpoint = self._first.keep(newest.checkpoint) if newest else None
        self._send("open", token=self._token, min_workers=self._shape.least)
        self._group = Group(
            self._run.run_config.name, self._shape, self._name_worker, self._task, self._send, self._on_end
        )
        self._group.limit(self._most)
        try:
            return await self._group.run()
        finally:
            self._send("close")

    def _send(self, order: str, **fields: object) -> None:
        assert self._coordinator is not None
        with contextlib.suppress(RunError):  # its end is noticed by `_listen`
            self._coordinator.send(order, job=self._job, **fields)

    async def _listen(self, coordinator: CoordinatorProcess) -> None:
        async for notice in coordinator.notices():
            if self._group is None or notice["job"] != self._job:
                continue
            if notice["notice"] == "kill":
                self._group.kill(notice["worker"], notice["why"])
            elif notice["notice"] == "committed" and notice["complete"]:
                self._note_size(notice)
        if self._group is not None:
            self._group.fail(RunError("the coordinator of the training has ended unexpectedly"))

    def _note_size(self, notice: dict[str, Any]) -> None:
        before, self._size = self._size, len(notice["members"])
        _log.info(
            "%d -> %d workers at step %d, pause %.1f ms, %d steps lost",
            before, self._size, notice["step"], notice["pause_ms"], notice["lost_steps"],
        )  # fmt: skip

    def _name_worker(self) -> str:
        self._workers += 1
        return f"w{self._workers - 1}"

    def _task(self, worker: str, provisional: tuple[str, ...]) -> Task:
        assert self._coordinator is not None
        return Task(
            worker=worker,
            job=self._job,
            functions=self._functions,
            run=self._run,
            provisional=provisional,
            url=self._coordinator.url,
            authority=self._coordinator.authority,
            token=self._token,
            checkpoints=self._own_checkpoints(),
            checkpoint=self._first_checkpoint,
            report_index=report_index(self._checkpoints),
            shards=self._shards,
            options=self._options,
        )

    def _own_checkpoints(self) -> str:
        """Return where elastic_runtime keeps its own checkpoints, for the next attempt; "" on object stores."""
        if not isinstance(self._storage.storage_filesystem, pyarrow.fs.LocalFileSystem):
            return ""
        return str(Path(self._storage.experiment_fs_path) / ".elastic_runtime" / self._run.run_id)

    def _continues(self) -> bool:
        """Return whether a loop of elastic_runtime begins this attempt in the middle of the one before."""
        directory = self._own_checkpoints()
        return bool(directory) and bool(whole_ones(directory))

    def _drop_own_checkpoints(self) -> None:
        if directory := self._own_checkpoints():
            shutil.rmtree(directory, ignore_errors=True)
            with contextlib.suppress(OSError):  # there is none, or another run's is there
                Path(directory).parent.rmdir()

    # Called by workers

    async def directory_of(self, point: Point, wanted: str | None) -> str | None:
        """Return the name of the checkpoint directory of this point; None where it was recorded before."""
        if self._reports.recorded(point):
            return None
        return self._directories.setdefault(point, wanted or self._storage.make_default_checkpoint_dir_name())

    async def report(self, worker: str, point: Point, members: tuple[str, ...], report: TrainingReport) -> None:
        """Receive one worker's report."""
        self._consolidate(lambda: self._reports.add(point, worker, members, report))

    async def nodes_of(self, workers: tuple[str, ...]) -> list[str]:
        """Return the nodes of these workers."""
        assert self._group is not None
        return [self._group.node_of(worker) for worker in workers]

    async def epoch(self) -> int:
        """Return the epoch that the workers of the attempt train."""
        return self._epoch

    async def agreed_batch(self, size: int) -> int:
        """Return the batch size of the attempt's first worker."""
        self._batch = self._batch or size
        return self._batch

    async def note_epoch(self, epoch: int) -> None:
        """Note it."""
        self._epoch = epoch

    async def get_all_reported_checkpoints(
        self, index: int, consistency_mode: Any, timeout_s: float | None
    ) -> list[Any]:
        """Return the checkpoints that are kept, as Ray's controller does."""
        return list(await self._checkpoints.get_all_reported_checkpoints(index, consistency_mode, timeout_s))

    def _on_end(self, worker: str) -> None:
        self._consolidate(lambda: self._reports.end(worker))

    def _consolidate(self, take: Callable[[], list[list[TrainingReport]]]) -> None:
        """Record what is complete now. What fails here (storage, a callback of the user's) ends the training."""
        try:
            for reports in take():
                if reports:
                    self._record(reports)
        except Exception as error:  # noqa: BLE001  (a callback may raise anything)
            _log.exception("a report could not be recorded")
            if self._group is not None:
                self._group.fail(error)

    def _record(self, reports: list[TrainingReport]) -> None:
        checkpoint = next((report.checkpoint for report in reports if report.checkpoint), None)
        metrics = [report.metrics for report in reports]
        self._checkpoints.after_report(TrainingReport(checkpoint, metrics[0], validation=False), metrics)
        for callback in self._callbacks:
            callback.after_report(run_context=self._run, metrics=metrics, checkpoint=checkpoint)

    # Called by users

    async def limit_workers(self, workers: int | None) -> str:
        """Limit the number of workers; return why this is impossible, or ""."""
        least, most = self._shape.least, self._shape.most
        if workers is not None and not least <= workers <= most:
            return f"workers={workers} is not between {least} and {most}, the num_workers of its ScalingConfig"
        self._most = most if workers is None else workers
        if self._group is not None:
            self._group.limit(self._most)
        return ""

    async def size(self) -> int:
        """Return how many workers train now."""
        return self._size
