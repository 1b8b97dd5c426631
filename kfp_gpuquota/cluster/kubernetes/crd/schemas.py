"""Generates the CRDs of the project's kinds from `api` and from the structs that the controller reads and writes.

`python -m kfp_gpuquota.cluster.kubernetes.crd.schemas > manifests/crds/crds.yaml`

Ranges come from `api`; constraints on two or more fields are CEL rules with the messages of `api`. So the API server
refuses invalid jobs before they are stored. Rejected: a `scale` subresource, since the plan chooses an elastic job's
size between minGpus and maxGpus, and an autoscaler would interfere with it.
"""

from __future__ import annotations

import sys
from typing import Final

import msgspec
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.api import JobSpec, Project
from kfp_gpuquota.api.validation import MAX_NAME_LENGTH
from kfp_gpuquota.cluster.kubernetes.crd.cel_rules import job_rules
from kfp_gpuquota.cluster.kubernetes.crd.quota_policy_schema import quota_policy
from kfp_gpuquota.cluster.kubernetes.crd.structural import Schema, column, definition, described, rule, status
from kfp_gpuquota.cluster.kubernetes.crd.workload_policy_schema import workload_policy
from kfp_gpuquota.cluster.kubernetes.objects import custom_types, labels
from kfp_gpuquota.cluster.kubernetes.objects.job_fields import JOB_FIELDS

YEAR_S: Final = 31_536_000
MAX_CONTAINERS: Final = 64
MAX_POOLS: Final = 64
_WORKERS_READY: Final = '.status.conditions[?(@.type=="WorkersReady")].reason'
_DNS_LABEL: Final = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"

# Descriptions by JSON name
_JOB_FIELDS: Final = {
    "kind": "train: may go over quota and be preempted; build: an interactive session, within quota only.",
    "gpus": "GPUs of the whole job; default 1.",
    "minGpus": "The minimum number of GPUs, which start together. With maxGpus it makes the job elastic.",
    "maxGpus": "The maximum number of GPUs that the job uses when GPUs are idle.",
    "gpusPerWorker": "GPUs of each pod; default 1 for an elastic job, all GPUs for any other job.",
    "gpuFraction": "Guaranteed fraction of each GPU, instead of whole GPUs.",
    "gpuFractionLimit": "The maximum fraction of each GPU, used while no other job needs it.",
    "gpuCompute": "Fraction of each GPU's computing power, beside a share of its memory; enforced by NVIDIA MPS.",
    "gpuDevices": "Number of GPUs of one node of which the job holds a share; default 1.",
    "priority": "Priority within the project; default 50 for train, 100 for build.",
    "preemptible": "Whether the job may be preempted; default true for train, false for build. If not, minGpus of an"
    " elastic job are protected, within the guaranteed quota, and the rest is borrowed.",
    "gracePeriodSeconds": "Seconds that a worker has to exit after it was asked to stop.",
    "maxRestarts": "Number of times that failed workers are replaced before the job fails.",
    "restartWindowSeconds": "Seconds without a restart after which restarts are counted from 0 again; default 21600.",
    "coolDownSeconds": "Seconds after a change of size in which the job does not grow.",
    "minRunTimeSeconds": "Seconds after its start in which the job is not preempted.",
    "after": "Jobs of the namespace that have to succeed before the job is queued; any:NAME: that have to end.",
    "array": "The place in an array of jobs, of which at most limit are queued or run at a time.",
    "nodePool": "The node pool to run in, within the project's quota there.",
    "requiredTopology": "A node label that must have the same value for all workers.",
    "preferredTopology": "A node label that has the same value for all workers if possible.",
    "spread": "Spread workers over as many nodes as possible, instead of as few.",
}
_QUOTA_FIELDS: Final = {
    "guaranteed": ("guaranteed", "GPUs that are guaranteed to the team."),
    "limit": ("limit", "The maximum number of GPUs; without a limit the team may borrow all idle GPUs."),
    "priority": ("priority", "Idle GPUs go to teams with a higher priority first."),
    "overQuotaWeight": (
        "over_quota_weight",
        "Weight of the team's share of idle GPUs among teams of the same priority.",
    ),
    "parent": ("parent", "The department, which is a GpuQuota as well."),
    "pools": ("pools", "Quotas by node pool; each pool is shared separately."),
}
_AMOUNTS: Final = {
    "guaranteedCpu": "CPU cores that are guaranteed to the team's jobs; default all.",
    "limitCpu": "The maximum number of CPU cores.",
    "guaranteedMemory": "Main memory that is guaranteed to the team's jobs, for example 512Gi; default all.",
    "limitMemory": "The maximum main memory.",
}
_DEFAULTED: Final = ("kind", "gracePeriodSeconds", "maxRestarts", "coolDownSeconds", "minRunTimeSeconds")


