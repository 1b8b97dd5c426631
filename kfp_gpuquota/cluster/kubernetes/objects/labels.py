"""Names of labels, annotations and resources, documented in docs/reference/kubernetes.md."""

from __future__ import annotations

from typing import Final

from kfp_gpuquota.api.job import USER_LABEL

GROUP: Final = "gpuquota.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
FIELD_MANAGER: Final = "gpuquota"
VENDOR: Final = "nvidia.com"
GPU_RESOURCE: Final = f"{VENDOR}/gpu"
GPU_MEMORY: Final = f"{VENDOR}/gpu.memory"

MANAGED: Final = f"{GROUP}/managed"
ALLOWS_CLAIMS: Final = f"{GROUP}/allow-resource-claims"
"""On a namespace: its pods may claim devices of DeviceClasses that the quota does not count."""
QUOTA_GATE: Final = f"{GROUP}/quota"
KIND: Final = f"{GROUP}/kind"
PRIORITY: Final = f"{GROUP}/priority"
PREEMPTIBLE: Final = f"{GROUP}/preemptible"
POD_GROUP: Final = f"{GROUP}/group"
POD_GROUP_SIZE: Final = f"{GROUP}/group-size"
DEVICES: Final = f"{GROUP}/devices"
GPU_WEIGHTS: Final = f"{GROUP}/gpu-resources"
"""On a pod: the resources that count as GPUs when it was created, as RESOURCE=GPUS, separated by commas."""
CLAIMED: Final = f"{GROUP}/claimed-classes"
"""On a pod: the DeviceClasses of which its claims requested devices when it was released, separated by commas."""
OPENED: Final = f"{GROUP}/opened-on"
RESERVED_ON: Final = f"{GROUP}/reserved-on"
"""On a pod that is not pinned: the node whose devices it holds until it is bound."""
GANG: Final = f"{GROUP}/admitted-gang"
RECLAIMED_AT: Final = f"{GROUP}/reclaimed-at"
REASON: Final = f"{GROUP}/reason"
JOB: Final = f"{GROUP}/job"
WORKER: Final = f"{GROUP}/worker"
ATTEMPT: Final = f"{GROUP}/attempt"
SOURCE: Final = f"{GROUP}/source"
STEP: Final = f"{GROUP}/step"  # on an ElasticJob: path of the pipeline step in its run
LEADER: Final = f"{GROUP}/leader"
USER: Final = USER_LABEL
POOL: Final = f"{GROUP}/pool"

# Shared GPUs: on pods that share a GPU, on reservation pods, and on nodes with simulated GPUs.
GPUS: Final = f"{GROUP}/gpus"
GPU_CONFIG: Final = f"{GROUP}/gpu-config"
SET_BY: Final = f"{GROUP}/set-by"
RESERVES: Final = f"{GROUP}/reserves"
RESERVES_ON: Final = f"{GROUP}/reserves-on"
SHARERS: Final = f"{GROUP}/sharers"
READY: Final = f"{GROUP}/ready"
LEDGER: Final = f"{GROUP}/ledger"
SIMULATED: Final = f"{GROUP}/simulated-gpus"

DEBUG_STATE: Final = "/debug/state"
"""The non-resource URL of what the planner sees."""
NOTEBOOK: Final = "notebook-name"
SESSIONS: Final = frozenset({NOTEBOOK, "notebooks.kubeflow.org/workspace-name"})
"""Labels of the pods of Kubeflow's Notebooks and Workspaces (notebooks v2), which are build sessions."""

# On Jobs that are run as ElasticJobs, and on the ElasticJob.
MIN_NODES: Final = f"{GROUP}/min-nodes"
MAX_NODES: Final = f"{GROUP}/max-nodes"
CHECKPOINT_CLAIM: Final = f"{GROUP}/checkpoint-claim"
DERIVED: Final = f"{GROUP}/derived"  # digests of the fields that were derived from the Job

# On RayClusters, RayJobs and RayServices (KubeRay), and on Jobs that are run as ElasticJobs.
ELASTIC: Final = f"{GROUP}/elastic"
RAY_GROUPS: Final = f"{GROUP}/ray-groups"  # what the user requested of groups whose size the controller has changed
SUSPENDED: Final = f"{GROUP}/suspended"
"""An annotation: why the controller has suspended the RayJob, Job, JobSet, ... (a label of all but RayJobs, too)."""
