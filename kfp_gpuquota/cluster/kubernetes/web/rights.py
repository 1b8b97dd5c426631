"""What a user may do, as the API server answers it (SubjectAccessReview).

Rights are kept for a minute, denials for 5 s.

Which namespaces a user may list jobs in takes one review where it is all of them. Otherwise only namespaces with a
RoleBinding for the user or one of the user's groups, and with anything to show, are asked about: the number of reviews
grows with the user's namespaces and not with the cluster's.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata, Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection

REVIEWS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
KEPT_S: Final = 60.0
DENIAL_KEPT_S: Final = 5.0
"""Somebody who was just given a right need not wait a minute for it."""
MAX_KEPT: Final = 50_000
AT_ONCE: Final = 16


class Identity(NamedTuple):
    """A user, and the groups that the proxy names."""

    name: str
    groups: tuple[str, ...] = ()


class Asked(NamedTuple):
    """What somebody wants to do; a namespace "" means all of them, and a name "" any."""

    user: Identity
    verb: str
    resource: str = "elasticjobs"
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    group: str = labels.GROUP


class Subject(Struct, frozen=True):
    """Who a RoleBinding is for."""

    kind: str = ""
    name: str = ""


class RoleBinding(Struct, frozen=True):
    """A RoleBinding, without its role."""

    metadata: Metadata
    subjects: tuple[Subject, ...] | None = None


class _Status(msgspec.Struct, frozen=True):
    allowed: bool = False


class _Review(msgspec.Struct, frozen=True):
    status: _Status = _Status()


class Bindings:
    """The namespaces in which each user and each group has a RoleBinding."""

    def __init__(self) -> None:
        self._bound: dict[str, tuple[str, frozenset[Subject]]] = {}
        self._of_subject: dict[Subject, dict[str, str]] = {}

    def put(self, binding: RoleBinding) -> None:
        """Take a new or changed binding."""
        uid = binding.metadata.uid
        self.drop(uid)
        subjects = frozenset(subject for subject in binding.subjects or () if subject.kind in {"User", "Group"})
        self._bound[uid] = binding.metadata.namespace, subjects
        for subject in subjects:
            self._of_subject.setdefault(subject, {})[uid] = binding.metadata.namespace

    def drop(self, uid: str) -> None:
        """Forget a binding."""
        _, subjects = self._bound.pop(uid, ("", frozenset[Subject]()))
        for subject in subjects:
            del self._of_subject[subject][uid]
            if not self._of_subject[subject]:
                del self._of_subject[subject]

    def namespaces_of(self, user: Identity) -> frozenset[str]:
        """Return where the user, or one of the user's groups, has a binding, of whatever role."""
        subjects = [Subject("User", user.name), *(Subject("Group", group) for group in user.groups)]
        return frozenset(name for subject in subjects for name in self._of_subject.get(subject, {}).values())


class Rights:
    """Asks the API server what users may do. `shown()` are the namespaces with anything to show."""

    def __init__(
        self,
        connection: Connection,
        bindings: Bindings,
        shown: Callable[[], Collection[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection, self._bindings, self._shown, self._clock = connection, bindings, shown, clock
        self._answers: dict[Asked, tuple[float, bool]] = {}
        self._free = asyncio.Semaphore(AT_ONCE)

    async def may(self, asked: Asked) -> bool:
        """Return the answer, which may be a minute old. Raises ClusterUnavailableError."""
        until, allowed = self._answers.get(asked, (0.0, False))
        if until <= self._clock():
            allowed = await self.may_now(asked)
            if len(self._answers) >= MAX_KEPT:
                self._answers.clear()
            self._answers[asked] = self._clock() + (KEPT_S if allowed else DENIAL_KEPT_S), allowed
        return allowed

    async def may_now(self, asked: Asked) -> bool:
        """Return the API server's answer of now. Raises ClusterUnavailableError."""
        wanted = {
            "verb": asked.verb,
            "group": asked.group,
            "resource": asked.resource,
            "subresource": asked.subresource,
            "namespace": asked.namespace,
            "name": asked.name,
        }
        review = {
            "spec": {
                "user": asked.user.name,
                "groups": asked.user.groups,
                "resourceAttributes": {name: at for name, at in wanted.items() if at},
            }
        }
        async with self._free:
            answer = await self._connection.call("POST", REVIEWS, review)
        return msgspec.json.decode(answer, type=_Review).status.allowed

    async def visible(self, user: Identity) -> frozenset[str] | None:
        """Return the namespaces whose jobs the user may list; None for all of them, also later ones."""
        if await self.may(Asked(user, "list")):
            return None
        candidates = sorted(self._bindings.namespaces_of(user).intersection(self._shown()))
        answers = await asyncio.gather(*(self.may(Asked(user, "list", namespace=each)) for each in candidates))
        return frozenset(each for each, allowed in zip(candidates, answers, strict=True) if allowed)
