"""What manifests/ install: taken by a real API server, the same when applied again, and removed without harm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.api import annotations as asked
from kfp_gpuquota.cluster.kubernetes.admission import gate_configuration, server
from kfp_gpuquota.cluster.kubernetes.controller import what_if
from kfp_gpuquota.cluster.kubernetes.controller.metrics import Metrics
from kfp_gpuquota.cluster.kubernetes.objects import labels, paths
from kfp_gpuquota.cluster.kubernetes.objects.what_if import AUDIENCE, AUTHORITY, AUTHORITY_FILE, PATH
from kfp_gpuquota.cluster.kubernetes.web.options import parsed
from kfp_gpuquota.cluster.kubernetes.web.planner import TOKEN_FILE
from tests.kubernetes.conftest import start_or_skip
from tests.kubernetes.installation import CONTROLLER, MANIFESTS, NAMESPACE, install
from tests.kubernetes.test_crds import job
from tests.kubernetes.test_webhook import pod
from tests.polling import TIMEOUT_S
from tools.devcluster import ApiError, DevCluster, Options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHARES = (
    asked.FRACTION,
    asked.FRACTION_LIMIT,
    asked.MEMORY,
    asked.MEMORY_LIMIT,
    asked.DEVICES,
)
README = (MANIFESTS / "overlays" / "kubeflow" / "web-page" / "kustomization.yaml").read_text()
COMPONENTS = sorted(path.name for path in (MANIFESTS / "components").iterdir())


def rendered(cluster: DevCluster, folder: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(cluster.kubectl("kustomize", str(folder))) if one]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    running = start_or_skip(tmp_path_factory.mktemp("standalone"), Options(kwok_nodes=1))
    try:
        install(running, "standalone")
        yield running
    finally:
        running.stop()


def versions(cluster: DevCluster, overlay: str) -> dict[str, str]:
    """The resourceVersion of everything that the overlay has."""
    lines = cluster.kubectl(
        *("get", "-k", str(MANIFESTS / "overlays" / overlay)),
        *("-o", r"jsonpath={range .items[*]}{.kind}/{.metadata.name} {.metadata.generation}{'\n'}{end}"),
    )
    return dict(line.split(" ", 1) for line in lines.splitlines())


@pytest.mark.parametrize("overlay", ["standalone", "kubeflow"])
def test_an_overlay_is_taken_strictly_and_the_same_when_applied_again(standalone: DevCluster, overlay: str) -> None:
    folder = str(MANIFESTS / "overlays" / overlay)
    standalone.kubectl("apply", "--validate=strict", "-k", folder)
    before = versions(standalone, overlay)
    again = standalone.kubectl("apply", "--validate=strict", "-k", folder)
    assert len(again.splitlines()) == len(before) > 25
    assert versions(standalone, overlay) == before


@pytest.mark.parametrize("overlay", ["standalone", "kubeflow"])
def test_an_overlay_needs_no_namespace_that_it_does_not_create(kubeflow_cluster: DevCluster, overlay: str) -> None:
    objects = rendered(kubeflow_cluster, MANIFESTS / "overlays" / overlay)
    made = {one["metadata"]["name"] for one in of_kind(objects, "Namespace")}
    assert {one["metadata"]["namespace"] for one in objects if "namespace" in one["metadata"]} <= made | {"kube-system"}


def test_every_expression_of_the_policies_is_well_typed(kubeflow_cluster: DevCluster) -> None:
    path = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
    names = [one["metadata"]["name"] for one in kubeflow_cluster.api.items(path)]
    of_a_component = "gpuquota-web-page-jobs"  # other tests of this cluster may have added it
    assert len([name for name in names if name.startswith("gpuquota-") and name != of_a_component]) == 20
    for name in names:
        checked = kubeflow_cluster.api.until(f"{path}/{name}", lambda one: "typeChecking" in one.get("status", {}))
        assert not checked["status"]["typeChecking"].get("expressionWarnings"), name


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_can_be_added_to_an_overlay(kubeflow_cluster: DevCluster, tmp_path: Path, component: str) -> None:
    objects = rendered(kubeflow_cluster, with_component(tmp_path, component))
    if component == "fail-open":
        (configuration,) = of_kind(objects, "MutatingWebhookConfiguration")
        assert {one["failurePolicy"] for one in configuration["webhooks"]} == {"Ignore"}
        assert "was not gated" not in yaml.safe_dump(of_kind(objects, "ValidatingAdmissionPolicy"), width=1000)
    if component == "monitoring":
        (monitor,) = of_kind(objects, "ServiceMonitor")
        services = of_kind(objects, "Service")
        wanted = monitor["spec"]["selector"]["matchLabels"]
        (service,) = [one for one in services if wanted.items() <= one["metadata"].get("labels", {}).items()]
        assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}


def test_the_page_in_kubeflow_is_reached_through_the_gateway_only(kubeflow_cluster: DevCluster, tmp_path: Path) -> None:
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [relative(tmp_path, MANIFESTS / "overlays" / "kubeflow")],
        "components": [relative(tmp_path, MANIFESTS / "overlays" / "kubeflow" / "web-page")],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content))
    objects = [one for one in rendered(kubeflow_cluster, tmp_path) if one["metadata"]["name"] == "gpuquota-web-page"]
    (deployment,), (service,), (route,), (policy,) = (
        of_kind(objects, kind) for kind in ("Deployment", "Service", "VirtualService", "AuthorizationPolicy")
    )
    pod = deployment["spec"]["template"]
    options = parsed(pod["spec"]["containers"][0]["args"])
    (match,) = route["spec"]["http"][0]["match"]
    destination = route["spec"]["http"][0]["route"][0]["destination"]
    assert match["uri"]["prefix"] == f"{options.base}/"
    assert destination["host"].split(".")[:2] == [service["metadata"]["name"], service["metadata"]["namespace"]]
    assert destination["port"]["number"] == service["spec"]["ports"][0]["port"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert policy["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert policy["spec"]["rules"][0]["to"][0]["operation"]["ports"] == [str(options.port)]
    (args,) = [line for line in README.splitlines() if "/args/" in line]
    index = int(re.findall(r"/args/(\d+)", args)[0])
    assert pod["spec"]["containers"][0]["args"][index].startswith("--origin=")
    for one in objects:
        if not one["apiVersion"].partition("/")[0].endswith("istio.io"):
            kubeflow_cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(one))


def test_the_page_asks_the_leader_what_ifs_and_nobody_else_reaches_that_port(
    kubeflow_cluster: DevCluster, tmp_path: Path
) -> None:
    objects = rendered(kubeflow_cluster, with_component(tmp_path, "web-page"))
    pods = {one["metadata"]["name"]: one["spec"]["template"] for one in of_kind(objects, "Deployment")}
    controller, page = pods["gpuquota-controller"], pods["gpuquota-web-page"]
    container = page["spec"]["containers"][0]
    options = parsed(container["args"])
    url = urlsplit(options.what_if)
    assert url.hostname in paths.service_names(what_if.SERVICE, NAMESPACE), "a name in the controller's certificate"
    (service,) = [one for one in of_kind(objects, "Service") if one["metadata"]["name"] == what_if.SERVICE]
    with_leader = {**controller["metadata"]["labels"], labels.LEADER: "true"}
    assert service["spec"]["selector"].items() <= with_leader.items()
    assert service["spec"]["selector"][labels.LEADER] == "true"
    (port,) = service["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (443, 8445)
    assert "--what-if-port=8445" in controller["spec"]["containers"][0]["args"]
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "NetworkPolicy")}
    (rule,) = policies["gpuquota-controller-what-if"]["ingress"]
    assert rule["ports"] == [{"port": 8445}]
    (source,) = rule["from"]
    assert source["podSelector"]["matchLabels"].items() <= page["metadata"]["labels"].items()
    assert "namespaceSelector" not in source
    (mount,), (volume,) = container["volumeMounts"], page["spec"]["volumes"]
    assert (mount["name"], mount["mountPath"]) == (volume["name"], options.what_if_files)
    token, authority = (next(iter(one.values())) for one in volume["projected"]["sources"])
    assert (token["audience"], token["path"]) == (AUDIENCE, TOKEN_FILE)
    assert (authority["name"], authority["optional"]) == (AUTHORITY, True)
    assert [item["path"] for item in authority["items"]] == [AUTHORITY_FILE]
    (role,) = [one for one in of_kind(objects, "ClusterRole") if one["metadata"]["name"] == what_if.ROLE]
    assert role["rules"] == [{"nonResourceURLs": [PATH], "verbs": ["post"]}]


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((MANIFESTS / "components" / "monitoring" / "gpuquota.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for one in panel["targets"]
        for name in re.findall(r"gpuquota_\w+", one["expr"])
    }
    assert asked <= known_series()
    assert len(asked) > 5


def known_series() -> set[str]:
    given = {metric.name for metric in Metrics().registry.collect()}
    return {f"{name}{suffix}" for name in given for suffix in ("", "_total", "_bucket")}


def test_each_alert_asks_for_metrics_that_exist_and_has_a_runbook() -> None:
    rules = yaml.safe_load((MANIFESTS / "components" / "monitoring" / "rules.yaml").read_text())
    alerts = [rule for group in rules["spec"]["groups"] for rule in group["rules"]]
    runbooks = (MANIFESTS.parent / "docs" / "runbooks.md").read_text()
    assert len(alerts) > 8
    for rule in alerts:
        expression = rule["expr"]
        assert set(re.findall(r"gpuquota_\w+", expression)) <= known_series(), rule["alert"]
        assert all(expression.count(one) == expression.count(other) for one, other in ("()", "[]", "{}"))
        assert f"\n## {rule['alert']}\n" in runbooks
        assert rule["annotations"]["runbook_url"].endswith(f"runbooks.md#{rule['alert'].lower()}")
        assert rule["labels"]["severity"] in {"critical", "warning"}
    assert runbooks.count("\n## Gpuquota") == len(alerts), "and each runbook an alert"


def with_component(folder: Path, component: str) -> Path:
    """A kustomization of the user's own: the standalone overlay and one component."""
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [relative(folder, MANIFESTS / "overlays" / "standalone")],
        "components": [relative(folder, MANIFESTS / "components" / component)],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return folder


