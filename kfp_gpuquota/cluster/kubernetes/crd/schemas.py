"""The schemas of our kinds, made from `api` and from the structs that the controller reads and writes.

`python -m kfp_gpuquota.cluster.kubernetes.crd.schemas > manifests/crds/crds.yaml`

Ranges come from the vocabulary; what needs two fields at once is a rule in CEL, in the words that `api` uses. So
the API server refuses what a job could never be, before anything is stored. Not given: a `scale` subresource, since an
elastic job's size is the plan's to choose between minGpus and maxGpus, and an autoscaler would argue with it.
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

YEAR_S: Final = 31_536_000
MAX_CONTAINERS: Final = 64
MAX_POOLS: Final = 64
_WORKERS_READY: Final = '.status.conditions[?(@.type=="WorkersReady")].reason'
_DNS_LABEL: Final = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"

# name on the wire: (the field of JobSpec that it is, what it means)
_JOB_FIELDS: Final = {
    "kind": ("kind", "train may borrow and be preempted; build is an interactive session, inside quota only."),
    "gpus": ("gpus", "GPUs of the whole job; 1 where none is given."),
    "minGpus": ("min_gpus", "The fewest GPUs it runs with: its gang. With maxGpus it makes the job elastic."),
    "maxGpus": ("max_gpus", "The most GPUs it makes use of when others leave them idle."),
    "gpusPerWorker": ("gpus_per_worker", "GPUs of each pod: by default 1 for an elastic job, all for any other."),
    "gpuFraction": ("gpu_fraction", "Instead of whole GPUs: the part of each device that is guaranteed."),
    "gpuFractionLimit": ("gpu_fraction_limit", "The part that it may use while nobody else needs it."),
    "gpuDevices": ("gpu_devices", "Of how many GPUs of one node it holds that share; 1 where none is given."),
    "priority": ("priority", "Within its project: 50 for train, 100 for build where none is given."),
    "preemptible": ("preemptible", "Whether others may take its GPUs back: true for train, false for build."),
    "gracePeriodSeconds": ("grace_period_s", "How long a worker may take to end when it is told to go."),
    "maxRestarts": ("max_restarts", "How often a failed worker is replaced before the job fails."),
    "coolDownSeconds": ("cool_down_s", "After a change of size it is not grown again for so long."),
    "minRunTimeSeconds": ("min_run_time_s", "Before it has run so long it is not stopped for others."),
    "nodePool": ("node_pool", "The pool whose nodes it runs on, within its project's quota there."),
    "requiredTopology": ("required_topology", "A node label of which all workers must have the same value."),
    "preferredTopology": ("preferred_topology", "A node label of which all workers have the same value if possible."),
    "spread": ("spread", "Workers go to as many nodes as possible, instead of as few."),
}
_QUOTA_FIELDS: Final = {
    "guaranteed": ("guaranteed", "GPUs that the team can always get back."),
    "limit": ("limit", "The most that it may hold; without one it may borrow all that is idle."),
    "priority": ("priority", "Idle GPUs are shared by priority, higher first."),
    "overQuotaWeight": ("over_quota_weight", "The share of idle GPUs among those of one priority."),
    "parent": ("parent", "The department, a GpuQuota as well."),
    "pools": ("pools", "Quotas in node pools by their names, each shared by itself."),
}
_AMOUNTS: Final = {
    "guaranteedCpu": "CPU cores that the team can always get back, for what asks for some; all where none is given.",
    "limitCpu": "The most CPU cores that it may hold.",
    "guaranteedMemory": "Main memory that the team can always get back, as 512Gi; all where none is given.",
    "limitMemory": "The most main memory that it may hold.",
}
_DEFAULTED: Final = ("kind", "gracePeriodSeconds", "maxRestarts", "coolDownSeconds", "minRunTimeSeconds")


def custom_resource_definitions() -> list[Schema]:
    """Return ElasticJob, GpuQuota, WorkloadPolicy and QuotaPolicy, as objects to apply."""
    return [_elastic_job(), _gpu_quota(), workload_policy(_metadata(), _name_rule()), quota_policy(_metadata())]


def render() -> str:
    """The YAML of manifests/crds/crds.yaml."""
    head = "# Made by: python -m kfp_gpuquota.cluster.kubernetes.crd.schemas\n"
    return head + str(yaml.safe_dump_all(custom_resource_definitions(), sort_keys=False, width=110))


def _elastic_job() -> Schema:
    columns = [
        column("Phase", "string", ".status.phase"),
        column("GPUs", "number", ".status.gpus", "held now"),
        column("Workers", "integer", ".status.workers", "pods now"),
        column("Pods", "string", _WORKERS_READY, "Running, or what keeps them from it"),
        column("Kind", "string", ".spec.kind", wide=True),
        column("Requested", "integer", ".spec.gpus", "GPUs asked for", wide=True),
        column("Priority", "integer", ".spec.priority", wide=True),
        column("Message", "string", ".status.message", "why it stands as it does"),
        column("Age", "date", ".metadata.creationTimestamp"),
    ]
    body = {
        "description": "One training or session, of one or many workers; the namespace is the project.",
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
        column("GPUs", "number", ".status.gpus", "held now"),
        column("Borrowed", "number", ".status.borrowed", "held above guaranteed"),
        column("Requested", "number", ".status.requested", "asked for, by what runs and what waits"),
        column("Waiting", "integer", ".status.waiting", "jobs that wait"),
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
    """A quantity as Kubernetes writes them, at least 0."""
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
    properties = described(_JOB_FIELDS, JobSpec, custom_types.ElasticJobSpec)
    defaults = JobSpec(name="x", project="x", command=("x",))
    for wire in _DEFAULTED:
        properties[wire]["default"] = msgspec.to_builtins(getattr(defaults, _JOB_FIELDS[wire][0]))
    properties |= {
        "gpuMemory": _memory("Instead of a fraction: the memory of each device that is guaranteed, as 4Gi."),
        "gpuMemoryLimit": _memory("The memory that it may use while nobody else needs it."),
        "suspend": {"type": "boolean", "default": False, "description": "Give everything back and wait."},
        "maxRuntimeSeconds": _seconds("It is ended after running so long, all its starts together.", least=1),
        "workersReadyTimeoutSeconds": _seconds(
            "Workers that do not come up in so long give their GPUs back; instead of the controller's time; 0: never."
        ),
        "ttlSecondsAfterFinished": _seconds("The object goes so long after the end."),
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
    # as long as any object's name may be: it only tells the server what the rule about names can cost
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
    claim = {"type": "string", "minLength": 1, "maxLength": 253, "description": "A claim of the job's namespace."}
    return {
        "type": "object",
        "description": "Where checkpoints outlive a preemption of the whole job.",
        "required": ["claimName"],
        "properties": {"claimName": claim},
    }


def _lease() -> Schema:
    return {
        "type": "object",
        "description": "Whoever waits for the job renews this; when it ends the job is cancelled.",
        "required": ["holder"],
        "properties": {
            "holder": {"type": "string", "minLength": 1, "maxLength": 253},
            "durationSeconds": {"type": "number", "minimum": 0, "maximum": 86_400},
            "renewTime": {"type": "string", "format": "date-time"},
        },
    }


def _template() -> Schema:
    """A pod template, open: the API server checks the pods themselves, and knows fields that we do not."""
    return {
        "type": "object",
        "description": "A pod template, as everywhere; container 0 trains. A change is that of the pods made after it.",
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
    """Against what would go around the plan: the controller creates these pods, so the policies on pods let them be."""
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
