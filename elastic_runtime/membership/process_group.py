"""One generation's process group, behind the few operations that the runtime needs.

Every wait ends early once the `Interrupt` is set: a collective whose peer is alive but no longer takes part would
otherwise wait for minutes. What was in flight is then abandoned, with its buffers.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from elastic_runtime.errors import CollectiveError
from elastic_runtime.membership import background
from elastic_runtime.membership.meetings import STEP, Meetings
from elastic_runtime.membership.pickled_objects import Exchange
from elastic_runtime.plan.replica_groups import Grid
from elastic_runtime.torch_internals import (
    all_gather_flat,
    drop_group,
    make_default,
    name_group,
    reduce_scatter_flat,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from elastic_runtime.torch_internals import Store

POLL = timedelta(milliseconds=10)
LOOK_EVERY_S = 0.0002
_SWAP = 1 << 20
"""The first tag of `Group.swap`; those of `send` and `receive` are below."""
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Far above any honest wait (a peer that evaluates); silent peers are the coordinator's to find."""


class Pending(Protocol):
    """A collective in flight."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Until it is done, or the time is over. Raises RuntimeError where it failed."""

    def is_completed(self) -> bool:
        """Return whether the collective has ended, successfully or not."""


class Interrupt:
    """Ends the loop's waits for peers. Set by the coordinator's thread or a signal handler, cleared by the loop.
    `waiting_since`, None outside of a wait, and `waited_until`, the end of the last one: by the monotonic clock.

    A plain flag that the waits poll: a handler runs in the loop's own thread, possibly while that clears the flag, and
    would wait permanently for the lock of a threading.Event.
    """

    def __init__(self) -> None:
        self.is_set = False
        self.waiting_since: float | None = None
        self.waited_until = 0.0

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """The loop waits for peers."""
        self.waiting_since = time.monotonic()
        try:
            yield
        finally:
            self.waited_until = time.monotonic()
            self.waiting_since = None  # last: who finds no wait finds the end of the last one

    def set(self) -> None:
        """Make the loop's waits for peers end."""
        self.is_set = True

    def clear(self) -> None:
        """Reset the interrupt, so that waits continue."""
        self.is_set = False


class Transfer:
    """Sends and receives that a thread of its own waits for: gloo closes the connection where one is waited for in
    turns. `start` gets the event that calls the thread away.
    """

    def __init__(self, start: Callable[[threading.Event], Iterable[dist.Work]]) -> None:
        self.ended, self.called_away = threading.Event(), threading.Event()
        self.errors: list[BaseException] = []
        self._start = start
        background.start(self._run, "elastic-transfer")

    @property
    def succeeded(self) -> bool:
        """Whether all has been sent and received."""
        return self.ended.is_set() and not self.errors

    def _run(self) -> None:
        try:
            for work in self._start(self.called_away):
                work.wait()
        except BaseException as error:  # noqa: BLE001  (raised in the loop's thread)
            self.errors.append(error)
        finally:
            self.ended.set()


@dataclass(frozen=True)
class Inner:
    """The connections of one rank where the generation is divided into replica groups. `shards`: to the others of its
    group; `replicas`: to those that hold the same part in other groups.
    """

    grid: Grid
    shards: Group
    replicas: Group


