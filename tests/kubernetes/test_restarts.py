"""A restarted controller plans what one that never stopped plans: its view of an object depends on the object alone."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gpuquota.cluster.kubernetes.client.process.tasks import TimeSlices
from kfp_gpuquota.cluster.kubernetes.convert import requests
from kfp_gpuquota.cluster.kubernetes.convert.pods import pod_job, pod_view
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
from tests.effort import effort
from tests.kubernetes import detached as watches
from tests.kubernetes.kuberay import elastic
from tests.kubernetes.test_admission import patched
from tests.kubernetes.twin_world import EPOCH, NODE_NAMES, Twin, World, plan_of, records_of, running

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView

Object = dict[str, Any]
TEAMS = "abc"
ZONES = ("a", "b")
REQUIRED = requests.REQUIRED

zone_terms = st.fixed_dictionaries(
    {"matchExpressions": st.just([{"key": "zone", "operator": "In", "values": ["a"]}])} | {"matchFields": st.just([])}
)
name_terms = st.builds(
    lambda operator, names: {"matchFields": [{"key": "metadata.name", "operator": operator, "values": names}]},
    st.sampled_from(["In", "NotIn"]),
    st.lists(st.sampled_from(NODE_NAMES), min_size=1, max_size=2, unique=True).map(sorted),
)


def _affinity(terms: list[Object] | None, preferred: bool) -> Object:
    node: Object = {} if terms is None else {REQUIRED: {"nodeSelectorTerms": terms}}
    return {"nodeAffinity": node} if terms is not None or preferred else {"podAntiAffinity": {}}


node_affinities = st.builds(
    _affinity, st.none() | st.lists(zone_terms | name_terms, min_size=1, max_size=2), st.booleans()
)
APART = {"podAntiAffinity": {REQUIRED: [{"labelSelector": {}, "topologyKey": "kubernetes.io/hostname"}]}}
affinities = node_affinities | node_affinities.map(lambda affinity: {**affinity, **APART})
constraints = st.fixed_dictionaries(
    {},
    optional={
        "nodeSelector": st.sampled_from([{}, {"zone": "a"}, {"zone": "b"}]),
        "affinity": affinities,
        "tolerations": st.just([{"key": "slow", "operator": "Exists"}]),
        "volumes": st.just([{"name": "v", "persistentVolumeClaim": {"claimName": "claim"}}]),
    },
)
pools = st.sampled_from(["", "p"])


def pod_body(spec: Object, gpus: int = 1, **metadata: Any) -> Object:
    """A gated pod with these fields in its specification."""
    container = {"name": "main", "resources": {"limits": {labels.GPU_RESOURCE: str(gpus)}}}
    return {
        "metadata": {"name": "p", "namespace": "a", "uid": "u", **metadata},
        "spec": {"containers": [container], "schedulingGates": [{"name": labels.QUOTA_GATE}], **deepcopy(spec)},
        "status": {"phase": "Pending"},
    }


def view_of(body: Object) -> PodView:
    return pod_view(msgspec.convert(body, Pod))


def admitted(body: Object, node: str, *, pinned: bool = True) -> Object:
    return patched(body, requests.admission(view_of(body), node, (0,), "why", pinned=pinned).body)


@given(spec=constraints, pool=pools, stand_in=st.booleans(), pinned=st.booleans())
def test_what_a_pod_requests_does_not_depend_on_its_stage(
    spec: Object, pool: str, stand_in: bool, pinned: bool
) -> None:
    gated = pod_body(spec, labels={labels.POOL: pool} if pool else {})
    node = "gpuquota-stand-in-p-0" if pool and stand_in else "n1"
    waits, sent = view_of(gated), admitted(gated, node, pinned=pinned)
    bound = {**sent, "spec": {**sent["spec"], "nodeName": "n1"}, "status": {"phase": "Running"}}
    ends = {**bound, "metadata": {**bound["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    for later in map(view_of, (sent, bound, ends)):
        assert pod_job(later) == pod_job(waits)
        assert later.claims == waits.claims


operations = st.lists(
    st.one_of(
        st.tuples(st.just("pod"), st.sampled_from(TEAMS), constraints, st.integers(1, 4)),
        st.tuples(st.just("gang"), st.sampled_from(TEAMS), constraints, st.integers(1, 2)),
        st.tuples(st.just("share"), st.sampled_from(TEAMS), constraints, st.sampled_from(["0.25", "0.5"])),
        st.tuples(st.just("job"), st.sampled_from(TEAMS), constraints, st.integers(1, 3)),
        st.tuples(st.just("segments"), st.sampled_from(TEAMS), constraints, st.integers(1, 3)),
        st.tuples(st.just("ray"), st.sampled_from(TEAMS), constraints, st.integers(1, 3)),
        st.tuples(st.just("plan")),
        st.tuples(st.just("run"), st.integers(0, 2)),
        st.tuples(st.just("refuse"), st.integers(0, 5)),
        st.tuples(st.just("end")),
        st.tuples(st.just("delete"), st.integers(0, 20)),
        st.tuples(st.just("finish"), st.integers(0, 20)),
        st.tuples(st.just("cordon"), st.sampled_from(NODE_NAMES), st.booleans()),
        st.tuples(st.just("quota"), st.sampled_from(TEAMS), st.integers(0, 6)),
        st.tuples(st.just("drop-claim"), st.sampled_from(TEAMS)),
        st.tuples(st.just("bind-claim"), st.sampled_from(TEAMS), st.sampled_from(ZONES)),
    ),
    min_size=3,
    max_size=25,
)


def make_node(world: World, name: str, *, cordoned: bool = False) -> None:
    at = NODE_NAMES.index(name)
    allocatable = {labels.GPU_RESOURCE: "4", "cpu": "64", "memory": "256Gi", "pods": "110"}
    taints = [{"key": "slow", "value": "", "effect": "NoSchedule"}] if at == 2 else []
    world.put(
        watches.NODES,
        {
            "metadata": {"name": name, "uid": f"node-{name}", "labels": {"zone": ZONES[at % 2]}},
            "spec": {"taints": taints, **({"unschedulable": True} if cordoned else {})},
            "status": {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]},
        },
    )


def set_quota(world: World, team: str, guaranteed: int) -> None:
    status = world.objects[watches.QUOTAS].get(team, {}).get("status", {})
    meta = {"name": team, "uid": f"quota-{team}"}
    world.put(watches.QUOTAS, {"metadata": meta, "spec": {"guaranteed": guaranteed}, "status": status})


class History:
    """Carries out drawn operations on a world."""

    def __init__(self, world: World) -> None:
        self.world, self.made = world, 0

    def apply(self, what: str, *how: Any) -> None:
        """Carry out one operation."""
        getattr(self, what.replace("-", "_"))(*how)

    def _pod(self, team: str, spec: Object, gpus: int, **metadata: Any) -> None:
        self.made += 1
        owner = {"kind": "ReplicaSet", "apiVersion": "apps/v1", "name": "r", "uid": f"rs-{team}", "controller": True}
        body = pod_body(spec, gpus, ownerReferences=[owner], **metadata)
        body["metadata"] |= {"name": f"p{self.made}", "namespace": team, "uid": f"pod-{self.made}"}
        self.world.put(watches.PODS, body)

    def pod(self, team: str, spec: Object, gpus: int) -> None:
        self._pod(team, spec, gpus)

    def gang(self, team: str, spec: Object, gpus: int) -> None:
        group = {"labels": {labels.POD_GROUP: f"g{self.made}"}, "annotations": {labels.POD_GROUP_SIZE: "2"}}
        for _ in range(2):
            self._pod(team, spec, gpus, **deepcopy(group))

    def share(self, team: str, spec: Object, part: str) -> None:
        self._pod(team, spec, 0, annotations={"gpu-fraction": part})

    def job(self, team: str, spec: Object, gpus: int) -> None:
        self._job(team, spec, {"gpus": gpus, "minGpus": 1, "maxGpus": gpus + 2})

    def segments(self, team: str, spec: Object, number: int) -> None:
        sizes = {"gpus": 2 * number, "minGpus": 2, "maxGpus": 2 * number + 2}
        self._job(team, spec, {**sizes, "segment": 2, "segmentTopology": "zone"})

    def _job(self, team: str, spec: Object, fields: Object) -> None:
        self.made += 1
        template = {"spec": {"containers": [{"name": "main", "image": "none"}], **deepcopy(spec)}}
        self.world.put(
            watches.JOBS,
            {
                "metadata": {"name": f"j{self.made}", "namespace": team, "uid": f"job-{self.made}", "generation": 1},
                "spec": {**fields, "template": template},
            },
        )

    def ray(self, team: str, spec: Object, replicas: int) -> None:
        self.made += 1
        template = {"spec": pod_body(spec)["spec"]}
        sizes = {"replicas": replicas, "minReplicas": 1, "maxReplicas": replicas + 1}
        meta = {"name": f"r{self.made}", "namespace": team, "uid": f"ray-{self.made}", "labels": elastic()}
        groups = [{"groupName": "g", **sizes, "template": template}]
        spec = {"headGroupSpec": {"template": {"spec": {}}}, "workerGroupSpecs": groups}
        self.world.put(watches.RAY_CLUSTERS, {"metadata": meta, "spec": spec})

    def run(self, choice: int = 0) -> None:
        self.world.run_pods(choice=choice)

    def refuse(self, number: int) -> None:
        if pods := self.world.unpinned():
            self.world.refuse(pods[number % len(pods)])

    def end(self) -> None:
        self.world.end_terminating()

    def _nth_pod(self, number: int) -> Object | None:
        pods = [pod for pod in self.world.objects[watches.PODS].values() if pod["metadata"]["namespace"] in TEAMS]
        return pods[number % len(pods)] if pods else None

    def delete(self, number: int) -> None:
        pod = self._nth_pod(number)
        if pod is None or pod["status"]["phase"] == "Succeeded":  # a finished worker's pod is what says that it has
            return
        pod["metadata"].setdefault("deletionTimestamp", self.world.now())
        self.world.put(watches.PODS, pod)

    def finish(self, number: int) -> None:
        pod = self._nth_pod(number)
        if pod is not None and pod["spec"].get("nodeName"):
            pod["status"] = {"phase": "Succeeded"}
            self.world.put(watches.PODS, pod)

    def cordon(self, node: str, cordoned: bool) -> None:
        make_node(self.world, node, cordoned=cordoned)

    def quota(self, team: str, guaranteed: int) -> None:
        set_quota(self.world, team, guaranteed)

    def bind_claim(self, team: str, zone: str) -> None:
        term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]}
        volume = {"nodeAffinity": {"required": {"nodeSelectorTerms": [term]}}}
        self.world.put(watches.VOLUMES, {"metadata": {"name": f"v-{team}", "uid": f"v-{team}"}, "spec": volume})
        claim = {"name": "claim", "namespace": team, "uid": f"claim-{team}"}
        self.world.put(watches.CLAIMS, {"metadata": claim, "spec": {"volumeName": f"v-{team}"}})

    def drop_claim(self, team: str) -> None:
        self.world.drop(watches.CLAIMS, f"{team}/claim")


async def settle(world: World, twin: Twin) -> None:
    """Return when neither the controller nor KubeRay has anything left to do."""
    await twin.settle()
    while world.run_kuberay():
        await twin.settle()


def check_nodes(twin: Twin) -> None:
    """Check that each bound pod is counted on its node, whichever was planned for it."""
    controller = twin.controller
    for pod in controller.snapshot.pods.values():
        if pod.bound and pod.holds:
            held = controller.snapshot.allocator.held(controller.holder_of(pod))
            assert held is not None, pod.name
            assert (held[0], len(held[1])) == (pod.node, pod.gpus), pod.name


async def compare(history: list[tuple[Any, ...]]) -> None:
    world = World()
    for node in NODE_NAMES:
        make_node(world, node)
    for team in TEAMS:
        set_quota(world, team, 4)
    player = History(world)
    async with running(world) as lasting:
        world.twin = lasting
        for what, *how in history:
            if what != "plan":
                player.apply(what, *how)
            await settle(world, lasting)
            check_nodes(lasting)
        world.twin = None
        lasting.controller._stop_timers()
        lasting.controller.snapshot.complete = False  # it plans no more, so that both see the same objects
        async with running(deepcopy_of(world)) as restarted:
            restarted.controller._stop_timers()
            lasting.controller.snapshot.complete = True
            assert records_of(restarted) == records_of(lasting)
            now = EPOCH + 86_400.0
            assert plan_of(restarted, now) == plan_of(lasting, now)


def deepcopy_of(world: World) -> World:
    other = World()
    other.objects, other.seconds = deepcopy(world.objects), world.seconds
    return other


@settings(max_examples=40)
@given(history=operations)
def test_a_restarted_controller_plans_what_one_that_never_stopped_plans(history: list[tuple[Any, ...]]) -> None:
    asyncio.run(compare(history))


@pytest.mark.slow
@settings(max_examples=effort(60, 5000))
@given(history=operations)
def test_it_does_after_many_histories(history: list[tuple[Any, ...]]) -> None:
    asyncio.run(compare(history))


def test_a_pod_is_where_its_admission_sent_it_whatever_other_nodes_its_user_names() -> None:
    names = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]} for name in ("n0", "n1")]
    gated = pod_body({"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": names}}}})
    assert view_of(admitted(gated, "n1")).node == "n1"


@pytest.mark.parametrize("kind", ["pod", "job", "ray"])
def test_what_is_not_pinned_is_counted_where_it_is_bound_also_after_a_refusal(kind: str) -> None:
    apart = {"affinity": APART}
    asyncio.run(compare([(kind, "a", apart, 2), ("refuse", 0), ("run", 1), ("run", 0)]))
    asyncio.run(compare([(kind, "a", apart, 2), (kind, "b", apart, 4), *[("refuse", 0)] * 4, ("plan",), ("run", 2)]))


def test_a_claim_that_was_bound_after_the_start_keeps_a_running_job_within_its_zone() -> None:
    claim = {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "claim"}}]}
    for what in ("pod", "job"):
        asyncio.run(compare([(what, "a", claim, 1), ("run",), ("bind-claim", "a", "b"), ("bind-claim", "a", "a")]))


def test_a_pod_that_was_bound_elsewhere_while_no_controller_ran_keeps_its_devices_annotated() -> None:
    async def play() -> str:
        world = World()
        for node in NODE_NAMES:
            make_node(world, node)
        set_quota(world, "a", 4)
        player = History(world)
        async with running(world) as twin:
            world.twin = twin
            player.apply("pod", "a", {"affinity": APART}, 1)
            await settle(world, twin)
        world.twin = None
        (pod,) = world.unpinned()
        other = next(node for node in NODE_NAMES if node != pod["metadata"]["annotations"][labels.RESERVED_ON])
        pod["spec"]["nodeName"], pod["status"] = other, {"phase": "Running"}
        async with running(world, follows=True) as twin:
            await settle(world, twin)
        devices: str = next(iter(world.objects[watches.PODS].values()))["metadata"]["annotations"][labels.DEVICES]
        return devices

    assert asyncio.run(play()) == "0"


@pytest.mark.parametrize("listed", [True, False])
def test_a_job_whose_deletion_waits_for_a_finalizer_starts_no_pods(listed: bool) -> None:
    async def play() -> tuple[int, int]:
        world = World()
        make_node(world, "n0", cordoned=not listed)
        set_quota(world, "a", 4)
        History(world).apply("job", "a", {}, 1)
        (job,) = world.objects[watches.JOBS].values()
        if listed:
            job["metadata"]["deletionTimestamp"] = world.now()
        async with running(world) as twin:
            world.twin = twin
            for _ in range(2):
                await settle(world, twin)
                job["metadata"].setdefault("deletionTimestamp", world.now())
                world.put(watches.JOBS, job)
            make_node(world, "n0")
            await settle(world, twin)
            pods = len(world.objects[watches.PODS])
            world.drop(watches.JOBS, f"a/{job['metadata']['name']}")
            await settle(world, twin)
            return pods, len(twin.controller.elastic.book.runtime_states)

    assert asyncio.run(play()) == (0, 0)


def test_a_cluster_that_is_suspended_before_it_has_pods_holds_no_gpus() -> None:
    async def play() -> list[int]:
        world = World()
        make_node(world, "n0")
        set_quota(world, "a", 4)
        held = []
        async with running(world) as twin:
            world.twin = twin
            History(world).apply("ray", "a", {}, 2)
            (cluster,) = world.objects[watches.RAY_CLUSTERS].values()
            for suspend in (False, True, False):
                cluster["spec"]["suspend"] = suspend
                world.put(watches.RAY_CLUSTERS, cluster)
                await twin.settle()
                held.append(twin.taken("n0"))
        return held

    before, suspended, after = asyncio.run(play())
    assert suspended == 0 < before == after


@pytest.mark.parametrize("kind", ["ray", "job"])
def test_pods_that_change_while_a_controller_starts_stay_workers_of_their_owner(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def compare_under_way() -> None:
        world = World()
        make_node(world, "n0")
        set_quota(world, "a", 4)
        async with running(world) as lasting:
            world.twin = lasting
            player = History(world)
            player.apply(kind, "a", {}, 2)
            await settle(world, lasting)
            player.run()
            await settle(world, lasting)
            world.twin = None
            other = deepcopy_of(world)

            async def see_pods(_: TimeSlices) -> None:
                for pod in other.objects[watches.PODS].values():
                    other.put(watches.PODS, pod)

            monkeypatch.setattr(TimeSlices, "yield_if_due", see_pods)
            async with running(other, follows=True) as restarted:
                assert records_of(restarted) == records_of(lasting)

    asyncio.run(compare_under_way())
