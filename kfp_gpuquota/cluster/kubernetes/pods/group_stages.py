"""The stage of a group of pods: whether its pods wait for each other, for their turn, or for nothing but quota.

| before    | now       | when                                                                               |
|-----------|-----------|------------------------------------------------------------------------------------|
| GATHERING | WAITING   | as many pods wait as start together: they are one job                              |
| GATHERING | ADMITTED  | a pod that was admitted is seen, after a restart of the controller                 |
| WAITING   | GATHERING | a pod of the job no longer waits, and was not admitted                             |
| WAITING   | ADMITTED  | a pod is admitted                                                                  |
| ADMITTED  | GATHERING | no pod holds GPUs any more, except those that are being deleted                    |
| ADMITTED  | WAITING   | all admissions have failed: the job waits again                                    |

Invariants. The stage is a function of the pods that exist, so a restarted controller finds it again. In an admitted
group no pod waits for another one: a replacement, or a pod beyond the number that start together, is a job of its own
with its own claim to quota. Before, no pod of the group starts alone. Rejected: to remember that a group was admitted
once. All its pods may have been evicted since, and they start together again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.convert.pod_view import Stage

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.pods.pod_jobs import Member, PodJob

GroupKey = tuple[str, str]


class GroupStage(Enum):
    """The stage of a group."""

    GATHERING = "fewer pods wait than start together"
    WAITING = "the pods that start together wait for their turn"
    ADMITTED = "a pod holds GPUs"


TRANSITIONS: Final = frozenset(
    {
        (GroupStage.GATHERING, GroupStage.WAITING),
        (GroupStage.GATHERING, GroupStage.ADMITTED),
        (GroupStage.WAITING, GroupStage.GATHERING),
        (GroupStage.WAITING, GroupStage.ADMITTED),
        (GroupStage.ADMITTED, GroupStage.GATHERING),
        (GroupStage.ADMITTED, GroupStage.WAITING),
    }
)


@dataclass(slots=True)
class Group:
    """The pods of one group that exist.

    `waiting` are those outside of the `gang`, by uid: alone, or without a job. `holding` are the uids of those that
    hold GPUs and are not being deleted. `gang` is the job of the pods that start together, until one of them has ended.
    """

    key: GroupKey
    stage: GroupStage = GroupStage.GATHERING
    waiting: dict[str, Member] = field(default_factory=dict)
    holding: set[str] = field(default_factory=set)
    gang: PodJob | None = None

    @property
    def size(self) -> int:
        """Return how many pods start together: the largest size that a waiting pod names."""
        return max((1, *(member.view.group_size for member in self.waiting.values())))

    @property
    def lacks_one(self) -> bool:
        """Return whether fewer pods hold GPUs, or wait to replace one that did, than start together."""
        members = () if self.gang is None else self.gang.members.values()
        coming = sum(member.stage is Stage.WAITING for member in members)
        coming += sum(member.job is not None and member.job.replaces for member in self.waiting.values())
        return len(self.holding) + coming < self.size

    def advance(self) -> bool:
        """Set the stage by what exists; return whether it has changed."""
        before, self.stage = self.stage, self._now()
        if before is self.stage:
            return False
        if (before, self.stage) not in TRANSITIONS:
            raise AssertionError(f"group {self.key}: {before} to {self.stage}")
        return True

    def _now(self) -> GroupStage:
        if self.holding:
            return GroupStage.ADMITTED
        return GroupStage.GATHERING if self.gang is None else GroupStage.WAITING
