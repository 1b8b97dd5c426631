"""What the controller writes for Jobs that it runs as ElasticJobs, beside hostile objects; without an API server."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.convert.owners import JOBSET_UID_LABEL
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_builder import checkpoint_folder
from kfp_gpuquota.cluster.kubernetes.managed_jobs.conversion import (
    MANAGER,
    ManagedJob,
    elastic_job_of,
    job_status_of,
    without_times,
)
from kfp_gpuquota.cluster.kubernetes.managed_jobs.conversion import PATH as BATCH_JOBS
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob
from kfp_gpuquota.errors import InvalidFieldError
from tests.kubernetes.detached import JOBS, Detached, Object, detached
from tests.kubernetes.test_hostile_objects import no_traceback
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


def run(scenario: Callable[[Detached], Coroutine[Any, Any, None]]) -> None:
    async def all_of_it() -> None:
        async with detached() as test, asyncio.timeout(TIMEOUT_S):
            await scenario(test)

    with no_traceback():
        asyncio.run(all_of_it())


def job_body(nodes: int = 2, notes: dict[str, str] | None = None, **spec: Any) -> Object:
    container = {"name": "main", "image": "x", "resources": {"limits": {labels.GPU_RESOURCE: "1"}}}
    return {
        "metadata": {"name": "train", "namespace": "a", "uid": "the-job", "annotations": notes or {}},
        "spec": {
            "managedBy": MANAGER,
            "parallelism": nodes,
            "template": {"spec": {"containers": [container], **spec.pop("pod", {})}},
            **spec,
        },
    }


def derived(job: Object) -> Object:
    return elastic_job_of(msgspec.json.decode(msgspec.json.encode(job), type=ManagedJob))


def elastic_body(job: Object, uid: str = "elastic", **metadata: Any) -> Object:
    """The ElasticJob that is derived from the Job, as the API server stores it."""
    wanted = derived(job)
    return {**wanted, "metadata": {**wanted["metadata"], "uid": uid, **metadata}, "status": {"phase": "Running"}}


async def written(test: Detached) -> list[tuple[str, str, Any]]:
    """All that is written, once nothing more is: requests are sent after a pause of the status's writer."""
    before = -1
    while before != len(test.connection.asked):
        before = len(test.connection.asked)
        await asyncio.sleep(0.1)
    return [(verb, path.partition("?")[0], body) for verb, path, body in test.connection.asked]


def patched(writes: list[tuple[str, str, Any]]) -> dict[str, Any]:
    """Return the fields of the patch of the ElasticJob, which is sent again while no server answers."""
    body, *_ = [body for verb, path, body in writes if verb == "PATCH" and path.endswith("/elasticjobs/train")]
    return {one["path"].removeprefix("/spec/"): one["value"] for one in body if one["path"].startswith("/spec/")}


@pytest.mark.parametrize("place", [{"namespace": "b"}, {"name": "other"}])
def test_an_elastic_job_that_claims_another_owner_is_not_taken_for_the_jobs(place: dict[str, str]) -> None:
    """Users write owner references: from another namespace or name it gets no template, and writes no status."""

    async def scenario(test: Detached) -> None:
        await test.start()
        test.see(JOBS, elastic_body(job_body(), "forged", **place))
        test.see(BATCH_JOBS, job_body(nodes=3))
        writes = await written(test)
        verbs = [(verb, path) for verb, path, _ in writes if "forged" not in path and "/status" not in path]
        assert ("POST", "/apis/gpuquota.dev/v1alpha1/namespaces/a/elasticjobs") in verbs
        assert not any(verb == "PATCH" and "/elasticjobs/" in path for verb, path in verbs)
        assert not any("/jobs/train/status" in path for _, path, _ in writes)

    run(scenario)


def test_several_elastic_jobs_that_claim_one_owner_can_be_deleted() -> None:
    async def scenario(test: Detached) -> None:
        await test.start()
        claims = [elastic_body(job_body(), uid) for uid in ("one", "two")]
        for claim in claims:
            test.see(JOBS, claim)
        for claim in reversed(claims):
            test.see(JOBS, claim, "DELETED")

    run(scenario)


def test_a_change_of_the_job_leaves_what_a_user_has_changed_of_its_elastic_job() -> None:
    async def scenario(test: Detached) -> None:
        await test.start()
        elastic = elastic_body(job_body())
        elastic["spec"] |= {"priority": 90}  # gpuquota update
        test.see(JOBS, elastic)
        test.see(BATCH_JOBS, job_body(suspend=True))
        assert patched(await written(test)) == {"suspend": True}

    run(scenario)