def custom_resource_definitions() -> list[Schema]:
    """Return ElasticJob, GpuQuota, WorkloadPolicy and QuotaPolicy, as objects to apply."""
    return [_elastic_job(), _gpu_quota(), workload_policy(_metadata(), _name_rule()), quota_policy(_metadata())]


def render() -> str:
    """Return the YAML of manifests/crds/crds.yaml."""
    head = "# Made by: python -m kfp_gpuquota.cluster.kubernetes.crd.schemas\n"
    return head + str(yaml.safe_dump_all(custom_resource_definitions(), sort_keys=False, width=110))


def _elastic_job() -> Schema:
    columns = [
        column("Phase", "string", ".status.phase"),
        column("GPUs", "number", ".status.gpus", "GPUs currently held"),
        column("Workers", "integer", ".status.workers", "current number of pods"),
        column("Pods", "string", _WORKERS_READY, "Running, or the reason why pods do not run"),
        column("Kind", "string", ".spec.kind", wide=True),
        column("Requested", "integer", ".spec.gpus", "GPUs requested", wide=True),
        column("Priority", "integer", ".spec.priority", wide=True),
        column("Message", "string", ".status.message", "reason for the current phase"),
        column("Age", "date", ".metadata.creationTimestamp"),
    ]
    body = {
        "description": "A training or a session with one or more workers; its namespace is the project.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "metadata": _metadata(),
            "spec": _elastic_job_spec(),
            "status": status(custom_types.ElasticJobStatus),
        },
        "x-kubernetes-validations": [_name_rule()],
    }
    return definition("ElasticJob", "elasticjobs", "ej", "Namespaced", body, columns)


def _gpu_quota() -> Schema:
    columns = [
        column("Guaranteed", "number", ".spec.guaranteed"),
        column("Limit", "number", ".spec.limit"),
        column("GPUs", "number", ".status.gpus", "GPUs currently held"),
        column("Borrowed", "number", ".status.borrowed", "GPUs held above the guarantee"),
        column("Requested", "number", ".status.requested", "GPUs requested by running and waiting jobs"),
        column("Waiting", "integer", ".status.waiting", "waiting jobs"),
        column("Parent", "string", ".spec.parent"),
        column("Source", "string", f".metadata.labels.{labels.SOURCE.replace('.', chr(92) + '.')}", wide=True),
        column("Age", "date", ".metadata.creationTimestamp"),
    ]
    own_parent = rule(
        "!has(self.spec.parent) || self.spec.parent != self.metadata.name",
        "parent is '%s', but a project cannot be its own parent",
        "self.spec.parent",
    )
    body = {
        "description": "The quota of the namespace of the same name, or of a department.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "metadata": _metadata(),
            "spec": _quota_spec(),
            "status": status(custom_types.GpuQuotaStatus),
        },
        "x-kubernetes-validations": [_name_rule(), own_parent],
    }
    return definition("GpuQuota", "gpuquotas", "gq", "Cluster", body, columns)


