"""The CRD of QuotaPolicy, the cluster's rules. Constraints on several fields are CEL rules."""

from __future__ import annotations

from typing import Final

from kfp_gpuquota.api.node import MAX_MEMORY_RESERVE, MAX_SMALLEST_SHARE, SharingRules
from kfp_gpuquota.api.share import SMALLEST_FRACTION
from kfp_gpuquota.api.validation import MAX_COUNT, MAX_SECONDS
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import MAX_WEIGHT
from kfp_gpuquota.cluster.kubernetes.crd.structural import Schema, column, definition, rule
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import (
    MIN_WEIGHT,
    NAME,
    RECLAIM_SLACK_S,
    ClusterRules,
    ReclaimRules,
    Unmanaged,
)

MAX_OWNERS: Final = 64
MAX_EXEMPT: Final = 256
MAX_POOLS: Final = 64
MAX_GPU_RESOURCES: Final = 64
_DEFAULT: Final = ReclaimRules()
_SHARING: Final = SharingRules()


def quota_policy(metadata: Schema) -> Schema:
    """Return the CustomResourceDefinition."""
    columns = [
        column("Bound", "number", ".spec.reclaim.boundSeconds", "seconds until a borrowed GPU is released"),
        column("Unmanaged", "string", ".spec.unmanaged", "GPU pods in namespaces without a quota"),
        column("Age", "date", ".metadata.creationTimestamp"),
    ]
    only_one = rule(
        f"self.metadata.name == '{NAME}'",
        f"name is '%s', but the cluster has one policy, whose name is {NAME}",
        "self.metadata.name",
    )
    body = {
        "description": "The cluster's rules for reclaims, owners and unmanaged namespaces.",
        "type": "object",
        "required": ["spec"],
        "properties": {"metadata": metadata, "spec": _spec()},
        "x-kubernetes-validations": [only_one],
    }
    return definition("QuotaPolicy", "quotapolicies", "qp", "Cluster", body, columns)


