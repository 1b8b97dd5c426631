"""`gpuquota policy check`: a QuotaPolicy in a file, checked before it is applied, with an API server and without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.cluster.check_results import Level, worst
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.paths import QUOTA_POLICIES
from kfp_gpuquota.cluster.kubernetes.operations.policy_check import examine, policy_in
from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls
from kfp_gpuquota.errors import UsageError
from tests.kubernetes.test_uninstall import gpuquota
from tests.kubernetes.users import connection_of
from tools.devcluster import fake_nodes

if TYPE_CHECKING:
    from pathlib import Path

    from kfp_gpuquota.cluster.check_results import Finding
    from tests.kubernetes.controlled import Controlled

Object = dict[str, Any]


def policy(**spec: Any) -> Object:
    return {
        "apiVersion": labels.API_VERSION,
        "kind": "QuotaPolicy",
        "metadata": {"name": "default"},
        "spec": spec,
    }


def messages(findings: tuple[Finding, ...], level: Level) -> str:
    return "\n".join(f"{one.message}; {one.remedy}" for one in findings if one.level is level)


def test_a_policy_is_checked_as_a_whole_and_not_stored(controlled: Controlled, tmp_path: Path) -> None:
    api, calls = controlled.cluster.api, Calls(connection_of(controlled.cluster.kubeconfig))
    node = fake_nodes.fake_node("checked", 2)
    node["status"]["allocatable"] |= {"amd.com/gpu": "2", "example.com/gpu-mem": "4"}
    node["metadata"]["labels"][labels.POOL] = "burst"
    api.create("/api/v1/nodes", node)
    controlled.nodes.append("checked")
    free = controlled.cluster.make_namespace("free-for-all")
    api.create(f"/api/v1/namespaces/{free}/pods", {"metadata": {"name": "p"}, "spec": {"containers": [
        {"name": "main", "image": "none", "resources": {"limits": {"amd.com/gpu": "1"}}}]}})  # fmt: skip
    before = api.items(QUOTA_POLICIES)
    rows = [{"name": "amd.com/gpu"}, {"name": "nvidia.com/mig-1g.10gb"}]
    pools = {"burst": {"autoscaled": {"maxGpus": 2, "gpusPerNode": 8}}}
    spec = {"gpuResources": rows, "unmanaged": "deny", "exemptNamespaces": ["none-such"], "pools": pools}
    found = examine(policy(**spec), calls)
    warnings = messages(found, Level.WARN)
    assert "nvidia.com/mig-1g.10gb counts as GPUs, but no node has it" in warnings
    assert "nodes have example.com/gpu-mem, which pods of managed namespaces may not request" in warnings
    assert "exemptNamespaces do not exist: none-such" in warnings
    assert "pool burst has 8 GPUs by gpusPerNode, more than its maxGpus 2" in warnings
    assert "a new GPU pod would be refused in: free-for-all" in warnings
    assert "unmanaged, exemptNamespaces, gpuResources, pools" in messages(found, Level.OK)
    assert worst(found) is Level.WARN
    assert api.items(QUOTA_POLICIES) == before
    # what several fields say together is the API server's to check
    refused = examine(policy(unmanaged="default-quota"), calls)
    assert "no defaultQuota is given" in messages(refused, Level.FAIL)
    file = tmp_path / "policy.yaml"
    file.write_text(yaml.safe_dump(policy(unmanaged="default-quota")))
    code, output = gpuquota(controlled.cluster, tmp_path, "policy", "check", str(file))
    assert code == 1
    assert "no defaultQuota is given" in output
    api.delete(f"/api/v1/namespaces/{free}/pods/p", 0)
    api.delete(f"/api/v1/namespaces/{free}")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (policy(gpuResource=[]), "spec.gpuResource is no field, and would be ignored; write gpuResources"),
        (policy(gpuResources=[{"name": "amd.com/gpu", "weight": 1}]), "spec.gpuResources[0].weight is no field"),
        (policy(moves="yes"), "spec.moves is 'yes', but must be of type boolean"),
        (policy(usageHalfLifeSeconds="week"), "spec.usageHalfLifeSeconds is 'week', but must be of type number"),
        (policy(limitGraceSeconds=True), "spec.limitGraceSeconds is True, but must be of type number"),
        (policy(gpuResources=[{"name": "amd.com/gpu", "countsAs": 65}]), "from 0.001 to 64"),
        (policy(reclaim={"boundSeconds": 20}), "maxGracePeriodSeconds"),
        (policy(defragmentation={"window": "night"}), "defragmentation.window is 'night', but a window is written as"),
        (
            policy(defragmentation={"window": "22:00-06:00", "timeZone": "Mars"}),
            "defragmentation.timeZone is 'Mars', but it must be the name of a time zone",
        ),
        (policy(defragmentation={"window": "22:00-06:00", "minAgeSeconds": 0}), "defragmentation.minAgeSeconds is 0"),
        (policy(recreatingOwners=["Job"]), "it must be an API group and a kind"),
        (policy() | {"metadata": {"name": "mine"}}, "whose name is default"),
        (policy() | {"metadata": "default"}, "whose name is default"),
        (policy() | {"apiVersion": "v1"}, "apiVersion is 'v1'"),
    ],
)
def test_a_file_is_refused_with_the_field_without_a_cluster(body: Object, message: str) -> None:
    found = examine(policy_in(yaml.safe_dump(body)))
    assert message in messages(found, Level.FAIL)


def test_a_file_alone_is_not_called_valid() -> None:
    found = examine(policy_in(yaml.safe_dump(policy(gpuResources=[{"name": "amd.com/gpu"}]))))
    assert worst(found) is Level.WARN
    assert "valid as far as a file shows" in messages(found, Level.WARN)


@pytest.mark.parametrize("text", ["", "a: [", "[]", "kind: List\nitems: []", "kind: List\nitems:", "kind: ConfigMap"])
def test_what_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        policy_in(text)
