"""Changes of an ElasticJob's specification, as the watch delivers them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.kubernetes.detached import JOBS, Detached, detached


def see(test: Detached, **spec: Any) -> None:
    template = {"spec": {"containers": [{"name": "main", "image": "x"}]}}
    metadata = {"name": "train", "namespace": "team", "uid": "job"}
    test.see(JOBS, {"metadata": metadata, "spec": {"template": template, **spec}})


@pytest.mark.parametrize("before", [False, True])
def test_a_job_that_is_suspended_or_resumed_follows_what_changes_with_it(*, before: bool) -> None:
    """As `kubectl apply` writes them, in one request."""

    async def scenario() -> None:
        async with detached() as test:
            await test.start()
            test.team("team")
            see(test, suspend=False, priority=1)
            see(test, suspend=before, priority=1)
            assert test.controller.elastic.book.jobs["job"].suspended is before
            see(test, suspend=not before, priority=90)
            job = test.controller.elastic.book.jobs["job"]
            assert (job.suspended, job.spec.priority) == (not before, 90)

    asyncio.run(scenario())
