"""Every pod that kube-scheduler would bind is bound under the controller too; it is the oracle, not a model of it.

Each case is created several times on one control plane: once as pods without a gate, and once for each kind in a team
with enough quota, as gated pods, as the workers of an ElasticJob or as those of an elastic RayCluster. No pod may be
replaced by another one. A failing case is printed with the fewest features that still fail.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.effort import effort
from tests.kubernetes.controlled import Controlled, gpus_of, holds
from tests.kubernetes.kuberay import Operator, cluster_spec, elastic, group, ray_path
from tests.kubernetes.placement_cases import CASE, FEATURES, WAITS_FOR_A_POD, Case, drawn_case, made
from tests.polling import until
from tools.devcluster.api import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tools.devcluster import DevCluster

Object = dict[str, Any]
ALONE, PODS, ELASTIC_JOB, RAY_CLUSTER = "alone", "pods", "elastic-job", "ray-cluster"
KINDS = (PODS, ELASTIC_JOB)
SETTLED_S = 40.0
PAUSE_S = 1.0  # each look lists hundreds of pods
OPERATOR_PAUSE_S = 2.0  # there are many of them


@pytest.fixture
def oracle(controlled: Controlled) -> Iterator[Oracle]:
    running = Oracle(controlled)
    yield running
    running.remove_everything()


class Oracle:
    """Tries cases with and without the controller."""

    def __init__(self, controlled: Controlled) -> None:
        self._controlled, self._api = controlled, controlled.cluster.api
        self._namespaces: dict[str, str] = {}  # by the case's name
        self._operators: list[Operator] = []
        self._seen: dict[str, set[str]] = {}  # uids of pods under test by namespace
        self._volumes: list[str] = []
        self._create_once("/apis/storage.k8s.io/v1/storageclasses", _STORAGE_CLASS)
        self._create_once("/apis/scheduling.k8s.io/v1/priorityclasses", _PRIORITY_CLASS)
        controlled.start()

    def check(self, cases: Iterable[Case], *kinds: str) -> None:
        """Try the cases; fail with a sentence for each that fails, shrunk to as few features as possible."""
        found = [self._shrunk(*failure) for failure in self.failures(list(cases), kinds)]
        assert not found, "\n".join(found)

    def failures(self, cases: list[Case], kinds: tuple[str, ...]) -> list[tuple[Case, str, str]]:
        """Return the cases and kinds for which the controller does worse than kube-scheduler alone, and in what."""
        sides = [
            (made(f"{case.name}-{kind}", case.seed, case.features), kind) for case in cases for kind in (ALONE, *kinds)
        ]
        for one, _ in sides:
            self._create_nodes(one)
        for one, kind in sides:
            self._create_environment(one, kind)
        for one, kind in sides:
            self._create_tested(one, kind)
        until(lambda: self._settled_alone(cases), pause_s=PAUSE_S)
        with contextlib.suppress(TimeoutError):
            until(lambda: not self._problems(cases, kinds), timeout_s=SETTLED_S, pause_s=PAUSE_S)
        return self._problems(cases, kinds)

    def _settled_alone(self, cases: list[Case]) -> bool:
        tested = self._tested()
        return all(map(_is_settled, (pod for case in cases for pod in tested[self._namespace(case, ALONE)])))

    def _problems(self, cases: list[Case], kinds: tuple[str, ...]) -> list[tuple[Case, str, str]]:
        tested = self._tested()
        found = []
        for case, kind in [(case, kind) for case in cases for kind in kinds]:
            alone, quota = tested[self._namespace(case, ALONE)], tested[self._namespace(case, kind)]
            deleted = self._seen[self._namespace(case, kind)] - {pod["metadata"]["uid"] for pod in quota}
            if problem := _problem(alone, quota, len(deleted)):
                found.append((case, kind, problem))
        return found

    def _shrunk(self, case: Case, kind: str, problem: str) -> str:
        """Leave out features one by one, as long as the case still fails."""
        for feature in case.features:
            smaller = case.without(feature, f"{case.name}x")
            again = self.failures([smaller], (kind,))
            case, kind, problem = again[0] if again else (case, kind, problem)
        return f"seed {case.seed}, features {case.features}, {kind}: {problem}"

    # What a case needs

    def _create_nodes(self, case: Case) -> None:
        for node in case.nodes:
            self._api.create("/api/v1/nodes", node)
            self._controlled.nodes.append(node["metadata"]["name"])

    def _create_environment(self, case: Case, kind: str) -> None:
        for node in case.nodes:
            self._api.until(f"/api/v1/nodes/{node['metadata']['name']}", _is_ready)
        if kind == ALONE:
            namespace = self._controlled.cluster.make_namespace(f"plain-{case.name}")
        else:
            namespace = self._controlled.team("oracle", guaranteed=100)
        self._namespaces[case.name] = namespace
        for volume in case.volumes:
            self._api.create("/api/v1/persistentvolumes", volume)
            self._volumes.append(volume["metadata"]["name"])
        for claim in case.claims:
            self._api.create(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", claim)
        for pod in case.others:
            self._api.create(f"/api/v1/namespaces/{namespace}/pods", pod)

    def _create_tested(self, case: Case, kind: str) -> None:
        namespace = self._namespaces[case.name]
        if kind == ELASTIC_JOB:
            gpus = gpus_of(case.pod)
            sizes = {"gpus": gpus * case.copies, "minGpus": gpus, "gpusPerWorker": gpus}
            self._controlled.job(namespace, "tested", case.pod, **sizes)
        elif kind == RAY_CLUSTER:
            self._create_ray_cluster(case, namespace)
        else:
            self._create_pods(case, namespace, {} if kind == ALONE else _GATED)

    def _create_pods(self, case: Case, namespace: str, gates: Object) -> None:
        for number in range(case.copies):
            meta = {**case.pod["metadata"], "name": f"tested-{number}"}
            body = {"metadata": meta, "spec": {**case.pod["spec"], **gates}}
            self._api.create(f"/api/v1/namespaces/{namespace}/pods", body)

    def _create_ray_cluster(self, case: Case, namespace: str) -> None:
        workers = group("g", case.copies, minReplicas=1)
        workers["template"] = {**case.pod, "spec": {**case.pod["spec"], **_GATED}}
        spec = cluster_spec(workers)
        spec["headGroupSpec"]["template"]["spec"]["nodeSelector"] = {CASE: "none"}  # it takes no pod slot
        meta = {"name": "tested", "labels": elastic()}
        body = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": meta, "spec": spec}
        self._api.create(ray_path(namespace, "rayclusters"), body)
        self._operators.append(Operator(self._api, namespace, OPERATOR_PAUSE_S))

    def _tested(self) -> dict[str, list[Object]]:
        """Return the pods under test by namespace."""
        found: dict[str, list[Object]] = {namespace: [] for namespace in self._namespaces.values()}
        for pod in self._api.items("/api/v1/pods", labelSelector="app=tested"):
            if pod["metadata"]["name"].startswith("tested-") and pod["metadata"]["namespace"] in found:
                found[pod["metadata"]["namespace"]].append(pod)
        for namespace, pods in found.items():
            self._seen.setdefault(namespace, set()).update(pod["metadata"]["uid"] for pod in pods)
        return found

    def _namespace(self, case: Case, side: str) -> str:
        return self._namespaces[f"{case.name}-{side}"]

    def _create_once(self, path: str, body: Object) -> None:
        try:
            self._api.create(path, body)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise

    def remove_everything(self) -> None:
        """Remove what the controlled cluster does not know of."""
        for operator in self._operators:
            operator.close()
        for name, namespace in self._namespaces.items():
            if name.endswith(RAY_CLUSTER):
                self._api.delete(ray_path(namespace, "rayclusters", "tested"))
        for name, namespace in self._namespaces.items():
            if name.endswith(ALONE):
                for pod in self._api.items(f"/api/v1/namespaces/{namespace}/pods"):
                    self._api.delete(f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}", 0)
                self._api.delete(f"/api/v1/namespaces/{namespace}")
        for volume in self._volumes:
            self._api.delete(f"/api/v1/persistentvolumes/{volume}")


def _problem(alone: list[Object], quota: list[Object], deleted: int) -> str:
    """Return in what the controller does worse; "" if in nothing."""
    here, there = sum(map(holds, quota)), sum(map(holds, alone))
    pinned = {node for pod in quota if not holds(pod) and (node := _pinned_to(pod))}
    if pinned:
        return f"pinned to {sorted(pinned)}, where kube-scheduler does not bind it"
    if deleted:
        return f"{deleted} pods were deleted"
    if here < there:
        return f"kube-scheduler binds {there} of {len(alone)}, under the controller {here} of {len(quota)} are bound"
    return ""


def _pinned_to(pod: Object) -> str:
    required = pod["spec"].get("affinity", {}).get("nodeAffinity", {}).get(_REQUIRED, {})
    fields = [field for term in required.get("nodeSelectorTerms", ()) for field in term.get("matchFields", ())]
    return str(fields[0]["values"][0]) if fields else ""


def _is_settled(pod: Object) -> bool:
    refused = any(c["type"] == "PodScheduled" and c["status"] == "False" for c in pod["status"].get("conditions", ()))
    return holds(pod) or refused


def _is_ready(node: Object) -> bool:
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", ()))
    return ready and not any(t["key"].startswith("node.kubernetes.io/") for t in node["spec"].get("taints", ()))


_GATED = {"schedulingGates": [{"name": labels.QUOTA_GATE}]}
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_STORAGE_CLASS = {
    "metadata": {"name": WAITS_FOR_A_POD},
    "provisioner": "kubernetes.io/no-provisioner",
    "volumeBindingMode": "WaitForFirstConsumer",
}
_PRIORITY_CLASS = {"metadata": {"name": "important"}, "value": 1000, "preemptionPolicy": "Never"}


def test_each_constraint_is_left_to_kube_scheduler_or_modelled(oracle: Oracle) -> None:
    oracle.check(cases_of_one_feature(), *KINDS)


def test_each_constraint_of_the_workers_of_a_ray_cluster_is(ray_cluster: DevCluster, oracle: Oracle) -> None:
    oracle.check(cases_of_one_feature(), RAY_CLUSTER)


@pytest.mark.slow
def test_random_constraints_together(ray_cluster: DevCluster, oracle: Oracle) -> None:
    cases = (drawn_case(f"{CASE}-{seed}", seed) for seed in range(100, 100 + effort(3, 300)))
    oracle.check(cases, *KINDS, RAY_CLUSTER)


def cases_of_one_feature() -> list[Case]:
    return [made(f"{CASE}-{n}", n, (feature,)) for n, feature in enumerate(sorted(FEATURES))]
