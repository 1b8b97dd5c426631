"""The stand-in for the coordinator: it gives the orders of the timetable, without a connection.

The report of the rehearsal is printed on standard output.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from elastic_runtime.membership.orders import Order
from elastic_runtime.process.process_exit import at_exit, end_with
from elastic_runtime.rehearsal.records import Records
from elastic_runtime.rehearsal.second_worker import SecondWorker, key_of, note_errors, prepare_directory
from elastic_runtime.rehearsal.timetable import (
    FIRST,
    FIRST_EPOCH,
    JOINED,
    JOINS_IN,
    LAST,
    LEADER_LOST,
    REPEATED,
    REPEATED_ALONE,
    SAVED,
    SECOND,
    first_order,
    order_after_failure,
)
from elastic_runtime.rehearsal.verdict import findings_of, largest_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from elastic_runtime.rehearsal.verdict import Finding
    from elastic_runtime.torch_internals import Store


_WIDTH = 118
_STAGES = (
    (REPEATED_ALONE, "a step repeated by one worker"),
    (JOINED, "a worker that joins"),
    (REPEATED, "a step repeated by two workers"),
    (LEADER_LOST, "the loss of rank 0"),
    (SAVED, "a checkpoint written and read"),
)

NOT_WITH_SHARDS = (
    "The state is sharded: checksums of the gathered state are compared before each step. Not tried with shard=: a "
    "worker that leaves and hands its shards over, more than 2 workers, FSDP's own collectives over NCCL, and objects "
    "that are neither prepared nor tracked."
)


def show(findings: Sequence[Finding], rows: Sequence[dict[str, Any]]) -> None:
    """Print the report."""
    flush()
    print("\n".join(lines(findings, rows)), flush=True)  # noqa: T201  (the program's result)


def flush() -> None:
    """Flush the script's output, so that it precedes the report."""
    sys.stdout.flush()
    sys.stderr.flush()


def lines(findings: Sequence[Finding], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Return the report as text."""
    reached = max((row["step"] for row in rows if row["what"] == "gradients"), default=-1)
    done = [text for step, text in _STAGES if step <= reached]
    fails = [finding for finding in findings if finding.fails]
    summary = f"ELASTIC_REHEARSE: {reached + 1} steps, with {', '.join(done) or 'nothing but their beginning'}."
    yield from textwrap.wrap(summary, _WIDTH)
    if reached < LAST and not fails:
        missing = ", ".join(text for step, text in _STAGES if step > reached)
        yield f"The training ended after {reached + 1} of {LAST + 1} steps" + (
            f"; not tried: {missing}." if missing else "."
        )
    if any(row["what"] == "sharded" for row in rows):
        yield from textwrap.wrap(NOT_WITH_SHARDS, _WIDTH)
    for number, finding in enumerate(fails, 1):
        yield from _block(f"{number}. {finding.what}", finding)
    for finding in findings:
        if not finding.fails:
            yield from _block(f"Note: {finding.what}", finding)
    if fails:
        yield f"{len(fails)} would go wrong on a cluster."
        return
    yield from textwrap.wrap(_limits(rows), _WIDTH)
    yield "No error was found in what was tried."


def _limits(rows: Sequence[dict[str, Any]]) -> str:
    """Return what the comparison of sizes could find, and what it could not."""
    gradients = [row for row in rows if row["what"] == "gradients"]
    if gradients and all(row["exact"] for row in gradients):
        return "Gradients of one worker and of two were compared bit by bit."
    found = largest_difference(rows)
    if found is None:
        return "Gradients of one worker and of two were not compared: a loss that depends on the size is not found."
    difference, limit = found
    compared = "Gradients of one worker and of two, without dropout and batch statistics,"
    if difference == 0.0:
        return f"{compared} were equal."
    return f"{compared} differ by {difference:.1g} of their norm at most; up to {limit:.1g} counts as rounding."


def _block(head: str, finding: Finding) -> Iterator[str]:
    yield from textwrap.wrap(head, _WIDTH, subsequent_indent="   ")
    for label, text in (("why", finding.why), ("remedy", finding.remedy)):
        first, *rest = text.splitlines() or [""]
        yield from textwrap.wrap(f"{label}: {first}", _WIDTH, initial_indent="   ", subsequent_indent="   ")
        yield from rest


SECOND_WORKER_S = 600.0
"""Seconds that the first worker waits for the exit of the second one."""


def when_both_ask(directory: Path, worker: str, give: Callable[[], None], closed: Callable[[], bool]) -> None:
    """Return once both workers have asked for the generation that the second one joins, after `give()`.

    A worker builds a group within a limited time, and either may ask minutes before the other: the second one, which
    starts as the first one does, while that computes slow steps; the first one, while the other loads its data.
    """
    (directory / f"asks-{worker}").touch()
    while not all((directory / f"asks-{each}").exists() for each in (FIRST, SECOND)):
        if closed():
            return
        time.sleep(0.05)
    give()


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
            self._give(first_order(self.worker))
        elif event == "CollectiveFailed":
            self._give(order_after_failure(self.worker, int(fields["generation"])))
        elif event == "PreparationFailed":
            self.records.write("error", kind="PreparationFailed", message=str(fields.get("why")))
            self.release()

    def _give(self, order: Order) -> None:
        if order.generation != JOINS_IN:
            self._on_order(order)
            return
        give, closed = partial(self._on_order, order), lambda: self._closed
        self._in_thread(partial(when_both_ask, self.directory, self.worker, give, closed))

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
        show(findings, rows)
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
            end_with(self.exit_code)

    def _watch_second(self) -> None:
        """End the first worker's part where the second one ends before it has taken part to the end."""
        assert self._second is not None
        while not self._closed:
            if self._second.poll() is not None:
                self.release()
                return
            time.sleep(0.05)

    def _in_thread(self, work: Callable[[], object]) -> None:
        threading.Thread(target=work, name="elastic-rehearsal", daemon=True).start()


def rehearsed_orders(rehearse: str, worker: str, on_order: Callable[[Order], None]) -> RehearsedOrders:
    """The stand-in, which reports at the end of the process."""
    orders = RehearsedOrders(rehearse, worker, on_order)
    at_exit(orders.at_exit)
    return orders
