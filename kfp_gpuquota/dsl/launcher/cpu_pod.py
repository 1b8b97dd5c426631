"""The pod of a step whose number of GPUs, a parameter of the run, is 0: it runs on the CPU and takes no quota.

The step's pod owns it. Another attempt does not find it again, but starts the command again, as KFP would.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.convert.pod_status import trouble_of
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
from kfp_gpuquota.dsl.launcher import pod_workers
from kfp_gpuquota.dsl.launcher.log_stream import ENDED, lines_of
from kfp_gpuquota.dsl.launcher.relay import Relay
from kfp_gpuquota.dsl.launcher.staging import Staging
from kfp_gpuquota.errors import AlreadyExistsError, GpuQuotaError, JobFailedError
from kfp_gpuquota.server.cluster_api import follow_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient
    from kfp_gpuquota.dsl.launcher.step import Step

Json = dict[str, Any]

_POLL_S: Final = 0.5


def run(client: KubernetesClient, step: Step, write: Callable[[str], None]) -> int:
    """Run the step's command in a pod of its image, publish its outputs, and return its exit code."""
    own = pod_workers.own_pod(client)
    meta, namespace = own["metadata"], client.namespace
    name = f"{step.job_name}-cpu-{meta['uid'][:5]}"
    owner = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
    staging = Staging(step.executor_input, name)
    staging.create(step.argv, {})
    received = threading.Event()
    address = pod_workers.address_of(own)
    relay = Relay(step.executor_input, staging, address, completed=lambda _worker: received.set())
    pod_workers.publish(client.calls, relay, namespace, name, owner)
    template = pod_workers.template_of(own, step, name)
    metadata = {**template["metadata"], "name": name, "ownerReferences": [owner]}
    pods = join("/api/v1/namespaces", namespace, "pods")
    with contextlib.suppress(AlreadyExistsError):  # by a first attempt of this call, whose answer was lost
        client.calls.create(pods, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
    try:
        _await_start(client, join(pods, name), write)
        code = _followed(client, namespace, name, write)
    finally:
        with contextlib.suppress(GpuQuotaError):
            client.calls.delete(join(pods, name))
    if code == 0 and not received.is_set():
        raise JobFailedError("the command succeeded, but its outputs did not arrive")
    if code:
        staging.discard()
    else:
        staging.publish_outputs(name)
    return code


def _await_start(client: KubernetesClient, path: str, write: Callable[[str], None]) -> None:
    """Return when the pod has started, and write why it does not."""
    written = ""
    while (pod := client.calls.read(path, Pod)).status.phase == "Pending":
        if (trouble := trouble_of(pod)) and trouble != written:
            write(f"gpuquota: the step's pod does not start: {trouble}")
            written = trouble
        time.sleep(_POLL_S)


def _followed(client: KubernetesClient, namespace: str, name: str, write: Callable[[str], None]) -> int:
    """Write the pod's log, and return the exit code of its command."""
    for line in lines_of(follow_log(client, namespace, "", worker=name)):
        text, ended, code = line.partition(ENDED)
        if text or not ended:
            write(f"[0] {text}")
        if ended:
            return int(code)
    path = join("/api/v1/namespaces", namespace, "pods", name)
    while (found := exit_code_of(client.calls.read(path, Pod))) is None:
        time.sleep(_POLL_S)
    return found


def exit_code_of(pod: Pod) -> int | None:
    """Return the exit code of a pod that was ended before it could write that, 0 excluded; None where it still runs.

    Raises JobFailedError for one that never started its command: the kubelet has not admitted it, or its init
    container has failed.
    """
    status = pod.status
    for container in status.container_statuses:
        if (terminated := container.state.terminated) is not None:
            return terminated.exit_code or 1
    if status.phase not in {"Succeeded", "Failed"}:
        return None
    found = [status.reason, status.message]
    found += [one.state.terminated.message for one in status.init_container_statuses if one.state.terminated]
    raise JobFailedError(f"the step's pod did not start its command: {': '.join(filter(None, found))}")
