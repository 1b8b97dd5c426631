"""Real processes grow, shrink and crash; each sample counts once, and the model is the single worker's."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.training import Plan, train, trained_alone
from tests.polling import TIMEOUT_S, until

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one undisturbed process gets."""
    directory = tmp_path_factory.mktemp("reference")
    return trained_alone(train, Plan(), directory)


def finish(cluster: Cluster, reference: dict[str, Any], *indices: int) -> None:
    cluster.let_go()
    cluster.wait_for_end(*indices)
    cluster.check_result(reference)


def test_a_job_of_two_grows_to_three(tmp_path: Path, reference: dict[str, Any]) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.start(0, 1)
        commit = cluster.resize(0, 1, 2, up_to=20)
        assert commit.lost_steps == 0
        finish(cluster, reference, 0, 1, 2)


def test_a_job_of_three_shrinks_to_one_without_its_leader(tmp_path: Path, reference: dict[str, Any]) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.start(0, 1, 2)
        cluster.resize(1, up_to=20)
        cluster.wait_for_end(0, 2)
        assert sorted(cluster.released) == ["w0", "w2"]
        finish(cluster, reference, 1)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_death_of_any_worker_costs_nothing(tmp_path: Path, reference: dict[str, Any], victim: int) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.start(0, 1, 2)
        cluster.kill(f"w{victim}")
        cluster.let_go()
        commit = cluster.wait_for_size(2)
        assert commit.lost_steps == 0
        finish(cluster, reference, *({0, 1, 2} - {victim}))


def test_two_deaths_at_once_leave_one_that_goes_on(tmp_path: Path, reference: dict[str, Any]) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.start(0, 1, 2)
        cluster.kill("w0")
        cluster.kill("w1")
        finish(cluster, reference, 2)


def test_the_death_of_a_joiner_disturbs_nobody(tmp_path: Path, reference: dict[str, Any]) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.start(0, 1)
        cluster.target(0, 1, 2)
        cluster.wait_until_prepared(0, 1, 2)
        cluster.kill("w2")
        finish(cluster, reference, 0, 1)


@pytest.mark.slow
def test_a_stopped_worker_is_killed_and_the_others_repeat_the_step(tmp_path: Path, reference: dict[str, Any]) -> None:
    """By the coordinator, as on another machine: its peers do not look."""
    with Cluster(tmp_path, environment={"ELASTIC_STOPPED_S": "off"}) as cluster:
        cluster.start(0, 1, 2)
        cluster.kill("w1", signal.SIGSTOP)
        finish(cluster, reference, 0, 2)
        assert [worker for worker, _ in cluster.kills] == ["w1"]


