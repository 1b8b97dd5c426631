"""Removes an installation: everything that `inventory` finds, in an order in which no pod is ever refused or stopped.

1. The policies, which allow only the controller to change gates and labels, and the webhook, so that new pods
   start ungated.
2. The controller, the membership and the agents. Later steps wait for their end: they would write labels again.
3. Owners of pods that the controller has suspended, which nobody else would resume; the gates, if the administrator
   chose to open them; labels and annotations of other pods.
4. ElasticJobs. Their workers lose their owner before, and run on.
5. Everything else: kinds, rights, settings, labels of namespaces and nodes, our namespaces, Helm's record.

Each step can be repeated, and so can the removal: a missing object is no error.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.operations import inventory
from kfp_gpuquota.cluster.kubernetes.operations.inventory import Inventory, Kind, is_alive, is_gated, is_running, marks
from kfp_gpuquota.cluster.kubernetes.suspension import kinds
from kfp_gpuquota.errors import ConflictError, NotFoundError, UnauthorizedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls

Json = dict[str, Any]

WAIT_S: Final = 120.0
FORGET_S: Final = 30.0  # an API server applies a deleted policy for a second or two
_POLL_S: Final = 0.2


class Waiting(StrEnum):
    """What becomes of pods that wait at the gate."""

    KEEP = "keep"
    OPEN = "open"


@dataclass
class Step:
    """A step: the objects that it removes or changes, and how. `awaited` returns those that are still there."""

    title: str
    objects: list[Json]
    act: Callable[[Json], None]
    awaited: Callable[[], list[Json]] = field(default=list)


class Removal:
    """The steps that remove the installation that is there now."""

    def __init__(self, calls: Calls, waiting: Waiting) -> None:
        self._calls, self._waiting = calls, waiting
        self.inventory = Inventory(calls)
        self.pods = self.inventory.pods()
        self.jobs = self.inventory.listed(inventory.JOBS)
        self.steps = [step for step in self._steps() if step.objects]

    @property
    def gated(self) -> list[Json]:
        """Return the pods that wait at the gate."""
        return [pod for pod in self.pods if is_gated(pod)]

    @property
    def unopened(self) -> list[Json]:
        """Return the gated pods that stay pending: those of `keep`, and those that wait for a part of a GPU.

        Such a pod names a ConfigMap that only the controller fills, so its containers could not start.
        """
        return [pod for pod in self.gated if self._waiting is Waiting.KEEP or _shares(pod)]

    @property
    def ends(self) -> list[Json]:
        """Return the ElasticJobs that have not ended and have no workers: they are deleted, and never start."""
        going_on = self._job_pods()
        return [one for one in self.jobs if inventory.name_of(one) not in going_on and not _is_over(one)]

    @property
    def sharers(self) -> list[Json]:
        """Return the running pods that share GPUs: without reservations their GPUs may be given to others as well."""
        return [
            pod for pod in self.pods if is_running(pod) and labels.GPUS in (pod["metadata"].get("annotations") or {})
        ]

    def run(self, progress: Callable[[Step], None]) -> None:
        """Carry out the steps; `progress` is called before each. Raises ConflictError if something does not end."""
        for step in self.steps:
            progress(step)
            for one in step.objects:
                self._until_allowed(step.act, one)
            _await(step)

    def remaining(self) -> list[tuple[str, list[Json]]]:
        """Return what is still there, by the title of the step that removes it; pods that stay pending are none."""
        left = [(step.title, step.objects) for step in Removal(self._calls, self._waiting).steps]
        kept = {inventory.name_of(pod) for pod in self.unopened}
        named = [(title, [one for one in objects if inventory.name_of(one) not in kept]) for title, objects in left]
        return [(title, objects) for title, objects in named if objects]

    def _steps(self) -> Iterator[Step]:
        found, delete = self.inventory, self._delete
        for title, kind in (
            ("bindings of policies", inventory.POLICY_BINDINGS),
            ("policies", inventory.POLICIES),
            ("webhook configurations", inventory.WEBHOOKS),
        ):
            yield Step(title, found.ours(kind), delete(kind))
        releases = found.releases()  # they are found by what the next step deletes
        programs = {one["metadata"]["uid"]: (kind, one) for kind in inventory.WORKLOADS for one in found.ours(kind)}

        def end(one: Json) -> None:
            self._calls.delete(_path(programs[one["metadata"]["uid"]][0], one))

        yield Step("programs", [one for _, one in programs.values()], end, self._processes)
        yield Step("suspended owners of pods", *self._suspended())
        gated = [pod for pod in self.gated if self._waiting is Waiting.OPEN and not _shares(pod)]
        yield Step("gates of waiting pods", gated, self._open)
        # before the labels of pods, by which they select: workers have to reach each other all the time
        yield Step("NetworkPolicies of jobs", found.job_network_policies(), delete(inventory.NETWORK_POLICIES))
        unopened = {inventory.name_of(pod) for pod in self.unopened}
        marked = [pod for pod in self.pods if inventory.name_of(pod) not in unopened and _marks(pod)]
        yield Step("labels and annotations of pods", marked, self._unmark(inventory.PODS))
        yield Step("jobs", self.jobs, self._delete_job, lambda: found.listed(inventory.JOBS))
        yield Step("Secrets of jobs", found.job_secrets(), delete(inventory.SECRETS))
        yield Step("reservations", found.reservations(), delete(inventory.PODS), found.reservations)
        defined = found.definitions()
        yield Step("kinds, with quotas and policies", defined, delete(inventory.DEFINITIONS), found.definitions)
        for kind in (*inventory.RIGHTS, *inventory.SETTINGS):
            yield Step(kind.plural, found.ours(kind), delete(kind))
        yield Step("labels of namespaces", found.marked_namespaces(), self._unmark(inventory.NAMESPACE_KIND))
        yield Step("labels of nodes", found.marked_nodes(), self._unmark(inventory.NODES))
        yield Step("namespaces", found.namespaces(), delete(inventory.NAMESPACE_KIND), found.namespaces)
        yield Step("records of Helm", releases, delete(inventory.SECRETS))

    def _processes(self) -> list[Json]:
        """Return the controller's, the membership's and the agents' pods."""
        return [
            pod
            for namespace in self.inventory.namespaces()
            for pod in self.inventory.listed(inventory.PODS, namespace["metadata"]["name"])
            if (pod["metadata"].get("labels") or {}).get("app.kubernetes.io/name", "").startswith("gpuquota-")
        ]

    def _suspended(self) -> tuple[list[Json], Callable[[Json], None]]:
        """Return the Jobs, JobSets, ... that the controller has suspended and not resumed, and how to resume one."""
        found: dict[str, tuple[kinds.Kind, Json]] = {}
        for kind in kinds.KINDS:
            api, _, plural = kind.path.rpartition("/")
            marked = self.inventory.listed(Kind(api, plural, namespaced=True), labelSelector=f"{labels.SUSPENDED}=true")
            found |= {one["metadata"]["uid"]: (kind, one) for one in marked}

        def resume(one: Json) -> None:
            write = kinds.suspension(found[one["metadata"]["uid"]][0], msgspec.convert(one, kinds.Suspendable), None)
            self._calls.patch(write.path, write.body)

        return [one for _, one in found.values()], resume

    def _delete(self, kind: Kind) -> Callable[[Json], None]:
        def act(one: Json) -> None:
            self._calls.delete(_path(kind, one))

        return act

    def _delete_job(self, job: Json) -> None:
        """Delete a job. Its live workers are released before, since the garbage collector would delete them with it.

        Rejected: a deletion that orphans dependents. It waits for the garbage collector, which takes up to half a
        minute to discover new kinds.
        """
        for pod in self.inventory.listed(inventory.PODS, job["metadata"]["namespace"]):
            owners = pod["metadata"].get("ownerReferences") or []
            others = [owner for owner in owners if owner["uid"] != job["metadata"]["uid"]]
            if is_alive(pod) and len(others) < len(owners):
                self._calls.patch(_path(inventory.PODS, pod), {"metadata": {"ownerReferences": others}})
        self._calls.delete(_path(inventory.JOBS, job))

    def _job_pods(self) -> set[str]:
        """Return the jobs (`namespace/name`) that have workers, which run or start."""
        return {
            f"{pod['metadata']['namespace']}/{owner['name']}"
            for pod in self.pods
            if is_alive(pod)
            for owner in pod["metadata"].get("ownerReferences") or ()
            if owner["kind"] == "ElasticJob"
        }

    def _open(self, pod: Json) -> None:
        gates = [gate["name"] for gate in pod["spec"]["schedulingGates"]]
        at = f"/spec/schedulingGates/{gates.index(labels.QUOTA_GATE)}"
        operations: list[Json] = [
            {"op": "test", "path": f"{at}/name", "value": labels.QUOTA_GATE},
            {"op": "remove", "path": at},
        ]
        self._calls.patch(_path(inventory.PODS, pod), operations)

    def _unmark(self, kind: Kind) -> Callable[[Json], None]:
        def act(one: Json) -> None:
            changed = {part: dict.fromkeys(names) for part in ("labels", "annotations") if (names := marks(one, part))}
            self._calls.patch(_path(kind, one), {"metadata": changed})

        return act

    def _until_allowed(self, act: Callable[[Json], None], one: Json) -> None:
        """Act, repeatedly while an API server applies a policy that was deleted; a missing object is no error."""
        deadline = time.monotonic() + FORGET_S
        while True:
            try:
                act(one)
            except NotFoundError:
                return
            except UnauthorizedError as error:
                if "ValidatingAdmissionPolicy" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)
            else:
                return


def _await(step: Step) -> None:
    deadline = time.monotonic() + WAIT_S
    while left := step.awaited():
        if time.monotonic() > deadline:
            names = ", ".join(inventory.summary(left))
            raise ConflictError(
                f"{step.title}: still there after {WAIT_S:g} s: {names}; see what holds them (finalizers, nodes that "
                "do not respond), then run the same command again"
            )
        time.sleep(_POLL_S)


def _path(kind: Kind, one: Json) -> str:
    return kind.path(one["metadata"]["name"], one["metadata"].get("namespace", ""))


def _marks(one: Json) -> list[str]:
    return [*marks(one, "labels"), *marks(one, "annotations")]


def _shares(pod: Json) -> bool:
    return labels.GPU_CONFIG in (pod["metadata"].get("annotations") or {})


def _is_over(job: Json) -> bool:
    return job.get("status", {}).get("phase") in {"Succeeded", "Failed", "Cancelled"}
