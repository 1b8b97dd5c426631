"""The Helm chart: the same objects as manifests/, its values, and its life on a real API server."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.version import __version__
from tests.kubernetes.conftest import skip_or_fail, start_or_skip
from tests.kubernetes.installation import MANIFESTS, NAMESPACE, QUOTAS
from tests.kubernetes.test_crds import quota
from tests.kubernetes.test_manifests import relative
from tests.kubernetes.test_two_versions import RELEASE, ROOT
from tools.chart import __main__ as chart
from tools.devcluster import Options, UnavailableError, binaries, helm

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

EVERYTHING = (
    "monitoring",
    "fail-open",
    "node-agent-killer",
    "web-page",
    "web-page-submit",
    "web-page-quotas",
    "pipeline-runner",
)
EVERY_VALUE = (
    "kubeflow.enabled=true",
    "kubeflow.pipelineRunner.serviceAccount=pipeline-runner",
    "monitoring.enabled=true",
    "webhook.failOpen=true",
    "nodeAgent.enabled=true",
    "nodeAgent.killer=true",
    "webPage.enabled=true",
    "webPage.submit=true",
    "webPage.quotas=true",
)
# kustomize gives a namespace to kinds that have none and that it has no list of
WITHOUT_NAMESPACE = {"FlowSchema", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}

Objects = dict[tuple[str, str, str], dict[str, Any]]


def run_helm(*words: str, kubeconfig: Path | None = None) -> str:
    """Standard output of one command of helm; skipped, or failed, where this machine cannot build it."""
    try:
        program = helm.provide()
    except UnavailableError as error:
        skip_or_fail(error)
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig or os.devnull)}
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout


def template(*values: str, namespace: str = "default") -> Objects:
    """What the chart renders with these values."""
    given = [word for value in values for word in ("--set", value)]
    text = run_helm("template", "gpuquota", str(chart.CHART), "--include-crds", f"--namespace={namespace}", *given)
    return by_name(yaml.safe_load_all(text))


def kustomize(folder: Path) -> Objects:
    try:
        kubectl = binaries.provide() / "kubectl"
    except UnavailableError as error:
        skip_or_fail(error)
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=True)
    return by_name(yaml.safe_load_all(done.stdout))


def by_name(objects: Iterable[dict[str, Any] | None]) -> Objects:
    """The objects, without what the two tools write differently."""
    found = {}
    for one in filter(None, objects):
        metadata = one["metadata"]
        if one["kind"] in WITHOUT_NAMESPACE:
            metadata.pop("namespace", None)
        if metadata.get("annotations") == {"helm.sh/resource-policy": "keep"}:
            del metadata["annotations"]
        found[one["kind"], metadata.get("namespace", ""), metadata["name"]] = plain(one)
    return found


def plain(value: Any) -> Any:
    """A value whose texts have single spaces, since kustomize adds empty lines to expressions."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return " ".join(value.split()) if isinstance(value, str) else value


def test_the_chart_is_made_of_the_manifests_as_they_are() -> None:
    stale = [path for path, content in chart.generated().items() if path.read_text() != content]
    assert not stale, "run: python -m tools.chart"
    written = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    assert written["version"] == written["appVersion"] == __version__


@pytest.mark.parametrize("overlay", ["standalone", "kubeflow", "everything"])
def test_the_chart_renders_what_the_overlays_and_components_have(overlay: str, tmp_path: Path) -> None:
    if overlay == "everything":
        content = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [relative(tmp_path, MANIFESTS / "overlays" / "kubeflow")],
            "components": [relative(tmp_path, MANIFESTS / "components" / name) for name in EVERYTHING],
        }
        (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content))
        wanted, rendered = kustomize(tmp_path), template(*EVERY_VALUE)
    else:
        wanted = kustomize(MANIFESTS / "overlays" / overlay)
        rendered = template(f"kubeflow.enabled={str(overlay == 'kubeflow').lower()}")
    assert rendered.pop(("QuotaPolicy", "", "default"))["spec"] == {"unmanaged": "ignore", "isolateWorkers": True}
    assert rendered.keys() == wanted.keys()
    for name, one in wanted.items():
        assert rendered[name] == one, name


def test_one_value_moves_all_images_and_one_the_namespace() -> None:
    rendered = template(
        "image.registry=registry.example/gpuquota/", "image.tag=v9", "namespace=gpuquota-here", *EVERY_VALUE
    )
    texts = [yaml.safe_dump(one, width=10_000) for one in rendered.values()]
    images = {
        word
        for text in texts
        for word in text.split()
        if re.search(r"registry\.example|kfp-gpuquota/(controller|reservation)", word)
    }
    assert images == {
        "registry.example/gpuquota/controller:v9",
        "--reservation-image=registry.example/gpuquota/reservation:v9",
    }
    assert NAMESPACE not in "".join(texts)
    assert ("Namespace", "", "gpuquota-here") in rendered
    assert ("Namespace", "", "gpuquota-here") not in template("namespace=gpuquota-here", namespace="gpuquota-here")


