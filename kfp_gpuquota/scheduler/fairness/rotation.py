"""Chooses the shapes of waiting jobs that the next plan considers, if there are more than one plan can.

A plan costs at least a search over all nodes for each shape, so a team that submits ten thousand jobs with different
node selectors would delay every other team's next job by that cost. A plan therefore considers `size` shapes:

- Queues get equal parts; what a queue does not use is for the others. A queue that fits into its part has all its
  shapes in every plan, so the shapes of one team cost the others nothing.
- Half of a queue's part are its first shapes by priority and age, in every plan. The other half are those that were
  considered longest ago.
- The shapes of nominated jobs are in the next plan. A nomination is not stored: without its shape the next plan would
  give what was reclaimed for the job to others, to reclaim it again, without end.
- A shape that no node can hold even when it is empty is considered again only after a node was added, has changed its
  labels or taints, or has more capacity.

The trade: within one queue that has more shapes than its part, a job may start before an older one, or one of higher
priority, that is not in this plan. It is bounded by one round. Between queues the order is as without a limit, because
the first shapes of each are in every plan.

Rejected: a clock inside of the plan, which would make it depend on the machine's speed; the caller measures plans
and chooses `size`. Rejected: one cursor over all shapes; the others would wait for a round of the team with the most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import ReasonCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kfp_gpuquota.api import Reason
    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Job, Queue, Shape

FEWEST: Final = 16
"""The smallest part of a queue: a team with no more shapes has all of them in every plan, whatever others have."""

IMPOSSIBLE: Final = frozenset({ReasonCode.TOO_LARGE, ReasonCode.NODE_AFFINITY, ReasonCode.NO_SUCH_NODE})
"""Reasons that only a change of a node can end."""

Chosen = dict["Queue", list["Shape"]]


class Rotation:
    """The shapes considered so far. `unvisited`: the number that no plan has considered since the last change."""

    def __init__(self, fewest: int = FEWEST) -> None:
        self._fewest = fewest
        self._plans = self._changed_at = 1
        self._epoch = 0
        self._last: dict[
            Queue, dict[int, int]
        ] = {}  # the plan that last considered a shape, by its id: hashes are slow
        self._nominated: dict[Queue, dict[Shape, None]] = {}
        self.unvisited = 0

    def changed(self) -> None:
        """Record that the state has changed: each shape is due again."""
        self._changed_at = self._plans

    def choose(self, ledger: Ledger, size: int) -> Chosen:
        """Return the shapes of the queues that do not have all of theirs in the next plan."""
        if ledger.epoch != self._epoch:
            self._epoch = ledger.epoch
            _take_up(ledger)
        waiting = [queue for queue in ledger.queues.values() if queue.waiting]
        parts = self._parts(waiting, size)
        self._last = {queue: last for queue, last in self._last.items() if queue in parts}
        self._plans += 1
        self.unvisited = 0
        return {queue: self._turn(queue, part) for queue, part in parts.items()}

    def considered(self, chosen: Chosen, reasons: Mapping[str, Reason], nominated: Iterable[Job] = ()) -> None:
        """Record the result of the plan: the nominated jobs, and why others wait: which shapes no node can hold."""
        self._nominated = {}
        for job in nominated:
            if job.filed is not None:
                self._nominated.setdefault(job.queue, {})[job.filed[0]] = None
        for queue, shapes in chosen.items():
            for shape in shapes:
                entries = queue.waiting.get(shape)
                reason = reasons.get(entries[0][1].uid) if entries else None
                if reason is not None and reason.code in IMPOSSIBLE:
                    queue.shelved[shape] = queue.waiting.pop(shape)

    def _parts(self, waiting: list[Queue], size: int) -> dict[Queue, int]:
        """Return how many shapes are considered of the queues that have more: equal parts of what others leave."""
        parts: dict[Queue, int] = {}
        left = size
        for done, queue in enumerate(sorted(waiting, key=lambda queue: (len(queue.waiting), queue.name, queue.pool))):
            part = max(self._fewest, left // (len(waiting) - done))
            left -= min(part, len(queue.waiting))
            if len(queue.waiting) > part:
                parts[queue] = part
        return parts

    def _turn(self, queue: Queue, part: int) -> list[Shape]:
        """Return the queue's first shapes, those of nominated jobs, and those that were considered longest ago."""
        ordered = [shape for shape, _ in sorted(queue.waiting.items(), key=lambda item: item[1][0][0])]
        last = self._last.get(queue, {})
        nominated = [shape for shape in self._nominated.get(queue, ()) if shape in queue.waiting]
        fixed = {id(shape): shape for shape in (*ordered[: part // 2], *nominated)}
        others = [shape for shape in ordered if id(shape) not in fixed]
        others.sort(key=lambda shape: last.get(id(shape), 0))  # stable: of equals the first in order
        turn = [*fixed.values(), *others[: max(1, part - len(fixed))]]
        self._last[queue] = last = {id(shape): last.get(id(shape), 0) for shape in ordered}
        last.update(dict.fromkeys(map(id, turn), self._plans))
        self.unvisited += sum(at <= self._changed_at for at in last.values())
        return turn


def _take_up(ledger: Ledger) -> None:
    """Consider all shelved jobs again."""
    for queue in ledger.queues.values():
        queue.waiting.update(queue.shelved)
        queue.shelved.clear()