def _spec() -> Schema:
    owner = {"type": "string", "minLength": 3, "maxLength": 320, "pattern": "^-?[^/]+/[^/]+$"}
    namespace = {"type": "string", "minLength": 1, "maxLength": 63}
    properties = {
        "reclaim": _reclaim(),
        "unmanaged": {
            "type": "string",
            "enum": [mode.value for mode in Unmanaged],
            "default": Unmanaged.IGNORE.value,
            "description": "GPU pods in namespaces without the label gpuquota.dev/managed=true are ignored (ignore),"
            " refused (deny), or managed with defaultQuota, which is created for the namespace (default-quota).",
        },
        "defaultQuota": _default_quota(),
        "exemptNamespaces": {
            "type": "array",
            "maxItems": MAX_EXEMPT,
            "items": namespace,
            "x-kubernetes-list-type": "set",
            "description": "Namespaces to which unmanaged does not apply, besides kube-* and gpuquota-*; for example"
            " those of GPU operators.",
        },
        "gpuResources": _gpu_resources(),
        "otherResources": {
            "type": "array",
            "maxItems": MAX_EXEMPT,
            "items": {"type": "string", "minLength": 1, "maxLength": 317},
            "x-kubernetes-list-type": "set",
            "description": "Resources that look like GPUs and are none, for example nvidia.com/hostdev. In managed"
            " namespaces all others of nvidia.com, or with gpu in their name, that gpuResources does not have are"
            " refused.",
        },
        "pools": {
            "type": "object",
            "maxProperties": MAX_POOLS,
            "additionalProperties": {"type": "object", "properties": {"autoscaled": _autoscaled()}},
            "description": "Node pools by name, which is the value of the node label gpuquota.dev/pool.",
        },
        "isolateWorkers": {
            "type": "boolean",
            "default": True,
            "description": "Each ElasticJob has a NetworkPolicy that admits traffic to its workers from its own workers"
            " only. Its enforcement is up to the cluster's network plugin. Running jobs get it when this becomes true,"
            " and keep it when it becomes false.",
        },
        "limitGraceSeconds": {
            "type": "number",
            "default": ClusterRules().limit_grace_s,
            "minimum": 0,
            "maximum": MAX_SECONDS,
            "description": "After how many seconds a team that holds more than its limit, because it was lowered, loses"
            " the rest: borrowed workers first, then the jobs of the lowest priority. Jobs that are not preemptible"
            " keep theirs. The time starts again with another leader.",
        },
        "sharing": _sharing(),
        "moves": {
            "type": "boolean",
            "default": True,
            "description": "Preemptible pods and workers are moved to other nodes, so that a job fits. Otherwise it"
            " waits; what is reclaimed is stopped as before.",
        },
        "reserveAfterSeconds": {
            "type": "number",
            "default": ClusterRules().reserve_after_s,
            "minimum": 0,
            "maximum": MAX_SECONDS,
            "description": "After so long the first waiting job of a team that fits into its guarantee is served before"
            " all others, and what becomes idle on the nodes that it needs is kept for it.",
        },
        "maxWaitingPods": {
            "type": "integer",
            "default": ClusterRules().max_waiting_pods,
            "minimum": 1,
            "maximum": MAX_COUNT,
            "description": "How many waiting pods of one team are considered at once. More of them wait unseen, the"
            " youngest ones, until others have started or are deleted.",
        },
        "recreatingOwners": {
            "type": "array",
            "maxItems": MAX_OWNERS,
            "items": owner,
            "x-kubernetes-list-type": "set",
            "description": "Kinds of owners that recreate a deleted pod, for example apps.kruise.io/CloneSet: added to"
            " the built-in ones, or with a leading '-' removed. Pods of other owners are never moved.",
        },
    }
    quota_given = rule(
        "self.unmanaged != 'default-quota' || has(self.defaultQuota)",
        "unmanaged is default-quota, but no defaultQuota is given; add one, for example {guaranteed: 0, limit: 4}",
    )
    one_list = rule(
        "!has(self.gpuResources) || !has(self.otherResources)"
        " || !self.gpuResources.exists(r, self.otherResources.exists(name, name == r.name))",
        "a resource is in gpuResources and in otherResources; leave it out of one of them",
    )
    return {"type": "object", "properties": properties, "x-kubernetes-validations": [quota_given, one_list]}


def _gpu_resources() -> Schema:
    named = rule(
        f"self.name.contains('/') && self.name != '{labels.GPU_RESOURCE}'",
        f"name is '%s', but it must be an extended resource other than {labels.GPU_RESOURCE}, which always counts as 1",
        "self.name",
    )
    bounded = rule(
        f"!has(self.countsAs) || self.countsAs >= {MIN_WEIGHT} && self.countsAs <= {MAX_WEIGHT}.0",
        f"countsAs is %s, but it must be a number of GPUs from {MIN_WEIGHT} to {MAX_WEIGHT}",
        "self.countsAs",
    )
    return {
        "type": "array",
        "maxItems": MAX_GPU_RESOURCES,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["name"],
        "description": f"Extended resources besides {labels.GPU_RESOURCE} that count as GPUs: other vendors' GPUs, time"
        " slices, MIG devices. Pods wait for them as for GPUs. Those that were created before keep what they count as.",
        "items": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "minLength": 3, "maxLength": 317, "description": "As nodes announce it."},
                "countsAs": {
                    "type": "number",
                    "description": "The number of GPUs that one of it counts as; for example 0.25 for one of four time"
                    " slices. The default is 1, and for a MIG profile its compute slices of 7: nvidia.com/mig-3g.40gb"
                    " counts as 3/7.",
                },
                "typeLabel": {
                    "type": "string",
                    "maxLength": 317,
                    "description": "The label of nodes whose value is the type of these GPUs, shown in lists of nodes;"
                    " known for those of NVIDIA, AMD, Intel and Google.",
                },
            },
            "x-kubernetes-validations": [named, bounded],
        },
    }


