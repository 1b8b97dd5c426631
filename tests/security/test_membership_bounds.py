"""What the holder of one job's token may do: to its own job what it likes, to others and to the coordinator nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest

from kfp_gpuquota.errors import ClusterUnavailableError, ConflictError, InvalidFieldError
from kfp_gpuquota.membership import Membership, TargetChanged, WorkerReconnected
from kfp_gpuquota.membership.events import CollectiveFailed, GenerationAdopted
from kfp_gpuquota.server.membership import messages
from kfp_gpuquota.server.membership.messages import check, check_worker
from kfp_gpuquota.server.membership.rendezvous_store import MAX_BYTES, MAX_KEYS, Store
from kfp_gpuquota.server.membership.training_reports import MAX_STEP, ProgressReported
from kfp_gpuquota.server.transport.unix_sockets import UnixConnection

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import EmbeddedCluster


def machine() -> Membership:
    made = Membership(first_generation=8)
    made.apply(TargetChanged(("job-0", "job-1")), 0.0)
    return made


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (WorkerReconnected("job-0", 3, ("job-0", "other-0")), "worker"),
        (GenerationAdopted("job-0", 3, 1, members=("other-0",)), "worker"),
        (CollectiveFailed("job-0", 3, members=("other-0",)), "worker"),
        (WorkerReconnected("other-0", 3, ("job-0",)), "worker"),
        (WorkerReconnected("job-1", 3, ("job-0",)), "worker"),
        (WorkerReconnected("job-0", 8, ("job-0",)), "generation"),
        (WorkerReconnected("job-0", -1, ("job-0",)), "generation"),
        (GenerationAdopted("job-0", 1 << 70, 1), "generation"),
        (GenerationAdopted("job-0", 3, MAX_STEP + 1), "step"),
        (ProgressReported("job-0", -1), "step"),
        (WorkerReconnected("job-0", 3, ("job-0",) * 10_001), "members"),
    ],
)
def test_a_message_that_names_what_is_not_its_jobs_is_refused(message: messages.Message, field: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        check(message, "job-0", "job-", machine())
    assert refused.value.field == field


@pytest.mark.parametrize("field", ["batch_size", "workers", "epoch", "total_steps"])
@pytest.mark.parametrize("value", ["-1", str((1 << 53) + 1), "9" * 400])
def test_a_number_that_nobody_can_compute_with_or_show_is_refused(field: str, value: str) -> None:
    line = f'{{"event": "ProgressReported", "worker": "job-0", "step": 1, "{field}": {value}}}'
    with pytest.raises(msgspec.ValidationError, match=field):
        messages.decode(line.encode())


def test_a_worker_of_another_job_may_not_connect_with_this_jobs_token() -> None:
    with pytest.raises(InvalidFieldError, match="begin with 'job-'"):
        check_worker("other-0", "job-", machine())


def test_a_job_is_not_remembered_more_workers_than_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_WORKERS", 2)
    check_worker("job-1", "job-", machine())
    with pytest.raises(ClusterUnavailableError, match="has 2 workers already"):
        check_worker("job-2", "job-", machine())


def test_all_generations_of_a_job_share_one_budget() -> None:
    store = Store()
    half = bytes(MAX_BYTES // 2)
    store.space(1, newest=9).set("k", half[:-10])
    store.space(2, newest=9).set("k", half[:-10])
    with pytest.raises(InvalidFieldError, match="a job's store holds"):
        store.space(3, newest=9).set("k", b"x" * 100)
    store.drop_before(2)
    store.space(3, newest=9).set("k", b"x" * 100)


def test_keys_count_by_their_length_and_by_their_number() -> None:
    space = Store().space(1, newest=1)
    with pytest.raises(InvalidFieldError):
        space.set("k" * (MAX_BYTES + 1), b"")
    for number in range(MAX_KEYS):
        space.set(str(number), b"")
    with pytest.raises(InvalidFieldError):
        space.set("one more", b"")
    space.delete("0")
    space.set("one more", b"")


@pytest.mark.parametrize("generation", [0, 2, 8, 1 << 70])
def test_only_generations_that_were_announced_have_a_store(generation: int) -> None:
    store = Store()
    store.drop_before(3)
    with pytest.raises(ConflictError, match="is not current; 3 to 7 are"):
        store.space(generation, newest=7)


def test_a_jobs_token_neither_kills_nor_releases_another_jobs_workers(embedded_cluster: EmbeddedCluster) -> None:
    embedded_cluster.project("team-a", 2)
    victim, attacker = embedded_cluster.submit("victim"), embedded_cluster.submit("attacker")
    for name in ("victim", "attacker"):
        embedded_cluster.wait_for_phase(name, "Running")
    home = embedded_cluster.home
    token, theirs, mine = home.job_token_file(attacker.uid).read_text(), f"{victim.uid}-0", f"{attacker.uid}-0"
    for worker, hello in (
        (theirs, {"event": "WorkerJoined"}),
        (mine, {"event": "WorkerReconnected", "generation": 0, "members": [theirs]}),
        (mine, {"event": "WorkerReconnected", "generation": 5, "members": [mine]}),
    ):
        path = f"/v1/membership/{attacker.uid}/workers/{worker}?incarnation=x"
        assert post(home.socket_file, path, token, {**hello, "worker": worker}) == 422
    assert post(home.socket_file, f"/v1/membership/{victim.uid}/workers/{theirs}", token, {}) == 401
    assert embedded_cluster.job("victim").status.phase == "Running"
    assert "killing worker" not in home.log_file.read_text()


def post(socket: Path, path: str, token: str, body: object) -> int:
    connection = UnixConnection(socket, 20.0)
    line = json.dumps(body).encode() + b"\n"
    connection.request("POST", path, line, {"Authorization": f"Bearer {token}"})
    status = connection.getresponse().status
    connection.close()
    return status
