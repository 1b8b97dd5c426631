"""Whatever users write into objects: no exception escapes, what holds GPUs is counted, and others are planned.

Objects go in as the watch delivers them, among them such as the API server itself would refuse: its validation is not
what keeps the controller alive.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kfp_gpuquota.api.annotations import SHARE_ANNOTATIONS
from kfp_gpuquota.cluster.kubernetes.convert.owners import (
    INDEX_ANNOTATION,
    JOBSET_LABEL,
    LEADER_WORKER_LABEL,
    POD_GROUP_LABEL,
    VOLCANO_ANNOTATION,
)
from kfp_gpuquota.cluster.kubernetes.convert.pod_repulsion import (
    ANY_NAMESPACE,
    MOST_REPULSIONS,
    PodRepulsions,
    Repulsion,
)
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import MAX_DEVICES
from kfp_gpuquota.cluster.kubernetes.managed_jobs.conversion import MANAGER
from kfp_gpuquota.cluster.kubernetes.managed_jobs.conversion import PATH as BATCH_JOBS
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.paths import WORKLOAD_POLICIES
from kfp_gpuquota.cluster.kubernetes.unused_gpus.unused_workloads import LAST_ACTIVITY, NOTEBOOKS, STOPPED
from tests.effort import SOAK, effort
from tests.kubernetes.detached import (
    CLAIMS,
    JOBS,
    LIMIT_RANGES,
    NAMESPACES,
    NODES,
    PODS,
    POLICIES,
    PROFILES,
    QUOTAS,
    VOLUMES,
    Detached,
    detached,
)
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

EXAMPLES = effort(25, 5000)
HUGE = "9" * 5000
NOTES = [
    labels.POD_GROUP_SIZE,
    labels.DEVICES,
    labels.REASON,
    labels.GPUS,
    labels.GPU_CONFIG,
    labels.RESERVES_ON,
    labels.SHARERS,
    labels.READY,
    labels.SET_BY,
    labels.SIMULATED,
    labels.OPENED,
    labels.RECLAIMED_AT,
    labels.MIN_NODES,
    labels.MAX_NODES,
    labels.CHECKPOINT_CLAIM,
    labels.SUSPENDED,
    LAST_ACTIVITY,
    STOPPED,
    VOLCANO_ANNOTATION,
    INDEX_ANNOTATION,
    *SHARE_ANNOTATIONS,
    *(f"{labels.GROUP}/{name}" for name in SHARE_ANNOTATIONS),
]
LABELS = [
    labels.KIND,
    labels.PRIORITY,
    labels.PREEMPTIBLE,
    labels.POD_GROUP,
    labels.JOB,
    labels.WORKER,
    labels.ATTEMPT,
    labels.POOL,
    labels.RESERVES,
    labels.MANAGED,
    labels.SOURCE,
    labels.GPU_MEMORY,
    *sorted(labels.SESSIONS),
    POD_GROUP_LABEL,
    JOBSET_LABEL,
    LEADER_WORKER_LABEL,
]
TEXTS = st.one_of(
    st.sampled_from(
        ["", "0", "1", "-1", "2", "0.5", "1e309", "nan", "inf", HUGE, f"pool.{HUGE}", f"-{HUGE}", "٣", "²", "1k", "4Gi"]
    ),
    st.text(max_size=20),
    st.integers().map(str),
)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NUMBERS = st.one_of(st.integers(-2, 10), st.integers(-(2**63), 2**64 - 1))
AMOUNTS = st.one_of(TEXTS, st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False))


def either(typical: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly of the right shape, seldom anything: else hardly an object would get beyond its decoder."""
    return st.integers(0, 29).flatmap(lambda drawn: ANY if drawn == 17 else typical)


