"""What must hold whatever happens: random clusters, random histories, plans carried out late or in part."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from kfp_gpuquota.api import (
    Device,
    JobSpec,
    Kind,
    Node,
    Order,
    Project,
    ReasonCode,
    StopPolicy,
    Taint,
    TaintEffect,
    Toleration,
    TolerationOperator,
)
from kfp_gpuquota.api.affinity import GPU_PRODUCT
from kfp_gpuquota.scheduler import (
    RESERVE_AFTER_S,
    Event,
    JobSubmitted,
    NodeChanged,
    Plan,
    ProgressReported,
    QuotaChanged,
    State,
    WorkerGone,
    plan,
)
from kfp_gpuquota.scheduler.dump import decode_dump, replay, take_dump
from kfp_gpuquota.scheduler.state.copying import copied
from tests.effort import effort
from tests.scheduler.world import World, stopped

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

PROJECTS = ["a", "b", "c"]
ORDERS = {"a": Order.FAIR, "b": Order.FAIR_USERS, "c": Order.FAIR_USERS}
TAINT = Taint("team", TaintEffect.NO_SCHEDULE)
MACHINES = st.fixed_dictionaries(
    {},
    optional={
        "cpu": st.sampled_from([2.0, 4.0]),
        "max_workers": st.integers(1, 4),
        "taints": st.just((TAINT,)),
    },
)
SHARES = st.one_of(
    st.fixed_dictionaries({"gpu_fraction": st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.55, 0.9])}),
    st.fixed_dictionaries({"gpu_fraction": st.sampled_from([0.25, 0.5]), "gpu_devices": st.integers(1, 3)}),
)
NEEDS = st.fixed_dictionaries(
    {},
    optional={
        "cpu": st.sampled_from([0.5, 1.0, 3.0]),
        "node_selector": st.sampled_from([{"rack": "a"}, {"rack": "b"}]),
        "tolerations": st.just((Toleration("team", TolerationOperator.EXISTS),)),
        "priority": st.sampled_from([10, 60, 90]),
        "spread": st.booleans(),
    },
)
EXAMPLES = effort(12, 200)


def victims(decided: Plan) -> Iterable[tuple[str, str]]:
    """The jobs that lose workers, and the beneficiaries."""
    yield from ((e.job, e.reason.beneficiary) for e in decided.evict)
    yield from ((r.job, r.reason.beneficiary) for r in decided.resize if r.remove)


class History(RuleBasedStateMachine):
    """A cluster lives: jobs come and go, quotas and nodes change, plans are carried out at once or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.count = 0

    @initialize(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=4), data=st.data())
    def build(self, sizes: list[int], data: st.DataObject) -> None:
        scarce = data.draw(st.booleans())
        self.world.state.ledger.reserve_after_s = data.draw(st.sampled_from([0.0, 10.0, RESERVE_AFTER_S]))
        for i, size in enumerate(sizes):
            more: dict[str, Any] = data.draw(MACHINES) if scarce else {}
            self.world.node(f"n{i}", size, labels={"rack": "ab"[i % 2], GPU_PRODUCT: "PQ"[i // 2]}, **more)
        for name in PROJECTS:
            self.set_quota(name, data.draw(st.integers(0, 6)), data.draw(st.none() | st.integers(6, 12)), 1.0)
        if data.draw(st.booleans()):
            self.world.project("department", 4, 10)
            self.world.project("a", 2, parent="department")
            self.world.project("b", 2, parent="department")

    @rule(
        project=st.sampled_from(PROJECTS),
        size=st.integers(1, 4),
        low=st.integers(1, 4),
        more=st.integers(0, 4),
        build=st.booleans(),
        priority=st.sampled_from([None, 10, 60, 90]),
        preemptible=st.booleans(),
    )
    def submit(
        self, project: str, size: int, low: int, more: int, priority: int | None, *, build: bool, preemptible: bool
    ) -> None:
        self.count += 1
        name = f"j{self.count:03}"
        if build:
            self.world.session(name, project, size)
        else:
            quality = {"priority": priority, "preemptible": preemptible, "gpus_per_worker": 1}
            self.world.submit(name, project, size, min(low, size), size + more, user=self._user(), **quality)

    @rule(
        project=st.sampled_from(PROJECTS),
        size=st.integers(1, 4),
        workers=st.integers(1, 3),
        least=st.sampled_from([0.0, 20.0]),
    )
    def submit_gang(self, project: str, size: int, workers: int, least: float) -> None:
        self.count += 1
        self.world.submit(
            f"j{self.count:03}", project, size * workers, user=self._user(), gpus_per_worker=size, min_run_time_s=least
        )

    @rule(project=st.sampled_from(PROJECTS), share=SHARES, needs=NEEDS, build=st.booleans())
    def submit_share(self, project: str, share: dict[str, Any], needs: dict[str, Any], *, build: bool) -> None:
        self._submit(project, {**share, **needs, "kind": Kind.BUILD if build else Kind.TRAIN})

    @rule(project=st.sampled_from(PROJECTS), workers=st.integers(1, 3), more=st.integers(0, 3), needs=NEEDS)
    def submit_with_needs(self, project: str, workers: int, more: int, needs: dict[str, Any]) -> None:
        self._submit(project, {"gpus": workers, "min_gpus": 1, "max_gpus": workers + more, **needs})

    @rule(project=st.sampled_from(PROJECTS), workers=st.integers(1, 4), required=st.booleans())
    def submit_near_each_other(self, project: str, workers: int, *, required: bool) -> None:
        key = "required_topology" if required else "preferred_topology"
        self._submit(project, {"gpus": workers, "gpus_per_worker": 1, key: "rack"})

    @rule(
        project=st.sampled_from(PROJECTS),
        workers=st.integers(1, 4),
        more=st.integers(0, 3),
        types=st.sampled_from([("P",), ("P", "Q"), ("Q", "P"), ("R", "Q")]),
        topology=st.sampled_from([{}, {"required_topology": "rack"}, {"preferred_topology": "rack"}]),
    )
    def submit_for_types(
        self, project: str, workers: int, more: int, types: tuple[str, ...], topology: dict[str, str]
    ) -> None:
        sizes = {"gpus": workers, "max_gpus": workers + more, "gpus_per_worker": 1}
        self._submit(project, {**sizes, "gpu_types": types, **topology})

    @rule(
        project=st.sampled_from(PROJECTS),
        segment=st.integers(1, 3),
        sizes=st.lists(st.integers(1, 3), min_size=3, max_size=3).map(sorted),
        preemptible=st.booleans(),
        topology=st.sampled_from([{}, {"required_topology": "rack"}, {"gpu_types": ("P", "Q")}]),
    )
    def submit_in_segments(
        self, project: str, segment: int, sizes: list[int], topology: dict[str, Any], *, preemptible: bool
    ) -> None:
        low, size, high = (segment * number for number in sizes)
        fields = {"gpus": size, "min_gpus": low, "max_gpus": high, "gpus_per_worker": 1, "preemptible": preemptible}
        self._submit(project, {**fields, "segment": segment, "segment_topology": "rack", **topology})

    def _submit(self, project: str, fields: dict[str, Any]) -> None:
        self.count += 1
        spec = JobSpec(name=f"j{self.count:03}", project=project, command=("true",), **fields)
        self.world.submit_spec(spec, self._user())

    def _user(self) -> str:
        return ("ann", "bob", "")[self.count % 3]

    @precondition(lambda self: self.world.specs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.world.remove(data.draw(st.sampled_from(sorted(self.world.specs))))

    @rule(name=st.sampled_from(PROJECTS), guaranteed=st.integers(0, 6), weight=st.sampled_from([0.0, 1.0, 3.0]))
    def set_quota(self, name: str, guaranteed: int, limit: float | None = None, weight: float = 1.0) -> None:
        limit = self.world.projects[name].limit if name in self.world.projects else limit
        parent = self.world.projects[name].parent if name in self.world.projects else None
        policy = self.world.projects[name].stop_policy if name in self.world.projects else StopPolicy.NONE
        self.world.project(
            name, guaranteed, limit, over_quota_weight=weight, parent=parent, stop_policy=policy, order=ORDERS[name]
        )

    @rule(data=st.data(), policy=st.sampled_from([*StopPolicy, StopPolicy.NONE]))
    def set_stop_policy(self, data: st.DataObject, policy: StopPolicy) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.projects)))
        self.world.projects[name] = replace(self.world.projects[name], stop_policy=policy)
        self.world.state.apply(QuotaChanged(self.world.projects[name]))

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data())
    def a_worker_crashes(self, data: st.DataObject) -> None:
        self.world.crash(data.draw(st.sampled_from(sorted(self.world.workers))))

    @precondition(lambda self: self.world.nodes)
    @rule(data=st.data(), ready=st.booleans())
    def a_node_changes(self, data: st.DataObject, *, ready: bool) -> None:
        self.world.set_ready(data.draw(st.sampled_from(sorted(self.world.nodes))), ready=ready)

    @precondition(lambda self: self.world.specs)
    @rule(data=st.data(), suspend=st.booleans())
    def suspend_or_resume(self, data: st.DataObject, *, suspend: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.specs)))
        if suspend:
            self.world.suspend(name)
        else:
            self.world.resume(name)

    @precondition(lambda self: self.world.specs)
    @rule(data=st.data(), workers=st.integers(1, 8), rate=st.floats(0.1, 100), saved=st.booleans())
    def a_training_reports(self, data: st.DataObject, workers: int, rate: float, *, saved: bool) -> None:
        job, now = data.draw(st.sampled_from(sorted(self.world.specs))), self.world.now
        self.world.state.apply(ProgressReported(job, 1, now, now if saved else None, rate, workers))

    @rule(seconds=st.sampled_from([1, 100]))
    def time_passes(self, seconds: int) -> None:
        self.world.now += seconds

    @rule()
    def plan_and_carry_out(self) -> None:
        self.world.step()

    @rule()
    def workers_leave(self) -> None:
        self.world.release()

    @precondition(lambda self: any(r.leaving for r in self.world.workers.values()))
    @rule(data=st.data())
    def one_worker_leaves(self, data: st.DataObject) -> None:
        leaving = sorted(w for w, r in self.world.workers.items() if r.leaving)
        self.world.exit(data.draw(st.sampled_from(leaving)))

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @invariant()
    def plans_are_sound(self) -> None:
        decided = self.world.plan()
        assert decided == self.world.plan()
        assert decided == plan(copied(self.world.state), self.world.now)
        dumped = msgspec.json.encode(take_dump(self.world.state, self.world.now, "0"))
        assert decided == replay(decode_dump(dumped)).plan
        assert decided.again_at is None or decided.again_at > self.world.now
        self.world.check_indexes()
        placed = {n.job for n in decided.nominate}
        lost = Counter(self.world.workers[worker].job for worker in stopped(decided))
        for victim, beneficiary in victims(decided):
            if beneficiary != victim:  # a gang that was below its minimum for too long is stopped for itself
                left = self.world.size(victim) - lost[victim]
                assert self.may_lose(victim, left), f"{victim} cannot be preempted, and keeps {left}"
                assert beneficiary in placed, f"{victim} loses workers for {beneficiary}, which gets no place"
        self.nothing_starts_that_is_held(decided)
        self.a_drain_stops_only_what_may_be_stopped(decided, lost)
        for job in decided.waiting:
            assert self.world.size(job) == 0, f"{job} runs and has a waiting reason"
        bound = {b.job for b in decided.bind}
        waiting = {j for j in self.world.specs if not self.world.of(j)} - bound
        assert waiting <= set(decided.waiting)

    def nothing_starts_that_is_held(self, decided: Plan) -> None:
        held = {uid for uid, job in self.world.state.jobs.items() if job.halted}
        begun = {one.job for one in decided.bind} | {n.job for n in decided.nominate if not self.world.size(n.job)}
        assert not held & begun
        for grown in decided.resize:
            if grown.add and grown.job in held:
                assert grown.to_workers <= self.world.state.jobs[grown.job].gang, f"{grown.job} grows, and is held"
        assert not held & {one.job for one in decided.move}

    def a_drain_stops_only_what_may_be_stopped(self, decided: Plan, lost: Counter[str]) -> None:
        reasons = [(one.job, one.reason) for one in decided.evict] + [(one.job, one.reason) for one in decided.resize]
        for job in [job for job, reason in reasons if reason.code is ReasonCode.PROJECT_DRAINED]:
            assert self.world.state.jobs[job].queue.halt is StopPolicy.HOLD_AND_DRAIN
            assert self.may_lose(job, self.world.size(job) - lost[job]), f"{job} cannot be preempted, and is drained"

    def may_lose(self, job: str, left: int) -> bool:
        """Return whether others may take workers of the job so that it keeps `left` GPUs."""
        spec = self.world.specs[job]
        return spec.may_be_preempted or left >= spec.smallest

    def teardown(self) -> None:
        if self.world.nodes:
            self.world.settle()
            self.world.check()


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=30, deadline=None, report_multiple_bugs=False
)