class Group:
    """The members of one generation, connected. `rank` and `size` are those of `torch.distributed` once published.

    `second`: further connections between the same members, which share what is sent from one to another: a single TCP
    stream moves about half of what two do. `polls`: how its works are waited for, by default by whether there is CUDA:
    NCCL takes a wait with a time limit for the operation's own, and aborts the communicator when it is over.
    `store`: the generation's at the coordinator, for what must not be read from a peer. `inner`: connections within
    the replica groups of a sharded training and between them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        size: int,
        interrupt: Interrupt,
        second: dist.ProcessGroup | None = None,
        *,
        polls: bool | None = None,
        store: Store | None = None,
        inner: Inner | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._store, self._exchange = store, Exchange(store, rank)
        self._group, self._interrupt, self.inner = group, interrupt, inner
        self._lanes = (group, second or group)
        self._polls = torch.cuda.is_available() if polls is None else polls
        self._meetings = Meetings(store, rank, size) if store is not None and second is not None else None

    @property
    def torch_group(self) -> dist.ProcessGroup:
        """Return torch's group of these ranks."""
        return self._group

    @property
    def grid(self) -> Grid:
        """Return the division into replica groups; one group of all where there is no other one."""
        return self.inner.grid if self.inner else Grid(self.size, self.size)

    @property
    def shards(self) -> Group:
        """Return this rank's replica group, the members of which share one copy of the state."""
        return self.inner.shards if self.inner else self

    def leave(self, content: bytes, to: int | None) -> str:
        """Leave bytes with the coordinator for one rank (None: for all); returns where. StateError, CollectiveError."""
        return self._exchange.leave(content, to)

    def fetch(self, name: object) -> bytes:
        """Return what another rank has left there. CollectiveError where it is not there or not whole."""
        return self._exchange.fetch(name)

    def report_wait(self, step: int) -> None:
        """Report through the coordinator that this worker waits for others in a step; from any thread."""
        if self._store is not None:
            self._store.set(f"waits/{step}", str(self.rank))

    def others_wait(self, step: int) -> bool:
        """Return whether a worker has reported that it waits in the step; from any thread."""
        return self._store is not None and self._store.check([f"waits/{step}"])

    def leave_process(self, text: str) -> None:
        """Leave what others need to recognize this process with the coordinator. RuntimeError if it is away."""
        if self._store is not None:
            self._store.set(f"process/{self.rank}", text)

    def processes(self) -> dict[int, str]:
        """Return what the other ranks have left of their processes; from any thread."""
        ranks = [rank for rank in range(self.size) if rank != self.rank]
        if self._store is None or not self._store.check([f"process/{rank}" for rank in ranks]):
            return {}
        found = self._store.multi_get([f"process/{rank}" for rank in ranks])
        return {rank: text.decode() for rank, text in zip(ranks, found, strict=True)}

    def publish(self) -> None:
        """Make it torch's default group."""
        make_default(self._group)
        if self.inner:
            name_group(self.inner.shards.torch_group, self.grid.same_group(self.rank))
            name_group(self.inner.replicas.torch_group, self.grid.same_shard(self.rank))

    def close_soon(self, after_s: float = 0.0) -> None:
        """Close it in the background, where it costs some tens of milliseconds of a core."""
        background.start(self._close, "elastic-close", after_s=after_s)

    def _close(self) -> None:
        group, second = self._lanes
        drop_group(group)
        if second is not group:
            second.shutdown()
        for part in (self.inner.shards, self.inner.replicas) if self.inner else ():
            part.close_soon()

    def __del__(self) -> None:
        """Destroy the group in another thread: gloo's destructor waits for transfers to peers that may hang."""
        held = list(self.__dict__.pop("_lanes", ()))
        self.__dict__.pop("_group", None)
        if not held or sys.is_finalizing():
            return
        with contextlib.suppress(RuntimeError):  # no thread can be started any more: the process is about to end
            background.start(held.clear, "elastic-drop")

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start summing in place."""
        with _lost_peers_reported():
            return self._group.allreduce([tensor])

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_parts: list[int], sent_parts: list[int]
    ) -> Pending:
        """Start to send part r of `sent` to rank r, and to receive its part for this rank; lengths in elements."""
        with _lost_peers_reported():
            return self._group.alltoall_base(received, sent, received_parts, sent_parts)

    def gather_parts(self, whole: torch.Tensor) -> list[Pending]:
        """Start to gather equal parts in place: part r of `whole` is rank r's.

        By one broadcast for each rank: gloo's all-gather collects into fresh memory and copies from there.
        """
        parts = whole.view(self.size, -1)
        with _lost_peers_reported():
            return [self._group.broadcast(parts[rank], rank) for rank in range(self.size)]

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """One row for each rank."""
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        with _lost_peers_reported():
            self.wait([self._group.allgather([rows], [tensor])])
        return torch.stack(rows)

    def all_gather_into(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Equal parts of all ranks, in order, as one flat tensor. `part` may lie in `whole` already."""
        if whole.is_cuda:
            with _lost_peers_reported():
                self.wait([all_gather_flat(self._group, whole, part)])
            return
        own = whole.view(self.size, -1)[self.rank]
        if own.data_ptr() != part.data_ptr():
            own.copy_(part)
        self.wait(self.gather_parts(whole))

    def reduce_scatter_into(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """This rank's part of the sum of all ranks' `whole`, a flat tensor of equal parts.

        Rejected on the CPU: gloo's reduce-scatter. It is an all-reduce whose `wait` ignores its time limit and whose
        `is_completed` is never true, so a rank whose peer has given the step up hung until the group's own timeout; and
        it moves twice the data.
        """
        if whole.is_cuda:
            with _lost_peers_reported():
                self.wait([reduce_scatter_flat(self._group, part, whole)])
            return
        received, parts = torch.empty_like(whole), [part.numel()] * self.size
        self.wait([self.all_to_all(received, whole, parts, parts)])
        torch.sum(received.view(self.size, -1), 0, out=part)

    def mesh(
        self,
        device: str,
        name: str,
        replicas: dist.ProcessGroup | None = None,
        shards: dist.ProcessGroup | None = None,
    ) -> DeviceMesh:
        """The mesh of its ranks, once it is published: of one dimension, or of two where there are replica groups,
        between which `replicas` sums. `shards` takes the place of torch's group of those that share the state. No two
        may have one name: torch keeps what it has learned about tensors of one mesh for every equal one.
        """
        shards = shards or self.shards.torch_group
        if self.inner is None:
            return DeviceMesh.from_group(shards, device, mesh_dim_names=(name,))
        groups = [replicas or self.inner.replicas.torch_group, shards]
        ranks = torch.arange(self.size).view(-1, self.grid.shards)
        return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=(f"{name}replicate", f"{name}shard"))

    def work_on(self, step: int | None) -> None:
        """Note that the loop works for a step, in which the others wait for it; None: it does not."""
        if self._meetings is not None:
            self._meetings.kind, self._meetings.step = (None, 0) if step is None else (STEP, step)

    def meet(self, kind: str, step: int) -> None:
        """Wait for all members outside of the steps, of which `step` are applied. `kind`: in which part of the script.

        LoopError on all of them if one is in another part, or in a step.
        """
        if self._meetings is None:
            self.barrier()
            return
        place = self._meetings.begin(kind, step)
        try:
            rows = [torch.empty_like(place) for _ in range(self.size)]
            with _lost_peers_reported():
                self.wait([self._lanes[1].allgather([rows], [place])])
        finally:
            self.work_on(None)
        self._meetings.end(rows)

    def barrier(self) -> None:
        """Until all are here."""
        with _lost_peers_reported():
            self.wait([self._group.allreduce([torch.zeros(1)])])

    def send(self, tensors: Sequence[torch.Tensor], to: int, *, last: torch.Tensor) -> None:
        """Send tensors one after another; then `last`, unless the caller was called away in the meantime."""

        def start(called_away: threading.Event) -> Iterator[dist.Work]:
            works = [self._lanes[tag % 2].send([tensor], to, tag) for tag, tensor in enumerate(tensors)]
            yield from works
            if not called_away.is_set():
                yield self._lanes[len(works) % 2].send([last], to, len(works))

        self._in_thread(start)

    def receive(self, tensors: Sequence[torch.Tensor], source: int, *, first: int = 0) -> None:
        """Receive into tensors of the same shapes, from the message number `first` on."""
        self._in_thread(lambda _: [self._lanes[tag % 2].recv([t], source, tag) for tag, t in enumerate(tensors, first)])

    def wait(self, works: Sequence[Pending]) -> None:
        """Until all are done. CollectiveError where one failed, or none will."""
        with _lost_peers_reported(), self._interrupt.waits():
            for work in works:
                while not self._done(work):
                    if self._interrupt.is_set:
                        raise CollectiveError("the coordinator ended this generation")
                    if self._meetings is not None and (since := self._interrupt.waiting_since) is not None:
                        self._meetings.look(since, partial(self._waits_since, since))

    def _waits_since(self, since: float) -> bool:
        return self._interrupt.waiting_since == since

    def swap(
        self,
        sent: Sequence[torch.Tensor],
        to: int,
        received: Sequence[torch.Tensor],
        source: int,
        after: Callable[[], None] | None = None,
    ) -> Transfer:
        """Start to send tensors to one rank and to receive from another, beside the loop; `finish` waits for it.

        Between two ranks only one at a time. The tensors must stay as they are until it has ended. `after` is called
        in the transfer's thread when all has arrived.
        """

        def start(_: threading.Event) -> Iterator[dist.Work]:
            lane = self._lanes[1]
            works = [lane.recv([tensor], source, _SWAP + tag) for tag, tensor in enumerate(received)]
            works += [lane.send([tensor], to, _SWAP + tag) for tag, tensor in enumerate(sent)]
            yield from works
            if after is not None:
                after()

        return Transfer(start)

    def finish(self, transfer: Transfer) -> None:
        """Wait for a transfer. Raises CollectiveError if a peer was lost, or the generation was ended meanwhile."""
        with self._interrupt.waits():
            while not transfer.ended.wait(POLL.total_seconds()):
                if self._interrupt.is_set:
                    transfer.called_away.set()
                    raise CollectiveError("the coordinator ended this generation")
        with _lost_peers_reported():
            for error in transfer.errors:
                raise error

    def _in_thread(self, start: Callable[[threading.Event], Iterable[dist.Work]]) -> None:
        self.finish(Transfer(start))

    def _done(self, work: Pending) -> bool:
        if self._polls:
            if not work.is_completed():
                time.sleep(LOOK_EVERY_S)
                return False
            work.wait()
            return True
        try:
            work.wait(POLL)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait(POLL)  # it may have ended, well or not, just after the time was over
        return True


class _lost_peers_reported:  # noqa: N801  (reads as the words of a `with` statement)
    """torch raises RuntimeError where a connection is already broken when a collective starts."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, RuntimeError):
            raise CollectiveError(f"a peer was lost: {str(error).splitlines()[0]}") from error
