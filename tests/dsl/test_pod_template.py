"""What a step's workers take over from the step's own pod, and what not."""

from __future__ import annotations

from typing import Any

from kfp_gpuquota.dsl.spec.pod_template import BOOTSTRAP, MOUNT, worker_template


def step_pod(**spec: Any) -> dict[str, Any]:
    """As KFP's backend and Argo make it, in short."""
    main = {
        "name": "main",
        "image": "launcher:1",
        "command": ["/var/run/argo/argoexec", "emissary", "--", "/kfp-launcher/launch"],
        "env": [
            {"name": "GPUQUOTA_GPUS", "value": "2"},
            {"name": "KFP_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "ARGO_NODE_ID", "value": "x"},
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
        ],
        "resources": {"limits": {"memory": "8Gi"}},
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"},
            {"name": "minio-scratch", "mountPath": "/minio"},
            {"name": "kfp-launcher", "mountPath": "/kfp-launcher"},
            {"name": "var-run-argo", "mountPath": "/var/run/argo"},
            {"name": "kube-api-access-abcde", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"},
        ],
    }
    volumes = [
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "minio-scratch", "emptyDir": {}},
        {"name": "kfp-launcher", "emptyDir": {}},
        {"name": "var-run-argo", "emptyDir": {}},
        {"name": "kube-api-access-abcde", "projected": {}},
    ]
    return {"spec": {"containers": [{"name": "wait"}, main], "volumes": volumes, "nodeName": "node-1", **spec}}


def container(template: dict[str, Any]) -> dict[str, Any]:
    (found,) = template["spec"]["containers"]
    return dict(found)


def test_workers_run_in_the_steps_own_image_with_what_its_author_asked_for() -> None:
    asked = {
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "nodeSelector": {"zone": "b"},
        "imagePullSecrets": [{"name": "pull"}],
        "serviceAccountName": "default-editor",
    }
    template = worker_template(step_pod(**asked), "trainer:7", "job-relay", ["python", "train.py"])
    assert container(template)["image"] == "trainer:7"
    assert container(template)["resources"] == {"limits": {"memory": "8Gi"}}
    assert {name: template["spec"][name] for name in asked} == asked
    assert template["spec"]["restartPolicy"] == "Never"
    assert "nodeName" not in template["spec"]


def test_without_a_launcher_image_workers_run_in_the_pods_image() -> None:
    assert container(worker_template(step_pod(), "", "s", ["true"]))["image"] == "launcher:1"


def test_what_kfp_and_argo_added_for_themselves_is_left_out() -> None:
    template = worker_template(step_pod(), "trainer:7", "job-relay", ["true"])
    assert [volume["name"] for volume in template["spec"]["volumes"]] == ["data", "minio-scratch", "gpuquota-relay"]
    assert [mount["mountPath"] for mount in container(template)["volumeMounts"]] == ["/data", "/minio", MOUNT]
    assert [entry["name"] for entry in container(template)["env"]] == ["HF_TOKEN", "GPUQUOTA_POD_NAME"]


def test_an_image_without_python_runs_the_command_itself() -> None:
    command = container(worker_template(step_pod(), "i", "s", ["train", "--fast"]))["command"]
    assert command[:2] == ["sh", "-c"]
    assert command[3:] == [BOOTSTRAP, MOUNT, "train", "--fast"]