resources = st.dictionaries(
    st.integers(0, 7), st.tuples(SHARES, NEEDS), max_size=4
)  # some of the jobs ask for shares and other resources instead


specs = st.builds(
    lambda project, gpus, low, more, kind: (project, gpus, min(low, gpus), gpus + more, kind),
    st.sampled_from(PROJECTS),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from(Kind),
)


def make_spec(index: int, drawn: tuple[str, int, int, int, Kind]) -> JobSpec:
    project, gpus, low, high, kind = drawn
    build = kind is Kind.BUILD
    return JobSpec(
        name=f"j{index}",
        project=project,
        command=("true",),
        gpus=gpus,
        min_gpus=None if build else low,
        max_gpus=None if build else high,
        kind=kind,
    )


@given(
    nodes=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    drawn=st.lists(specs, max_size=8),
    richer=resources,
    seed=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None, report_multiple_bugs=False)
def test_the_plan_does_not_depend_on_the_order_of_the_input(
    nodes: list[int],
    drawn: list[tuple[str, int, int, int, Kind]],
    richer: dict[int, tuple[dict[str, Any], dict[str, Any]]],
    seed: random.Random,
) -> None:
    jobs = [make_spec(i, d) for i, d in enumerate(drawn)]
    for i, (share, needs) in richer.items():
        jobs.append(JobSpec(name=f"r{i}", project=PROJECTS[i % 3], command=("true",), **share, **needs))
    groups: list[list[Event]] = [
        [QuotaChanged(Project(name=name, guaranteed=2)) for name in PROJECTS],
        [
            NodeChanged(
                Node(
                    name=f"n{i}",
                    devices=tuple(Device(index=d) for d in range(n)),
                    cpu=4.0 * i + 2,
                    labels={"rack": "ab"[i % 2]},
                )
            )
            for i, n in enumerate(nodes)
        ],
        [JobSubmitted(spec.name, spec, float(i)) for i, spec in enumerate(jobs)],
    ]
    events = [e for group in groups for e in group]
    plans = []
    for _ in range(2):
        state = State()
        for event in events:
            state.apply(event)
        plans.append(plan(state, 100.0))
        seed.shuffle(events)
    assert plans[0] == plans[1]


