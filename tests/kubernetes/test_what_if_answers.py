"""What-ifs without a cluster: how many are answered at once, and what the page says of each refusal."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from kfp_gpuquota.api.wire import OtherTeams, Outlook
from kfp_gpuquota.cluster.kubernetes.controller.what_if import MAX_WAITING, WhatIfs
from kfp_gpuquota.cluster.kubernetes.objects.what_if import Question
from kfp_gpuquota.cluster.kubernetes.web.planner import _outlook
from kfp_gpuquota.errors import ClusterUnavailableError, UsageError
from kfp_gpuquota.scheduler.forecast import RunTime
from kfp_gpuquota.web.views.submission import others
from tests.scheduler.test_victims import world_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota import scheduler

MORE = 3
QUESTION = Question(namespace="a", gpus=1, visible=())


class Leader:
    """A controller with a state."""

    def __init__(self, state: scheduler.State | None) -> None:
        self._state = state

    def current_state(self) -> scheduler.State | None:
        return self._state

    def run_times(self, _now: float) -> Callable[[str], RunTime]:
        return lambda _: RunTime(left_s=600.0)


def test_those_beyond_the_queue_are_asked_to_come_back_and_all_others_are_answered() -> None:
    answers = WhatIfs(lambda: Leader(world_of(2, a=1).state))

    async def ask() -> list[bytes | BaseException]:
        asked = (answers.answer(QUESTION) for _ in range(MAX_WAITING + MORE))
        return [*await asyncio.gather(*asked, return_exceptions=True), await answers.answer(QUESTION)]

    found = asyncio.run(ask())
    refused = [one for one in found if isinstance(one, ClusterUnavailableError)]
    assert len(refused) == MORE
    assert "ask again in a moment" in refused[0].message
    for one in found:
        if one not in refused:
            assert isinstance(one, bytes)
            assert [effect.job for effect in msgspec.json.decode(one, type=Outlook).starts] == ["this-job"]


def test_a_plan_that_takes_too_long_is_given_up_and_the_next_is_made() -> None:
    state = world_of(2, a=1).state

    async def ask() -> None:
        with pytest.raises(ClusterUnavailableError, match="took longer than 1e-09 s"):
            await WhatIfs(lambda: Leader(state), limit_s=1e-9).answer(QUESTION)
        assert await WhatIfs(lambda: Leader(state)).answer(QUESTION)

    asyncio.run(ask())


def test_a_job_that_would_wait_has_an_expected_start() -> None:
    world = world_of(4, a=4)
    world.submit("first", "a", 4)
    world.settle()
    began = time.time()
    found = asyncio.run(WhatIfs(lambda: Leader(world.state)).answer(Question(namespace="a", gpus=4, visible=())))
    (effect,) = msgspec.json.decode(found, type=Outlook).waits
    assert effect.expected_start is not None
    assert effect.expected_start.latest >= began + 600


def test_before_all_objects_are_listed_there_is_no_answer() -> None:
    for leader in (lambda: None, lambda: Leader(None)):
        with pytest.raises(ClusterUnavailableError, match="does not lead, or has not listed"):
            asyncio.run(WhatIfs(leader).answer(QUESTION))


@pytest.mark.parametrize(
    ("status", "content", "sentence"),
    [
        (404, b"404: Not Found", "the controller must be upgraded to this page's version"),
        (401, b"x", r"refuses the page's question \(401\)"),
        (503, b"this controller does not lead\n", r"No answer: this controller does not lead\."),
    ],
)
def test_the_page_says_why_there_is_no_answer(status: int, content: bytes, sentence: str) -> None:
    with pytest.raises(ClusterUnavailableError, match=sentence):
        _outlook(status, content)


def test_a_long_refusal_is_cut_and_one_that_is_no_text_is_shown() -> None:
    with pytest.raises(UsageError) as refused:
        _outlook(400, b"\xff" * 10_000)
    assert len(refused.value.message) == 500


def test_effects_on_other_teams_are_sentences_with_numbers() -> None:
    assert list(others(OtherTeams())) == []
    assert list(others(OtherTeams(shrinks=1, released_gpus=1))) == [
        "1 job of another team would give back 1 GPU that they borrow"
    ]
    assert list(others(OtherTeams(shrinks=1, stops=2, released_gpus=2.5, no_longer_starts=1, grows=2))) == [
        "3 jobs of other teams would give back 2.5 GPUs that they borrow; 2 of them would be stopped",
        "1 job of another team would no longer start",
        "2 jobs of other teams would grow",
    ]
