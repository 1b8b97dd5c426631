"""Numbers of generations are stored before they are sent, and grow from leader to leader."""

from __future__ import annotations

from typing import Any

import pytest

from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator
from kfp_gpuquota.cluster.kubernetes.elasticjob.membership.reporting import EPOCH_SPAN, JobMembership
from kfp_gpuquota.cluster.kubernetes.elasticjob.runtime_state import RuntimeState
from kfp_gpuquota.cluster.kubernetes.elasticjob.status.conversion import record_of
from kfp_gpuquota.cluster.kubernetes.elasticjob.store import RESERVED_AT_ONCE, ElasticJobStore
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_builder import PodSettings
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob, ElasticJobSpec, ElasticJobStatus
from kfp_gpuquota.engine.job_book import Change
from kfp_gpuquota.server.membership.service import NotStoredYetError

META = Metadata(name="job", namespace="team", uid="uid")


class Leader:
    """One leader's membership of one job; the test stores the status."""

    def __init__(self, stored: int, epoch: int) -> None:
        spec = ElasticJobSpec(template=b'{"spec": {"containers": [{"name": "main"}]}}', gpus=2)  # type: ignore[arg-type]
        job = ElasticJob(metadata=META, spec=spec, status=ElasticJobStatus(generation_reserved=stored))
        book = self.book = ElasticJobStore(lambda _: None, DeviceAllocator(), {}, lambda: 0.0)
        self.state = book.runtime_states["uid"] = RuntimeState(job)
        book.commit(Change(jobs={"uid": record_of(job)}))
        self.requested: list[str] = []
        book.changed = self.changed
        settings = PodSettings(coordinator="", key=b"key")
        self.membership = JobMembership(book, settings, self, self, epoch=epoch)
        self.membership.begin_epoch()
        self.membership.open(book.jobs["uid"])

    def changed(self, key: str) -> None:
        """A write of the status is requested."""
        self.requested.append(key)

    decided = kill = changed

    def store(self) -> int:
        """The API server takes the status."""
        self.membership.status_stored("uid", self.state.reserved)
        return self.state.reserved

    @property
    def next(self) -> int:
        service: Any = self.membership.service
        machine = service.machine("uid")
        return int(machine._job.highest) + 1


def test_a_number_is_not_sent_before_the_api_server_has_stored_its_block() -> None:
    leader = Leader(stored=0, epoch=0)
    assert leader.requested == ["uid"]  # the status is to be written at once
    with pytest.raises(NotStoredYetError):
        leader.book.reserve_generation("uid", leader.next)
    leader.store()
    leader.book.reserve_generation("uid", leader.next)
    with pytest.raises(NotStoredYetError):
        leader.book.reserve_generation("uid", RESERVED_AT_ONCE + 1)


def test_the_next_block_is_stored_before_it_is_needed() -> None:
    leader = Leader(stored=0, epoch=0)
    stored = leader.store()
    leader.requested.clear()
    leader.book.reserve_generation("uid", RESERVED_AT_ONCE // 2 + 1)
    assert leader.requested == ["uid"]
    assert leader.store() > stored


def test_a_later_leader_numbers_beyond_all_that_an_earlier_one_may_still_send() -> None:
    first = Leader(stored=0, epoch=3)
    assert first.next == 3 * EPOCH_SPAN + 1
    stale = Leader(stored=0, epoch=4)  # it read the status before the first leader's came through
    assert stale.next > first.state.reserved + RESERVED_AT_ONCE
    again = Leader(stored=first.store(), epoch=3)
    assert again.next == first.state.reserved + 1


def test_numbers_grow_where_the_lease_was_made_anew_and_epochs_begin_again() -> None:
    stored = Leader(stored=0, epoch=7).state.reserved
    reinstalled = Leader(stored=stored, epoch=0)
    assert reinstalled.next == 8 * EPOCH_SPAN + 1
