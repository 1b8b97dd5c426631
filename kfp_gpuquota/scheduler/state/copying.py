"""Copies a state so that original and copy share no mutable record.

Rejected: `copy.deepcopy`, which follows job -> worker -> node -> worker -> job by recursion and raises RecursionError
for a large state; and applying events and undoing them, because not every event has an inverse.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from kfp_gpuquota.scheduler.state.state import State

if TYPE_CHECKING:
    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Host, Job, Queue


def copied(state: State) -> State:
    """Return an independent copy of the state. O(jobs + workers + nodes)."""
    return _Copier(state).state


class _Copier:
    """Makes a shallow copy of every record, by the original, then replaces the references between the copies."""

    def __init__(self, original: State) -> None:
        jobs = original.jobs.values()
        self.hosts = {host: copy(host) for host in original.ledger.hosts.values()}
        self.queues = {queue: copy(queue) for queue in original.ledger.queues.values()}
        self.jobs = {job: copy(job) for job in jobs}
        users = {user for queue in original.ledger.queues.values() for user in queue.users.values()}
        self.users = {user: copy(user) for user in users}
        self.tasks = {task: copy(task) for job in jobs for task in (*job.tasks.values(), *job.pending)}
        self.state = State()
        self._relink()
        self._fill(original)

    def _relink(self) -> None:
        for task in self.tasks.values():
            task.job = self.jobs[task.job]
            task.node = None if task.node is None else self.hosts[task.node]
            task.within = None
        for host in self.hosts.values():
            self._relink_host(host)
        for job in self.jobs.values():
            self._relink_job(job)
        for queue in self.queues.values():
            self._relink_queue(queue)

    def _relink_host(self, host: Host) -> None:
        host.taken = {device: list(columns) for device, columns in host.taken.items()}
        host.sharers = {device: list(columns) for device, columns in host.sharers.items()}
        used, leaving, nominated = host.other
        host.other = (list(used), list(leaving), list(nominated))
        host.counted = {name: list(amounts) for name, amounts in host.counted.items()}
        host.tasks = {self.tasks[task]: None for task in host.tasks}

    def _relink_job(self, job: Job) -> None:
        job.queue, job.user = self.queues[job.queue], self.users.get(job.user, job.user)
        job.tasks = {name: self.tasks[task] for name, task in job.tasks.items()}
        job.pending = [self.tasks[task] for task in job.pending]
        job.hosts = {self.hosts[host]: count for host, count in job.hosts.items()}
        job.throughput, job.batches = dict(job.throughput), dict(job.batches)

    def _relink_queue(self, queue: Queue) -> None:
        queue.parent = None if queue.parent is None else self.queues[queue.parent]
        queue.children = {name: self.queues[child] for name, child in queue.children.items()}
        queue.path = tuple(self.queues[above] for above in queue.path)
        for name in ("waiting", "shelved"):
            filed = {
                shape: [(key, self.jobs[job]) for key, job in entries]
                for shape, entries in getattr(queue, name).items()
            }
            setattr(queue, name, filed)
        queue.running = {self.jobs[job]: None for job in queue.running}
        queue.priorities, queue.allocated = dict(queue.priorities), list(queue.allocated)
        queue.users = {name: self.users[user] for name, user in queue.users.items()}
        queue.recalled = dict(queue.recalled)
        for name in ("held", "leaving", "lent", "fixed", "requested"):
            setattr(queue, name, list(getattr(queue, name)))

    def _fill(self, original: State) -> None:
        self._fill_ledger(original.ledger)
        self.state.last_at, self.state.projects = original.last_at, dict(original.projects)
        self.state.workers = {name: self.tasks[task] for name, task in original.workers.items()}
        for name in (
            "jobs",
            "growable",
            "below",
            "sheltered",
            "suspended",
            "emptying",
            "deferred",
            "halted",
            "promised",
        ):
            setattr(self.state, name, {uid: self.jobs[job] for uid, job in getattr(original, name).items()})

    def _fill_ledger(self, original: Ledger) -> None:
        ledger = self.state.ledger
        ledger.hosts = {name: self.hosts[host] for name, host in original.hosts.items()}
        ledger.queues = {name: self.queues[queue] for name, queue in original.queues.items()}
        ledger.by_idle = {count: list(names) for count, names in original.by_idle.items()}
        ledger.by_future = {count: list(names) for count, names in original.by_future.items()}
        ledger.totals = {pool: list(totals) for pool, totals in original.totals.items()}
        ledger.boundless = {pool: list(counts) for pool, counts in original.boundless.items()}
        ledger.by_size, ledger.special = dict(original.by_size), original.special
        ledger.gpu_memory_mib, ledger.half_life_s = original.gpu_memory_mib, original.half_life_s
        ledger.reclaim_shelter_s, ledger.moves = original.reclaim_shelter_s, original.moves
        ledger.reserve_after_s = original.reserve_after_s
        ledger.shared_hosts = {self.hosts[host]: None for host in original.shared_hosts}
        ledger.held_gpus, ledger.leaving_gpus = dict(original.held_gpus), dict(original.leaving_gpus)
        ledger.lent_tasks = original.lent_tasks
        ledger.leaving = {self.tasks[task]: None for task in original.leaving}
