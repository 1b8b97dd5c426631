"""The order of a project's waiting jobs and pods."""

from __future__ import annotations

import msgspec
import pytest

from kfp_gpuquota.api import Job, JobSpec, JobStatus, Order, Phase, Reason, ReasonCode
from kfp_gpuquota.api.queue import Queued, ahead_of, has_places, queued


def job(name: str, at: float = 0.0, phase: Phase = Phase.PENDING, **spec: object) -> Job:
    asked = JobSpec(name=name, project="a", command=("x",), **spec)  # type: ignore[arg-type]
    return Job(uid=name, spec=asked, status=JobStatus(phase=phase, submitted_at=at))


def waits(name: str, at: float = 0.0, **spec: object) -> Queued:
    found = queued(job(name, at, **spec))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_the_higher_priority_comes_first_then_the_older() -> None:
    line = [waits("new", 3), waits("old", 1), waits("urgent", 9, priority=80), waits("later", 4), waits("twin", 3)]
    assert [each.name for each in ahead_of(line[4], line)] == ["urgent", "old", "new"]
    assert ahead_of(line[2], line) == []


def test_what_waits_for_another_node_pool_is_in_another_queue() -> None:
    mine = waits("mine", 5)
    assert ahead_of(mine, [waits("other", 1, node_pool="a100"), mine]) == []


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.PENDING])
def test_what_does_not_wait_for_its_turn_is_in_no_queue(phase: Phase) -> None:
    assert queued(job("x", phase=phase)) is None


def test_one_that_rests_after_its_workers_did_not_come_up_is_in_no_queue() -> None:
    rests = job("x")
    reason = Reason(code=ReasonCode.PODS_NOT_READY, message="no such image")
    rests = msgspec.structs.replace(rests, status=msgspec.structs.replace(rests.status, reason=reason))
    assert queued(rests) is None


def test_a_place_is_told_where_the_order_is_known_and_does_not_change_with_time() -> None:
    shown = {(order, known): has_places(order, uses_known=known) for order in Order for known in (True, False)}
    assert {one for one, has in shown.items() if not has} == {
        (Order.SHORTEST, True),
        (Order.SHORTEST, False),
        (Order.FAIR_USERS, False),
    }


def test_the_order_is_that_of_the_scheduler() -> None:
    from kfp_gpuquota.scheduler.state.intake import new_job  # noqa: PLC0415 - the API does not import it
    from kfp_gpuquota.scheduler.state.model import Queue  # noqa: PLC0415
    from kfp_gpuquota.scheduler.state.order import job_key  # noqa: PLC0415

    jobs = [job("b", 2), job("a", 2), job("s", 7, kind="build"), job("p", 9, priority=10), job("o", 1)]
    line = [waiting for each in jobs if (waiting := queued(each)) is not None]
    planned = [new_job(each.uid, each.spec, Queue(name="a"), each.status.submitted_at) for each in jobs]
    assert [w.uid for w in sorted(line, key=lambda w: w.key)] == [j.uid for j in sorted(planned, key=job_key)]
