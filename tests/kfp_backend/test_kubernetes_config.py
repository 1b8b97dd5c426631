"""The double's reading of kfp-kubernetes makes the pod that a real backend made."""

from __future__ import annotations

from typing import Any

from kfp import kubernetes

from tests.dsl.kubernetes_settings import config_of
from tests.kfp_backend.kubernetes_config import configured
from tests.kfp_backend.test_shapes import container, made_from, recorded_only, recording

Json = dict[str, Any]


@recorded_only
def test_a_step_with_volumes_secrets_and_node_selector_gets_the_recorded_pod() -> None:
    pod = recording("pods.json")["k8s-settings, executor pod, running"]
    config = config_of(
        lambda task: kubernetes.mount_pvc(task, "kfp-data", "/data"),
        lambda task: kubernetes.mount_pvc(task, "my-data", "/more", sub_path="part"),
        lambda task: kubernetes.use_secret_as_volume(task, "my-secret", "/secret"),
        lambda task: kubernetes.use_config_map_as_volume(task, "my-conf", "/conf"),
        lambda task: kubernetes.empty_dir_mount(task, "cache", "/cache"),
        lambda task: kubernetes.use_secret_as_env(task, "my-secret", {"key": "MY_SECRET"}),
        lambda task: kubernetes.use_config_map_as_env(task, "my-conf", {"key": "MY_CONF"}),
        lambda task: kubernetes.use_field_path_as_env(task, "MY_POD", "metadata.name"),
        lambda task: kubernetes.add_node_selector(task, "disk", "fast"),
        lambda task: kubernetes.add_toleration(task, "gpu", "Exists", effect="NoSchedule"),
        lambda task: kubernetes.add_pod_label(task, "my-label", "x"),
        lambda task: kubernetes.add_pod_annotation(task, "my-annotation", "y"),
        lambda task: kubernetes.set_timeout(task, 120),
    )
    made = configured(made_from(_without_settings(pod)), config)
    spec, recorded = made["spec"], pod["spec"]
    assert made["metadata"]["labels"] == pod["metadata"]["labels"]
    assert made["metadata"]["annotations"] == pod["metadata"]["annotations"]
    assert spec["activeDeadlineSeconds"] == recorded["activeDeadlineSeconds"]
    assert spec["nodeSelector"] == recorded["nodeSelector"]
    assert spec["tolerations"] == recorded["tolerations"][:1]
    assert {one["name"]: _kind(one) for one in spec["volumes"]} == {
        one["name"]: _kind(one) for one in recorded["volumes"] if "kube-api-access" not in one["name"]
    }
    ours, theirs = container(made, "main"), container(pod, "main")
    assert {(one["name"], one["mountPath"], one.get("subPath")) for one in ours["volumeMounts"]} == {
        (one["name"], one["mountPath"], one.get("subPath"))
        for one in theirs["volumeMounts"]
        if "kube-api-access" not in one["name"]
    }
    assert {one["name"]: _source(one) for one in ours["env"] if one["name"].startswith("MY_")} == {
        one["name"]: _source(one) for one in theirs["env"] if one["name"].startswith("MY_")
    }


def _without_settings(pod: Json) -> Json:
    """The recorded pod as `made_from` wants it: only the environment that its author wrote as values."""
    containers = [
        {**one, "env": [entry for entry in one.get("env", []) if "valueFrom" not in entry]}
        for one in pod["spec"]["containers"]
    ]
    return {**pod, "spec": {**pod["spec"], "containers": containers}}


def _kind(volume: Json) -> str:
    return next(kind for kind in volume if kind != "name")


def _source(entry: Json) -> Any:
    source = entry.get("valueFrom")
    if not source:
        return entry.get("value")
    return {kind: {name: text for name, text in one.items() if name != "apiVersion"} for kind, one in source.items()}
