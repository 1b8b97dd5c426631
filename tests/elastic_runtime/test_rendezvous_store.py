"""The workers' store, while the coordinator that keeps it restarts or is away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from elastic_runtime.membership.environment import Environment
from elastic_runtime.membership.rendezvous_store import CoordinatorStore
from tests.elastic_runtime.test_loops import Notes
from tests.standalone_coordinator import StandaloneCoordinator

if TYPE_CHECKING:
    from pathlib import Path

JOB = "job"


def serve(coordinator: StandaloneCoordinator) -> None:
    coordinator.call(lambda service: service.open(JOB, "secret"))


def test_an_operation_is_repeated_once_over_a_new_connection_and_a_coordinator_that_is_away_is_an_error(
    tmp_path: Path,
) -> None:
    (tmp_path / "token").write_text("secret")
    with StandaloneCoordinator(Notes()) as first:
        serve(first)
        environment = Environment(
            worker_id="w0", coordinator=first.url(JOB), token_file=str(tmp_path / "token"), ca_file=""
        )
        store = CoordinatorStore(environment, 0)
        store.set("key", "value")
        assert store.get("key") == b"value"
    with StandaloneCoordinator(Notes(), port=first.port) as second:
        serve(second)
        assert not store.check(["key"]), "the second coordinator's store is empty"
        assert store.clone().add("number", 2) == 2
    with pytest.raises(dist.DistStoreError, match="the coordinator's store is away"):
        store.num_keys()
