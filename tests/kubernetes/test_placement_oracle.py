"""Every pod that kube-scheduler would bind is bound under the controller too; it is the oracle, not a model of it.

Each case is created twice on one control plane: once without a gate, and once gated in a team with enough quota. A
failing case is printed with the fewest features that still fail.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.effort import effort
from tests.kubernetes.controlled import Controlled, holds
from tests.kubernetes.placement_cases import CASE, FEATURES, WAITS_FOR_A_POD, Case, drawn_case, made
from tests.polling import until
from tools.devcluster.api import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Object = dict[str, Any]
ALONE, QUOTA = "alone", "quota"
SETTLED_S = 40.0


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
        self._volumes: list[str] = []
        self._create_once("/apis/storage.k8s.io/v1/storageclasses", _STORAGE_CLASS)
        self._create_once("/apis/scheduling.k8s.io/v1/priorityclasses", _PRIORITY_CLASS)
        controlled.start()

    def check(self, cases: Iterable[Case]) -> None:
        """Try the cases; fail with a sentence for each that fails, shrunk to as few features as possible."""
        found = [self._shrunk(case, problem) for case, problem in self.failures(list(cases))]
        assert not found, "\n".join(found)

    def failures(self, cases: list[Case]) -> list[tuple[Case, str]]:
        """Return the cases in which the controller does worse than kube-scheduler alone, with the difference."""
        names = [(f"{case.name}-{side}", case) for case in cases for side in (ALONE, QUOTA)]
        sides = [made(name, case.seed, case.features) for name, case in names]
        for one in sides:
            self._create_nodes(one)
        for one in sides:
            self._create_environment(one)
        for one in sides:
            self._create_pods(one, gated=one.name.endswith(QUOTA))
        until(lambda: self._settled_alone(cases))
        with contextlib.suppress(TimeoutError):
            until(lambda: not self._problems(cases), timeout_s=SETTLED_S)
        return self._problems(cases)

    def _settled_alone(self, cases: list[Case]) -> bool:
        tested = self._tested()
        return all(map(_is_settled, (pod for case in cases for pod in tested[self._namespace(case, ALONE)])))

    def _problems(self, cases: list[Case]) -> list[tuple[Case, str]]:
        tested = self._tested()
        sides = {case.name: [tested[self._namespace(case, side)] for side in (ALONE, QUOTA)] for case in cases}
        return [(case, problem) for case in cases if (problem := _problem(*sides[case.name]))]

    def _shrunk(self, case: Case, problem: str) -> str:
        """Leave out features one by one, as long as the case still fails."""
        for feature in case.features:
            smaller = case.without(feature, f"{case.name}x")
            again = self.failures([smaller])
            case, problem = again[0] if again else (case, problem)
        return f"seed {case.seed}, features {case.features}: {problem}"

    # What a case needs

    def _create_nodes(self, case: Case) -> None:
        for node in case.nodes:
            self._api.create("/api/v1/nodes", node)
            self._controlled.nodes.append(node["metadata"]["name"])

    def _create_environment(self, case: Case) -> None:
        for node in case.nodes:
            self._api.until(f"/api/v1/nodes/{node['metadata']['name']}", _is_ready)
        if case.name.endswith(QUOTA):
            namespace = self._controlled.team("oracle", guaranteed=100)
        else:
            namespace = self._controlled.cluster.make_namespace(f"plain-{case.name}")
        self._namespaces[case.name] = namespace
        for volume in case.volumes:
            self._api.create("/api/v1/persistentvolumes", volume)
            self._volumes.append(volume["metadata"]["name"])
        for claim in case.claims:
            self._api.create(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", claim)
        for pod in case.others:
            self._api.create(f"/api/v1/namespaces/{namespace}/pods", pod)

    def _create_pods(self, case: Case, *, gated: bool) -> None:
        gate = {"schedulingGates": [{"name": labels.QUOTA_GATE}]} if gated else {}
        for number in range(case.copies):
            meta = {**case.pod["metadata"], "name": f"tested-{number}"}
            body = {"metadata": meta, "spec": {**case.pod["spec"], **gate}}
            self._api.create(f"/api/v1/namespaces/{self._namespaces[case.name]}/pods", body)

    def _tested(self) -> dict[str, list[Object]]:
        """Return the pods under test by namespace."""
        found: dict[str, list[Object]] = {namespace: [] for namespace in self._namespaces.values()}
        for pod in self._api.items("/api/v1/pods", labelSelector="app=tested"):
            if pod["metadata"]["name"].startswith("tested-") and pod["metadata"]["namespace"] in found:
                found[pod["metadata"]["namespace"]].append(pod)
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
        for name, namespace in self._namespaces.items():
            if name.endswith(ALONE):
                for pod in self._api.items(f"/api/v1/namespaces/{namespace}/pods"):
                    self._api.delete(f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}", 0)
                self._api.delete(f"/api/v1/namespaces/{namespace}")
        for volume in self._volumes:
            self._api.delete(f"/api/v1/persistentvolumes/{volume}")


def _problem(alone: list[Object], quota: list[Object]) -> str:
    """Return in what the controller does worse; "" if in nothing."""
    here, there = sum(map(holds, quota)), sum(map(holds, alone))
    pinned = {node for pod in quota if not holds(pod) and (node := _pinned_to(pod))}
    if pinned:
        return f"pinned to {sorted(pinned)}, where kube-scheduler does not bind it"
    if len(quota) < len(alone):
        return f"{len(alone) - len(quota)} pods were deleted"
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


_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_STORAGE_CLASS = {
    "metadata": {"name": WAITS_FOR_A_POD},
    "provisioner": "kubernetes.io/no-provisioner",
    "volumeBindingMode": "WaitForFirstConsumer",
}
_PRIORITY_CLASS = {"metadata": {"name": "important"}, "value": 1000, "preemptionPolicy": "Never"}


def test_each_constraint_is_left_to_kube_scheduler_or_modelled(oracle: Oracle) -> None:
    cases = [made(f"{CASE}-{n}", n, (feature,)) for n, feature in enumerate(sorted(FEATURES))]
    oracle.check(cases)


@pytest.mark.slow
def test_random_constraints_together(oracle: Oracle) -> None:
    oracle.check(drawn_case(f"{CASE}-{seed}", seed) for seed in range(100, 100 + effort(20, 300)))
