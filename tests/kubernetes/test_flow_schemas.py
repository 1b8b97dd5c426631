"""The API server serves the controller's Lease and its other calls apart from every tenant's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.kubernetes.installation import CONTROLLER, NAMESPACE
from tests.polling import until

if TYPE_CHECKING:
    from tools.devcluster import DevCluster

DISPATCHED = re.compile(r"^apiserver_flowcontrol_dispatched_requests_total\{(.*)\} (\S+)$", re.MULTILINE)


def served(cluster: DevCluster, schema: str, level: str) -> float:
    """Requests that this FlowSchema has sent to this priority level."""
    wanted = {f'flow_schema="{schema}"', f'priority_level="{level}"'}
    lines = DISPATCHED.findall(cluster.api.text("/metrics"))
    return sum(float(count) for tags, count in lines if wanted <= set(tags.split(",")))


def test_the_lease_is_served_before_everything_and_other_calls_before_tenants(kubeflow_cluster: DevCluster) -> None:
    groups = "system:serviceaccounts", f"system:serviceaccounts:{NAMESPACE}", "system:authenticated"
    controller = kubeflow_cluster.api.as_user(CONTROLLER, *groups)
    for schema, level, path in (
        (
            "gpuquota-leader-election",
            "leader-election",
            f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/x",
        ),
        ("gpuquota-controller", "workload-high", "/api/v1/nodes/none"),
    ):
        before = served(kubeflow_cluster, schema, level)

        def counted(schema: str = schema, level: str = level, path: str = path, before: float = before) -> bool:
            controller.exists(path)  # the API server reads its FlowSchemas a moment after they are made
            return served(kubeflow_cluster, schema, level) > before

        until(counted, f"{schema}: {level}")
