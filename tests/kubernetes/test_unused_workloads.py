"""Workloads whose GPUs are unused, on Kubernetes: measured by exporters, warned, suspended; never without a measure."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.api import Kind, Progress
from kfp_gpuquota.api.policy import IdleRule, WorkloadPolicy
from kfp_gpuquota.cluster.kubernetes.convert.owners import Owner
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage
from kfp_gpuquota.cluster.kubernetes.elasticjob.reconciler import LONGEST_WHY
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import PolicyObject, UnusedWorkload
from kfp_gpuquota.cluster.kubernetes.objects.paths import QUOTA_POLICIES, WORKLOAD_POLICIES
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import GpuUseRules
from kfp_gpuquota.cluster.kubernetes.quota.workload_policies import policy_body, policy_of
from kfp_gpuquota.cluster.kubernetes.unused_gpus import exporters as exporters_module
from kfp_gpuquota.cluster.kubernetes.unused_gpus.dcgm import MAX_BYTES, MAX_SAMPLES, Reading, readings_in
from kfp_gpuquota.cluster.kubernetes.unused_gpus.exporters import Exporters
from kfp_gpuquota.cluster.kubernetes.unused_gpus.unused_workloads import LAST_ACTIVITY, NOTEBOOKS, STOPPED
from kfp_gpuquota.cluster.kubernetes.unused_gpus.workloads import (
    MOST_STORED,
    Stop,
    counted_of,
    plain_workloads,
    stored,
)
from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient
from kfp_gpuquota.engine.notifications import Notification, Notified
from kfp_gpuquota.engine.records import with_status
from kfp_gpuquota.engine.unused_gpus import Observed, UnusedGpus
from kfp_gpuquota.errors import InvalidFieldError
from kfp_gpuquota.fractions.activity import GpuUse
from tests.kubernetes.controlled import Controlled, pod_body
from tests.kubernetes.detached import JOBS, PODS, POLICIES, Detached, Unanswered, detached
from tests.kubernetes.gpu_exporter import (
    NAMESPACE,
    SERVICE,
    USED_MIB,
    GpuExporter,
    endpoint_slice,
    install_notebooks,
    own_address,
    publish,
)
from tests.kubernetes.installation import QUOTAS, batch_jobs_of
from tests.kubernetes.test_suspended_owners import job_path, job_spec
from tests.kubernetes.trainer import AppWrappers, install_kinds, path_of
from tests.kubernetes.users import connection_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Object = dict[str, Any]
RULES = GpuUseRules(exporter=f"{NAMESPACE}/{SERVICE}")
RULE = IdleRule(warn_after_s=200, preempt_after_s=300, suspend_after_s=500)
GAP_S = RULES.longest_gap_s

# What exporters serve


def sample(name: str, value: str, gpu: str = "GPU-1", pod: str = "p", namespace: str = "a", more: str = "") -> str:
    return f'{name}{{gpu="0",UUID="{gpu}",namespace="{namespace}",pod="{pod}"{more}}} {value}\n'


UTIL, ENERGY = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (sample(UTIL, "0") + sample(ENERGY, "5"), Reading(used=False, energy=5)),
        (sample(UTIL, "0.0") + sample("DCGM_FI_DEV_MEM_COPY_UTIL", "1"), Reading(used=True, energy=None)),
        (sample(UTIL, "0") + sample("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "0.004"), Reading(used=True, energy=None)),
        (sample("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "0.000000"), Reading(used=False, energy=None)),
        (sample("DCGM_FI_DEV_MEM_COPY_UTIL", "0"), Reading(used=None, energy=None)),
        (sample(UTIL, "NaN") + sample(ENERGY, "+Inf"), Reading(used=None, energy=None)),
        (sample(UTIL, "-1"), Reading(used=None, energy=None)),
        (sample(UTIL, "2147483632"), Reading(used=None, energy=None)),  # DCGM's "unknown"
        (sample(UTIL, "0x0"), Reading(used=None, energy=None)),
        (sample(UTIL, "0") + sample("DCGM_FI_DEV_ENC_UTIL", "NaN"), Reading(used=None, energy=None)),
        (sample(UTIL, "0 1700000000000"), Reading(used=False, energy=None)),
        (sample(UTIL, "0", more=',modelName="a \\"b\\\\ } 5"'), Reading(used=False, energy=None)),
    ],
)
def test_a_gpu_is_unused_only_by_numbers_that_say_so(text: str, expected: Reading) -> None:
    ((pod, gpus),) = readings_in(f"# HELP {UTIL} x\n{text}".encode()).items()
    assert (pod, list(gpus), gpus["GPU-1/"][:2]) == (("a", "p"), ["GPU-1/"], expected[:2])


@pytest.mark.parametrize(
    "text",
    [
        sample(UTIL, "0", pod=""),
        sample(UTIL, "0", namespace=""),
        sample(UTIL, "0", more=',pod="q"'),  # two pods
        sample(UTIL, "0", more=",x=y"),
        f"{UTIL} 0\n",
        f"{UTIL}{{}} 0\n",
        f"x{sample(UTIL, '0')}",
        "",
    ],
)
def test_a_sample_that_names_no_pod_is_left_out(text: str) -> None:
    assert readings_in(text.encode()) == {}


def test_mig_instances_of_a_gpu_are_devices_of_their_own() -> None:
    text = sample(UTIL, "0", more=',GPU_I_ID="1"') + sample(UTIL, "0", more=',GPU_I_ID="2"')
    assert set(readings_in(text.encode())["a", "p"]) == {"GPU-1/1", "GPU-1/2"}


@pytest.mark.parametrize("body", [b"x" * (MAX_BYTES + 1), sample(UTIL, "0").encode() * (MAX_SAMPLES + 1), b"\xff"])
def test_an_answer_that_no_exporter_gives_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"MiB|values|decode"):
        readings_in(body)


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_any_bytes_are_an_answer_or_none(body: bytes) -> None:
    with suppress(UnicodeDecodeError):
        assert readings_in(body + b"\n" + sample(UTIL, "0").encode())["a", "p"]


# Whom they are asked of


class Slices(Unanswered):
    """Answers with EndpointSlices."""

    def __init__(self, *slices: Object) -> None:
        super().__init__()
        self.slices = slices

    def answer(self, verb: str, path: str, body: object) -> bytes:
        """Answer as an API server does."""
        assert (verb, path) == ("GET", f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices")
        return json.dumps({"items": self.slices}).encode()


def view(name: str = "p", node: str = "n0", **more: Any) -> PodView:
    fields = {"uid": f"uid-{name}", "namespace": "a", "stage": Stage.ASSIGNED, "created": 0.0, "gpus": 1, **more}
    return PodView(name=name, node=node, running=True, **fields)


@contextmanager
def asking(exporter: GpuExporter, *nodes: str, team: str = "") -> Iterator[tuple[Exporters, list[float]]]:
    """An exporter that is that of these nodes, and the time, which the test sets."""
    now = [1000.0]
    with exporter.serving():
        slices = Slices(endpoint_slice("127.0.0.1", exporter.port, list(nodes)))
        yield Exporters(slices, lambda: now[0], lambda namespace: namespace == team), now


def looks(exporters: Exporters, now: list[float], pod: PodView, times: int = 2) -> bool | None:
    for _ in range(times):
        now[0] += RULES.interval_s
        asyncio.run(exporters.look(RULES, {"n0"}))
    return exporters.used(pod)


def test_a_pod_is_unused_once_its_exporter_has_reported_twice() -> None:
    with asking(GpuExporter({("a", "p"): ["0"]}), "n0") as (exporters, now):
        assert looks(exporters, now, view(), 1) is None
        assert looks(exporters, now, view(), 1) is False


def test_a_use_counts_at_once() -> None:
    with asking(GpuExporter({("a", "p"): ["0", "3"]}), "n0") as (exporters, now):
        assert looks(exporters, now, view(gpus=2), 1) is True


@pytest.mark.parametrize(
    ("served", "pod"),
    [
        ({("a", "other"): ["0"]}, view()),
        ({("b", "p"): ["0"]}, view()),  # another team's pod of the same name
        ({("a", "p"): ["0"]}, view(gpus=2)),  # a GPU less than it has
        ({("a", "p"): ["0", "0"]}, view()),  # one more
        ({("a", "p"): ["0"]}, view(node="n1")),  # what an exporter says of a pod on another node
        ({("a", "p"): ["0"]}, view(share=(("gpu_fraction", 0.5),))),
        ({("a", "p"): ["NaN"]}, view()),
    ],
)
def test_what_is_not_measured_is_not_unused(served: dict[tuple[str, str], list[str]], pod: PodView) -> None:
    with asking(GpuExporter(served), "n0") as (exporters, now):
        assert looks(exporters, now, pod, 3) is None


def test_values_that_stand_still_are_no_measure() -> None:
    exporter = GpuExporter({("a", "p"): ["0"]})
    with asking(exporter, "n0") as (exporters, now):
        assert looks(exporters, now, view()) is False
        exporter.frozen = True
        now[0] += GAP_S
        assert looks(exporters, now, view(), 1) is False  # the counter had another value than before
        now[0] += GAP_S
        assert looks(exporters, now, view(), 1) is None


def test_figures_of_a_pod_are_in_the_order_of_the_node_and_new() -> None:
    exporter = GpuExporter({("a", "p"): ["7", "NaN"]})
    with asking(exporter, "n0") as (exporters, now):
        looks(exporters, now, view(), 1)
        assert exporters.figures("n0", "a", "p") == [], "one of its GPUs was not measured"
        exporter.used = {("a", "p"): ["7", "0"]}
        looks(exporters, now, view(), 1)
        expected = [GpuUse(percent > 0, percent, USED_MIB) for percent in (7.0, 0.0)]
        assert exporters.figures("n0", "a", "p") == expected
        assert exporters.figures("n1", "a", "p") == exporters.figures("n0", "", "") == []
        exporter.frozen = True
        looks(exporters, now, view(), 1)
        now[0] += 2 * GAP_S
        looks(exporters, now, view(), 1)
        assert exporters.figures("n0", "a", "p") == []


@pytest.mark.parametrize(
    "broken",
    [
        {"status": 500},
        {"status": 302, "headers": {"Location": "/elsewhere"}},
        {"more": b"x" * (MAX_BYTES + 1)},
        {"more": b"\xff\xfe"},
        {"more": sample(UTIL, "0").encode() * (MAX_SAMPLES + 1)},
        {"headers": {"Content-Length": "5"}},
    ],
    ids=str,
)
def test_an_exporter_that_fails_is_asked_less_and_less(broken: dict[str, Any]) -> None:
    exporter = GpuExporter({("a", "p"): ["0"]}, **broken)
    with asking(exporter, "n0") as (exporters, now):
        assert looks(exporters, now, view(), 20) is None
        assert exporter.asked < 12 or "Content-Length" in str(broken)


def test_an_exporter_that_answers_slowly_delays_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters_module, "TIMEOUT_S", 0.05)
    asyncio.run(ask_a_slow_one())


async def ask_a_slow_one() -> None:
    held = asyncio.Event()

    async def hold(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await held.wait()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    exporters = Exporters(Slices(endpoint_slice("127.0.0.1", port, ["n0"])), lambda: 1000.0, lambda _: False)
    await exporters.look(RULES, {"n0"})
    assert exporters.used(view()) is None
    held.set()
    server.close()


@pytest.mark.parametrize(
    "change",
    [
        {"endpoints": [{"addresses": ["metadata.internal"], "nodeName": "n0"}]},  # a name: only addresses are asked
        {"endpoints": [{"addresses": ["127.0.0.1"]}]},
        {"endpoints": [{"addresses": ["127.0.0.1"], "nodeName": "n0", "conditions": {"ready": False}}]},
        {"endpoints": None},
        {"ports": []},
    ],
    ids=str,
)
def test_only_a_ready_endpoint_of_the_pods_node_is_asked(change: Object) -> None:
    exporter = GpuExporter({("a", "p"): ["0"]})
    with exporter.serving():
        one = {**endpoint_slice("127.0.0.1", exporter.port, ["n0"]), **change}
        exporters = Exporters(Slices(one), lambda: 1000.0, lambda _: False)
        asyncio.run(exporters.look(RULES, {"n0"}))
    assert exporter.asked == 0


def test_a_service_in_a_teams_namespace_is_not_asked() -> None:
    exporter = GpuExporter({("a", "p"): ["0"]})
    with asking(exporter, "n0", team=NAMESPACE) as (exporters, now):
        assert looks(exporters, now, view()) is None
    assert exporter.asked == 0


# What is counted

EVENTS = st.lists(
    st.tuples(
        st.sampled_from((RULES.interval_s, RULES.interval_s, GAP_S, GAP_S + 1)),
        st.sampled_from((False, False, False, False, None, True)),
        st.booleans(),
        st.integers(0, 9),
    ),
    max_size=40,
)


@given(EVENTS)
def test_a_restarted_controller_decides_as_one_that_never_stopped(
    events: list[tuple[float, bool | None, bool, int]],
) -> None:
    """And nobody is suspended without a whole time in which each of their GPUs was measured and unused."""
    steady, restarted = (UnusedGpus(GAP_S, GAP_S) for _ in range(2))
    now, last_use, last_seen, started = 1_000_000.0, 1_000_000.0, 1_000_000.0, 0.0
    for after_s, used, restarts, pods in events:
        now += after_s
        started = now - 5 if pods == 0 else started  # another pod was started
        last_use = max(last_use, started)
        if restarts:
            written = msgspec.json.encode(stored(restarted.counted(), now + 60))
            restarted = UnusedGpus(GAP_S, GAP_S)
            restarted.restore(
                {one.uid: counted_of(one) for one in msgspec.json.decode(written, type=tuple[UnusedWorkload, ...])}
            )
        seen = {"w": Observed(used, RULE, "idle", started)}
        verdicts, others = steady.observe(seen, now), restarted.observe(seen, now)
        assert verdicts == others
        if used is True or now - last_seen > GAP_S:
            last_use = now
        if used is not None:
            last_seen = now
        if verdicts.suspend or verdicts.preemptible:
            assert used is False
            assert now - last_use >= (RULE.suspend_after_s if verdicts.suspend else 300)


def test_a_notebook_in_which_its_user_worked_is_not_unused() -> None:
    unused, found = UnusedGpus(GAP_S, GAP_S), list[float]()
    for now in range(1000, 1800, 30):
        active = min(now, 1400.0)
        verdicts = unused.observe({"w": Observed(used=False, rule=RULE, active_at=active)}, now)
        found += [one.at for one in verdicts.warn]
    assert found == [1600]


def test_what_is_stored_of_a_team_is_bounded_and_the_warned_come_first() -> None:
    unused = UnusedGpus(GAP_S, GAP_S)
    uids = [f"w{number:03}" for number in range(3 * MOST_STORED)]
    unused.observe({uid: Observed(used=False, rule=RULE) for uid in uids}, 1000.0)
    found = stored(unused.counted(), 1060.0)
    assert [one.uid for one in found] == uids[:MOST_STORED]
    assert stored(unused.counted(), 1001.0) == ()


def test_a_stored_warning_with_an_invalid_rule_does_not_hold() -> None:
    given = UnusedWorkload(uid="w", since=1, observed_at=2, warned_at=3, warn_after_seconds=5, suspend_after_seconds=4)
    assert counted_of(given).warned is None


def test_pods_of_one_owner_are_suspended_together_and_only_a_notebooks_own_pod_stops_it() -> None:
    owned = {"controller_uid": "job", "controller_kind": "batch/Job"}
    notebook: Object = {"labels": {labels.NOTEBOOK: "nb"}, "kind": Kind.BUILD, "controller_uid": "set"}
    pods = [
        view("x-0", **owned),
        view("x-1", **owned),
        view("nb-0", **{**notebook, "controller_kind": "apps/StatefulSet"}),
        view("other-0", **{**notebook, "controller_uid": "set2", "controller_kind": "apps/StatefulSet"}),
        view("nb-1", **{**notebook, "controller_uid": ""}),
        view("bare"),
    ]
    found = {one.pods[0].name: (one.stop, len(one.pods), one.kind) for one in plain_workloads(pods)}
    assert found == {
        "x-0": (Stop.OWNER, 2, Kind.TRAIN),
        "nb-0": (Stop.NOTEBOOK, 1, Kind.BUILD),
        "other-0": (Stop.NEVER, 1, Kind.BUILD),
        "nb-1": (Stop.NEVER, 1, Kind.BUILD),
        "bare": (Stop.NEVER, 1, Kind.TRAIN),
    }


def test_no_name_is_in_what_everybody_reads() -> None:
    """All users read GpuQuotas, with their status."""
    owner = Owner("jobset.x-k8s.io/v1alpha2", "JobSet", "a", "secret-plan")
    pods = [view("secret-0", controller_uid="set"), view("secret-1", controller_uid="job", owner=owner), view("secret")]
    unused = UnusedGpus(GAP_S, GAP_S)
    unused.observe({one.uid: Observed(used=False, rule=RULE) for one in plain_workloads(pods)}, 1000.0)
    found = stored(unused.counted(), 1060.0)
    assert len(found) == 3
    assert b"secret" not in msgspec.json.encode(found).replace(b"uid-secret", b"")


def test_a_policy_is_the_same_after_it_was_an_object() -> None:
    for rule in (RULE, IdleRule(warn_after_s=1800, suspend_after_s=3600)):
        policy = WorkloadPolicy(name="unused", project="team-a", kind=Kind.BUILD, idle=rule)
        assert policy_of(msgspec.convert(policy_body(policy), PolicyObject)) == policy


@pytest.mark.parametrize("name", ["", "dcgm", "a/b/c", "/x", "a/", "A/b", "a/b c"])
def test_a_source_that_is_no_service_is_refused(name: str) -> None:
    with pytest.raises(InvalidFieldError, match="namespace and the name of a Service"):
        GpuUseRules(exporter=name)


# A whole controller, at a clock of the test's


class Answering(Slices):
    """Accepts writes, too."""

    def answer(self, verb: str, path: str, body: object) -> bytes:
        """Answer as an API server does, without keeping anything."""
        return b"{}" if verb != "GET" else super().answer(verb, path, body)

    def patches_of(self, plural: str) -> list[Any]:
        """Return the bodies of the patches of objects of a kind."""
        return [body for verb, path, body in self.asked if verb == "PATCH" and f"/{plural}/" in path]


async def watched(
    exporter: GpuExporter,
    now: list[float],
    seconds: float,
    during: Callable[[Detached], None] = lambda _: None,
    notify: Callable[[Notification], None] = lambda _: None,
    gpus: int = 8,
) -> Answering:
    """Run a controller with a notebook and an ElasticJob for so long, and call `during` before each look."""
    connection = Answering(endpoint_slice("127.0.0.1", exporter.port, ["n0"]))
    async with detached(clock=lambda: now[0], notify=notify) as running:
        controller = running.controller
        controller._writer._connection = controller.unused._exporters._connection = connection
        running.see(POLICIES, {"metadata": {"name": "default", "uid": "qp"}, "spec": {"gpuUse": SOURCE}})
        rule = policy_body(WorkloadPolicy(name="idle", idle=RULE))
        running.see(WORKLOAD_POLICIES, {**rule, "metadata": {"name": "idle", "uid": "wp"}})
        running.node("n0", gpus)
        running.team("a")
        meta = {"name": "nb", "namespace": "a", "uid": "nb", "annotations": {}}
        running.see(NOTEBOOKS, {"metadata": meta})
        owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "nb", "uid": "set", "controller": True}
        running.pod("a", "nb-0", node="n0", metadata={"labels": {labels.NOTEBOOK: "nb"}, "ownerReferences": [owner]})
        running.see(JOBS, {"metadata": {"name": "j", "namespace": "a", "uid": "j"}, "spec": SPEC, "status": RUNNING})
        owner = {"apiVersion": labels.API_VERSION, "kind": "ElasticJob", "name": "j", "uid": "j", "controller": True}
        notes = {"annotations": {labels.DEVICES: "1"}, "ownerReferences": [owner]}
        marks = {labels.JOB: "j", labels.WORKER: "0", labels.ATTEMPT: "1"}
        running.pod("a", "j-0", node="n0", metadata={"labels": marks, **notes})
        await running.start()
        for _ in range(int(seconds / RULES.interval_s)):
            now[0] += RULES.interval_s
            during(running)
            await controller.unused.look()
            for _ in range(5):
                await asyncio.sleep(0)
        return connection


SOURCE = {"exporter": f"{NAMESPACE}/{SERVICE}", "intervalSeconds": RULES.interval_s}
SPEC = {"gpus": 1, "template": {"spec": {"containers": [{"name": "main", "image": "none"}]}}}
RUNNING = {
    "phase": "Running",
    "attempt": 1,
    "nextIndex": 1,
    "gpus": 1,
    "workers": 1,
    "generation": 1,
    "trainingGpus": 1,
}
IDLE = {("a", "nb-0"): ["0"], ("a", "j-0"): ["0"]}


def test_a_notebook_and_an_elastic_job_are_suspended_once_their_time_is_over() -> None:
    with GpuExporter(dict(IDLE)).serving() as exporter:
        now = [1_000_000.0]
        connection = asyncio.run(watched(exporter, now, 480))
        assert connection.patches_of("notebooks") == []
        connection = asyncio.run(watched(exporter, [1_000_000.0], 600))
    (notebook, *_) = connection.patches_of("notebooks")
    assert notebook["metadata"]["uid"] == "nb"
    assert set(notebook["metadata"]["annotations"]) == {"kubeflow-resource-stopped", labels.SUSPENDED}
    (job, *_) = [body for body in connection.patches_of("elasticjobs") if "spec" in body]
    assert (job["spec"], job["metadata"]["uid"]) == ({"suspend": True}, "j")
    assert job["metadata"]["resourceVersion"], "a user who changes it in the meantime is not overruled"


@pytest.mark.parametrize("first", ["nb", "j"])
def test_no_second_workload_is_suspended_for_one_job_while_the_pods_of_the_first_end(first: str) -> None:
    """Pods may have minutes of grace, in which the scheduler counts with what they release."""
    suspended, served = list[str](), GpuExporter(dict(IDLE))
    stops = {"nb": stop_notebook, "j": stop_job}

    def play(running: Detached) -> None:
        now = running.controller._now()
        if now == 1_000_000 + RULES.interval_s:
            running.team("b")
            running.pod("b", "waits")
        used = "9" if now < 1_000_000 + 120 else "0"  # the other one is unused later
        served.used = {key: ["0" if key[1] == f"{first}-0" else used] for key in IDLE}
        connection = running.controller._writer._connection
        assert isinstance(connection, Answering)
        for name, plural in (("nb", "notebooks"), ("j", "elasticjobs")):
            notes = [body["metadata"].get("annotations", {}) for body in connection.patches_of(plural)]
            if name not in suspended and any(labels.SUSPENDED in each for each in notes):
                suspended.append(name)
                stops[name](running)
                (pod,) = [body for body in running.pods if body["metadata"]["name"] == f"{name}-0"]
                ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now + 600))
                running.see(PODS, {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": ends}})

    with served.serving():
        asyncio.run(watched(served, [1_000_000.0], 540, play, gpus=2))
    assert suspended == [first]


def stop_notebook(running: Detached) -> None:
    notes = {"annotations": {STOPPED: "at"}}
    running.see(NOTEBOOKS, {"metadata": {"name": "nb", "namespace": "a", "uid": "nb", **notes}})


def stop_job(running: Detached) -> None:
    meta, spec = {"name": "j", "namespace": "a", "uid": "j"}, {**SPEC, "suspend": True}
    running.see(JOBS, {"metadata": meta, "spec": spec, "status": RUNNING})


def test_a_reason_that_a_user_has_written_is_bounded() -> None:
    def write(running: Detached) -> None:
        notes = {"annotations": {labels.SUSPENDED: "x" * 100_000}}
        spec = {**SPEC, "suspend": True}
        running.see(JOBS, {"metadata": {"name": "j", "namespace": "a", "uid": "j", **notes}, "spec": spec})
        reason = running.controller.elastic.book.jobs["j"].status.reason
        assert reason is not None
        assert len(reason.message) == LONGEST_WHY

    with GpuExporter(dict(IDLE)).serving() as exporter:
        asyncio.run(watched(exporter, [1_000_000.0], 30, write))


def test_webhooks_have_one_message_of_a_warning() -> None:
    sent = list[Notification]()
    with GpuExporter(dict(IDLE)).serving() as exporter:
        asyncio.run(watched(exporter, [1_000_000.0], 300, notify=sent.append))
    assert sorted((one.what, one.kind, one.job) for one in sent) == [
        (Notified.UNUSED, "Job", "j"),
        (Notified.UNUSED, "Notebook", "nb"),
    ]


def test_a_training_that_advances_and_a_notebook_in_use_are_left_alone_whatever_their_gpus_do() -> None:
    def advance(running: Detached) -> None:
        controller, now = running.controller, running.controller._now()
        job = controller.elastic.book.jobs["j"]
        controller.elastic.book.record(with_status(job, progress=Progress(step=int(now))))
        active = {LAST_ACTIVITY: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now - 100))}
        running.see(NOTEBOOKS, {"metadata": {"name": "nb", "namespace": "a", "uid": "nb", "annotations": active}})

    with GpuExporter(dict(IDLE)).serving() as exporter:
        connection = asyncio.run(watched(exporter, [1_000_000.0], 1200, advance))
    assert connection.patches_of("notebooks") == []
    assert not [body for body in connection.patches_of("elasticjobs") if "spec" in body]


def test_pods_that_were_started_since_are_counted_from_their_start() -> None:
    """A user has restarted a notebook, or resumed a job, between two looks: it has a whole time again."""

    def restart(running: Detached) -> None:
        if running.controller._now() == 1_000_000.0 + 480:
            for name in ("nb-0", "j-0"):
                (pod,) = [body for body in running.pods if body["metadata"]["name"] == name]
                running.see(PODS, pod, "DELETED")
                meta = {**pod["metadata"], "uid": f"{name}-again"}
                started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(1_000_000 + 470))
                running.see(PODS, {**pod, "metadata": meta, "status": {**pod["status"], "startTime": started}})

    with GpuExporter(dict(IDLE)).serving() as exporter:
        connection = asyncio.run(watched(exporter, [1_000_000.0], 900, restart))
    assert connection.patches_of("notebooks") == []
    assert not [body for body in connection.patches_of("elasticjobs") if "spec" in body]


def test_no_exporter_is_asked_without_a_rule_and_none_without_a_source() -> None:
    def without(path: str, uid: str) -> Callable[[Detached], None]:
        return lambda running: running.see(path, {"metadata": {"name": "default", "uid": uid}, "spec": {}}, "DELETED")

    for path, uid in ((WORKLOAD_POLICIES, "wp"), (POLICIES, "qp")):
        with GpuExporter(dict(IDLE)).serving() as exporter:
            connection = asyncio.run(watched(exporter, [1_000_000.0], 120, without(path, uid)))
        assert exporter.asked == 0
        assert not [path for verb, path, _ in connection.asked if verb == "GET"]


# On a real API server

EVENTS_OF_UNUSED = {"GpusUnused", "SuspendedUnused"}
TIMES = IdleRule(warn_after_s=2, suspend_after_s=5)


@pytest.fixture
def exporter(controlled: Controlled) -> Iterator[GpuExporter]:
    """An exporter of all nodes of the test, which the QuotaPolicy names."""
    api, path = controlled.cluster.api, f"{QUOTA_POLICIES}/default"
    nodes = controlled.add_nodes(2, 4)
    address = own_address()
    with GpuExporter().serving(address) as one:
        publish(api, address, one.port, nodes)
        body = {"apiVersion": labels.API_VERSION, "kind": "QuotaPolicy", "metadata": {"name": "default"}}
        spec = {"gpuUse": {"exporter": f"{NAMESPACE}/{SERVICE}", "intervalSeconds": 1}}
        api.apply(path, {**body, "spec": spec})
        yield one
        api.delete(path)


@pytest.fixture
def policy(controlled: Controlled) -> Iterator[Any]:
    """Set a rule of a team; it is deleted when the test ends."""
    made = []

    def set_rule(team: str, rule: IdleRule) -> None:
        name = f"unused-{uuid.uuid4().hex[:6]}"
        made.append(name)
        controlled.cluster.api.create(
            WORKLOAD_POLICIES, policy_body(WorkloadPolicy(name=name, project=team, idle=rule))
        )

    yield set_rule
    for name in made:
        controlled.cluster.api.delete(f"{WORKLOAD_POLICIES}/{name}")


def events_of(controlled: Controlled, team: str, kind: str) -> list[tuple[str, str]]:
    found = controlled.cluster.api.items(f"/api/v1/namespaces/{team}/events")
    ours = (one for one in found if one.get("source", {}).get("component") == "gpuquota-controller")
    return [(one["reason"], one["message"]) for one in ours if one["involvedObject"]["kind"] == kind]


def test_unused_jobs_are_suspended_with_their_reason_and_stay_so(
    controlled: Controlled, exporter: GpuExporter, policy: Any
) -> None:
    """A Job, an ElasticJob and a pod are unused, another Job is used: each does what the documentation promises."""
    team, api = controlled.team("team", guaranteed=8), controlled.cluster.api
    controlled.start()
    for name in ("unused", "busy"):
        api.create(batch_jobs_of(team), {"metadata": {"name": name}, "spec": job_spec(1)})
    elastic = controlled.job(team, "elastic", gpus=1)
    controlled.until_phase(elastic, "Running")
    controlled.until_bound(controlled.pod(team, "bare"))
    controlled.wait(lambda: len(controlled.bound(team)) == 4, lambda: controlled.log()[-3000:])
    exporter.used = {(team, pod): ["35" if pod.startswith("busy") else "0"] for pod in controlled.bound(team)}
    policy(team, TIMES)
    job = controlled.until(job_path(team, "unused"), lambda one: one["spec"]["suspend"])
    assert "its GPUs had been unused since" in job["metadata"]["annotations"][labels.SUSPENDED]
    assert labels.SUSPENDED not in job["metadata"].get("labels", {})
    status = controlled.until_phase(elastic, "Suspended")["status"]
    assert (status["reason"], status["message"][:31]) == ("gpus-unused", "its GPUs had been unused since ")
    controlled.wait(lambda: {reason for reason, _ in events_of(controlled, team, "ElasticJob")} == EVENTS_OF_UNUSED)
    controlled.wait(lambda: controlled.bound(team) == {"bare", *(p for p in exporter_pods(exporter) if "busy" in p)})
    controlled.wait(lambda: "GpusUnused" in dict(events_of(controlled, team, "Pod")))
    assert "Evicted" not in dict(events_of(controlled, team, "Pod"))
    client = KubernetesClient(connection_of(controlled.cluster.kubeconfig))
    assert "GpusUnused" in "".join(client.explain_pod(team, "bare"))
    exporter.used = {**exporter.used, (team, "bare"): ["50"]}
    controlled.wait(lambda: "GpusUsed: its GPUs are used again" in client.explain_pod(team, "bare"))
    controlled.kill()
    controlled.start()
    assert not api.get(job_path(team, "busy"))["spec"].get("suspend")
    assert api.get(job_path(team, "unused"))["spec"]["suspend"]
    assert api.get(elastic)["status"]["reason"] == "gpus-unused"
    api.patch(elastic, {"spec": {"suspend": False}})
    controlled.until(elastic, lambda one: labels.SUSPENDED not in one["metadata"].get("annotations", {}))


@pytest.mark.slow
def test_an_app_wrapper_of_two_jobs_is_suspended_once_both_are_unused(
    controlled: Controlled, exporter: GpuExporter, policy: Any
) -> None:
    team, api = controlled.team("team", guaranteed=8), controlled.cluster.api
    install_kinds(api)
    wrappers = AppWrappers(api, team)
    controlled.on_close.append(wrappers.close)
    controlled.start()
    jobs = [{"metadata": {"name": name}, "spec": job_spec(1)} for name in ("one", "two")]
    body = {"apiVersion": "workload.codeflare.dev/v1beta2", "kind": "AppWrapper", "metadata": {"name": "all"}}
    path = path_of("appwrappers", team, "all")
    api.create(path_of("appwrappers", team), {**body, "spec": {"components": [{"template": job} for job in jobs]}})
    controlled.wait(lambda: len(controlled.bound(team)) == 2, lambda: controlled.log()[-3000:])
    one, two = sorted(controlled.bound(team))
    exporter.used = {(team, one): ["0"], (team, two): ["40"]}
    policy(team, TIMES)
    refused = "its AppWrapper has other pods whose GPUs are in use"
    controlled.wait(lambda: refused in dict(events_of(controlled, team, "Pod")).get("NotSuspended", ""))
    assert not api.get(path)["spec"].get("suspend")
    exporter.used = {(team, one): ["0"], (team, two): ["0"]}
    controlled.until(path, lambda found: found["spec"].get("suspend"))
    controlled.wait(lambda: {reason for reason, _ in events_of(controlled, team, "AppWrapper")} == {"SuspendedUnused"})
    controlled.wait(lambda: not controlled.pods(team))
    api.delete(path)


def exporter_pods(exporter: GpuExporter) -> list[str]:
    return [pod for _, pod in exporter.used]


@pytest.mark.slow
def test_a_killed_controller_continues_to_count_and_a_notebook_is_stopped_as_kubeflow_stops_it(
    controlled: Controlled, exporter: GpuExporter, policy: Any
) -> None:
    team, api = controlled.team("team", guaranteed=4), controlled.cluster.api
    install_notebooks(api)
    controlled.start()
    notebooks = f"/apis/kubeflow.org/v1/namespaces/{team}/notebooks"
    made = {"apiVersion": "kubeflow.org/v1", "kind": "Notebook", "metadata": {"name": "nb"}, "spec": {}}
    api.create(notebooks, made)
    sets = f"/apis/apps/v1/namespaces/{team}/statefulsets"
    chosen = {labels.NOTEBOOK: "nb"}
    template = {"metadata": {"labels": chosen}, "spec": pod_body("x")["spec"]}
    spec = {"serviceName": "nb", "replicas": 1, "selector": {"matchLabels": chosen}, "template": template}
    api.create(sets, {"metadata": {"name": "nb"}, "spec": spec})
    controlled.wait(lambda: controlled.bound(team) == {"nb-0"}, lambda: controlled.log()[-3000:])
    exporter.used = {(team, "nb-0"): ["0"]}
    policy(team, IdleRule(warn_after_s=31, suspend_after_s=34))
    quota = f"{QUOTAS}/{team}"
    (counted,) = controlled.until(quota, lambda one: one["status"].get("unused"))["status"]["unused"]
    controlled.kill()
    controlled.start()
    stopped = controlled.until(f"{notebooks}/nb", lambda one: "kubeflow-resource-stopped" in notes_of(one))
    assert "its GPUs had been unused since" in notes_of(stopped)[labels.SUSPENDED]
    (again,) = api.get(quota)["status"]["unused"]
    assert (again["uid"], again["since"]) == (counted["uid"], counted["since"])
    assert "nb" not in json.dumps(again).replace(again["uid"], ""), "every user reads it"
    controlled.wait(lambda: {reason for reason, _ in events_of(controlled, team, "Notebook")} == EVENTS_OF_UNUSED)
    api.patch(f"{sets}/nb", {"spec": {"replicas": 0}})  # as Kubeflow's controller does
    controlled.wait(lambda: not controlled.pods(team))
    controlled.until(quota, lambda one: not one["status"].get("unused"))


def notes_of(found: Object) -> dict[str, str]:
    return dict(found["metadata"].get("annotations") or {})


@pytest.mark.slow
def test_an_unused_job_is_suspended_for_one_that_waits(
    controlled: Controlled, exporter: GpuExporter, policy: Any
) -> None:
    """Within the guarantee of its team, and only because another one starts in its place."""
    team, other = controlled.team("team", guaranteed=8), controlled.team("other", guaranteed=8)
    api = controlled.cluster.api
    controlled.start()
    api.create(batch_jobs_of(team), {"metadata": {"name": "unused"}, "spec": pod_job_spec(4)})
    api.create(batch_jobs_of(team), {"metadata": {"name": "busy"}, "spec": pod_job_spec(4)})
    controlled.wait(lambda: len(controlled.bound(team)) == 2, lambda: controlled.log()[-3000:])
    exporter.used = {(team, pod): ["9" if "busy" in pod else "0"] * 4 for pod in controlled.bound(team)}
    policy(team, IdleRule(warn_after_s=1, preempt_after_s=2, suspend_after_s=100_000))
    controlled.wait(lambda: "GpusUnused" in dict(events_of(controlled, team, "Pod")))
    controlled.until_bound(controlled.pod(other, "waits", gpus=2))
    job = controlled.until(job_path(team, "unused"), lambda one: one["spec"]["suspend"])
    assert job["metadata"]["annotations"][labels.SUSPENDED].endswith(f"a job of project {other} starts in its place")
    assert not api.get(job_path(team, "busy"))["spec"].get("suspend")


def pod_job_spec(gpus: int) -> Object:
    spec = {**pod_body("x", gpus)["spec"], "restartPolicy": "Never"}
    return {"backoffLimit": 0, "template": {"spec": spec}}
