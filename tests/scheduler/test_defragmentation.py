"""Moves that gather free GPUs in the administrator's window: `api/defragmentation.py`, `actions/defragmentation.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from itertools import combinations
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.api import Kind
from kfp_gpuquota.api.defragmentation import Defragmentation
from kfp_gpuquota.errors import InvalidFieldError
from kfp_gpuquota.scheduler import Placement, ProgressReported, State
from kfp_gpuquota.scheduler.actions.defragmentation import RESTART_S
from tests.scheduler.world import World

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.scheduler import Plan

NIGHT = Defragmentation(window="22:00-06:00", time_zone="UTC")
DAY_S = 86_400.0
OPENS, ENDS = 22 * 3600.0, 30 * 3600.0
ROUND_S, MIN_AGE_S = NIGHT.round_s, NIGHT.min_age_s


def at(text: str) -> float:
    """Return an ISO time with its offset in seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(
    ("window", "zone", "now", "inside", "opens"),
    [
        ("22:00-06:00", "UTC", "2026-11-29T21:59Z", None, "2026-11-29T22:00Z"),
        ("22:00-06:00", "UTC", "2026-11-29T22:00Z", "2026-11-29T22:00Z", "2026-11-30T22:00Z"),
        ("22:00-06:00", "UTC", "2026-11-30T05:59Z", "2026-11-29T22:00Z", "2026-11-30T22:00Z"),
        ("22:00-06:00", "UTC", "2026-11-30T06:00Z", None, "2026-11-30T22:00Z"),
        ("Mon-Fri 22:00-06:00", "UTC", "2026-11-28T05:00Z", "2026-11-27T22:00Z", "2026-11-30T22:00Z"),
        ("Mon-Fri 22:00-06:00", "UTC", "2026-11-29T23:00Z", None, "2026-11-30T22:00Z"),
        ("Sat-Mon,Wed 01:00-02:00", "UTC", "2026-11-30T01:30Z", "2026-11-30T01:00Z", "2026-12-02T01:00Z"),
        ("sat,sun 00:00-24:00", "Europe/Berlin", "2026-11-27T23:00Z", "2026-11-27T23:00Z", "2026-11-28T23:00Z"),
        # clocks are put back at 03:00 on 25 October, and forward at 02:00 on 28 March
        ("22:00-06:00", "Europe/Berlin", "2026-10-25T04:59Z", "2026-10-24T20:00Z", "2026-10-25T21:00Z"),
        ("22:00-06:00", "Europe/Berlin", "2027-03-28T04:00Z", None, "2027-03-28T20:00Z"),
    ],
)
def test_a_window_opens_by_the_clocks_of_its_time_zone(
    window: str, zone: str, now: str, inside: str | None, opens: str
) -> None:
    rule = Defragmentation(window=window, time_zone=zone)
    found = rule.open_at(at(now))
    assert (found and found.start) == (inside and at(inside))
    assert rule.opens_after(at(now)) == at(opens)


