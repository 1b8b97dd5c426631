"""Reviews a pod on creation: allows it, adds the scheduling gate, or refuses it with a message. Pure.

| the pod                                              | is                                                     |
|------------------------------------------------------|--------------------------------------------------------|
| is created by the controller                         | allowed unchanged: the plan has chosen its node        |
| has labels or an owner of an ElasticJob's workers    | refused                                                |
| requests no GPU and no share of one                  | allowed; its GPUs are hidden (device_visibility.py)    |
| has an invalid request, or names its node            | refused                                                |
| requests GPUs, or a share of one                     | gated; annotations that only the controller may write  |
|                                                      | are removed                                            |
| requests what counts as GPUs (QuotaPolicy)           | gated, with an annotation of what it counts as         |
| claims devices (spec.resourceClaims)                 | gated: the controller reads what its claims request    |
| requests a share                                     | gated, with the annotations and variables of shares.py |
| may borrow GPUs, and has a longer grace period than  | gated, with that grace period                          |
| the cluster's rules allow                            |                                                        |

The registration of the webhook selects the reviewed namespaces and pods. manifests/base/policies.yaml repeats those
rules that CEL can express, since a webhook may be unavailable or configured to fail open.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api import JobSpec, Kind
from kfp_gpuquota.api.annotations import asks_for_share, share_of_pod
from kfp_gpuquota.api.job import COMMAND_OF_PODS
from kfp_gpuquota.api.quantity import parse_quantity
from kfp_gpuquota.api.validation import check_count
from kfp_gpuquota.cluster.kubernetes.admission import device_visibility, shares
from kfp_gpuquota.cluster.kubernetes.admission.review_types import Container, Metadata, Pod, PodSpec, Request, Review
from kfp_gpuquota.cluster.kubernetes.admission.shares import SharingJob
from kfp_gpuquota.cluster.kubernetes.convert.requests import escape_json_pointer
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import weights_text
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import DEFAULT_RULES
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kfp_gpuquota.api.policy import WorkloadPolicy
    from kfp_gpuquota.api.resources import Resources as Amounts
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import ClusterRules

FORBIDDEN: Final = 403
UNPROCESSABLE: Final = 422
JOB_KIND: Final = "ElasticJob"
EPHEMERAL: Final = "ephemeralcontainers"
# Labels that make a pod a worker of a job, and annotations with the plan's decisions: only the controller writes them.
OF_WORKERS: Final = (labels.JOB, labels.WORKER, labels.ATTEMPT)
OF_THE_PLAN: Final = (
    labels.DEVICES,
    labels.GPU_WEIGHTS,
    labels.CLAIMED,
    labels.REASON,
    labels.GPUS,
    labels.RECLAIMED_AT,
    labels.OPENED,
    labels.RESERVED_ON,
    labels.GANG,
)
_NOTHING: Final[dict[str, str]] = {}


class Verdict(msgspec.Struct, frozen=True):
    """The result of a review: allowed with JSON patch operations, or refused with a message (`status` is not 200).

    `warnings` are shown to the user who creates the object.
    """

    patch: tuple[dict[str, Any], ...] = ()
    status: int = 200
    message: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def allowed(self) -> bool:
        """Return whether the pod may be created."""
        return self.status == 200


class MalformedReviewError(ValueError):
    """The body is not an AdmissionReview, so that no response is possible."""


_REVIEW: Final = msgspec.json.Decoder(Review)
_POD: Final = msgspec.json.Decoder(Pod)
_JOB: Final = msgspec.json.Decoder(SharingJob)
_GATE: Final = {"name": labels.QUOTA_GATE}
_UNCHANGED: Final = Verdict()
_NEW_GATES: Final = Verdict(({"op": "add", "path": "/spec/schedulingGates", "value": [_GATE]},))


def answer(
    body: bytes, controller: str, policies: Sequence[WorkloadPolicy] = (), rules: ClusterRules = DEFAULT_RULES
) -> tuple[bytes, Verdict]:
    """Return the response to an AdmissionReview of the creation of a pod or an ElasticJob.

    `controller` is the user name of the controller, `policies` and `rules` are those in effect.

    Raises MalformedReviewError.
    """
    try:
        request = _REVIEW.decode(body).request
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedReviewError(f"the body is not an AdmissionReview: {error}") from None
    verdict = _verdict(request, controller, policies, rules)
    return _encoded(request.uid, verdict), verdict


def review(
    pod: Pod,
    namespace: str = "",
    uid: str = "",
    policies: Sequence[WorkloadPolicy] = (),
    rules: ClusterRules = DEFAULT_RULES,
) -> Verdict:
    """Return the verdict on a pod that a user other than the controller creates. `uid` is the review's."""
    try:
        return _reviewed(pod, namespace, uid, policies, rules)
    except InvalidFieldError as error:
        name = pod.metadata.name or f"{pod.metadata.generate_name or ''}*"
        return Verdict((), UNPROCESSABLE, f"pod {namespace}/{name}: {error.message}")