def _quota_spec() -> Schema:
    properties = described(_QUOTA_FIELDS, Project, custom_types.GpuQuotaSpec)
    for wire in ("guaranteed", "priority", "overQuotaWeight"):
        properties[wire]["default"] = getattr(Project(name="x"), _QUOTA_FIELDS[wire][0])
    limit = rule(
        "!has(self.limit) || self.limit >= self.guaranteed",
        "limit is %s, but it must be at least the guaranteed %s GPUs",
        "self.limit",
        "self.guaranteed",
    )
    if "pools" in properties:
        pool = properties["pools"]["additionalProperties"]
        pool["properties"]["guaranteed"]["default"] = 0
        pool["x-kubernetes-validations"] = [dict(limit)]
        properties["pools"] |= {"maxProperties": MAX_POOLS}
    properties |= {wire: _amount(text) for wire, text in _AMOUNTS.items()}
    rules = [limit, *(_amounts_rule(of) for of in ("Cpu", "Memory"))]
    return {"type": "object", "properties": properties, "x-kubernetes-validations": rules}


def _amount(description: str) -> Schema:
    """Return the schema of a Kubernetes quantity of at least 0."""
    fine = rule(
        "isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('0')) >= 0",
        "it is '%s', but it must be at least 0, a number with one of the suffixes of quantities; for example 64, 500m"
        " or 512Gi",
        "string(self)",
    )
    return {"x-kubernetes-int-or-string": True, "description": description, "x-kubernetes-validations": [fine]}


def _amounts_rule(of: str) -> Schema:
    guaranteed, limit = f"string(self.guaranteed{of})", f"string(self.limit{of})"
    both = f"has(self.guaranteed{of}) && has(self.limit{of}) && isQuantity({guaranteed}) && isQuantity({limit})"
    return rule(
        f"!({both}) || quantity({limit}).compareTo(quantity({guaranteed})) >= 0",
        f"limit{of} is '%s', but it must be at least the guaranteed %s",
        limit,
        guaranteed,
    )


def _elastic_job_spec() -> Schema:
    described_fields = {wire: (JOB_FIELDS[wire].name, text) for wire, text in _JOB_FIELDS.items()}
    properties = described(described_fields, JobSpec, custom_types.ElasticJobSpec)
    for wire in _DEFAULTED:
        properties[wire]["default"] = msgspec.to_builtins(JOB_FIELDS[wire].default)
    properties["gpus"]["minimum"] = 1  # without GPUs a Job does, which needs no quota
    properties |= {
        "gpuMemory": _memory("Guaranteed memory of each GPU, instead of a fraction, for example 4Gi."),
        "gpuMemoryLimit": _memory("The maximum memory of each GPU, used while no other job needs it."),
        "suspend": {"type": "boolean", "default": False, "description": "Release all GPUs and wait."},
        "begin": {"type": "string", "format": "date-time", "description": "The job is not queued before this time."},
        "maxRuntimeSeconds": _seconds("Maximum total run time of all starts, after which the job fails.", least=1),
        "workersReadyTimeoutSeconds": _seconds(
            "Seconds after which workers that are not ready release their GPUs; overrides the controller's; 0: never."
        ),
        "ttlSecondsAfterFinished": _seconds("Seconds after its end at which the object is deleted."),
        "checkpoint": _checkpoint(),
        "lease": _lease(),
        "template": _template(),
    }
    return {
        "type": "object",
        "required": ["template"],
        "properties": properties,
        "x-kubernetes-validations": job_rules(properties),
    }


def _metadata() -> Schema:
    # the limit of any object's name: the API server needs it to estimate the cost of the rule about names
    return {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}}


def _name_rule() -> Schema:
    return rule(
        f"self.metadata.name.size() <= {MAX_NAME_LENGTH} && self.metadata.name.matches('{_DNS_LABEL}')",
        f"name is '%s', but a name is 1 to {MAX_NAME_LENGTH} lower-case letters, digits and '-', and starts and ends"
        " with one of the first two",
        "self.metadata.name",
    )