def _sharing() -> Schema:
    return {
        "type": "object",
        "description": "How GPUs are shared. Running pods keep their shares.",
        "default": {
            "maxSharers": _SHARING.max_sharers,
            "memoryReserve": _SHARING.memory_reserve,
            "smallestShare": _SHARING.smallest_share,
        },
        "properties": {
            "maxSharers": {
                "type": "integer",
                "default": _SHARING.max_sharers,
                "minimum": 1,
                "maximum": MAX_COUNT,
                "description": "The most pods and workers that share one GPU.",
            },
            "memoryReserve": {
                "type": "number",
                "default": _SHARING.memory_reserve,
                "minimum": 0,
                "maximum": MAX_MEMORY_RESERVE,
                "description": "The part of each GPU's memory that is the driver's. Fractions are parts of the rest.",
            },
            "smallestShare": {
                "type": "number",
                "default": _SHARING.smallest_share,
                "minimum": SMALLEST_FRACTION,
                "maximum": MAX_SMALLEST_SHARE,
                "description": "The smallest fraction of a GPU that a new pod or ElasticJob may request.",
            },
        },
    }


def _default_quota() -> Schema:
    count = {"type": "number", "minimum": 0, "maximum": MAX_COUNT}
    fits = rule(
        "!has(self.limit) || self.limit >= self.guaranteed",
        "limit is %s, but it must be at least the guaranteed %s GPUs",
        "self.limit",
        "self.guaranteed",
    )
    return {
        "type": "object",
        "description": "The GpuQuota of namespaces without one, if unmanaged is default-quota.",
        "properties": {
            "guaranteed": {**count, "default": 0, "description": "GPUs that are guaranteed to each namespace."},
            "limit": {
                **count,
                "description": "The maximum number of GPUs; without a limit a namespace may borrow all idle GPUs.",
            },
            "parent": {"type": "string", "minLength": 1, "maxLength": 63, "description": "The department."},
        },
        "x-kubernetes-validations": [fits],
    }


def _autoscaled() -> Schema:
    count = {"type": "integer", "minimum": 1, "maximum": MAX_COUNT}
    texts = {"type": "string", "maxLength": 63}
    return {
        "type": "object",
        "required": ["maxGpus"],
        "description": "An autoscaler adds nodes for pending pods, so pods within quota are admitted without a node."
        " Changes take effect when the controller restarts.",
        "properties": {
            "maxGpus": {**count, "description": "The maximum number of GPUs of all nodes of the pool."},
            "gpusPerNode": {**count, "default": 1, "description": "GPUs of each node that the autoscaler adds."},
            "labels": {
                "type": "object",
                "maxProperties": 64,
                "additionalProperties": texts,
                "description": "Labels of these nodes that pods may select.",
            },
        },
    }


def _reclaim() -> Schema:
    def seconds(default: float, least: int, description: str) -> Schema:
        bounds = {"minimum": least, "maximum": MAX_SECONDS}
        return {"type": "number", "default": default, **bounds, "description": description}

    needed = f"self.maxGracePeriodSeconds + self.maxMinRunTimeSeconds + {RECLAIM_SLACK_S}"
    fits = rule(
        f"{needed} <= self.boundSeconds",
        "boundSeconds is %s, but maxGracePeriodSeconds, maxMinRunTimeSeconds and"
        f" {RECLAIM_SLACK_S:g} s for the calls are %s",
        "self.boundSeconds",
        needed,
    )
    return {
        "type": "object",
        "description": "Time limits for reclaiming a borrowed GPU, whatever its borrower has configured.",
        "default": {
            "boundSeconds": _DEFAULT.bound_s,
            "maxGracePeriodSeconds": _DEFAULT.max_grace_s,
            "maxMinRunTimeSeconds": _DEFAULT.max_min_run_time_s,
        },
        "properties": {
            "boundSeconds": seconds(_DEFAULT.bound_s, 1, "Seconds from the decision to reclaim a GPU to its release."),
            "maxGracePeriodSeconds": seconds(
                _DEFAULT.max_grace_s, 1, "The maximum grace period of an evicted pod, in seconds."
            ),
            "maxMinRunTimeSeconds": seconds(
                _DEFAULT.max_min_run_time_s,
                0,
                "The maximum time that minRunTimeSeconds protects borrowed GPUs, in seconds.",
            ),
        },
        "x-kubernetes-validations": [fits],
    }