def review_job(
    job: SharingJob, namespace: str, policies: Sequence[WorkloadPolicy], rules: ClusterRules = DEFAULT_RULES
) -> Verdict:
    """Return the verdict on an ElasticJob, whose limits are set by policies."""
    try:
        rules.check_share(job.spec.gpu_fraction, job.spec.node_pool or "")
        return Verdict(tuple(shares.of_job(job, namespace, policies)))
    except InvalidFieldError as error:
        return Verdict((), UNPROCESSABLE, error.message)


def _verdict(request: Request, controller: str, policies: Sequence[WorkloadPolicy], rules: ClusterRules) -> Verdict:
    if request.user_info.username == controller:
        return _UNCHANGED
    if request.resource.resource == "elasticjobs":
        try:
            return review_job(_JOB.decode(request.object), request.namespace, policies, rules)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return _UNCHANGED  # the CRD's schema refuses it with a message
    try:
        pod = _POD.decode(request.object)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Verdict((), UNPROCESSABLE, f"the pod cannot be read: {error}")
    if request.sub_resource == EPHEMERAL:
        return Verdict(tuple(device_visibility.hiding(PodSpec(ephemeral_containers=pod.spec.ephemeral_containers))))
    return review(pod, request.namespace, request.uid, policies, rules)


def _reviewed(pod: Pod, namespace: str, uid: str, policies: Sequence[WorkloadPolicy], rules: ClusterRules) -> Verdict:
    written, notes = pod.metadata.labels or _NOTHING, pod.metadata.annotations or _NOTHING
    if _claims_to_be_a_worker(pod, written):
        return Verdict(
            (), FORBIDDEN, "workers of an ElasticJob are created by the controller only; create an ElasticJob"
        )
    gpus = _gpus(pod.spec)
    shared = bool(notes) and asks_for_share(notes)
    weights = tuple(row for row in rules.gpu_weights if row[0] in requested_in(pod.spec))
    hidden = tuple(device_visibility.hiding(pod.spec, rules.gpu_weights, shares=shared))
    if not gpus and not shared and not weights and not pod.spec.resource_claims:
        return Verdict(hidden) if hidden else _UNCHANGED
    if pod.spec.node_name:
        raise InvalidFieldError(
            "spec.nodeName", pod.spec.node_name, "a pod that requests GPUs is assigned to its node by the quota",
            hint="leave it out, and name the node in nodeSelector (kubernetes.io/hostname)",
        )  # fmt: skip
    if weights:
        _check_weighed(weights, rules, gpus, written, shared=shared)
    if not written and not notes and not weights:
        return _capped(_gated(pod.spec, notes, hidden), pod.spec, rules)
    spec = _check_request(written, notes, gpus, _environment(pod.spec) if shared else _NOTHING, namespace or "pod")
    gated = _gated(pod.spec, notes, hidden)
    if weights:
        gated = msgspec.structs.replace(gated, patch=(*gated.patch, *_weights_noted(pod.metadata, weights)))
    if spec.may_be_preempted:
        gated = _capped(gated, pod.spec, rules)
    if shared:
        rules.check_share(spec.gpu_fraction, spec.node_pool)
        more = shares.of_pod(pod, spec, uid, policies)
        return msgspec.structs.replace(gated, patch=(*gated.patch, *more))
    return gated


def requested_in(spec: PodSpec) -> frozenset[str]:
    """Return the names of the resources of which the pod's containers request any."""
    containers = (*(spec.containers or ()), *(spec.init_containers or ()))
    given = (
        amounts for one in containers if one.resources for amounts in (one.resources.limits, one.resources.requests)
    )
    return frozenset(name for amounts in given for name, amount in (amounts or _NOTHING).items() if amount != "0")


def _check_weighed(
    weights: Amounts, rules: ClusterRules, gpus: int, written: Mapping[str, str], *, shared: bool
) -> None:
    """Raise InvalidFieldError for a pod whose resource cannot be counted beside others, or in its pool."""
    name = weights[0][0]
    if gpus or shared:
        other = labels.GPU_RESOURCE if gpus else "a share of a GPU"
        raise InvalidFieldError("resources", name, f"the pod requests {other} as well", hint="leave out one of the two")
    rules.refuse_shares_in(written.get(labels.POOL, ""))


def _weights_noted(metadata: Metadata, weights: Amounts) -> Iterator[dict[str, Any]]:
    text = weights_text(weights)
    if metadata.annotations is None:
        yield {"op": "add", "path": "/metadata/annotations", "value": {labels.GPU_WEIGHTS: text}}
    else:
        yield {"op": "add", "path": f"/metadata/annotations/{escape_json_pointer(labels.GPU_WEIGHTS)}", "value": text}


def _capped(verdict: Verdict, spec: PodSpec, rules: ClusterRules) -> Verdict:
    """Cap the grace period of a pod that may borrow GPUs: kubelets apply that of its first deletion."""
    requested, longest = spec.termination_grace_period_seconds, rules.reclaim.max_grace_s
    if requested is None or requested <= longest:
        return verdict
    patch = {"op": "replace", "path": "/spec/terminationGracePeriodSeconds", "value": int(longest)}
    warning = (
        f"spec.terminationGracePeriodSeconds is {requested:g}, and was set to {longest:g}: the pod may borrow GPUs"
        f" (QuotaPolicy, reclaim.maxGracePeriodSeconds); label {labels.PREEMPTIBLE}=false keeps it within quota"
    )
    return msgspec.structs.replace(verdict, patch=(*verdict.patch, patch), warnings=(*verdict.warnings, warning))


