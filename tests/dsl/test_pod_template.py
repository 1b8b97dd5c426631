"""What a step's workers take over from the step's own pod, and what not."""

from __future__ import annotations

from typing import Any

from kfp_gpuquota.dsl.spec.pod_template import MOUNT, PROGRAM, PROGRAM_MOUNT, worker_template
from kfp_gpuquota.dsl.worker.start import folders_of


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
    template = worker_template(step_pod(**asked), "trainer:7", "job-relay")
    assert container(template)["image"] == "trainer:7"
    assert container(template)["resources"] == {"limits": {"memory": "8Gi"}}
    assert {name: template["spec"][name] for name in asked} == asked
    assert template["spec"]["restartPolicy"] == "Never"
    assert "nodeName" not in template["spec"]


def test_without_a_launcher_image_workers_run_in_the_pods_image() -> None:
    assert container(worker_template(step_pod(), "", "s"))["image"] == "launcher:1"


def test_what_argo_and_kfp_added_for_themselves_is_left_out() -> None:
    template = worker_template(step_pod(), "trainer:7", "job-relay")
    ours = ["gpuquota-relay", "gpuquota-program"]
    assert [volume["name"] for volume in template["spec"]["volumes"]] == ["data", "minio-scratch", *ours]
    mounts = [mount["mountPath"] for mount in container(template)["volumeMounts"]]
    assert mounts == ["/data", "/minio", MOUNT, PROGRAM_MOUNT]
    assert [entry["name"] for entry in container(template)["env"]] == ["KFP_POD_NAME", "HF_TOKEN", "GPUQUOTA_POD_NAME"]


def test_the_image_needs_nothing_but_the_command() -> None:
    template = worker_template(step_pod(), "scratch:1", "s")
    assert container(template)["command"] == [f"{PROGRAM_MOUNT}/gpuquota-worker", "run", MOUNT]
    (copy,) = template["spec"]["initContainers"]
    assert (copy["image"], copy["command"]) == ("launcher:1", [PROGRAM, "install", PROGRAM_MOUNT])
    (mount,) = copy["volumeMounts"]
    assert mount == {"name": "gpuquota-program", "mountPath": PROGRAM_MOUNT}


def test_the_program_is_copied_under_the_restrictions_and_with_the_resources_of_the_steps_own_container() -> None:
    pod = step_pod()
    main = pod["spec"]["containers"][1]
    restricted = {"allowPrivilegeEscalation": False, "runAsUser": 1000}
    main |= {"securityContext": restricted, "imagePullPolicy": "Always"}
    template = worker_template(pod, "trainer:7", "s", resources={"limits": {"memory": "64Gi"}})
    (copy,) = template["spec"]["initContainers"]
    assert {name: copy[name] for name in ("securityContext", "imagePullPolicy", "resources")} == {
        "securityContext": restricted,
        "imagePullPolicy": "Always",
        "resources": {"limits": {"memory": "8Gi"}},
    }
    assert container(template)["resources"] == {"limits": {"memory": "64Gi"}}


def test_kfps_folders_are_volumes_unless_they_are_on_one() -> None:
    executor_input = {
        "inputs": {"artifacts": {"weights": {"artifacts": [{"uri": "oci://registry/model:1"}]}}},
        "outputs": {
            "outputFile": "/tmp/kfp_outputs/output_metadata.json",
            "parameters": {"x": {"outputFile": "/tmp/kfp/outputs/x"}, "y": {"outputFile": "/tmp/kfp/outputs/deep/y"}},
            "artifacts": {"model": {"artifacts": [{"uri": "minio://b/model", "customPath": "/home/me/model"}]}},
        },
    }
    template = worker_template(step_pod(), "scratch:1", "s", folders=folders_of(executor_input))
    mounts = [mount for mount in container(template)["volumeMounts"] if mount["name"] == "gpuquota-folders"]
    assert mounts == [
        {"name": "gpuquota-folders", "mountPath": "/oci", "subPath": "0"},
        {"name": "gpuquota-folders", "mountPath": "/tmp/kfp/outputs", "subPath": "1"},
        {"name": "gpuquota-folders", "mountPath": "/tmp/kfp_outputs", "subPath": "2"},
    ]
    assert {"name": "gpuquota-folders", "emptyDir": {}} in template["spec"]["volumes"]
