"""What must hold of moves that gather free GPUs, on each kind of cluster."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.scheduler.actions.defragmentation import RESTART_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.api.defragmentation import Defragmentation
    from kfp_gpuquota.engine.job_book import Change, JobBook
    from kfp_gpuquota.engine.records import JobRecord

GATHERS: Final = "to gather free GPUs"
EPSILON: Final = 1e-6


def is_gathered(old: JobRecord, new: JobRecord) -> bool:
    """Return whether the job moves to gather free GPUs, in the change from `old` to `new`."""
    last = new.status.last_move
    return new.status.moves > old.status.moves and last is not None and GATHERS in last.reason.message


@dataclass
class Gathering:
    """What such moves have cost; it outlives the processes of the cluster."""

    rule: Defragmentation | None
    restarts_gpu_s: defaultdict[float, float] = field(default_factory=lambda: defaultdict(float))  # by start of window
    jobs: int = 0

    def observe(self, book: JobBook, moved: JobRecord, change: Change, now: float) -> Iterator[str]:
        """Yield what is wrong: a move outside of the window, of a young worker, or beyond the budget."""
        done = change.defragmented
        window = None if self.rule is None else self.rule.open_at(now)
        if self.rule is None or window is None or done is None:
            yield f"{moved.spec.name} moves to gather GPUs outside of the window: {done}"
            return
        leave = [w for w in change.workers.values() if w.worker.job_uid == moved.uid and w.released]
        if any(now - record.worker.started_at < self.rule.min_age_s - EPSILON for record in leave):
            yield f"{moved.spec.name} moves to gather GPUs soon after its start"
        if len(leave) == len(book.wanted_of(moved.uid)):
            self.restarts_gpu_s[window.start] += RESTART_S * sum(record.worker.gpus for record in leave)
        least, most = self.restarts_gpu_s[window.start], 60 * self.rule.budget_gpu_minutes
        if not least - EPSILON <= done.lost_gpu_s <= most + EPSILON:
            yield f"moves that gather GPUs cost {done}, of which {self.restarts_gpu_s} for restarts"
        self.jobs += 1
