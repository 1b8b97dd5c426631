"""Runs one script alone, and through 1 -> 2 -> 1 -> 2 workers and a kill -9 of rank 0; compares what they trained."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import UsageError
from elastic_runtime.loop.session import Session
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.training import Plan
from tests.elastic_runtime.zoo import catalogue
from tests.elastic_runtime.zoo.parts import SCRIPTS, Script, fetched, flat

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elastic_runtime.plan.batches import MicroBatch
    from tests.elastic_runtime.training import Gate

__all__ = ["alone", "catalogue", "changed", "compare", "refusal"]


def run_script(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    """One worker: the script named by the plan, and what it trained in `directory`."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    with recording(index, directory, gate) as sessions:
        modules = SCRIPTS[str(plan.options["script"])].body(reduction=plan.options["reduction"])
        final = {"model": flat(modules), "step": sessions[-1].position.step}
    torch.save(final, directory / f"final-{index}.pt")


@contextlib.contextmanager
def recording(index: int, directory: Path, gate: Gate | None) -> Iterator[list[Session]]:
    """Write down which samples each step was computed from and which steps were applied; wait at the gate."""
    begin, count = Session.begin_iteration, Session._count
    sessions: list[Session] = []
    consumed: list[int] = []
    with (directory / f"consumed-{index}.jsonl").open("a", buffering=1) as log:

        def note(session: Session, what: str) -> None:
            row = {what: session.position.step, "generation": session._member.generation, "indices": consumed}
            log.write(json.dumps(row) + "\n")

        def noted_begin(session: Session, micro: MicroBatch) -> int:
            if session not in sessions:
                sessions.append(session)
            if gate:
                gate.pass_through(index, session.position.step)
            if session._step.first:
                consumed.clear()
            consumed.extend(fetched[-micro.size :] if micro.size else [])
            fetched.clear()
            number = begin(session, micro)
            if micro.last:
                note(session, "computed")
            return number

        def noted_count(session: Session, micro: MicroBatch) -> None:
            note(session, "applied")
            count(session, micro)

        Session.begin_iteration, Session._count = noted_begin, noted_count  # type: ignore[method-assign, assignment]
        try:
            yield sessions
        finally:
            Session.begin_iteration, Session._count = begin, count  # type: ignore[method-assign]


def plan_of(script: Script, reduction: str) -> Plan:
    """What the workers are given."""
    return Plan(body=run_script, options={"script": script.name, "reduction": reduction})


def alone(script: Script, reduction: str, directory: Path) -> dict[str, Any]:
    """What one undisturbed worker trains, in this process, and the samples of each step."""
    directory.mkdir()
    threads = torch.get_num_threads()
    try:
        run_script(plan_of(script, reduction), 0, directory, None)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(mode=False)
    rows = [json.loads(line) for line in (directory / "consumed-0.jsonl").read_text().splitlines()]
    steps = {row["computed"]: row["indices"] for row in rows if "computed" in row}
    return {**torch.load(directory / "final-0.pt"), "samples": steps}


def refusal(script: Script, reduction: str, directory: Path) -> str:
    """The message with which the script ends alone; "" where it trains."""
    try:
        alone(script, reduction, directory)
    except UsageError as error:
        return str(error)
    return ""


def changed(script: Script, reduction: str, directory: Path) -> dict[str, Any]:
    """What is trained through 1 -> 2 -> 1 -> 2 workers, of which the first one is then killed."""
    directory.mkdir()
    with Cluster(directory, plan_of(script, reduction)) as cluster:
        first = script.first_step
        cluster.start(0, step=first + 2)
        cluster.resize(0, 1, up_to=first + 5)
        cluster.wait_until_at(first + 5, 0, 1)
        cluster.resize(0, up_to=first + 8)
        cluster.wait_until_at(first + 8, 0)
        cluster.resize(0, 2, up_to=first + 12)
        cluster.wait_until_at(first + 12, 0, 2)
        cluster.kill("w0")
        cluster.let_go()
        cluster.wait_for_end(2)
        return {**cluster.finals()["final-2"], "samples": cluster.consumed()}


def compare(found: dict[str, Any], expected: dict[str, Any], *, exact: bool) -> None:
    """AssertionError where another number of steps, other samples or another model was trained."""
    assert found["step"] == expected["step"]
    assert {k: sorted(v) for k, v in found["samples"].items()} == {k: sorted(v) for k, v in expected["samples"].items()}
    for name, value in expected["model"].items():
        if exact:
            assert torch.equal(found["model"][name], value), name
        else:
            torch.testing.assert_close(found["model"][name], value, rtol=2e-3, atol=2e-4, msg=name)