def test_training_goes_on_while_the_coordinator_is_away_and_resizes_after_its_restart(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.start(0, 1)
        cluster.hold_at(12)
        cluster.restart_coordinator()
        cluster.wait_until_at(12, 0, 1)
        cluster.resize(0, 1, 2, up_to=25)
        finish(cluster, reference, 0, 1, 2)


def test_a_worker_may_be_replaced_by_another(tmp_path: Path, reference: dict[str, Any]) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.start(0)
        cluster.target(1)
        cluster.wait_until_prepared(0, 1)
        cluster.let_go()
        cluster.wait_for_end(0, 1)
        cluster.check_samples()


def test_an_evicted_job_saves_and_goes_on_at_another_size(tmp_path: Path, reference: dict[str, Any]) -> None:
    with Cluster(tmp_path, checkpoints=True) as cluster:
        cluster.start(0, 1)
        cluster.target()
        cluster.wait_until_prepared()
        cluster.let_go()
        cluster.wait_for_end(0, 1)
        assert len(list((tmp_path / "checkpoints").glob("*.elastic"))) == 1
        cluster.target(2, 3, 4)
        finish(cluster, reference, 2, 3, 4)


def left(directory: Path, *indices: int) -> bool:
    return all('"event": "left"' in (directory / f"report-{index}.jsonl").read_text() for index in indices)


@pytest.mark.slow
def test_an_eviction_that_is_agreed_on_while_the_coordinator_restarts_lets_all_go_and_the_next_ones_go_on(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    with Cluster(tmp_path, checkpoints=True) as cluster:
        cluster.start(0, 1)
        cluster.target()
        cluster.wait_until_prepared()
        with cluster.without_coordinator():
            cluster.let_go()
            until(lambda: left(tmp_path, 0, 1), cluster.logs)
        cluster.target(2, 3, 4)
        cluster.wait_for_end(0, 1)
        finish(cluster, reference, 2, 3, 4)
        assert cluster.kills == []


@pytest.mark.slow
def test_joiners_that_wait_for_a_stopped_worker_begin_without_it_after_the_coordinator_restarts(tmp_path: Path) -> None:
    """What was under way to the stopped one never ends: gloo's destructor of that group held the joiner's loop."""
    with Cluster(tmp_path, checkpoints=True) as cluster:
        cluster.start(0)
        cluster.target(0, 1)
        cluster.wait_until_prepared(0, 1)
        cluster.target(0, 1, 2)
        cluster.kill("w0", signal.SIGSTOP)
        cluster.restart_coordinator()
        cluster.let_go()
        cluster.wait_for_end(1, 2)
        cluster.kill("w0")
        cluster.processes["w0"].join()


def test_who_leaves_by_a_switch_that_is_agreed_on_while_the_coordinator_restarts_is_let_go(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.start(0, 1, 2)
        cluster.target(0, 2)
        cluster.wait_until_prepared(0, 2)
        with cluster.without_coordinator():
            cluster.hold_at(20)
            until(lambda: left(tmp_path, 1), cluster.logs)
        cluster.wait_for_end(1)
        finish(cluster, reference, 0, 2)
        assert cluster.kills == []


def test_sigterm_lets_a_worker_go_by_agreement(tmp_path: Path, reference: dict[str, Any]) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.start(0, 1)
        cluster.kill("w0", signal.SIGTERM)
        cluster.wait_until_prepared(1)
        finish(cluster, reference, 1)
        cluster.wait_for_end(0)
        assert cluster.released == ["w0"]


@pytest.mark.slow
def test_loader_processes_and_buffers_live_through_resizes(tmp_path: Path) -> None:
    plan = Plan(loader_workers=1, normalise=True, max_batch=None)
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1)
        cluster.grow_lose_the_first_and_end()
        cluster.check_samples()
        first, second = cluster.finals().values()
        for name, value in first["model"].items():
            assert torch.equal(value, second["model"][name]), name


def test_more_workers_than_samples_in_a_step(tmp_path: Path) -> None:
    plan = Plan(epochs=2, samples=10, global_batch=4)
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1, 2, step=2)
        cluster.let_go()
        cluster.wait_for_end(0, 1, 2)
        alone = tmp_path / "alone"
        alone.mkdir()
        train(plan, 0, alone, None)
        cluster.check_result(torch.load(alone / "final-0.pt"))


def test_a_worker_with_another_model_is_refused_and_the_others_go_on(tmp_path: Path, reference: dict[str, Any]) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.start(0, 1)
        cluster.plan = Plan(normalise=True)
        cluster.target(0, 1, 2)
        cluster.wait_until_prepared(0, 1, 2)
        cluster.let_go()
        cluster.processes["w2"].join(TIMEOUT_S)
        assert cluster.processes["w2"].exitcode == 1
        assert "ModelMismatchError: the model of rank 2 differs from that of rank 0" in cluster.logs()
        cluster.plan = Plan()
        finish(cluster, reference, 0, 1)


def test_a_worker_with_a_wrong_token_ends_and_says_so(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        (tmp_path / "token").write_text("another")
        cluster.target(0)
        cluster.processes["w0"].join(TIMEOUT_S)
        assert cluster.processes["w0"].exitcode == 1
        assert "read it from ELASTIC_TOKEN_FILE" in cluster.logs()