def _memory(description: str) -> Schema:
    positive = rule(
        "isQuantity(self) && quantity(self).isGreaterThan(quantity('0'))",
        "it is '%s', but it must be more than 0, a number with one of the suffixes Ki Mi Gi Ti (of 1024) or k M G T"
        " (of 1000); for example 4Gi",
        "self",
    )
    return {"type": "string", "maxLength": 40, "description": description, "x-kubernetes-validations": [positive]}


def _seconds(description: str, least: int = 0) -> Schema:
    return {"type": "number", "minimum": least, "maximum": YEAR_S, "description": description}


def _checkpoint() -> Schema:
    claim = {
        "type": "string",
        "minLength": 1,
        "maxLength": 253,
        "description": "A PersistentVolumeClaim in the job's namespace.",
    }
    return {
        "type": "object",
        "description": "Storage of checkpoints, from which the job continues after a preemption.",
        "required": ["claimName"],
        "properties": {"claimName": claim},
    }


def _lease() -> Schema:
    return {
        "type": "object",
        "description": "A lease that the job's client renews; when it expires the job is cancelled.",
        "required": ["holder"],
        "properties": {
            "holder": {"type": "string", "minLength": 1, "maxLength": 253},
            "durationSeconds": {"type": "number", "minimum": 0, "maximum": 86_400},
            "renewTime": {"type": "string", "format": "date-time"},
            "reason": {"type": "string", "maxLength": 1024, "description": "Why its holder cancels the job by 0 s."},
        },
    }


def _template() -> Schema:
    """Return the schema of a pod template, which preserves unknown fields: the API server validates the pods."""
    return {
        "type": "object",
        "description": "The pod template; container 0 trains. Changes apply to pods created later.",
        "required": ["spec"],
        "properties": {
            "metadata": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            "spec": {
                "type": "object",
                "required": ["containers"],
                "properties": {
                    "containers": {"type": "array", "minItems": 1, "maxItems": MAX_CONTAINERS, "items": _container()},
                    "initContainers": {"type": "array", "maxItems": MAX_CONTAINERS, "items": _container()},
                    "nodeName": {"type": "string", "maxLength": 253},
                },
                "x-kubernetes-preserve-unknown-fields": True,
                "x-kubernetes-validations": _template_rules(),
            },
        },
    }


def _template_rules() -> list[Schema]:
    """Return the rules against bypassing the plan: admission policies exempt the pods that the controller creates."""
    holds = f"has(c.resources) && has(c.resources.%s) && '{labels.GPU_RESOURCE}' in c.resources.%s"
    asks = f"(({holds % ('limits', 'limits')}) || ({holds % ('requests', 'requests')}))"
    only_first = f"self.containers.all(c, c.name == self.containers[0].name || !{asks})"
    none = f"(!has(self.initContainers) || self.initContainers.all(c, !{asks}))"
    return [
        rule(
            "!has(self.nodeName) || self.nodeName == ''",
            "nodeName is '%s', but workers go where the plan sends them; leave it out, and name the node in"
            " nodeSelector (kubernetes.io/hostname)",
            "self.nodeName",
        ),
        rule(
            f"{only_first} && {none}",
            f"the first container holds the worker's GPUs (gpus, gpusPerWorker); leave {labels.GPU_RESOURCE} out of"
            " the others",
        ),
    ]


def _container() -> Schema:
    resources = {
        "type": "object",
        "properties": {"limits": _quantities(), "requests": _quantities()},
        "x-kubernetes-preserve-unknown-fields": True,
    }
    return {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string", "maxLength": 253}, "resources": resources},
        "x-kubernetes-preserve-unknown-fields": True,
    }


def _quantities() -> Schema:
    quantity = {"x-kubernetes-int-or-string": True}
    return {"type": "object", "maxProperties": MAX_CONTAINERS, "additionalProperties": quantity}


if __name__ == "__main__":
    sys.stdout.write(render())
