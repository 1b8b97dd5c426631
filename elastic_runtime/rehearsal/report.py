"""The report of a rehearsal, on standard output."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING, Any

from elastic_runtime.rehearsal.timetable import JOINED, LAST, LEADER_LOST, REPEATED, REPEATED_ALONE, SAVED
from elastic_runtime.rehearsal.verdict import largest_difference

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elastic_runtime.rehearsal.verdict import Finding

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
