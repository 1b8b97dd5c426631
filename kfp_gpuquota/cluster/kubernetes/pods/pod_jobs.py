"""A job of the scheduler that pods of another controller form: its members, its placeholders and its parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage
from kfp_gpuquota.cluster.kubernetes.convert.pods import pod_job

if TYPE_CHECKING:
    from kfp_gpuquota.api import JobSpec
    from kfp_gpuquota.cluster.kubernetes.convert.owners import Rest
    from kfp_gpuquota.cluster.kubernetes.pods.group_stages import GroupKey

REST: Final = "/rest/"
"""In the id of a placeholder, which no pod's uid has."""
REST_PART: Final = "rest/"
"""Begins the name of a part of a job whose pods do not exist yet."""


@dataclass(slots=True)
class PodJob:
    """A job of the scheduler: one pod, or a gang. `rest` are its placeholders with their parts of the job.

    `replaces`: its pod is in place of one of a gang that runs.
    """

    uid: str
    key: GroupKey | None = None
    members: dict[str, Member] = field(default_factory=dict)
    closed: bool = False
    rest: dict[str, str] = field(default_factory=dict)
    replaces: bool = False

    @property
    def started(self) -> bool:
        """Return whether any of its pods holds devices."""
        return any(member.reported >= Stage.ASSIGNED for member in self.members.values())


@dataclass(slots=True)
class Member:
    """A pod as last seen, and the stage last reported to the scheduler. `sent_to`: it is being admitted there.

    `part`: the part of its gang with equal pods, if the gang's pods differ. `key` is its group's, at its last change of
    stage.
    """

    view: PodView
    reported: Stage = Stage.OUTSIDE
    job: PodJob | None = None
    sent_to: tuple[str, tuple[int, ...]] | None = None
    evicted: bool = False
    part: str = ""
    key: GroupKey | None = None

    @property
    def stage(self) -> Stage:
        """Return its stage, assuming that pending writes succeed."""
        stage = self.view.stage
        if stage is Stage.WAITING and self.sent_to is not None:
            stage = Stage.ASSIGNED
        return Stage.TERMINATING if stage is Stage.ASSIGNED and self.evicted else stage


def group_key(view: PodView) -> GroupKey | None:
    """Return the key of the group that the pod starts with; None if it starts alone."""
    if not view.group or view.share:  # a job with shared GPUs has one worker
        return None
    return view.namespace, view.group


def by_age(member: Member) -> tuple[float, str]:
    """Return the key by which the oldest pod is first."""
    return member.view.created, member.view.uid


def rest_part(number: int, rest: Rest) -> str:
    """Return the name of a part of a job whose pods do not exist yet."""
    return f"{REST_PART}{number}/{rest.gpus}"


def gpus_of_part(part: str) -> int:
    """Return how many GPUs each pod of such a part requests."""
    return int(part.rpartition("/")[2])


def takes(member: Member, part: str) -> bool:
    """Return whether the pod takes the place of a placeholder of the part."""
    return member.view.gpus == gpus_of_part(part)


def split_into_parts(members: list[Member], rest: tuple[Rest, ...]) -> dict[str, JobSpec]:
    """Return the job of each part of the gang; {} if all pods are equal, and all exist."""
    alike: dict[tuple[object, ...], list[Member]] = {}
    for member in sorted(members, key=by_age):
        member.part = ""
        alike.setdefault((member.view.gpus, member.view.needs, nodes_of(member.view)), []).append(member)
    if len(alike) == 1 and not rest:
        return {}
    parts: dict[str, JobSpec] = {}
    for number, same in enumerate(alike.values()):
        parts[str(number)] = pod_job(same[0].view, len(same))
        for member in same:
            member.part = str(number)
    first = min(members, key=by_age).view
    for number, later in enumerate(rest):
        parts[rest_part(number, later)] = pod_job(msgspec.structs.replace(first, gpus=later.gpus), later.pods)
    return parts


def nodes_of(view: PodView) -> tuple[object, ...]:
    """Return the fields that determine which nodes a pod may use at any stage."""
    return view.constraints, view.volume_terms


def request_of(view: PodView) -> tuple[object, ...]:
    """Return all fields of a waiting pod that determine its job."""
    quality = view.kind, view.priority, view.preemptible, view.pool, *nodes_of(view), view.excluded_nodes
    return view.gpus, view.gpu_weights, view.share, view.needs, *quality, view.group, view.group_size, view.rest
