"""Checks of what is installed: version, programs, leader, webhook, kinds, policies, rights, clocks."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.cluster.check_results import fail, ok, warn
from kfp_gpuquota.cluster.kubernetes.operations.definitions import custom_resource_definitions
from kfp_gpuquota.cluster.kubernetes.operations.doctor.facts import seconds
from kfp_gpuquota.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.cluster.check_results import Finding
    from kfp_gpuquota.cluster.kubernetes.operations.doctor.facts import Facts

Json = dict[str, Any]

OLDEST: Final = (1, 30)
DAY_S: Final = 86_400.0
RENEWED_BEFORE_S: Final = 30 * DAY_S
LEASE_SILENT_S: Final = 60.0
SKEW_S: Final = 10.0
_PROGRAMS: Final = ("gpuquota-controller", "gpuquota-webhook", "gpuquota-membership")
_BAD_IMAGE: Final = {"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"}
_REINSTALL: Final = "install this version again: helm upgrade, or kubectl apply -k manifests/overlays/..."


def kubernetes_version(facts: Facts) -> Iterator[Finding]:
    """Check that the API server is new enough."""
    major, minor = facts.version
    if facts.version < OLDEST:
        yield fail("kubernetes", f"version {major}.{minor}; 1.30 or newer is needed", "upgrade the cluster")
    else:
        yield ok("kubernetes", f"version {major}.{minor}")


def programs(facts: Facts) -> Iterator[Finding]:
    """Check that the controller, the webhook and the membership run, in this program's version."""
    found = {one["metadata"]["name"]: one for one in facts.programs}
    if not found:
        yield fail(
            "programs", "gpuquota is not installed here", "install it: helm install gpuquota charts/kfp-gpuquota"
        )
        return
    for name in _PROGRAMS:
        if name not in found:
            yield fail("programs", f"{name} is missing", _REINSTALL)
    for name, one in sorted(found.items()):
        yield from _program(facts, name, one)


def _program(facts: Facts, name: str, one: Json) -> Iterator[Finding]:
    status = one.get("status", {})
    wanted = status.get("desiredNumberScheduled", one["spec"].get("replicas", 0))
    ready = status.get("numberReady", status.get("readyReplicas", 0))
    if ready < wanted:
        level = warn if ready else fail
        why, remedy = _why_not_ready(facts, name, one["metadata"]["namespace"])
        yield level("programs", f"{name}: {ready} of {wanted} ready{why}", remedy)
        return
    image = one["spec"]["template"]["spec"]["containers"][0]["image"]
    if (tag := _tag(image)) and tag.removeprefix("v") != __version__:
        yield warn(
            "programs",
            f"{name}: {ready} ready, of version {tag}; this command is {__version__}",
            "use the same version on both sides (UPGRADE.md), or upgrade the installation",
        )
    else:
        yield ok("programs", f"{name}: {ready} ready ({image})")


def _tag(image: str) -> str:
    """Return the tag of an image if it is a version."""
    tag = image.rpartition("/")[2].partition("@")[0].partition(":")[2]
    return tag if tag.removeprefix("v")[:1].isdigit() else ""


def _why_not_ready(facts: Facts, name: str, namespace: str) -> tuple[str, str]:
    """Return the first reason that a pod of the program gives, and the remedy."""
    for pod in facts.pods:
        metadata = pod["metadata"]
        if metadata["namespace"] != namespace or not metadata["name"].startswith(f"{name}-"):
            continue
        for status in pod.get("status", {}).get("containerStatuses") or ():
            waiting = status.get("state", {}).get("waiting") or {}
            if waiting.get("reason") in _BAD_IMAGE:
                return (
                    f": {waiting['reason']} of {status['image']}",
                    "build and push the images, and name registry and tag: helm upgrade --reset-then-reuse-values "
                    "--set image.registry=... --set image.tag=...; for a private registry image.pullSecrets",
                )
            if waiting.get("reason"):
                return f": {waiting['reason']}", f"see: kubectl -n {namespace} logs {metadata['name']} --previous"
        for condition in pod.get("status", {}).get("conditions") or ():
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return f": {condition.get('message', '')}", "make room, or set nodeSelector and tolerations"
    return "", f"see: kubectl -n {namespace} get pods; kubectl -n {namespace} get events"


def leader(facts: Facts) -> Iterator[Finding]:
    """Check that a controller leads."""
    if not facts.programs:
        return
    spec = (facts.lease or {}).get("spec", {})
    if not spec.get("holderIdentity"):
        yield fail("leader", "no controller leads: nothing is planned", "see the controller's pods and their logs")
        return
    silent = facts.now - seconds(spec["renewTime"])
    if silent > LEASE_SILENT_S:
        remedy = f"see: kubectl -n {facts.system} logs deployment/gpuquota-controller"
        yield fail("leader", f"the leader has not renewed its lease for {silent:.0f} s", remedy)
    elif silent < -SKEW_S:
        remedy = "synchronize the clocks of the nodes (NTP)"
        yield warn("clocks", f"the leader's clock is {-silent:.0f} s ahead of the API server's", remedy)
    else:
        yield ok("leader", spec["holderIdentity"].partition("_")[0])


def clocks(facts: Facts) -> Iterator[Finding]:
    """Check that this machine's clock agrees with the API server's."""
    if (skew := abs(facts.now - facts.local_now)) > SKEW_S:
        remedy = "synchronize the clock (NTP): leases of jobs and ages depend on it"
        yield warn("clocks", f"this machine and the API server differ by {skew:.0f} s", remedy)
    else:
        yield ok("clocks", "this machine and the API server agree")


