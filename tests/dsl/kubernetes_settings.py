"""Every setter of kfp-kubernetes with one use of it, and the configuration that KFP compiles of some of them."""

# mypy: disable-error-code="untyped-decorator"
# Annotations must be evaluated: KFP reads them.
from collections.abc import Callable
from typing import Any, Final

from kfp import dsl, kubernetes

Json = dict[str, Any]
Setter = Any

_REQUIRED: Final = {
    "requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]
    }
}
_ZONE: Final = [{"key": "zone", "operator": "In", "values": ["a"]}]

USES: Final[dict[str, Callable[[Setter], object]]] = {
    "add_ephemeral_volume": lambda task: kubernetes.add_ephemeral_volume(
        task, "kfp-launcher-data", "/scratch", ["ReadWriteOnce"], "5Gi", storage_class_name="fast"
    ),
    "add_node_affinity": lambda task: kubernetes.add_node_affinity(task, match_expressions=_ZONE, weight=5),
    "add_node_affinity_json": lambda task: kubernetes.add_node_affinity_json(task, _REQUIRED),
    "add_node_selector": lambda task: kubernetes.add_node_selector(task, "disk", "fast"),
    "add_node_selector_json": lambda task: kubernetes.add_node_selector_json(task, {"zone": "a"}),
    "add_pod_annotation": lambda task: kubernetes.add_pod_annotation(task, "k8s.v1.cni.cncf.io/networks", "rdma-net"),
    "add_pod_label": lambda task: kubernetes.add_pod_label(task, "cost-centre", "7"),
    "add_toleration": lambda task: kubernetes.add_toleration(task, "gpu", "Exists", effect="NoSchedule"),
    "add_toleration_json": lambda task: kubernetes.add_toleration_json(task, {"key": "spot", "operator": "Exists"}),
    "empty_dir_mount": lambda task: kubernetes.empty_dir_mount(
        task, "argo-shm", "/dev/shm", medium="Memory", size_limit="8Gi"
    ),
    "mount_pvc": lambda task: kubernetes.mount_pvc(task, "kfp-data", "/data", sub_path="part"),
    "set_image_pull_policy": lambda task: kubernetes.set_image_pull_policy(task, "Always"),
    "set_image_pull_secrets": lambda task: kubernetes.set_image_pull_secrets(task, ["registry-key"]),
    "set_security_context": lambda task: kubernetes.set_security_context(task, run_as_user=1000, run_as_non_root=True),
    "set_timeout": lambda task: kubernetes.set_timeout(task, 60),
    "use_config_map_as_env": lambda task: kubernetes.use_config_map_as_env(task, "conf", {"key": "ELASTIC_PASSWORD"}),
    "use_config_map_as_volume": lambda task: kubernetes.use_config_map_as_volume(task, "argo-conf", "/conf"),
    "use_field_path_as_env": lambda task: kubernetes.use_field_path_as_env(task, "ARGO_POD", "metadata.name"),
    "use_secret_as_env": lambda task: kubernetes.use_secret_as_env(task, "secret", {"key": "KFP_API_TOKEN"}),
    "use_secret_as_volume": lambda task: kubernetes.use_secret_as_volume(task, "kfp-secret", "/secret"),
}


def config_of(*uses: Callable[[Setter], object]) -> Json:
    """A task's Kubernetes configuration after these setters, as KFP compiles it."""
    found: Json = {}

    @dsl.container_component
    def step() -> dsl.ContainerSpec:
        return dsl.ContainerSpec(image="image:1", command=["sh"])

    @dsl.pipeline
    def one_step() -> None:
        task = step()
        for use in uses:
            use(task)
        found.update(task.platform_config.get("kubernetes", {}))

    del one_step
    return found