def maybe(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of the fields."""
    return st.fixed_dictionaries({}, optional={name: either(value) for name, value in fields.items()})


RESOURCES = maybe(
    {
        "limits": st.dictionaries(st.sampled_from([labels.GPU_RESOURCE, "cpu", "memory"]), AMOUNTS),
        "requests": st.dictionaries(st.sampled_from([labels.GPU_RESOURCE, "cpu", "memory"]), AMOUNTS),
    }
)
CONTAINERS = st.lists(maybe({"name": TEXTS, "resources": RESOURCES, "restartPolicy": TEXTS, "env": ANY}), max_size=3)
MATCHES = st.lists(
    maybe(
        {
            "key": TEXTS,
            "operator": st.sampled_from(["In", "NotIn", "Gt", "Lt", "Exists", "Near"]),
            "values": st.lists(TEXTS, max_size=2),
        }
    ),
    max_size=2,
)
TERMS = st.lists(maybe({"matchFields": MATCHES, "matchExpressions": MATCHES}), max_size=2)
REQUIRED = st.builds(
    lambda terms: {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}},
    TERMS,
)
OWNERS = st.lists(
    maybe(
        {
            "apiVersion": st.sampled_from([labels.API_VERSION, "elastic.iml.github.io/v1alpha1", "batch/v1"]),
            "kind": st.sampled_from(["ElasticJob", "Job", "ReplicaSet", "Workflow"]),
            "name": TEXTS,
            "uid": st.sampled_from(["elasticjobs-1", "jobs-2", "else"]),
            "controller": st.booleans(),
        }
    ),
    max_size=2,
)
CLAIM = maybe({"claimName": st.just("persistentvolumeclaims-1")})
POD_SPECS = maybe(
    {
        "nodeName": st.sampled_from(["node", "nowhere", ""]),
        "schedulingGates": st.just([{"name": labels.QUOTA_GATE}]),
        "containers": CONTAINERS,
        "initContainers": CONTAINERS,
        "affinity": REQUIRED,
        "nodeSelector": st.dictionaries(TEXTS, TEXTS, max_size=2),
        "tolerations": st.lists(maybe({"key": TEXTS, "operator": TEXTS, "value": TEXTS, "effect": TEXTS}), max_size=2),
        "terminationGracePeriodSeconds": AMOUNTS,
        "volumes": st.lists(maybe({"persistentVolumeClaim": CLAIM}), max_size=2),
        "overhead": st.dictionaries(st.sampled_from(["cpu", "memory"]), AMOUNTS),
        "resources": RESOURCES,
    }
)
NAMES = st.sampled_from(["team", "other", "kube-system"])


def metadata(uid: str, namespace: str = "") -> st.SearchStrategy[dict[str, Any]]:
    """Of an object that has this uid, and a name and a namespace as the API server assigns them."""
    drawn = maybe(
        {
            "labels": st.dictionaries(st.sampled_from(LABELS), TEXTS, max_size=4),
            "annotations": st.dictionaries(st.sampled_from(NOTES), TEXTS, max_size=4),
            "ownerReferences": OWNERS,
            "creationTimestamp": st.just("2026-11-22T10:00:00Z"),
            "deletionTimestamp": st.just("2026-11-22T10:00:00Z"),
            "generation": st.integers(),
        }
    )
    return drawn.map(lambda meta: {**meta, "uid": uid, "name": uid, "namespace": namespace})


TIMES = st.sampled_from(["2026-11-22T10:00:00Z", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2026-W47"])
STATUSES = maybe(
    {
        "phase": st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Odd"]),
        "startTime": TIMES,
        "conditions": st.lists(maybe({"type": TEXTS, "status": TEXTS, "message": TEXTS}), max_size=2),
        "allocatable": st.dictionaries(st.sampled_from([labels.GPU_RESOURCE, "cpu", "memory", "pods"]), AMOUNTS),
    }
)
JOB_SPECS = maybe(
    {
        "template": st.fixed_dictionaries({"spec": POD_SPECS, "metadata": maybe({"annotations": ANY, "labels": ANY})}),
        **dict.fromkeys(("gpus", "minGpus", "maxGpus", "gpusPerWorker", "gpuDevices", "priority", "segment"), NUMBERS),
        **dict.fromkeys(("gpuFraction", "gpuFractionLimit", "gpuMemory", "gpuMemoryLimit"), NUMBERS),
        **dict.fromkeys(("gracePeriodSeconds", "maxRestarts", "coolDownSeconds", "minRunTimeSeconds"), NUMBERS),
        **dict.fromkeys(("maxRuntimeSeconds", "ttlSecondsAfterFinished", "workersReadyTimeoutSeconds"), NUMBERS),
        **dict.fromkeys(("kind", "nodePool", "requiredTopology", "preferredTopology", "segmentTopology"), TEXTS),
        **dict.fromkeys(("begin", "after", "array"), ANY),
        "suspend": st.booleans(),
        "spread": st.booleans(),
        "checkpoint": maybe({"claimName": TEXTS}),
        "lease": maybe({"holder": TEXTS, "durationSeconds": NUMBERS, "renewTime": TEXTS}),
    }
)
JOB_STATUSES = maybe(
    {
        **dict.fromkeys(("attempt", "nextIndex", "generation", "generationReserved", "restarts"), NUMBERS),
        "phase": st.sampled_from(["Pending", "Running", "Starting", "Succeeded", "Suspended", "Odd"]),
        "intent": st.sampled_from(["run", "delete", "requeue", "odd"]),
        **dict.fromkeys(("reason", "resultWorker"), TEXTS),
        **dict.fromkeys(("ranks", "ended"), st.lists(NUMBERS, max_size=3)),
        **dict.fromkeys(("progress", "requeueState", "growState"), st.none()),
    }
)
BATCH_JOB_SPECS = maybe(
    {
        "template": st.fixed_dictionaries({"spec": POD_SPECS, "metadata": maybe({"annotations": ANY, "labels": ANY})}),
        **dict.fromkeys(("parallelism", "completions", "backoffLimit", "activeDeadlineSeconds"), NUMBERS),
        "suspend": st.booleans(),
    }
).map(lambda spec: {**spec, "managedBy": MANAGER})
TAINTS = st.lists(st.fixed_dictionaries({"key": TEXTS, "effect": TEXTS, "value": TEXTS}), max_size=2)
LIMITS = maybe({"limits": st.lists(maybe({"type": st.just("Container"), "defaultRequest": RESOURCES}), max_size=2)})
QUOTA_SPECS = maybe(
    {
        **dict.fromkeys(("guaranteed", "limit", "priority", "overQuotaWeight", "guaranteedCpu"), AMOUNTS),
        **dict.fromkeys(("defaultRuntimeSeconds", "maxRuntimeSeconds"), AMOUNTS),
        "stopPolicy": st.sampled_from(["Hold", "HoldAndDrain", "None", "hold", "", 7, None]),
        "parent": st.sampled_from(["team", "other", "kube-system", ""]),
        "pools": st.dictionaries(TEXTS, ANY, max_size=2),
    }
)


COUNTED = dict.fromkeys(("since", "observedAt", "warnedAt", "warnAfterSeconds", "suspendAfterSeconds"), AMOUNTS)
QUOTA_STATUSES = maybe(
    {
        "usage": st.lists(maybe({"gpuSeconds": AMOUNTS, "at": AMOUNTS, "pool": TEXTS}), max_size=2),
        "unused": st.lists(maybe({"uid": st.sampled_from(["team/else", "elasticjobs-1"]), **COUNTED}), max_size=2),
    }
)
IDLE = maybe(dict.fromkeys(("warnAfterSeconds", "preemptAfterSeconds", "suspendAfterSeconds"), AMOUNTS))


def objects() -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """(path, object) of any kind that the controller watches."""
    kinds: list[tuple[str, Callable[[str], st.SearchStrategy[dict[str, Any]]], dict[str, st.SearchStrategy[Any]]]] = [
        (PODS, lambda uid: NAMES.flatmap(lambda space: metadata(uid, space)), {"spec": POD_SPECS, "status": STATUSES}),
        (NODES, metadata, {"spec": maybe({"taints": TAINTS, "unschedulable": st.booleans()}), "status": STATUSES}),
        (JOBS, lambda uid: metadata(uid, "team"), {"spec": JOB_SPECS, "status": JOB_STATUSES}),
        (QUOTAS, metadata, {"spec": QUOTA_SPECS, "status": QUOTA_STATUSES}),
        (BATCH_JOBS, lambda uid: metadata(uid, "team"), {"spec": BATCH_JOB_SPECS, "status": STATUSES}),
        (PROFILES, metadata, {"spec": maybe({"plugins": st.lists(maybe({"kind": st.just("GpuQuota"), "spec": ANY}))})}),
        (NAMESPACES, metadata, {}),
        (CLAIMS, lambda uid: metadata(uid, "team"), {"spec": maybe({"volumeName": st.just("persistentvolumes-1")})}),
        (
            VOLUMES,
            metadata,
            {"spec": maybe({"nodeAffinity": maybe({"required": maybe({"nodeSelectorTerms": TERMS})})})},
        ),
        (LIMIT_RANGES, lambda uid: metadata(uid, "team"), {"spec": LIMITS}),
        (NOTEBOOKS, lambda uid: metadata(uid, "team"), {"spec": ANY}),
        (WORKLOAD_POLICIES, metadata, {"spec": maybe({"project": NAMES, "kind": TEXTS, "idle": IDLE})}),
    ]

    def of(kind: int, number: int) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
        path, meta, fields = kinds[kind]
        uid = f"{path.rpartition('/')[2]}-{number}"
        body = st.fixed_dictionaries({"metadata": meta(uid), **{name: either(value) for name, value in fields.items()}})
        return body.map(lambda one: (path, one))

    return st.tuples(st.integers(0, len(kinds) - 1), st.integers(1, 3)).flatmap(lambda drawn: of(*drawn))


class Tracebacks(logging.Handler):
    """What was logged with a traceback: a guard has caught it, and it is a fault all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.seen.append(logging.Formatter().formatException(record.exc_info))


@contextmanager
def no_traceback() -> Iterator[None]:
    """Nothing is logged inside, and no guard has to catch an exception."""
    handler, package = Tracebacks(), logging.getLogger("kfp_gpuquota")
    package.addHandler(handler)
    package.propagate = False
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.propagate = True
    assert not handler.seen, handler.seen[0]


def run(scenario: Callable[[Detached], Coroutine[Any, Any, None]]) -> None:
    async def all_of_it() -> None:
        async with detached() as test, asyncio.timeout(TIMEOUT_S):
            await scenario(test)

    asyncio.run(all_of_it())


async def planned(test: Detached, uid: str) -> None:
    """Return when the pod was sent to a node."""
    while not test.sent(uid):
        await asyncio.sleep(0)


@pytest.mark.parametrize("examples", [20, pytest.param(EXAMPLES, marks=pytest.mark.slow)])
def test_no_object_keeps_a_valid_pod_from_being_planned(examples: int) -> None:
    drawn = settings(
        deadline=None, max_examples=examples, derandomize=not SOAK, suppress_health_check=list(HealthCheck)
    )
    several = st.lists(objects(), max_size=8)
    drawn(given(several, several, st.sampled_from(["MODIFIED", "DELETED"]))(plans_beside))()


def plans_beside(before: list[tuple[str, dict[str, Any]]], after: list[tuple[str, dict[str, Any]]], event: str) -> None:
    """Have a valid pod planned beside these objects."""

    async def scenario(test: Detached) -> None:
        for path, body in before:
            test.see(path, body)
        await test.start()
        for path, body in after:
            test.see(path, body, event)
        test.node("valid")
        test.team("valid")
        await planned(test, test.pod("valid", "pod"))
        held = [uid for uid, pod in test.controller.snapshot.pods.items() if pod.holds and pod.requested]
        assert all(test.controller.snapshot.allocator.held(uid) for uid in held if not is_worker(test, uid))
        assert not test.controller.plans.health.failures
        await suspends_what_is_unused(test)

    with no_traceback():
        run(scenario)


async def suspends_what_is_unused(test: Detached) -> None:
    """No GPU is used for a long time."""
    unused, now = test.controller.unused, test.controller._now()
    test.see(POLICIES, {"metadata": {"name": "default", "uid": "qp"}, "spec": {"gpuUse": {"exporter": "ops/dcgm"}}})
    rule = {"warnAfterSeconds": 60, "preemptAfterSeconds": 90, "suspendAfterSeconds": 200}
    test.see(WORKLOAD_POLICIES, {"metadata": {"name": "idle", "uid": "wp"}, "spec": {"idle": rule}})
    unused.restore(test.controller.snapshot.quotas.values())
    test.pod("valid", "runs", node="valid")
    test.team("team")
    for kind, version, name in (("StatefulSet", "apps/v1", "notebooks-1"), ("Job", "batch/v1", "jobs-2")):
        owner = {"apiVersion": version, "kind": kind, "name": name, "uid": f"{name}-owner", "controller": True}
        meta = {"labels": {labels.NOTEBOOK: name}, "ownerReferences": [owner]}
        test.pod("team", f"{name}-0", node="valid", metadata=meta)
    for seconds in (0, 100, 200, 300):
        unused._now = lambda at=now + seconds: at  # type: ignore[misc]
        with patch.object(unused._exporters, "used", lambda _pod: False):
            await unused.look()
        await asyncio.sleep(0)
        warned = [one.warned_at for one in unused.stored_of("valid")]
        assert bool(warned) is (100 <= seconds < 300)  # a pod of no owner is only warned, and counted again


def is_worker(test: Detached, uid: str) -> bool:
    """A worker's devices are stored under the worker's name."""
    return bool(test.controller.snapshot.pods[uid].job_uid)


@pytest.mark.parametrize(
    ("note", "text"),
    [
        (labels.POD_GROUP_SIZE, HUGE),
        ("gpu-fraction", "half"),
        ("gpu-fraction-num-devices", HUGE),
        ("gpu-memory", HUGE),
        ("gpuquota.dev/gpu-memory-limit", "4Q"),
    ],
)
def test_a_pod_whose_annotations_cannot_be_read_is_counted_by_its_plain_request(note: str, text: str) -> None:
    async def scenario(test: Detached) -> None:
        test.node(gpus=8)
        test.team("team")
        test.pod("team", "odd", 6, node="node", metadata={"annotations": {note: text}})
        fits, too_many = test.pod("team", "fits", 2), test.pod("team", "many", 3)
        await test.start()
        await planned(test, fits)
        assert test.taken() == 8
        assert not test.sent(too_many)
        assert test.controller.quarantine.counts() == {"Pod": 1}
        warnings = [body for verb, path, body in test.connection.asked if path.endswith("/events")]
        assert any(note in warning["message"] for warning in warnings), warnings

    run(scenario)


def test_a_pod_of_which_only_a_part_can_be_read_is_counted() -> None:
    async def scenario(test: Detached) -> None:
        test.node(gpus=8)
        test.team("team")
        container = {"resources": {"limits": {labels.GPU_RESOURCE: "5"}}}
        odd = {
            "metadata": {"name": "odd", "namespace": "team", "uid": "odd"},
            "spec": {"nodeName": "node", "containers": [container], "tolerations": "all"},
            "status": {"phase": "Running", "conditions": 7},
        }
        test.see(PODS, odd)
        await test.start()
        assert test.taken() == 5
        test.see(PODS, odd, "DELETED")
        assert test.taken() == 0
        assert not test.controller.quarantine.counts()

    run(scenario)


MANY = 3000


def terms(count: int, values: int) -> dict[str, Any]:
    """A node affinity of this many terms, each with this many values."""
    found = [
        {"matchExpressions": [{"key": f"k{n}", "operator": "NotIn", "values": [f"v{one}" for one in range(values)]}]}
        for n in range(count)
    ]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": found}}
    return {"affinity": {"nodeAffinity": required}}


def keeping_away(count: int, values: int = 1) -> dict[str, Any]:
    """An anti-affinity of this many terms to pods of all namespaces."""
    found = [
        {
            "labelSelector": {
                "matchExpressions": [{"key": f"k{n}", "operator": "In", "values": [f"v{v}" for v in range(values)]}]
            },
            "namespaceSelector": {},
            "topologyKey": "zone",
        }
        for n in range(count)
    ]
    return {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": found}}}


def long_pod(test: Detached, field: str, name: str, gpus: int, **more: Any) -> str:
    more = {**more, **copy.deepcopy(LONG[field])}
    if ports := more.pop("ports", []):
        limits = {"limits": {labels.GPU_RESOURCE: str(gpus)}}
        more["containers"] = [{"name": "main", "resources": limits, "ports": ports}]
    return test.pod("evil", name, gpus, **more)


LONG: dict[str, dict[str, Any]] = {
    "labels": {"metadata": {"labels": {f"k{n}": "v" for n in range(MANY)}}},
    "nodeSelector": {"nodeSelector": {f"k{n}": "v" for n in range(MANY)}},
    "nodeAffinity.required": terms(MANY, 1),
    "nodeAffinity.required values": terms(1, MANY),
    "tolerations": {"tolerations": [{"key": f"k{n}", "operator": "Exists"} for n in range(MANY)]},
    "persistentVolumeClaim": {
        "volumes": [{"name": f"v{n}", "persistentVolumeClaim": {"claimName": f"c{n}"}} for n in range(MANY)]
    },
    "resourceClaims": {"resourceClaims": [{"name": f"v{n}", "resourceClaimName": f"c{n}"} for n in range(MANY)]},
    "resources and host ports": {
        "ports": [{"hostPort": number, "protocol": "TCP", "hostIP": "10.0.0.1"} for number in range(1, MANY)]
    },
    "anti-affinity": keeping_away(MANY),
    "anti-affinity values": keeping_away(1, MANY),
}
"""Pods such as a tenant may create by the thousand, by the field that is refused, or cut."""


def leaves(kept: Any) -> int:
    """Return the number of values in what is kept of an object."""
    if isinstance(kept, msgspec.Struct):
        kept = msgspec.structs.astuple(kept)
    if isinstance(kept, dict):
        return 2 * len(kept)
    return sum(map(leaves, kept)) if isinstance(kept, list | tuple) else 1


@pytest.mark.parametrize("field", LONG)
def test_a_pod_with_a_long_list_of_anything_delays_no_other_and_is_counted(field: str) -> None:
    async def scenario(test: Detached) -> None:
        test.node()
        test.team("team", 6)
        test.team("evil")
        long_pod(test, field, "runs", 1, node="node")
        gated = long_pod(test, field, "waits", 1)
        long_pod(test, field, "without", 0, node="node")
        fits = test.pod("team", "fits", 6)
        await test.start()
        await planned(test, fits)
        assert test.taken() == 7 + test.sent(gated)
        if not field.startswith("anti-affinity"):
            assert not test.sent(gated)
            warnings = [body["message"] for _, path, body in test.connection.asked if path.endswith("/events")]
            assert any(f"{field} is " in one and "of them is not planned" in one for one in warnings), warnings
        assert all(leaves(pod) < 1500 for pod in test.controller.snapshot.pods.values())

    run(scenario)


@pytest.mark.parametrize("field", ["labels", "tolerations"])
def test_a_started_pod_to_which_its_user_adds_a_long_list_is_counted_as_before(field: str) -> None:
    """Its labels and tolerations may change as long as it exists, so no view of it may depend on their number."""
    admitted = {labels.DEVICES: "0", labels.RESERVED_ON: "node"}
    pods: dict[str, dict[str, Any]] = {
        "pool": {"gpus": 1, "node": "node", "metadata": {"labels": {labels.POOL: "big"}}},
        "share": {"gpus": 0, "node": "node", "metadata": {"annotations": {labels.DEVICES: "0", "gpu-fraction": "0.5"}}},
        "session": {"gpus": 1, "node": "node", "metadata": {"labels": {labels.KIND: "build"}}},
        "sent": {"gpus": 1, "schedulingGates": [], "metadata": {"annotations": admitted}},
    }

    async def scenario(test: Detached) -> None:
        for name, pod in pods.items():
            test.pod("team", name, **copy.deepcopy(pod))
        await test.start()
        before = dict(test.controller.snapshot.pods)
        for name, pod in pods.items():
            longer = copy.deepcopy(pod)
            more = copy.deepcopy(LONG[field])
            given = {**longer["metadata"].get("labels", {}), **more.get("metadata", {}).get("labels", {})}
            longer["metadata"]["labels"] = given
            test.pod("team", name, **longer, **{key: more[key] for key in more if key != "metadata"})
        for uid, earlier in before.items():
            view = test.controller.snapshot.pods[uid]
            assert leaves(view) < 1500
            assert msgspec.structs.replace(view, labels=earlier.labels, constraints=earlier.constraints) == earlier
        assert not test.controller.quarantine.counts()

    run(scenario)


@pytest.mark.parametrize("name", ["first", "worker"])
def test_a_pod_of_another_namespace_is_no_worker_of_a_job(name: str) -> None:
    """Whatever the namespace, its user may write any owner reference where no policy of ours applies."""

    async def scenario(test: Detached) -> None:
        test.node()
        test.team("team", 2)
        test.see(QUOTAS, {"metadata": {"name": "evil", "uid": "evil"}, "spec": {"guaranteed": 2, "limit": 2}})
        spec = {"gpus": 1, "template": {"spec": {"containers": [{"name": "main", "image": "x"}]}}}
        status = {"phase": "Running", "workers": 1}
        test.see(JOBS, {"metadata": {"name": "j", "namespace": "team", "uid": "j"}, "spec": spec, "status": status})
        owner = {"apiVersion": labels.API_VERSION, "kind": "ElasticJob", "name": "j", "uid": "j", "controller": True}
        notes = {"annotations": {labels.DEVICES: "4,5"}, "ownerReferences": [owner]}
        worker = {"annotations": {labels.DEVICES: "0"}, "labels": {labels.WORKER: "0"}, "ownerReferences": [owner]}
        pods = {"evil": (name, 2, notes), "team": ("worker", 1, worker)}
        for team in sorted(pods, reverse=name == "worker"):
            of_team, gpus, metadata = pods[team]
            test.pod(team, of_team, gpus, node="node", metadata=metadata)
        more = test.pod("evil", "more", 1)
        fits = test.pod("team", "fits", 1)
        await test.start()
        await planned(test, fits)
        book = test.controller.elastic.book
        (record,) = book.alive_of("j")
        assert record.worker.devices == (0,)
        assert not test.sent(more)
        test.see(PODS, next(pod for pod in test.pods if pod["metadata"]["namespace"] == "evil"), "DELETED")
        assert book.alive_of("j") == [record]

    run(scenario)


def test_what_pods_keep_away_is_evaluated_as_far_as_that_delays_nothing() -> None:
    """Each release of any team's pod compares it with these."""
    found = PodRepulsions()
    for number in range(MOST_REPULSIONS):
        away = Repulsion((ANY_NAMESPACE,), (("app", "In", (str(number),)),))
        found.put(f"pod{number}", (away,))
    assert not found.keeps_away("team", {"app": "other"})
    assert found.keeps_away("team", {"app": "7"})
    found.put("more", (Repulsion((ANY_NAMESPACE,), (("app", "In", ("more",)),)),))
    assert found.keeps_away("team", {"app": "other"})
    found.drop("more")
    assert not found.keeps_away("team", {"app": "other"})


def test_an_object_that_can_no_longer_be_read_is_not_taken_for_gone() -> None:
    async def scenario(test: Detached) -> None:
        test.team("team", guaranteed=3)
        await test.start()
        test.see(QUOTAS, {"metadata": {"name": "team", "uid": "quota-team"}, "spec": "much"})
        assert test.controller.snapshot.projects["team"].guaranteed == 3
        assert test.controller.quarantine.counts() == {"GpuQuota": 1}
        reflector = next(one for one in test.controller.reflectors if one._path == QUOTAS)
        seen = reflector._read(msgspec.Raw(b'{"metadata": {"name": "team", "uid": "quota-team"}, "spec": "much"}'))
        assert seen is not None
        reflector._drop_missing({seen.metadata.uid}, 1000)
        assert "team" in test.controller.snapshot.projects
        test.team("team", guaranteed=2)
        assert test.controller.snapshot.projects["team"].guaranteed == 2
        assert not test.controller.quarantine.counts()

    run(scenario)


def test_devices_that_a_pod_claims_by_annotations_alone_are_not_taken_from_others() -> None:
    async def scenario(test: Detached) -> None:
        test.node(gpus=8)
        claim = {"annotations": {"gpu-fraction": "0.5", "gpu-fraction-num-devices": "8"}}
        container = {"name": "main"}
        body = {
            "metadata": {"name": "claim", "namespace": "unmanaged", "uid": "claim", **claim},
            "spec": {"nodeName": "node", "containers": [container]},
            "status": {"phase": "Running"},
        }
        test.see(PODS, body)
        await test.start()
        assert test.taken() == 0

    run(scenario)


def test_a_pod_of_another_projects_elastic_job_is_a_plain_pod() -> None:
    async def scenario(test: Detached) -> None:
        test.node()
        test.team("team")
        owner = {"apiVersion": "elastic.iml.github.io/v1alpha1", "kind": "ElasticJob", "name": "j", "uid": "u"}
        uid = test.pod("team", "pod", metadata={"ownerReferences": [{**owner, "controller": True}]})
        await test.start()
        await planned(test, uid)

    run(scenario)


def test_no_pod_counts_for_more_devices_than_any_machine_has() -> None:
    async def scenario(test: Detached) -> None:
        test.node(gpus=8)
        test.pod("unmanaged", "greedy", "1000000000", node="node")
        await test.start()
        assert test.taken() == MAX_DEVICES

    run(scenario)


def test_gauges_of_deleted_projects_go() -> None:
    async def scenario(test: Detached) -> None:
        test.team("team")
        await test.start()
        metrics = test.controller.metrics
        metrics.look(test.controller)
        assert metrics.registry.get_sample_value("gpuquota_guaranteed_gpus", {"project": "team"}) == 4
        test.see(QUOTAS, {"metadata": {"name": "team", "uid": "quota-team"}}, "DELETED")
        metrics.look(test.controller)
        assert metrics.registry.get_sample_value("gpuquota_guaranteed_gpus", {"project": "team"}) is None

    run(scenario)


def test_a_claim_to_a_place_in_an_autoscaled_pool_makes_no_more_places_than_the_pool_has() -> None:
    async def scenario(test: Detached) -> None:
        pools = {"burst": {"autoscaled": {"maxGpus": 8, "gpusPerNode": 4}}}
        test.see(POLICIES, {"metadata": {"name": "default", "uid": "policy"}, "spec": {"pools": pools}})
        claim = {labels.OPENED: "autoscaled.burst.9999999", labels.DEVICES: "0"}
        container = {"name": "main", "resources": {"limits": {labels.GPU_RESOURCE: "1"}}}
        body = {
            "metadata": {"name": "claim", "namespace": "team", "uid": "claim", "annotations": claim},
            "spec": {"containers": [container]},
            "status": {"phase": "Pending"},
        }
        test.see(PODS, body)
        await test.start()
        assert set(test.controller.snapshot.emitted_nodes) == {"autoscaled.burst.0", "autoscaled.burst.1"}

    run(scenario)


def test_a_job_learns_nothing_of_a_job_in_another_namespace() -> None:
    """It waits for a name of its own namespace, whether or not a job of another one has that name, or has ended."""

    async def scenario(test: Detached) -> None:
        test.node()
        spec = {"template": {"spec": {"containers": [{"name": "main", "image": "x"}]}}}
        ended = {"phase": "Failed"}
        for namespace, name, after in (("b", "prep", []), ("a", "one", ["prep"]), ("a", "two", ["x"])):
            meta = {"name": name, "namespace": namespace, "uid": name}
            status = {} if after else ended
            test.see(JOBS, {"metadata": meta, "spec": {**spec, "after": after}, "status": status})
        meta = {"name": "up", "namespace": "a", "uid": "up"}
        test.see(JOBS, {"metadata": meta, "spec": {**spec, "after": ["../b/prep"]}})
        await test.start()
        book = test.controller.elastic.book
        sentences = {name: str(book.jobs[name].held).replace("prep", "x") for name in ("one", "two")}
        assert sentences["one"] == sentences["two"] == "waits for job x, which does not exist yet (after)"
        assert "up" not in book.jobs, "its name is no name"

    run(scenario)