def webhook(facts: Facts) -> Iterator[Finding]:
    """Check that pods that ask for GPUs are gated, and the webhook's certificate."""
    if not facts.programs:
        return
    found = next((one for one in facts.webhooks if one["metadata"]["name"] == "gpuquota"), None)
    if found is None:
        yield fail("webhook", "the MutatingWebhookConfiguration gpuquota is missing: pods are not gated", _REINSTALL)
        return
    if any("caBundle" not in one["clientConfig"] for one in found["webhooks"]):
        yield fail(
            "webhook",
            "its configuration has no caBundle: the API server cannot call it",
            "the webhook's pods write it when they run; with a certificate of another source that source does "
            "(cert-manager.io/inject-ca-from)",
        )
    elif facts.gated:
        yield ok("webhook", "gates a pod that asks for a GPU")
    elif facts.refusal:
        remedy = f"see: kubectl -n {facts.system} logs deployment/gpuquota-webhook, and whether nodes let 8443 through"
        yield fail("webhook", f"a trial pod was refused: {facts.refusal}", remedy)
    else:
        remedy = "another webhook or failOpen lets pods through; see the webhook's pods"
        yield fail("webhook", "a trial pod that asks for a GPU was not gated", remedy)
    yield from _certificate(facts)


def _certificate(facts: Facts) -> Iterator[Finding]:
    if facts.certificate_expires is None:
        return
    days = (facts.certificate_expires - facts.now) / DAY_S
    if days < 0:
        yield fail("certificate", f"expired {-days:.0f} days ago", "restart the webhook's pods, and see their logs")
    elif days < RENEWED_BEFORE_S / DAY_S - 2:
        remedy = "it is renewed 30 days before it expires; see the logs of the webhook's pods"
        yield warn("certificate", f"expires in {days:.0f} days and was not renewed", remedy)
    else:
        yield ok("certificate", f"expires in {days:.0f} days")


def kinds(facts: Facts) -> Iterator[Finding]:
    """Check that our kinds are served, with this version's schemas."""
    if not facts.programs:
        return
    there = {one["metadata"]["name"]: one for one in facts.definitions}
    old = []
    for wanted in custom_resource_definitions():
        name = wanted["metadata"]["name"]
        if name not in there:
            yield fail("kinds", f"{name} is missing", "kubectl apply --server-side -f charts/kfp-gpuquota/crds")
        elif _schemas(there[name]) != _schemas(wanted):
            old.append(name)
    if old:
        remedy = "kubectl apply --server-side --force-conflicts -f charts/kfp-gpuquota/crds"
        yield warn("kinds", f"other schemas than this version's: {', '.join(old)}", remedy)
    elif all(one["metadata"]["name"] in there for one in custom_resource_definitions()):
        yield ok("kinds", f"{len(custom_resource_definitions())} kinds as of version {__version__}")


def _schemas(definition: Json) -> dict[str, Json]:
    return {one["name"]: one["schema"] for one in definition["spec"]["versions"]}


def policies(facts: Facts) -> Iterator[Finding]:
    """Check that the policies against ways around the quota are there, in force, and as this version has them."""
    if not facts.programs:
        return
    there = {one["metadata"]["name"]: one for one in facts.policies}
    bound = {one["spec"]["policyName"] for one in facts.bindings if "Deny" in one["spec"]["validationActions"]}
    wanted = expected_policies()
    needed = {name for name, one in wanted.items() if one["always"]}
    if missing := sorted(needed - there.keys()):
        yield fail("policies", f"missing: {', '.join(missing)}; users can go around the quota", _REINSTALL)
    if loose := sorted((needed & there.keys()) - bound):
        yield fail("policies", f"without a binding that denies: {', '.join(loose)}", _REINSTALL)
    changed = [
        name
        for name, one in wanted.items()
        if name in there and digest(there[name], facts.system) not in one["digests"]
    ]
    if changed:
        yield warn("policies", f"other rules than this version's: {', '.join(sorted(changed))}", _REINSTALL)
    if not missing and not loose and not changed:
        yield ok("policies", f"{len(wanted.keys() & there.keys())} policies as of version {__version__}")


@cache
def expected_policies() -> dict[str, Json]:
    """Return the digests of each policy's rules, which `python -m tools.chart` writes."""
    text = resources.files(__package__).joinpath("policies.json").read_text()
    found: dict[str, Json] = json.loads(text)
    return found


def digest(policy: Json, system: str) -> str:
    """Return a digest of a policy's expressions, with the namespace of its installation left out."""
    spec = policy["spec"]
    parts = (one for part in ("matchConditions", "variables", "validations") for one in spec.get(part) or ())
    text = " ".join(" ".join(one["expression"].split()) for one in parts)
    return hashlib.sha256(text.replace(system, "").encode()).hexdigest()[:16]


def rights(facts: Facts) -> Iterator[Finding]:
    """Check that the controller may do what it must."""
    if not facts.programs or "subjectaccessreviews" in facts.unreadable:
        return
    if facts.denied_rights:
        yield fail("rights", f"the controller may not: {', '.join(facts.denied_rights)}", _REINSTALL)
    else:
        yield ok("rights", "the controller may do what it must")


def readable(facts: Facts) -> Iterator[Finding]:
    """Report what could not be read, so that what depends on it was not checked."""
    if facts.unreadable:
        what = ", ".join(sorted(facts.unreadable))
        yield warn("you", f"you may not read: {what}; what depends on them is not checked", "ask as an administrator")