def test_values_reach_the_objects_that_they_are_for() -> None:
    rendered = template(
        "membership.replicas=3",
        "priorityClasses.create=false",
        "webhook.certificate.secretName=from-cert-manager",
        r"webhook.certificate.annotations.cert-manager\.io/inject-ca-from=a/b",
        "controller.extraArgs={--workers-ready-timeout=900}",
        "controller.resources.limits.memory=2Gi",
        "webhook.nodeSelector.zone=a",
        "image.pullSecrets[0].name=pull",
        "quotaPolicy.unmanaged=default-quota",
        "quotaPolicy.defaultQuota.limit=4",
        "quotaPolicy.exemptNamespaces={gpu-operator}",
        "quotaPolicy.isolateWorkers=false",
        "kubeflow.enabled=true",
        "kubeflow.pipelineRunner.serviceAccount=runner",
        "kubeflow.pipelineRunner.namespace=pipelines",
    )
    controller, webhook = (
        rendered["Deployment", NAMESPACE, f"gpuquota-{name}"]["spec"]["template"]["spec"]
        for name in ("controller", "webhook")
    )
    arguments = controller["containers"][0]["args"]
    assert arguments[-1] == "--workers-ready-timeout=900"
    (shards,) = [argument for argument in arguments if argument.startswith("--membership-shards=")]
    assert shards.count("https://") == 3
    assert controller["containers"][0]["resources"]["limits"] == {"memory": "2Gi"}
    assert "priorityClassName" not in controller
    assert "--reservation-priority-class=gpuquota-reservation" not in arguments
    assert controller["imagePullSecrets"] == [{"name": "pull"}]
    assert webhook["nodeSelector"] == {"zone": "a"}
    assert "--cert-dir=/certificate" in webhook["containers"][0]["args"]
    assert webhook["volumes"][0]["secret"] == {"secretName": "from-cert-manager"}
    configuration = rendered["MutatingWebhookConfiguration", "", "gpuquota"]
    assert configuration["metadata"]["annotations"] == {"cert-manager.io/inject-ca-from": "a/b"}
    policy = rendered["QuotaPolicy", "", "default"]["spec"]
    wanted = {"unmanaged": "default-quota", "defaultQuota": {"limit": 4}, "exemptNamespaces": ["gpu-operator"]}
    assert policy == {**wanted, "isolateWorkers": False}
    binding = rendered["RoleBinding", "pipelines", "gpuquota-launcher"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "runner", "namespace": "pipelines"}]
    assert not [name for kind, _, name in rendered if kind == "PriorityClass"]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("namespace=quota", "does not match pattern"),
        ("nodeAgents.enabled=true", "nodeAgents"),
        ("quotaPolicy.unmanaged=allow", "must be one of"),
        ("quotaPolicy.unmanaged=default-quota", "defaultQuota"),
        ("membership.replicas=0", "minimum"),
    ],
)
def test_a_value_that_cannot_be_is_refused_before_anything_is_installed(value: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        template(value)


def released_chart(folder: Path) -> Path:
    """Return the chart of the last release; in a checkout without its commit, today's."""
    archive = subprocess.run(["git", "archive", RELEASE, "charts"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        return chart.CHART
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder / "charts" / chart.CHART.name


@pytest.mark.slow
def test_the_chart_is_installed_upgraded_and_removed_by_helm(tmp_path: Path) -> None:
    """From the last release's, as UPGRADE.md writes, and back: `--reuse-values` lacks the values that came later."""
    cluster = start_or_skip(tmp_path / "cluster", Options(kwok_nodes=0))
    try:
        values = ("--namespace=default", "--set", "quotaPolicy.unmanaged=deny")
        run_helm("install", "gpuquota", str(released_chart(tmp_path)), *values, kubeconfig=cluster.kubeconfig)
        policy = f"{QUOTAS.removesuffix('gpuquotas')}quotapolicies/default"
        assert cluster.api.get(policy)["spec"]["unmanaged"] == "deny"
        deployment = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/gpuquota-controller"
        cluster.api.until(deployment, lambda one: one.get("status", {}).get("replicas") == 2)
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(chart.CHART / "crds"))
        again = (str(chart.CHART), "--reset-then-reuse-values", "--namespace=default", "--set", "controller.replicas=3")
        run_helm("upgrade", "gpuquota", *again, kubeconfig=cluster.kubeconfig)
        assert cluster.api.get(deployment)["spec"]["replicas"] == 3
        assert cluster.api.get(policy)["spec"]["unmanaged"] == "deny"
        run_helm("rollback", "gpuquota", "1", "--namespace=default", kubeconfig=cluster.kubeconfig)
        assert cluster.api.get(deployment)["spec"]["replicas"] == 2
        to_cluster = (str(chart.CHART), *values)
        run_helm("upgrade", "gpuquota", *to_cluster, kubeconfig=cluster.kubeconfig)
        cluster.api.create(QUOTAS, quota("team-a", guaranteed=1))
        run_helm("uninstall", "gpuquota", "--wait", "--namespace=default", kubeconfig=cluster.kubeconfig)
        left = {one["metadata"]["name"] for one in cluster.api.items("/api/v1/namespaces")}
        assert {"gpuquota-keys", "gpuquota-reservations"} <= left, "what workers that train still need"
        assert cluster.api.get(f"{QUOTAS}/team-a")["spec"]["guaranteed"] == 1
        run_helm("install", "gpuquota", *to_cluster, kubeconfig=cluster.kubeconfig)
    finally:
        cluster.stop()