@pytest.mark.parametrize("notes", [{}, {labels.DERIVED: "{"}, {labels.DERIVED: '{"ttlSecondsAfterFinished": "x"}'}])
def test_an_elastic_job_of_which_a_user_has_changed_the_digests_follows_the_job_again(notes: dict[str, str]) -> None:
    async def scenario(test: Detached) -> None:
        await test.start()
        test.see(JOBS, elastic_body(job_body(), annotations=notes))
        test.see(BATCH_JOBS, job_body(suspend=True))
        assert patched(await written(test)) == {"template": job_body()["spec"]["template"], "suspend": True}

    run(scenario)


@pytest.mark.parametrize(
    "job", [job_body(nodes=0, suspend=True), job_body(notes={labels.MIN_NODES: "x"}, suspend=True)]
)
def test_a_job_that_cannot_be_run_any_more_can_be_suspended(job: Object) -> None:
    async def scenario(test: Detached) -> None:
        await test.start()
        test.see(JOBS, elastic_body(job_body()))
        test.see(BATCH_JOBS, job)
        assert patched(await written(test)) == {"suspend": True}

    run(scenario)


@pytest.mark.parametrize(("status", "warned"), [(409, False), (422, True)])
def test_only_a_refusal_that_somebody_must_act_on_is_reported(
    monkeypatch: pytest.MonkeyPatch, status: int, *, warned: bool
) -> None:
    """Another writer was faster (409): the ElasticJob is read again."""

    def answer(verb: str, path: str, _body: object) -> bytes:
        raise ApiError(status, "", f"refused {verb} {path}")

    async def scenario(test: Detached) -> None:
        await test.start()
        monkeypatch.setattr(test.connection, "answer", answer)
        test.see(JOBS, elastic_body(job_body(), resourceVersion="7"))
        test.see(BATCH_JOBS, job_body(suspend=True))
        writes = await written(test)
        assert patched(writes) == {"suspend": True}
        events = [body for verb, path, body in writes if verb == "POST" and "/events" in path]
        assert any(body["reason"] == "Refused" for body in events) == warned

    run(scenario)


def test_a_status_that_is_refused_is_written_again_after_growing_pauses() -> None:
    """They grow while what is urgent of it stays the same, and the time at which it is derived is not."""
    job = msgspec.json.decode(msgspec.json.encode(job_body(suspend=True)), type=ManagedJob)
    failed = {**elastic_body(job_body()), "status": {"phase": "Failed"}}
    elastic = msgspec.json.decode(msgspec.json.encode(failed), type=ElasticJob)
    first, later = (job_status_of(job, elastic, datetime.fromtimestamp(at, UTC)) for at in (1.0, 100.0))
    assert first != later
    assert without_times(first) == without_times(later)


def test_a_name_that_no_elastic_job_may_have_is_refused() -> None:
    job = job_body()
    job["metadata"]["name"] = "a.b"
    with pytest.raises(InvalidFieldError, match="lower-case letters, digits and '-'"):
        derived(job)


def test_a_field_that_is_taken_out_of_the_job_is_taken_out() -> None:
    async def scenario(test: Detached) -> None:
        await test.start()
        test.see(JOBS, elastic_body(job_body(backoffLimit=2)))
        test.see(BATCH_JOBS, job_body())
        assert patched(await written(test)) == {"maxRestarts": None}

    run(scenario)


@pytest.mark.parametrize(
    ("given", "field", "found"),
    [
        ({"backoffLimit": 2**31 - 1}, "maxRestarts", 1_000_000),  # the default beside backoffLimitPerIndex
        ({"activeDeadlineSeconds": 0}, "maxRuntimeSeconds", 1),
        ({"activeDeadlineSeconds": 10**12}, "maxRuntimeSeconds", None),
        ({"pod": {"terminationGracePeriodSeconds": 10**6}}, "gracePeriodSeconds", 86_400),
    ],
)
def test_a_number_that_only_a_job_may_have_becomes_the_nearest(given: Object, field: str, found: int | None) -> None:
    assert derived(job_body(**given))["spec"].get(field) == found


@pytest.mark.parametrize(
    ("metadata", "folder"),
    [
        ({"ownerReferences": []}, "elastic"),
        ({}, "the-job"),
        ({"labels": {JOBSET_UID_LABEL: "the-set"}}, "the-set-train"),
    ],
)
def test_checkpoints_are_found_again_by_the_next_elastic_job_and_below_a_job_set_by_the_next_job(
    metadata: Object, folder: str
) -> None:
    body = elastic_body(job_body(), **metadata)
    assert checkpoint_folder(msgspec.json.decode(msgspec.json.encode(body), type=ElasticJob)) == folder