@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    greedy=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=10),
)
@settings(max_examples=60, deadline=None, report_multiple_bugs=False)
def test_guaranteed_quota_is_always_obtained_in_a_bounded_number_of_rounds(
    sizes: list[int], greedy: list[tuple[int, int]]
) -> None:
    world = World()
    total = sum(sizes)
    for i, size in enumerate(sizes):
        world.node(f"n{i}", size)
    mine = total // 2
    world.project("mine", mine)
    world.project("theirs", total - mine)
    for i, (gpus, more) in enumerate(greedy):
        world.submit(f"g{i}", "theirs", gpus, 1, gpus + more, gpus_per_worker=1)
    world.settle()
    for i in range(mine):
        world.session(f"s{i}", "mine")
    world.settle(2 * total + 4)
    assert all(world.size(f"s{i}") == 1 for i in range(mine))


@settings(max_examples=2 * EXAMPLES, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(0, 2)), min_size=2, max_size=10),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(0, 12),
)
def test_a_process_that_ends_between_two_requests_costs_no_promise(
    nodes: list[int], borrowers: list[tuple[int, int, int]], owners: list[int], asked: int
) -> None:
    """The next one asks the other workers to leave, and gives what becomes free to nobody else."""
    world = World()
    for i, gpus in enumerate(nodes):
        world.node(f"n{i}", gpus)
    world.project("owner", sum(nodes))
    world.project("borrower")
    for i, (gpus, more, workers) in enumerate(borrowers):
        each = 1 if workers else None
        most = gpus + more if more else None
        world.submit(f"b{i}", "borrower", gpus, 1 if more else None, most, gpus_per_worker=each)
    world.settle()
    for i, gpus in enumerate(owners):
        world.submit(f"o{i}", "owner", min(gpus, max(nodes)))
    world.now += 1
    decided = world.plan()
    world.carry_out(decided, asked=asked)
    world.submit("younger", "owner", 1)
    again = world.plan()
    started = {bind.job for bind in again.bind} | {resize.job for resize in again.resize if resize.add}
    for job in decided.victims:  # those that move may be given another place
        kept = again.promises.get(job) == decided.promises[job]
        assert kept or job in started, f"the promise of {job} is dropped"
    assert set(stopped(decided)[asked:]) <= set(stopped(again))
    world.settle()


def test_a_worker_that_is_gone_frees_its_devices_once() -> None:
    world = World()
    world.node("n0", 2)
    world.project("a", 2)
    world.submit("j", "a", 2, 1, 2)
    world.settle()
    worker = world.of("j")[0]
    del world.workers[worker]
    world.state.apply(WorkerGone(worker))
    world.settle()
    assert world.size("j") == 2
