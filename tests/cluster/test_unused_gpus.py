"""Jobs whose GPUs are unused: their owners are warned, then they are suspended; one that uses a GPU never is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.api import Kind, Phase, ReasonCode
from kfp_gpuquota.api.policy import IdleRule, WorkloadPolicy, idle_rule_of
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.local.workers.sharing import simulated_directory
from kfp_gpuquota.engine.unused_gpus import LONGEST_GAP_S, Observed, UnusedGpus, fewest
from kfp_gpuquota.errors import InvalidFieldError
from kfp_gpuquota.fractions.activity import SIMULATED_FILE, SimulatedActivity, busy, use_of
from tests.conftest import running_cluster

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RULE = IdleRule(warn_after_s=20, suspend_after_s=50)


@given(st.lists(st.tuples(st.sampled_from((1.0, 5.0, 15.0, 40.0)), st.sampled_from((False, False, False, True, None)))))
def test_a_job_is_suspended_only_after_a_warning_and_a_whole_time_without_use(
    seen: list[tuple[float, bool | None]],
) -> None:
    unused, now, warned_at = UnusedGpus(), 1000.0, None
    history: list[tuple[float, bool | None]] = []
    for after_s, used in seen:
        now += after_s
        history.append((now, None if after_s > LONGEST_GAP_S else used))
        if used is not False:
            history.append((now, used))
        verdicts = unused.observe({"job": Observed(used, RULE)}, now)
        last = max((at for at, use in history if use is not False), default=history[0][0])
        if verdicts.warn:
            warned_at = now
            assert now - last >= RULE.warn_after_s
        if not unused.warned and not verdicts.suspend:
            warned_at = None
        if verdicts.suspend:
            assert warned_at is not None
            assert now - last >= RULE.suspend_after_s
            assert now - warned_at >= RULE.suspend_after_s - RULE.warn_after_s
            return


def test_a_job_is_warned_and_then_suspended() -> None:
    unused, found = UnusedGpus(), list[tuple[float, str]]()
    for now in range(0, 100, 5):
        verdicts = unused.observe({"job": Observed(used=False, rule=RULE, policy="idle")}, 1000.0 + now)
        found += [(now, kind) for kind in ("warn", "suspend") if getattr(verdicts, kind)]
    assert found[:2] == [(20, "warn"), (50, "suspend")]


def test_a_job_is_preemptible_between_its_warning_and_its_suspension() -> None:
    rule = IdleRule(warn_after_s=20, preempt_after_s=35, suspend_after_s=50)
    unused, found = UnusedGpus(), list[int]()
    for now in range(0, 60, 5):
        verdicts = unused.observe({"job": Observed(used=now == 5, rule=rule)}, 1000.0 + now)
        found += [now for _ in verdicts.preemptible]
    assert found == [45, 50, 55]


def test_another_rule_is_warned_of_anew_and_a_deleted_one_not_at_all() -> None:
    unused = UnusedGpus()

    def observe(now: float, policy: str, rule: IdleRule) -> list[str]:
        verdicts = unused.observe({"job": Observed(used=False, rule=rule, policy=policy)}, 1000.0 + now)
        return [kind for kind in ("warn", "suspend") if getattr(verdicts, kind)]

    shorter = IdleRule(warn_after_s=5, suspend_after_s=20)
    found = [observe(now, "idle", RULE) for now in (0, 10, 20)] + [observe(now, "of-a", shorter) for now in (30, 40)]
    assert found == [[], [], ["warn"], ["warn"], []], "nobody is suspended before the time of which the owner knows"
    assert unused.warned["job"].suspended_at == 1045
    assert observe(42, "longer", IdleRule(warn_after_s=50, suspend_after_s=60)) == []
    assert not unused.warned
    observe(44, "of-a", shorter)
    assert unused.warned
    unused.observe({}, 1045.0)
    assert not unused.warned


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"warn_after_s": 60, "suspend_after_s": 60}, "idle.suspend_after_s is 60, but it must be more than"),
        ({"warn_after_s": 0, "suspend_after_s": 60}, "idle.warn_after_s is 0"),
        ({"warn_after_s": 1, "preempt_after_s": 60, "suspend_after_s": 60}, "must be more than idle.preempt_after_s"),
        ({"warn_after_s": 9, "preempt_after_s": 9, "suspend_after_s": 60}, "preempt_after_s is 9, but it must be more"),
        ({"warn_after_s": 1, "suspend_after_s": float("inf")}, "idle.suspend_after_s is inf"),
    ],
)
def test_a_rule_that_warns_nobody_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidFieldError, match=words):
        IdleRule(**given)


def test_the_most_special_policy_has_the_rule() -> None:
    policies = [
        WorkloadPolicy(name="all", idle=RULE),
        WorkloadPolicy(name="sessions", kind=Kind.BUILD, idle=RULE),
        WorkloadPolicy(name="of-a", project="a", idle=RULE),
    ]
    named = []
    for project, kind in (("a", Kind.BUILD), ("b", Kind.BUILD), ("b", Kind.TRAIN)):
        found = idle_rule_of(project, kind, policies)
        named.append(found and found.name)
    assert named == ["of-a", "sessions", "all"]


@pytest.mark.parametrize(
    ("text", "expected"), [("0", {"d": False}), ("0.5", {"d": True}), ("", {}), ("nan", {}), ("-1", {}), ("1e9", {})]
)
def test_a_device_is_measured_only_by_a_percentage(tmp_path: Path, text: str, expected: dict[str, bool]) -> None:
    (tmp_path / SIMULATED_FILE).write_text(text)
    assert busy(SimulatedActivity({"d": tmp_path, "none": tmp_path / "none"}).measure()) == expected


@pytest.mark.parametrize(
    ("visible", "used", "bus_order", "expected"),
    [
        ("0,1", (False, False, False), False, False),
        ("", (False, False, False), True, None),
        ("1", (True, False, False), False, None),  # number 1 may be any of the three
        ("1", (True, False, False), True, False),
        ("0,1", (True, False, False), True, True),
        ("1,2", (True, False, None), True, None),
        ("9", (True, False, False), True, None),
        ("GPU-b", (True, False, False), False, False),
        ("GPU-", (True, False, False), False, None),
        ("none", (True, False, False), True, None),
        ("0", (), True, None),
    ],
)
def test_the_gpus_of_a_worker_are_known_by_uuid_or_in_the_order_of_the_bus(
    visible: str, used: tuple[bool | None, ...], bus_order: bool, expected: bool | None
) -> None:
    devices = tuple(f"GPU-{name}" for name in "abc"[: len(used)])
    measured = {device: use for device, use in zip(devices, used, strict=True) if use is not None}
    assert use_of(visible, devices, measured, bus_order=bus_order) is expected


def test_an_unused_session_is_suspended_with_its_reason_and_a_training_that_uses_its_gpu_is_not(
    tmp_path: Path,
) -> None:
    config = ClusterConfig(gpus_per_node=2, gpu_memory_mib=1024)
    with running_cluster(tmp_path / "home", config) as cluster:
        cluster.project("team-a", 2)
        rule = IdleRule(warn_after_s=1, suspend_after_s=2)
        cluster.client.set_policy(WorkloadPolicy(name="unused", project="team-a", idle=rule))
        session = cluster.submit("session", kind="build")
        cluster.wait_for("session", lambda job: job.status.phase is Phase.RUNNING)
        cluster.submit("training")
        training = cluster.wait_for("training", lambda job: job.status.phase is Phase.RUNNING)
        (worker,) = training.status.workers
        for index in range(2):
            _measure(cluster, worker.node, index, "35" if index in worker.devices else "0")
        warned = cluster.wait_for(session.spec.name, lambda job: _is_unused(job.status.reason))
        assert warned.status.reason is not None
        assert "unless it uses one, it is suspended at" in warned.status.reason.message
        suspended = cluster.wait_for("session", lambda job: job.status.phase is Phase.SUSPENDED)
        assert suspended.status.reason is not None
        assert suspended.status.reason.message.startswith("its GPUs had been unused since ")
        cluster.kill_daemon()
        after = cluster.job("session").status
        assert (after.phase, after.reason) == (Phase.SUSPENDED, suspended.status.reason)
        assert cluster.job("training").status.phase is Phase.RUNNING


def test_a_warning_is_shown_only_while_it_holds(tmp_path: Path) -> None:
    config = ClusterConfig(gpus_per_node=1, gpu_memory_mib=1024)
    with running_cluster(tmp_path / "home", config) as cluster:
        cluster.project("team-a", 1)
        cluster.client.set_policy(WorkloadPolicy(name="unused", idle=IdleRule(warn_after_s=1, suspend_after_s=1000)))
        cluster.submit("job")
        node = cluster.wait_for("job", lambda job: job.status.phase is Phase.RUNNING).status.workers[0].node
        _measure(cluster, node, 0, "0")
        cluster.wait_for("job", lambda job: _is_unused(job.status.reason))
        cluster.kill_daemon()
        _measure(cluster, node, 0, "35")
        cluster.wait_for("job", lambda job: not _is_unused(job.status.reason))
        _measure(cluster, node, 0, "0")
        cluster.wait_for("job", lambda job: _is_unused(job.status.reason))
        cluster.client.delete_policy("unused")
        assert cluster.wait_for("job", lambda job: not _is_unused(job.status.reason)).status.phase is Phase.RUNNING


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 30))
def test_as_few_jobs_as_it_takes_are_suspended_and_few_plans_are_made(nodes: list[int], gpus: int) -> None:
    """Jobs of a GPU each on some nodes; one that waits needs so many GPUs of one node."""
    asked = 0

    def starts_without(ones: Sequence[int]) -> tuple[str, ...]:
        nonlocal asked
        asked += 1
        return tuple(str(node) for node in range(10) if sum(nodes[one] == node for one in ones) >= gpus)

    needed, starts = fewest(range(len(nodes)), starts_without)
    made = asked
    if not needed:
        assert (starts_without(range(len(nodes))), made) == ((), 1)
        return
    assert starts == starts_without(needed)
    assert len(needed) == gpus
    assert {str(nodes[one]) for one in needed} == set(starts)
    assert made <= 8 + 2 * gpus * 6


def test_an_unused_job_is_suspended_for_one_that_waits_and_not_for_one_that_could_not_start(tmp_path: Path) -> None:
    config = ClusterConfig(gpus_per_node=2, gpu_memory_mib=1024)
    with running_cluster(tmp_path / "home", config) as cluster:
        cluster.project("team-a", 2)
        cluster.project("team-b", 2)
        rule = IdleRule(warn_after_s=1, preempt_after_s=2, suspend_after_s=1000)
        cluster.client.set_policy(WorkloadPolicy(name="unused", idle=rule))
        for name in ("unused", "busy"):
            cluster.submit(name, kind="build")
            (worker,) = cluster.wait_for(name, lambda job: job.status.phase is Phase.RUNNING).status.workers
            _measure(cluster, worker.node, worker.devices[0], "0" if name == "unused" else "35")
        cluster.submit("large", project="team-b", gpus=2)
        warned = cluster.wait_for("unused", lambda job: _is_unused(job.status.reason))
        assert warned.status.reason is not None
        assert "on for a job that needs them" in warned.status.reason.message
        cluster.wait_for("large", lambda job: job.status.phase is Phase.PENDING, project="team-b")
        cluster.submit("small", project="team-b")
        suspended = cluster.wait_for("unused", lambda job: job.status.phase is Phase.SUSPENDED)
        assert suspended.status.reason is not None
        assert suspended.status.reason.message.endswith("and a job of project team-b starts in its place")
        cluster.wait_for("small", lambda job: job.status.phase is Phase.RUNNING, project="team-b")
        assert cluster.job("busy").status.phase is Phase.RUNNING
        assert cluster.job("large", project="team-b").status.phase is Phase.PENDING


def _measure(cluster: Any, node: str, index: int, used: str) -> None:
    directory = simulated_directory(cluster.home, node, index)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / SIMULATED_FILE).write_text(used)


def _is_unused(reason: Any) -> bool:
    return reason is not None and reason.code is ReasonCode.GPUS_UNUSED
