"""Which worker's log becomes the step's, and how it is split into lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.api import Job, JobSpec, JobStatus, Phase, Worker, WorkerPhase
from kfp_gpuquota.api.wire import LogChunk
from kfp_gpuquota.dsl.launcher.log_stream import (
    ENDED,
    LogFollower,
    lines_of,
    ran_beside,
    shown_rank,
    to_follow,
    unfollowed_leader,
)

if TYPE_CHECKING:
    from kfp_gpuquota.server.cluster_api import ClusterApi

RUNNING, GONE = WorkerPhase.RUNNING, WorkerPhase.GONE


def _worker(index: int, phase: WorkerPhase = RUNNING, **more: Any) -> Worker:
    return Worker(id=f"w-{index}", job_uid="u", index=index, node="n", devices=(index,), phase=phase, **more)


def _job(*workers: Worker, phase: Phase = Phase.RUNNING) -> Job:
    spec = JobSpec(name="train", project="team-a", command=("true",), gpus=2, min_gpus=1)
    return Job(uid="u", spec=spec, status=JobStatus(phase=phase, workers=workers))


def _next(job: Job, *followed: str) -> list[str]:
    return [worker.id for worker in to_follow(job, list(followed))]


def test_rank_0_is_followed_first_and_a_worker_without_a_rank_last() -> None:
    assert _next(_job(_worker(0, rank=1), _worker(1, rank=0), _worker(2))) == ["w-1", "w-0", "w-2"]


def test_where_another_turns_out_to_lead_its_log_comes_next_also_when_it_has_ended() -> None:
    beside = {"started_at": 1.0, "finished_at": 9.0}
    assert _next(_job(_worker(0), _worker(1)), "w-0") == ["w-1"], "ranks are undetermined: in order of their start"
    assert _next(_job(_worker(0, rank=1), _worker(1, rank=0), _worker(2, rank=2)), "w-0") == ["w-1"]
    assert _next(_job(_worker(0, GONE, rank=1, **beside), _worker(1, GONE, rank=0, **beside)), "w-0") == ["w-1"]


def test_who_led_before_is_not_told_again_when_the_next_one_leads() -> None:
    assert (
        unfollowed_leader(_job(_worker(0, GONE, rank=0), _worker(1, rank=0), _worker(2, rank=1)), ["w-0", "w-1"])
        is None
    )


def test_when_the_followed_worker_leaves_the_next_one_is_followed() -> None:
    job = _job(_worker(0, GONE, rank=0), _worker(1, rank=0), _worker(2, WorkerPhase.STARTING))
    assert _next(job, "w-0") == ["w-1"]


def test_of_workers_that_ended_together_one_log_is_shown() -> None:
    ended = [_worker(index, GONE, started_at=1.0, finished_at=5.0) for index in range(2)]
    job = _job(*ended, phase=Phase.FAILED)
    assert _next(job) == ["w-0", "w-1"]
    assert _next(job, "w-0") == []


def test_a_worker_that_came_and_went_unseen_is_not_missed() -> None:
    before = _worker(0, GONE, started_at=1.0, finished_at=5.0)
    job = _job(before, _worker(1, GONE, started_at=6.0, finished_at=6.1), phase=Phase.SUCCEEDED)
    assert _next(job, "w-0") == ["w-1"]


def test_whoever_takes_a_job_over_is_not_told_of_earlier_attempts() -> None:
    earlier = _worker(0, GONE, started_at=1.0, finished_at=5.0)
    running = _job(earlier, _worker(1, started_at=6.0))
    ended = _job(earlier, _worker(1, GONE, started_at=6.0, finished_at=9.0), phase=Phase.SUCCEEDED)
    assert (_next(running), _next(ended), _next(ended, "w-1")) == (["w-1"], ["w-1"], [])


def test_a_worker_that_ran_beside_the_one_before_is_joined_where_its_log_stands() -> None:
    ended = _worker(0, GONE, started_at=1.0, finished_at=5.0)
    beside, after = _worker(1, started_at=1.0), _worker(2, started_at=6.0)
    job = _job(ended, beside, after)
    assert (ran_beside(job, "w-0", beside), ran_beside(job, "w-0", after)) == (True, False)


def test_without_ranks_a_workers_place_is_shown_also_after_a_restart() -> None:
    first = [_worker(index, GONE, started_at=1.0, finished_at=2.0) for index in range(2)]
    second = [_worker(index, started_at=3.0) for index in (2, 3)]
    job = _job(*first, *second)
    assert [shown_rank(job, worker) for worker in second] == [0, 1]
    assert [shown_rank(_job(*first), worker) for worker in first] == [0, 1]


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\r")), st.integers(1, 7))
def test_lines_are_whole_however_the_log_is_cut(text: str, size: int) -> None:
    raw = text.encode()
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    lines = text.split("\n")
    assert list(lines_of(pieces)) == (lines if lines[-1] else lines[:-1])


def test_of_a_progress_bar_the_last_state_is_left() -> None:
    assert list(lines_of([b" 0%\r 50%", b"\r100%\r\ndone\r", b"\n 1%\r 2%"])) == ["100%", "done", " 2%"]


def test_bytes_that_are_no_text_do_not_stop_the_log() -> None:
    assert list(lines_of([b"\xff\xfe\n", b"ok"])) == ["\ufffd\ufffd", "ok"]


class Cluster:
    """One worker's log, in pieces, which never ends: its pod's end is not seen yet."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)

    def read_log(self, project: str, name: str, *, worker: str, offset: int, timeout_s: float) -> LogChunk:
        text = self._pieces.pop(0)
        return LogChunk(text=text, next_offset=offset + len(text), more=True)


@pytest.mark.parametrize("pieces", [(b"a\nlast", b"%s0\n"), (b"a\nlast\n", b"%s0\n"), (b"a\nlast%s0\n",)])
def test_a_workers_log_is_whole_as_soon_as_its_command_has_ended(pieces: tuple[bytes, ...]) -> None:
    job, written = _job(_worker(0)), list[str]()
    cluster = Cluster(*(piece.replace(b"%s", ENDED.encode()) for piece in pieces))
    follower = LogFollower(lambda: cast("ClusterApi", cluster), job, written.append)
    follower.start()
    follower.await_end_of(job.status.workers[0].id, 60.0)
    assert written == ["[0] a", "[0] last"]
    follower.update(msgspec.structs.replace(job, status=msgspec.structs.replace(job.status, phase=Phase.SUCCEEDED)))
    follower.join(60.0)
    assert written == ["[0] a", "[0] last"]
