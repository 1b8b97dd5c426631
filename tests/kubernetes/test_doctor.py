"""`gpuquota doctor`: each check on facts made by hand, and all of them on a real API server."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

import pytest
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.cluster import certificates
from kfp_gpuquota.cluster.check_results import Level, worst
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.operations.definitions import custom_resource_definitions
from kfp_gpuquota.cluster.kubernetes.operations.doctor import checks_cluster, checks_installation, facts
from kfp_gpuquota.cluster.kubernetes.operations.doctor.examination import examine, judge
from kfp_gpuquota.cluster.kubernetes.operations.doctor.facts import Facts, not_after
from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls
from kfp_gpuquota.version import __version__
from tests.kubernetes.installation import MANIFESTS
from tests.kubernetes.test_uninstall import gpuquota
from tests.kubernetes.users import connection_of
from tests.polling import until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tools.devcluster import DevCluster

Object = dict[str, Any]

GPUS = {"requests.nvidia.com/gpu": "4"}
NOW = 1_800_000_000.0
STAMP = "2027-01-15T08:00:00.000000Z"  # the same
DAY_S = 86_400.0


def program(name: str, ready: int = 2, tag: str = __version__, kind: str = "Deployment") -> Object:
    container = {"name": "main", "image": f"registry.example/controller:{tag}"}
    return {
        "kind": kind,
        "metadata": {"name": f"gpuquota-{name}", "namespace": "gpuquota-system"},
        "spec": {"replicas": 2, "template": {"spec": {"containers": [container]}}},
        "status": {"readyReplicas": ready},
    }


def node(name: str = "n", allocatable: int = 8, capacity: int = 8, pool: str = "") -> Object:
    amounts = {"allocatable": allocatable, "capacity": capacity}
    status: Object = {part: {labels.GPU_RESOURCE: str(count)} for part, count in amounts.items() if capacity}
    status["conditions"] = [{"type": "Ready", "status": "True"}]
    return {"metadata": {"name": name, "labels": {labels.POOL: pool} if pool else {}}, "spec": {}, "status": status}


def namespaced(name: str, namespace: str = "team-a", **spec: Any) -> Object:
    return {"metadata": {"name": name, "namespace": namespace}, "spec": spec}


def installed_policies() -> tuple[list[Object], list[Object]]:
    """The policies and their bindings, as the manifests have them."""
    found = [
        one
        for path in sorted((MANIFESTS / "base").glob("*.yaml"))
        for one in yaml.safe_load_all(path.read_text())
        if one and one["kind"].startswith("ValidatingAdmissionPolicy")
    ]
    return tuple([one for one in found if one["kind"] == kind] for kind in KINDS)  # type: ignore[return-value]


KINDS = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")


def healthy() -> Facts:
    """An installation in which nothing is wrong."""
    policies, bindings = installed_policies()
    webhook = {"metadata": {"name": "gpuquota"}, "webhooks": [{"clientConfig": {"caBundle": "x"}}]}
    return Facts(
        now=NOW,
        local_now=NOW + 1,
        version=(1, 36),
        nodes=[node("a"), node("b")],
        namespaces=[{"metadata": {"name": "team-a", "labels": {labels.MANAGED: "true"}}}],
        programs=[program("controller"), program("webhook"), program("membership")],
        definitions=copy.deepcopy(custom_resource_definitions()),
        policies=policies,
        bindings=bindings,
        webhooks=[webhook],
        quotas=[{"metadata": {"name": "team-a"}, "spec": {"guaranteed": 16}}],
        lease={"spec": {"holderIdentity": "gpuquota-controller-0_1", "renewTime": STAMP}},
        certificate_expires=NOW + 60 * DAY_S,
        gated=True,
    )


def test_of_an_installation_in_order_every_finding_is_fine() -> None:
    findings = judge(healthy())
    assert worst(findings) is Level.OK, [one for one in findings if one.remedy]
    assert {one.check for one in findings} >= {"programs", "webhook", "certificate", "kinds", "policies", "gpus"}


def waiting_image(state: Facts) -> None:
    state.programs[0]["status"]["readyReplicas"] = 0
    waiting = {"waiting": {"reason": "ImagePullBackOff"}}
    pod = namespaced("gpuquota-controller-x", "gpuquota-system", containers=[])
    pod["status"] = {"containerStatuses": [{"image": "kfp-gpuquota/controller:0.2.0", "state": waiting}]}
    state.pods = [pod]


def old_kind(state: Facts) -> None:
    del state.definitions[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]


def weaker_policy(state: Facts) -> None:
    pods = next(one for one in state.policies if one["metadata"]["name"] == "gpuquota-pods")
    del pods["spec"]["validations"][2]


def unbound_policy(state: Facts) -> None:
    state.bindings = [one for one in state.bindings if one["spec"]["policyName"] != "gpuquota-devices"]


def outside_pod(state: Facts) -> None:
    container = {"name": "main", "resources": {"limits": {labels.GPU_RESOURCE: "2"}}}
    state.pods = [namespaced("p", "team-b", nodeName="a", containers=[container])]


def wrong_pool(state: Facts) -> None:
    pools = {"burst": {"autoscaled": {"maxGpus": 16, "gpusPerNode": 4}}}
    state.rules = [{"metadata": {"name": "default"}, "spec": {"pools": pools}}]
    state.nodes.append(node("c", pool="burst"))


def changed(name: str, value: Any) -> Any:
    return lambda state: setattr(state, name, value)


def unmeasured(exporter: str, endpoints: Sequence[str] = ()) -> Callable[[Facts], None]:
    """A rule on unused GPUs, and a source of these endpoints."""

    def damage(state: Facts) -> None:
        idle = {"warnAfterSeconds": 60, "suspendAfterSeconds": 120}
        state.workload_policies = [{"metadata": {"name": "sessions"}, "spec": {"idle": idle}}]
        state.rules = [{"spec": {"gpuUse": {"exporter": exporter}} if exporter else {}}]
        state.exporters = [{"endpoints": [{"nodeName": name} for name in endpoints] or None}]

    return damage


@pytest.mark.parametrize(
    ("damage", "level", "message", "remedy"),
    [
        (changed("version", (1, 29)), "fail", "version 1.29", "upgrade the cluster"),
        (changed("programs", []), "fail", "not installed", "helm install"),
        (waiting_image, "fail", "0 of 2 ready: ImagePullBackOff of kfp-gpuquota/controller:0.2.0", "image.registry"),
        (changed("lease", None), "fail", "no controller leads", "pods"),
        (changed("now", NOW + 90), "fail", "has not renewed its lease for 90 s", "logs"),
        (changed("local_now", NOW + 90), "warn", "differ by 90 s", "NTP"),
        (changed("webhooks", []), "fail", "MutatingWebhookConfiguration gpuquota is missing", "again"),
        (changed("gated", value=False), "fail", "was not gated", "failOpen"),
        (changed("certificate_expires", NOW - DAY_S), "fail", "expired 1 days ago", "restart"),
        (changed("certificate_expires", NOW + 5 * DAY_S), "warn", "expires in 5 days", "logs"),
        (changed("definitions", []), "fail", "elasticjobs.gpuquota.dev is missing", "kubectl apply"),
        (old_kind, "warn", "other schemas than this version's: elasticjobs", "kubectl apply"),
        (weaker_policy, "warn", "other rules than this version's: gpuquota-pods", "again"),
        (unbound_policy, "fail", "without a binding that denies: gpuquota-devices", "again"),
        (changed("denied_rights", ["patch pods"]), "fail", "may not: patch pods", "again"),
        (changed("nodes", []), "fail", "no node has GPUs", "device plugin"),
        (changed("nodes", [node(allocatable=6), node("b")]), "warn", "2 GPUs are not healthy: n", "nvidia-smi"),
        (changed("quotas", []), "warn", "without a GpuQuota: team-a", "project create"),
        (changed("resource_quotas", [namespaced("q", hard=GPUS)]), "warn", "team-a/q", "migrating"),
        (changed("local_queues", [namespaced("lq")]), "warn", "Kueue queues pods", "one of them"),
        (outside_pod, "warn", "hold 2 GPUs: team-b/p", "unmanaged"),
        (wrong_pool, "warn", "gpusPerNode is 4, not so on c", "gpusPerNode"),
        (changed("node_pools", [namespaced("np")]), "warn", "an autoscaler runs here", "autoscaled"),
        (unmeasured(""), "warn", "nothing measures use for the policies sessions", "gpuUse.exporter"),
        (unmeasured("team-a/dcgm"), "warn", "team-a/dcgm is in the namespace of a team", "without a GpuQuota"),
        (unmeasured("gpu-operator/dcgm"), "warn", "gpu-operator/dcgm has no endpoint", "kubectl -n gpu-operator"),
        (unmeasured("gpu-operator/dcgm", ["a"]), "ok", "gpu-operator/dcgm is asked", ""),
        (changed("unreadable", {"nodes": "forbidden"}), "warn", "you may not read: nodes", "administrator"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_with_what_to_do(damage: Any, level: str, message: str, remedy: str) -> None:
    state = healthy()
    damage(state)
    (found,) = [one for one in judge(state) if message in one.message]
    assert found.level == level
    assert remedy in found.remedy


def test_a_department_is_not_counted_beside_its_teams() -> None:
    state = healthy()
    state.quotas[0]["spec"]["parent"] = "research"
    state.quotas.append({"metadata": {"name": "research"}, "spec": {"guaranteed": 16}})
    assert worst(checks_cluster.quotas(state)) is Level.OK
    state.quotas[0]["spec"]["guaranteed"] = 17
    assert worst(checks_cluster.quotas(state)) is Level.WARN


def test_gpus_of_other_vendors_count_as_the_policy_says() -> None:
    state = healthy()
    for one in state.nodes:
        one["status"]["allocatable"] = one["status"]["capacity"] = {"nvidia.com/mig-1g.10gb": "14"}
    state.rules = [{"metadata": {"name": "default"}, "spec": {"gpuResources": [{"name": "nvidia.com/mig-1g.10gb"}]}}]
    (found,) = checks_cluster.gpus(state)
    assert found.message == "4 GPUs on 2 nodes"


def test_pods_of_exempt_namespaces_and_of_jobs_are_not_outside_of_the_quota() -> None:
    state = healthy()
    outside_pod(state)
    assert worst(checks_cluster.unmanaged(state)) is Level.WARN
    state.rules = [{"metadata": {"name": "default"}, "spec": {"exemptNamespaces": ["team-b"]}}]
    assert not list(checks_cluster.unmanaged(state))
    state.rules = []
    state.pods[0]["metadata"]["labels"] = {labels.JOB: "train"}
    assert not list(checks_cluster.unmanaged(state))


def test_an_older_release_beside_this_command_is_a_warning() -> None:
    state = healthy()
    state.programs[0] = program("controller", tag="v0.0.9")
    assert "of version v0.0.9" in next(one.message for one in checks_installation.programs(state) if one.remedy)


def test_the_date_of_a_certificate_is_read_without_a_library() -> None:
    for valid_s in (90 * DAY_S, 40 * 365 * DAY_S):  # UTCTime, and GeneralizedTime from 2050 on
        pair = certificates.issue(certificates.new_authority("a", NOW), ["x.svc"], NOW, valid_s)
        assert not_after(pair.certificate.decode()) == certificates.expires_at(pair.certificate)
    with pytest.raises(ValueError, match="cut off"):
        not_after("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")


def test_what_an_overlay_installs_is_recognised_on_a_real_api_server(
    kubeflow_cluster: DevCluster,
) -> None:
    calls = Calls(connection_of(kubeflow_cluster.kubeconfig), retry_for_s=10)
    read = facts.Reader(calls).read()
    assert abs(read.now - time.time()) < 5
    assert read.version >= (1, 30)
    assert read.gated, read.refusal
    assert not read.denied_rights
    assert not read.unreadable
    assert read.certificate_expires is not None
    levels = {one.check: one.level for one in judge(read)}
    wanted = ("kubernetes", "clocks", "webhook", "certificate", "kinds", "policies", "rights")
    assert {levels[name] for name in wanted} == {Level.OK}

    def programs_run() -> bool:
        found = {one.check: one.level for one in judge(facts.Reader(calls).read())}
        return found["programs"] is Level.OK

    until(programs_run, "the fake node says that their containers run")
    assert levels["leader"] is Level.FAIL, "but nothing of theirs does"


def test_who_may_not_read_the_cluster_is_shown_what_was_not_checked(crds_cluster: DevCluster) -> None:
    calls = Calls(connection_of(crds_cluster.kubeconfig_of_user("eve")), retry_for_s=10)
    first = examine(calls)[0]
    assert first.level is Level.WARN
    assert "you may not read: " in first.message


def test_the_command_shows_what_it_found_and_ends_with_1_where_a_check_fails(
    crds_cluster: DevCluster, tmp_path: Path
) -> None:
    code, shown = gpuquota(crds_cluster, tmp_path, "doctor")
    assert code == 1, shown
    assert "RESULT" in shown
    assert "FAIL" in shown.upper()