def test_closed_or_open_as_configured(standalone: DevCluster, tmp_path: Path) -> None:
    # the webhook has no server here
    namespace = standalone.make_namespace("open-or-closed", {labels.MANAGED: "true"})
    path = f"/api/v1/namespaces/{namespace}/pods"
    with pytest.raises(ApiError, match="failed calling webhook"):
        standalone.api.create(path, pod())
    standalone.kubectl("apply", "-k", str(with_component(tmp_path, "fail-open")))
    try:
        assert "schedulingGates" not in created_in_the_end(standalone, path, pod())["spec"]
        with pytest.raises(ApiError, match=r"spec.nodeName out"):  # what needs no controller stands
            standalone.api.create(path, pod(name="b", spec={"nodeName": "fake-0"}))
    finally:
        standalone.kubectl("apply", "-k", str(MANIFESTS / "overlays" / "standalone"))


def created_in_the_end(cluster: DevCluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The pod; the API server takes a second or two to follow its own admission configuration."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return cluster.api.create(path, body)
        except ApiError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def relative(start: Path, target: Path) -> str:
    ups = "/".join([".."] * len(start.resolve().parts[1:]))
    return f"{ups}{target.resolve()}"


def test_without_the_kind_of_the_policy_pods_are_created_and_deleted_as_ever(standalone: DevCluster) -> None:
    standalone.kubectl("delete", "crd", "quotapolicies.gpuquota.dev")
    try:
        managed = standalone.make_namespace("no-policy-managed", {labels.MANAGED: "true"})
        other = standalone.make_namespace("no-policy")
        paths = [f"/api/v1/namespaces/{name}/pods" for name in (managed, other)]
        created_in_the_end(standalone, paths[1], pod())
        standalone.api.create(paths[0], pod("", spec={"terminationGracePeriodSeconds": 1}))
        for path in paths:
            standalone.api.delete(f"{path}/a", 1)
    finally:
        standalone.kubectl("apply", "-k", str(MANIFESTS / "crds"))
        standalone.api.until_served("/apis/gpuquota.dev/v1alpha1/quotapolicies")


def test_what_refers_to_each_other_fits(kubeflow_cluster: DevCluster) -> None:
    objects = rendered(kubeflow_cluster, MANIFESTS / "overlays" / "kubeflow")
    sets = [*of_kind(objects, "Deployment"), *of_kind(objects, "StatefulSet")]
    pods = {one["metadata"]["name"]: one["spec"]["template"] for one in sets}
    assert set(pods) == {"gpuquota-controller", "gpuquota-webhook", "gpuquota-membership"}
    for service in [*of_kind(objects, "Service"), *of_kind(objects, "NetworkPolicy")]:
        spec = service["spec"]
        selector = spec.get("selector") or spec["podSelector"]["matchLabels"]
        (chosen,) = [one for one in pods.values() if selector.items() <= one["metadata"]["labels"].items()]
        listening = {port["name"] for port in chosen["spec"]["containers"][0]["ports"]}
        stand_in = [port["port"] for rule in spec.get("ingress", ()) for port in rule["ports"]]
        assert {*stand_in, *(port["targetPort"] for port in spec.get("ports", ()))} <= listening
    (configuration,) = of_kind(objects, "MutatingWebhookConfiguration")
    assert configuration["metadata"]["name"] == gate_configuration.CONFIGURATION
    for one in configuration["webhooks"]:
        called = one["clientConfig"]["service"]
        assert called == {"name": server.SERVICE, "namespace": NAMESPACE, "path": server.PATH, "port": 443}
        assert any(CONTROLLER in condition["expression"] for condition in one["matchConditions"])
    for policy in of_kind(objects, "ValidatingAdmissionPolicy"):
        if policy["metadata"]["name"] in {"gpuquota-pods", "gpuquota-namespaces"}:
            assert CONTROLLER in yaml.safe_dump(policy, width=1000)
    flags = {"webhook": "--webhook-port", "membership": "--port", "metrics": "--metrics-port"}
    for template in pods.values():
        container = template["spec"]["containers"][0]
        for port in container["ports"]:
            assert f"{flags[port['name']]}={port['containerPort']}" in container["args"]


def test_the_controller_names_each_shard_of_the_membership(kubeflow_cluster: DevCluster) -> None:
    objects = rendered(kubeflow_cluster, MANIFESTS / "overlays" / "kubeflow")
    (shards,) = of_kind(objects, "StatefulSet")
    deployment = next(one for one in of_kind(objects, "Deployment") if one["metadata"]["name"] == "gpuquota-controller")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    (named,) = [argument.partition("=")[2] for argument in arguments if argument.startswith("--membership-shards=")]
    name, service = shards["metadata"]["name"], shards["spec"]["serviceName"]
    port = shards["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"]
    hosts = [f"https://{name}-{i}.{service}.$(POD_NAMESPACE).svc:{port}" for i in range(shards["spec"]["replicas"])]
    assert named.split(",") == hosts
    advertised = shards["spec"]["template"]["spec"]["containers"][0]["args"][-1]
    assert advertised == f"--advertise=https://$(POD_NAME).{service}.$(POD_NAMESPACE).svc:{port}"


def test_only_workers_reach_the_membership_and_only_chosen_namespaces_the_metrics(kubeflow_cluster: DevCluster) -> None:
    objects = rendered(kubeflow_cluster, MANIFESTS / "overlays" / "standalone")
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in of_kind(objects, "NetworkPolicy")}
    programs = {
        made["metadata"]["name"]: made for kind in ("Deployment", "StatefulSet") for made in of_kind(objects, kind)
    }
    assert policies.keys() == programs.keys()
    sources: dict[str, list[Any]] = {}
    for name, policy in policies.items():
        pod = programs[name]["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= pod.items()
        for rule in policy["ingress"]:
            sources.setdefault(rule["ports"][0]["port"], []).append(rule.get("from"))
    assert sources["webhook"] == [None], "API servers have no selector"
    ((workers, controller),) = sources["membership"]
    assert workers["podSelector"]["matchExpressions"] == [{"key": labels.JOB, "operator": "Exists"}]
    assert controller["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "gpuquota-controller"}
    assert "namespaceSelector" not in controller
    for (readers,) in sources["metrics"]:
        assert readers["namespaceSelector"]["matchLabels"] == {"gpuquota.dev/reads-metrics": "true"}


def test_the_expressions_name_the_annotations_that_admission_reads(kubeflow_cluster: DevCluster) -> None:
    objects = rendered(kubeflow_cluster, MANIFESTS / "overlays" / "standalone")
    (configuration,) = of_kind(objects, "MutatingWebhookConfiguration")
    texts = [yaml.safe_dump(configuration)]
    texts += [
        yaml.safe_dump(one)
        for one in of_kind(objects, "ValidatingAdmissionPolicy")
        if one["metadata"]["name"] == "gpuquota-pods"
    ]
    assert len(texts) == 2
    weights = labels.GPU_WEIGHTS.partition("/")[2]  # what admission itself writes
    for text in texts:
        assert set(re.findall(r"'(gpu-[a-z-]+)'", text.replace("''", "'"))) - {weights} == set(SHARES)


def test_the_controllers_pods_are_accepted_as_restricted(standalone: DevCluster) -> None:
    # the namespace enforces it: were a field missing, the ReplicaSet could create no pod
    path = f"/api/v1/namespaces/{NAMESPACE}/pods"
    standalone.api.until(
        f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/gpuquota-controller",
        lambda one: one.get("status", {}).get("replicas") == 2,
    )
    for replica in standalone.api.items(path, labelSelector="app.kubernetes.io/name=gpuquota-controller"):
        assert replica["spec"]["priority"] == 1_000_000_000
        assert replica["spec"]["containers"][0]["image"] != "controller"


def test_the_controller_starts_with_what_its_image_has() -> None:
    absent = ["torch", "kfp", "kubernetes", "typer", "rich", "matplotlib", "pynvml", "pytest", "elastic_runtime"]
    blocked = f"import sys; sys.modules.update(dict.fromkeys({absent!r}))"
    run = "from kfp_gpuquota.cluster.kubernetes.__main__ import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", f"{blocked}; {run}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for flag in (
        "--webhook-port",
        "--metrics-port",
        "--membership-port",
        "--advertise",
        "--namespace",
        "--leader-elect",
        "--keys-namespace",
        "--membership-shards",
        "--reviews-only",
    ):
        assert flag in done.stdout


@pytest.mark.slow
def test_removal_leaves_what_runs(tmp_path: Path) -> None:
    cluster = start_or_skip(tmp_path / "cluster", Options(kwok_nodes=1))
    try:
        install(cluster, "standalone")
        namespace = cluster.make_namespace("team-a")
        # no label of the quota on the namespace yet: these pods stand for those that were admitted
        made = cluster.api.create(f"/apis/gpuquota.dev/v1alpha1/namespaces/{namespace}/elasticjobs", job())
        owner = {key: made["metadata"][key] for key in ("name", "uid")} | {"controller": True}
        owner |= {"kind": "ElasticJob", "apiVersion": labels.API_VERSION}
        spec = {
            "containers": [{"name": "main", "image": "x", "resources": {"limits": {labels.GPU_RESOURCE: "1"}}}],
            "affinity": {},
        }
        path = f"/api/v1/namespaces/{namespace}/pods"
        for name, owners in (("plain", []), ("worker", [owner])):
            cluster.api.create(path, {"metadata": {"name": name, "ownerReferences": owners}, "spec": spec})
            cluster.api.until(f"{path}/{name}", lambda one: one["status"].get("phase") == "Running")
        cluster.kubectl("delete", "--wait=false", "-k", str(MANIFESTS / "base"))
        left = {one["metadata"]["name"]: one["status"]["phase"] for one in cluster.api.items(path)}
        assert left == {"plain": "Running", "worker": "Running"}
        # nothing of ours is asked any more: pods of managed namespaces start by themselves
        cluster.api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": {labels.MANAGED: "true"}}})
        created_in_the_end(cluster, path, {"metadata": {"name": "new"}, "spec": spec})
        cluster.api.until(f"{path}/new", lambda one: one["status"].get("phase") == "Running")
    finally:
        cluster.stop()
