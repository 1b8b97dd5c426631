"""Pods that wait are put into the group that their owner makes of them: it is asked once, when its first pod comes.

Not watched: a cluster may have very many Jobs, and what they say is needed for some seconds only, until their pods have
gathered. So an answer is good for a short while; who is asked about pods that come later is asked again.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.kubernetes.client.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.client.request import Write
from kfp_gpuquota.cluster.kubernetes.convert.owners import ALONE, Together, together
from kfp_gpuquota.cluster.kubernetes.convert.pods import PodView, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.cluster.kubernetes.client.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.convert.owners import Owner

GOOD_FOR_S: Final = 30.0
AGAIN_S: Final = 5.0

log = logging.getLogger(__name__)


class Gangs:
    """`known` are the pods that were put, by uid; `put` gets those whose owner has answered."""

    def __init__(self, known: Mapping[str, PodView], put: Callable[[PodView], None], writer: Writer) -> None:
        self._known, self._put, self._writer = known, put, writer
        self._answers: dict[Owner, tuple[Together, float]] = {}
        self._waiting: dict[Owner, dict[str, PodView]] = {}
        self._all_answered = asyncio.Event()
        self._all_answered.set()

    def join(self, pod: PodView) -> PodView | None:
        """The pod, with its group; None where its owner is asked first: it is put then."""
        owner = pod.owner
        if pod.stage is not Stage.WAITING:
            self.drop(pod.uid)
        if owner is None or pod.group_size or (pod.stage is not Stage.WAITING and owner not in self._answers):
            return pod
        before = self._known.get(pod.uid)
        if before is not None and before.stage is Stage.WAITING:
            return _grouped(pod, Together(before.group_size, before.group_size) if before.group_size else ALONE)
        answer = self._answer(owner)
        if answer is not None:
            return _grouped(pod, answer)
        asked = owner in self._waiting
        self._waiting.setdefault(owner, {})[pod.uid] = pod
        if not asked:
            self._ask(owner)
        return None

    def drop(self, uid: str) -> None:
        """A pod is gone, perhaps before its owner has answered."""
        for pods in self._waiting.values():
            pods.pop(uid, None)

    async def settled(self) -> None:
        """Return when nobody is being asked."""
        await self._all_answered.wait()

    def _answer(self, owner: Owner) -> Together | None:
        found = self._answers.get(owner)
        if found is None:
            return None
        if asyncio.get_running_loop().time() - found[1] < GOOD_FOR_S:
            return found[0]
        del self._answers[owner]
        return None

    def _ask(self, owner: Owner) -> None:
        self._all_answered.clear()
        write = Write(verb="GET", path=owner.path, about=f"{owner.namespace}/{owner.group}", level=logging.DEBUG)
        self._writer.submit(
            write, lambda body: self._settle(owner, together(owner, body)), partial(self._failed, owner)
        )

    def _failed(self, owner: Owner, error: Exception) -> None:
        """It is gone, of a kind that is not installed, or none of our business: its pods go alone. Else ask again."""
        if isinstance(error, ApiError) and error.status in {403, 404}:
            log.warning("pods of %s/%s are planned one by one: %s", owner.namespace, owner.group, error)
            self._settle(owner, ALONE)
        else:
            asyncio.get_running_loop().call_later(AGAIN_S, self._ask, owner)

    def _settle(self, owner: Owner, answer: Together) -> None:
        now = asyncio.get_running_loop().time()
        self._answers = {one: known for one, known in self._answers.items() if now - known[1] < GOOD_FOR_S}
        self._answers[owner] = answer, now
        for pod in self._waiting.pop(owner, {}).values():
            self._put(_grouped(pod, answer))
        if not self._waiting:
            self._all_answered.set()


def _grouped(pod: PodView, answer: Together) -> PodView:
    """With a label it is in that group, of which the owner says the size; without one it is in its owner's."""
    size = answer.labelled if pod.group else answer.pods
    if pod.owner is None or size <= 1:
        return pod
    return msgspec.structs.replace(pod, group=pod.group or pod.owner.group, group_size=size)
