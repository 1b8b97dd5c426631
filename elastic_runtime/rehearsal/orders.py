"""The stand-in for the coordinator: it gives the orders of the timetable, without a connection."""

from __future__ import annotations

import atexit
import os
import shutil
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from elastic_runtime.membership.orders import Order
from elastic_runtime.rehearsal import report
from elastic_runtime.rehearsal.records import Records
from elastic_runtime.rehearsal.second_worker import SecondWorker, key_of, note_errors, prepare_directory
from elastic_runtime.rehearsal.timetable import FIRST, FIRST_EPOCH, SECOND, first_order, order_after_failure
from elastic_runtime.rehearsal.verdict import findings_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elastic_runtime.torch_internals import Store

SECOND_WORKER_S = 600.0
"""Seconds that the first worker waits for the exit of the second one."""


class RehearsedOrders:
    """Has the methods of `Coordinator`. `on_order` is called in the thread that reports an event.

    `directory`: of the rehearsal's files. `key`: what both workers prove to hold. `exit_code`: of the process, once it
    is closed.
    """

    exit_code = 0
    first_epoch = FIRST_EPOCH

    def __init__(self, rehearse: str, worker: str, on_order: Callable[[Order], None]) -> None:
        """`rehearse`: the value of ELASTIC_REHEARSE, which names the second worker's directory."""
        self.worker, self._on_order = worker, on_order
        self._leads = worker == FIRST
        self.directory: Path = prepare_directory(rehearse)
        self.records = Records(self.directory, worker)
        self.key = key_of(self.directory)
        self._second: SecondWorker | None = None
        self._closed = False

    def start(self) -> None:
        """Start the second worker, or watch the first one."""
        note_errors(self.records)
        if self._leads:
            self._second = SecondWorker(self.directory)
            self._in_thread(self._watch_second)

    def send(self, event: str, **fields: Any) -> None:
        """React to what this worker reports."""
        if event == "WorkerReady":
            self._on_order(first_order(self.worker))
        elif event == "CollectiveFailed":
            self._on_order(order_after_failure(self.worker, int(fields["generation"])))
        elif event == "PreparationFailed":
            self.records.write("error", kind="PreparationFailed", message=str(fields.get("why")))
            self.release()

    def release(self) -> None:
        """End this worker's part."""
        self._on_order(Order("Release", why="the rehearsal is over"))

    def store(self, generation: int) -> Store:
        """The rendezvous store of a generation: a file."""
        file = FileStore(str(self.directory / "store"), -1)
        return PrefixStore(f"generation-{generation}", file)

    def close(self) -> None:
        """End the rehearsal: wait for the second worker, compare, print the report, and set the exit code."""
        if self._closed:
            return
        self._closed = True
        if not self._leads:
            self.records.write("end")
            return
        if self._second is not None:  # else this training was refused before it began
            self._report(self._second)
        self._remove_directory()

    def _report(self, second: SecondWorker) -> None:
        failed = any(row["what"] == "error" for row in self.records.rows())
        second.end(0.0 if failed else SECOND_WORKER_S)
        rows = [*self.records.rows(), *Records(self.directory, SECOND).rows()]
        findings = findings_of(rows)
        if not failed and second.code != 0 and not any(row["what"] == "error" for row in rows):
            findings.append(second.finding())
        report.show(findings, rows)
        self.exit_code = int(any(finding.fails for finding in findings))

    def _remove_directory(self) -> None:
        """Under another name first: a thread that still prepares a generation would create files in it meanwhile."""
        ended = self.directory.with_name(f"{self.directory.name}.ended")
        with suppress(FileNotFoundError):
            self.directory.rename(ended)
        shutil.rmtree(ended, ignore_errors=True)

    def at_exit(self) -> None:
        """The script has ended by itself: the exit code is the report's."""
        self.close()
        if self.exit_code:
            report.flush()
            os._exit(self.exit_code)

    def _watch_second(self) -> None:
        """End the first worker's part where the second one ends before it has taken part to the end."""
        assert self._second is not None
        while not self._closed:
            if self._second.poll() is not None:
                self.release()
                return
            time.sleep(0.05)

    def _in_thread(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="elastic-rehearsal", daemon=True).start()


def rehearsed_orders(rehearse: str, worker: str, on_order: Callable[[Order], None]) -> RehearsedOrders:
    """The stand-in, which reports at the end of the process."""
    orders = RehearsedOrders(rehearse, worker, on_order)
    atexit.register(orders.at_exit)
    return orders