@pytest.mark.parametrize(
    "fields",
    [
        {"window": "night"},
        {"window": "22:00-22:00"},
        {"window": "24:00-06:00"},
        {"window": "22:60-23:00"},
        {"window": "Mo 22:00-06:00"},
        {"window": "22:00-06:00", "time_zone": "Mars/Olympus"},
        {"window": "22:00-06:00", "time_zone": "../../etc/passwd"},
        {"window": "22:00-06:00", "budget_gpu_minutes": -1.0},
        {"window": "22:00-06:00", "max_gpu_minutes_per_gpu": float("nan")},
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidFieldError):
        Defragmentation(**fields)  # type: ignore[arg-type]


@dataclass
class Night:
    """A world whose jobs were placed by day; its time is the beginning of the window."""

    rule: Defragmentation = NIGHT
    world: World = field(init=False)

    def __post_init__(self) -> None:
        self.world = World(State(defragmentation=self.rule))
        self.world.now = OPENS - MIN_AGE_S - 1000

    def fill(self, gpus: int, *nodes: Sequence[int], **more: Any) -> None:
        """Make nodes of `gpus`, each with jobs of these sizes; the jobs of n0 are job-0-0, job-0-1, ..."""
        self.world.project("team", gpus * len(nodes))
        for i, sizes in enumerate(nodes):
            self.world.node(f"n{i}", gpus)
            for j, size in enumerate(sizes):
                self.place(self.world.submit(f"job-{i}-{j}", "team", size, **more), f"n{i}")
        self.world.now = OPENS

    def place(self, job: str, *nodes: str) -> None:
        """Start a worker of the job on each of these nodes."""
        gpus = self.world.specs[job].worker_gpus
        for node in nodes:
            used = {device for r in self.world.workers.values() if r.node == node for device in r.devices}
            devices = [device for device in range(self.world.nodes[node]) if device not in used][:gpus]
            self.world.start(job, Placement(node, tuple(devices)))

    def saved(self, ago_s: float) -> None:
        """Let all jobs have a checkpoint of so long ago."""
        for uid in self.world.specs:
            self.world.state.apply(ProgressReported(uid, 1, self.world.now, checkpoint_at=self.world.now - ago_s))

    def round(self) -> Plan:
        """Plan, carry it out, and let the workers exit and start again; return the first plan."""
        decided = self.world.plan()
        self.world.carry_out(decided)
        self.world.release()
        for _ in range(3):
            self.world.carry_out(self.world.plan())
            self.world.release()
        return decided

    @property
    def free(self) -> set[str]:
        return set(self.world.nodes) - {r.node for r in self.world.workers.values()}


def moves(decided: Plan) -> dict[str, str]:
    return {one.job: one.to.node for one in decided.move}


def test_two_half_full_nodes_become_a_full_and_a_free_one() -> None:
    night = Night()
    night.fill(4, [2], [2])
    night.saved(30.0)
    decided = night.round()
    assert moves(decided) == {"job-0-0": "n1"}
    assert decided.defragmented is not None
    assert decided.defragmented.lost_gpu_s == pytest.approx(2 * (30 + RESTART_S))
    assert decided.move[0].reason.message == (
        "moved from n0 to n1: to gather free GPUs, window 22:00-06:00; it repeats at most 30 s of work"
    )
    assert night.free == {"n0"}
    assert night.world.size("job-0-0") == 2


@pytest.mark.parametrize(("now", "opens"), [(OPENS - 1, OPENS), (ENDS, OPENS + DAY_S)])
def test_nothing_is_moved_outside_of_the_window(now: float, opens: float) -> None:
    night = Night()
    night.fill(4, [2], [2])
    night.world.now = now
    decided = night.world.plan()
    assert (decided.empty, decided.defragmented, decided.again_at) == (True, None, opens)


def test_without_a_rule_no_plan_looks_for_moves() -> None:
    night = Night()
    night.fill(4, [2], [2])
    night.world.state.ledger.defragmentation = None
    assert night.world.plan().again_at is None


def test_a_round_without_moves_is_repeated_later_only() -> None:
    night = Night()
    night.fill(4, [3], [3])
    night.saved(0.0)
    decided = night.round()
    assert (decided.empty, decided.again_at) == (True, OPENS + ROUND_S)
    night.world.now += 1
    assert night.world.plan().defragmented is None
    night.world.now = OPENS + ROUND_S
    assert night.world.plan().defragmented is not None


@pytest.mark.parametrize(
    "more", [{"kind": Kind.BUILD}, {"preemptible": False}, {"min_run_time_s": DAY_S}], ids=lambda more: next(iter(more))
)
def test_protected_jobs_are_not_moved(more: dict[str, object]) -> None:
    night = Night()
    night.fill(4, [2], [2], **more)
    assert night.world.plan().empty


def test_a_job_that_started_recently_is_not_moved() -> None:
    night = Night(Defragmentation(window="00:00-24:00", time_zone="UTC"))
    night.fill(4, [2], [2])
    started_at = min(task.started_at for task in night.world.state.workers.values())
    night.saved(0.0)
    night.world.now = started_at + MIN_AGE_S - 1
    assert night.world.plan().empty
    night.world.now = started_at + MIN_AGE_S
    assert len(night.world.plan().move) == 1


def test_moves_that_cost_more_than_a_gpu_is_worth_are_not_made() -> None:
    night = Night(Defragmentation(window="22:00-06:00", time_zone="UTC", max_gpu_minutes_per_gpu=10))
    night.fill(4, [2], [2])
    night.saved(20 * 60 - RESTART_S + 1)  # of 2 GPUs, for 4 free ones
    assert night.world.plan().empty
    night.saved(20 * 60 - RESTART_S)
    assert len(night.world.plan().move) == 1


def test_an_elastic_training_moves_in_place_and_loses_nothing() -> None:
    night = Night(Defragmentation(window="22:00-06:00", time_zone="UTC", budget_gpu_minutes=0))
    night.fill(4, [], [2])
    night.world.now = OPENS - MIN_AGE_S - 10
    night.place(night.world.submit("elastic", "team", 3, low=1, high=3), "n0", "n1", "n1")
    night.world.now = OPENS
    assert night.world.plan().empty  # full, but for the node that has its third worker
    night.world.remove("job-1-0")
    night.world.release()
    assert night.world.plan().empty  # it has reported no progress, so its other workers could fail
    night.world.state.apply(ProgressReported("elastic", 9, OPENS, throughput=9.0, workers=3))
    decided = night.round()
    assert moves(decided) == {"elastic": "n1"}
    assert decided.defragmented is not None
    assert decided.defragmented.lost_gpu_s == 0.0
    assert night.free == {"n0"}
    assert night.world.size("elastic") == 3


def test_jobs_that_share_gpus_move_onto_one() -> None:
    night = Night()
    night.fill(1, [1], [1], gpu_fraction=0.4)
    night.saved(0.0)
    decided = night.round()
    assert moves(decided) == {"job-0-0": "n1"}
    assert decided.defragmented is not None
    assert decided.defragmented.lost_gpu_s == pytest.approx(0.4 * RESTART_S)
    assert night.free == {"n0"}


@pytest.mark.parametrize("left", [0, 1])
def test_a_node_whose_gpus_have_disappeared_under_its_jobs_does_not_keep_others_from_moving(left: int) -> None:
    """Each plan in the window failed by a division by the number of its GPUs."""
    night = Night()
    night.fill(4, [2], [2], [2])
    night.saved(30.0)
    night.world.node("n0", left)
    assert moves(night.world.plan()) == {"job-1-0": "n2"}


def test_the_budget_of_a_window_is_spent_once() -> None:
    night = Night(Defragmentation(window="22:00-06:00", time_zone="UTC", budget_gpu_minutes=5))
    night.fill(4, [2], [2], [2], [2])
    night.saved(60.0)
    first = night.round()  # a move costs 2 GPUs for 2 minutes
    assert len(moves(first)) == 1
    for _ in range(3):
        night.world.now += ROUND_S
        night.saved(60.0)
        assert night.round().empty
    night.world.now = OPENS + DAY_S
    night.saved(60.0)
    second = night.round()
    assert len(moves(second)) == 1
    assert second.defragmented is not None
    assert second.defragmented.lost_gpu_s == pytest.approx(240.0)


JOBS = st.fixed_dictionaries(
    {
        "workers": st.lists(st.integers(0, 4), min_size=1, max_size=3),  # the nodes of its workers
        "gpus": st.sampled_from([1, 1, 2]),
        "low": st.integers(1, 3),
        "kind": st.sampled_from(["train", "train", "train", "fixed", "session", "elastic"]),
        "ago_s": st.integers(0, 1200),
    }
)


def drawn(rule: Defragmentation, nodes: list[int], jobs: list[dict[str, Any]]) -> Night:
    """Return a world with these jobs, of which each is placed as far as there are idle GPUs."""
    night = Night(rule)
    night.world.project("team", sum(nodes))
    for i, gpus in enumerate(nodes):
        night.world.node(f"n{i}", gpus)
    left = list(nodes)
    for number, job in enumerate(jobs):
        on = []
        for node in (one % len(nodes) for one in job["workers"]):
            if left[node] >= job["gpus"]:
                left[node] -= job["gpus"]
                on.append(f"n{node}")
        if not on:
            continue
        elastic, kind = job["kind"] == "elastic", job["kind"]
        more: dict[str, Any] = {"gpus_per_worker": job["gpus"]}
        if kind == "session":
            on, more = on[:1], {"kind": Kind.BUILD}
        elif kind == "fixed":
            more["preemptible"] = False
        total = job["gpus"] * len(on)
        low = job["gpus"] * min(job["low"], len(on)) if elastic else None
        uid = night.world.submit(f"j{number}", "team", total, low=low, high=total if elastic else None, **more)
        night.place(uid, *on)
        saved_at = OPENS - job["ago_s"]
        measured: dict[str, Any] = {"throughput": 9.0, "workers": len(on)} if elastic else {}
        night.world.state.apply(ProgressReported(uid, 1, OPENS, checkpoint_at=saved_at, **measured))
    night.world.now = OPENS
    return night


@given(
    nodes=st.lists(st.sampled_from([2, 4, 4, 8]), min_size=2, max_size=5),
    jobs=st.lists(JOBS, min_size=1, max_size=8),
    budget=st.integers(0, 120),
    per_gpu=st.integers(0, 30),
)
def test_a_round_keeps_its_promises(nodes: list[int], jobs: list[dict[str, Any]], budget: int, per_gpu: int) -> None:
    rule = Defragmentation(
        window="22:00-06:00", time_zone="UTC", budget_gpu_minutes=budget, max_gpu_minutes_per_gpu=per_gpu
    )
    kept_promises(drawn(rule, nodes, jobs))


def kept_promises(night: Night) -> int:
    """Check a round and the one after it; return how many GPUs of whole nodes it has freed."""
    world, free = night.world, night.free
    sizes = {uid: world.size(uid) for uid in world.specs}
    first = night.round()
    assert (first.evict, first.nominate) == ((), ())
    assert first.defragmented is not None
    assert first.defragmented.lost_gpu_s <= 60 * night.rule.budget_gpu_minutes + 1e-6
    assert not {uid for uid, spec in world.specs.items() if not spec.may_be_preempted} & moves(first).keys()
    assert free <= night.free, "a free node was used"
    assert len(night.free) > len(free) or not first.move, "the moves have freed no node"
    assert {uid: world.size(uid) for uid in world.specs} == sizes, "a job has lost a worker"
    world.check_indexes()
    world.now = max(world.now, OPENS) + ROUND_S
    second = world.plan()
    assert second.empty, "a second round moves workers again"
    assert second.defragmented is not None
    return sum(world.nodes[node] for node in night.free - free)


def random_world(chance: Random) -> tuple[list[int], list[dict[str, Any]]]:
    """Return nodes that are about half full of jobs on one node each."""
    nodes = [chance.choice((4, 4, 8)) for _ in range(chance.randint(3, 5))]
    jobs = []
    for node, gpus in enumerate(nodes):
        left = gpus
        while left and chance.random() < 0.6:
            size = chance.choice([n for n in (1, 1, 2, 3, 4) if n <= left])
            left -= size
            kind = "fixed" if chance.random() < 0.1 else "train"
            jobs.append({"workers": [node], "gpus": size, "low": 1, "kind": kind, "ago_s": chance.randrange(1200)})
    return nodes, jobs


def most_gpus(nodes: list[int], jobs: list[dict[str, Any]], budget_s: float, per_gpu_s: float) -> int:
    """Return how many GPUs of whole nodes any choice of nodes and of new locations frees within the budget."""
    on = {node: [job for job in jobs if job["workers"] == [node]] for node in range(len(nodes))}
    used = {node: sum(job["gpus"] for job in mine) for node, mine in on.items() if mine}
    cost = {node: sum(job["gpus"] * (job["ago_s"] + RESTART_S) for job in on[node]) for node in used}
    may = [n for n in used if all(j["kind"] == "train" for j in on[n]) and cost[n] <= per_gpu_s * nodes[n]]
    best = 0
    for count in range(1, len(may) + 1):
        for chosen in combinations(may, count):
            idle = [nodes[node] - used[node] for node in used if node not in chosen]
            sizes = sorted((job["gpus"] for node in chosen for job in on[node]), reverse=True)
            if sum(map(cost.__getitem__, chosen)) <= budget_s and packs(sizes, idle):
                best = max(best, sum(nodes[node] for node in chosen))
    return best


def packs(sizes: list[int], idle: list[int]) -> bool:
    """Return whether the sizes fit into what is idle, by trying all ways."""
    if not sizes:
        return True
    for i, left in enumerate(idle):
        if left >= sizes[0] and packs(sizes[1:], [*idle[:i], left - sizes[0], *idle[i + 1 :]]):
            return True
    return False


def test_a_round_frees_nearly_as_much_as_any_choice_of_moves() -> None:
    """Of 400 worlds 142 have something to free: 98.5 % of the most GPUs on average, and all of them in 96 %."""
    parts = []
    for seed in range(400):
        chance = Random(seed)
        nodes, jobs = random_world(chance)
        budget, per_gpu = chance.choice((30, 60, 1000)), chance.choice((10, 20))
        best = most_gpus(nodes, jobs, 60.0 * budget, 60.0 * per_gpu)
        rule = Defragmentation(
            window="22:00-06:00", time_zone="UTC", budget_gpu_minutes=budget, max_gpu_minutes_per_gpu=per_gpu
        )
        freed = kept_promises(drawn(rule, nodes, jobs))
        assert freed <= best, (seed, "the search has missed something")
        if best:
            parts.append(freed / best)
    assert len(parts) > 100
    assert sum(parts) / len(parts) >= 0.98
    assert parts.count(1.0) / len(parts) >= 0.94