def _claims_to_be_a_worker(pod: Pod, written: Mapping[str, str]) -> bool:
    owned = any(
        owner.kind == JOB_KIND and owner.api_version.startswith(f"{labels.GROUP}/")
        for owner in pod.metadata.owner_references or ()
    )
    return owned or any(name in written for name in OF_WORKERS)


def _gpus(spec: PodSpec) -> int:
    """Return the largest request of one container; the controller sums up the pod's requests."""
    return max((_quantity(amount) for amount in _amounts(spec)), default=0)


def _amounts(spec: PodSpec) -> Iterator[str]:
    for containers in (spec.containers, spec.init_containers):
        for container in containers or ():
            if (resources := container.resources) is not None:
                for given in (resources.limits, resources.requests):
                    if given is not None and labels.GPU_RESOURCE in given:
                        yield given[labels.GPU_RESOURCE]


def _quantity(amount: str) -> int:
    if amount.isascii() and amount.isdecimal() and len(amount) < 8:
        return int(amount)
    # "1k" is a thousand devices for the API server, and would be none for a component that reads digits only
    value = parse_quantity(labels.GPU_RESOURCE, amount)
    if value:
        raise InvalidFieldError(labels.GPU_RESOURCE, amount, "it must be a whole number of devices, in digits")
    return 0


def _environment(spec: PodSpec) -> dict[str, str]:
    first = next(iter(spec.containers or ()), Container())
    return {one.name: one.value for one in first.env or () if one.value is not None}


def _check_request(
    written: Mapping[str, str], notes: Mapping[str, str], gpus: int, environment: Mapping[str, str], project: str
) -> JobSpec:
    """Return the pod's request as a JobSpec. Raises InvalidFieldError for invalid labels or annotations."""
    share = share_of_pod(notes, environment)
    if gpus and asks_for_share(notes):
        raise InvalidFieldError(
            labels.GPU_RESOURCE,
            gpus,
            "an annotation requests a share of a GPU as well",
            hint="leave out one of the two",
        )
    usual = Kind.TRAIN if labels.SESSIONS.isdisjoint(written) else Kind.BUILD
    kind = _one_of(written, labels.KIND, tuple(Kind), usual)
    preemptible = _one_of(written, labels.PREEMPTIBLE, ("true", "false"), None)
    spec = JobSpec(
        name="pod",
        project=project,
        command=COMMAND_OF_PODS,
        kind=Kind(kind),
        priority=_whole(written, labels.PRIORITY),
        preemptible=None if preemptible is None else preemptible == "true",
        node_pool=written.get(labels.POOL, ""),
        **share,
    )
    size = _whole(notes, labels.POD_GROUP_SIZE)
    if size is not None:
        check_count(labels.POD_GROUP_SIZE, size, 1, "pods")
        if labels.POD_GROUP not in written:
            raise InvalidFieldError(
                labels.POD_GROUP_SIZE,
                size,
                "no label has the name of the pod's group",
                hint=f"add {labels.POD_GROUP}",
            )
    return spec


def _one_of(given: Mapping[str, str], name: str, choices: tuple[str, ...], default: str | None) -> Any:
    value = given.get(name, default)
    if value is not None and value not in choices:
        raise InvalidFieldError(name, value, f"it must be one of {', '.join(choices)}")
    return value


def _whole(given: Mapping[str, str], name: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) <= 18):
        raise InvalidFieldError(name, value, "it must be a whole number, in digits")
    return int(value)


def _gated(spec: PodSpec, notes: Mapping[str, str], hidden: tuple[dict[str, Any], ...]) -> Verdict:
    erased = tuple(
        {"op": "remove", "path": f"/metadata/annotations/{escape_json_pointer(name)}"}
        for name in OF_THE_PLAN
        if name in notes
    )
    more = (*erased, *hidden)
    gates = spec.scheduling_gates
    if not gates:
        return Verdict((*_NEW_GATES.patch, *more)) if more else _NEW_GATES
    if any(gate.name == labels.QUOTA_GATE for gate in gates):
        return Verdict(more) if more else _UNCHANGED
    return Verdict(({"op": "add", "path": "/spec/schedulingGates/-", "value": _GATE}, *more))


def _encoded(uid: str, verdict: Verdict) -> bytes:
    response: dict[str, Any] = {"uid": uid, "allowed": verdict.allowed}
    if verdict.patch:
        patch = base64.b64encode(msgspec.json.encode(verdict.patch)).decode()
        response |= {"patchType": "JSONPatch", "patch": patch}
    if verdict.warnings:
        response["warnings"] = verdict.warnings
    if not verdict.allowed:
        response["status"] = {"code": verdict.status, "message": verdict.message}
    return msgspec.json.encode({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response})
