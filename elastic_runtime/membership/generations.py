"""The generation in force for this worker, and the next ones, which are built in the background.

The orders' thread writes, the loop reads; one lock between them. The loop never waits here while it trains, only where
it has nothing to do: before the first generation and after a loss.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from elastic_runtime.errors import ModelMismatchError, RunError
from elastic_runtime.membership import background
from elastic_runtime.membership.orders import Order
from elastic_runtime.membership.pair_authentication import check_users, listening_ports, prove
from elastic_runtime.membership.process_group import COLLECTIVE_TIMEOUT, Group, Inner, Interrupt
from elastic_runtime.plan.replica_groups import Grid
from elastic_runtime.torch_internals import build_group, build_second_connections

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_runtime.errors import ElasticError
    from elastic_runtime.torch_internals import Store

BUILD_S = 30.0
"""For connecting the members of a generation, and `BUILD_S_A_MEMBER` more for each: it takes milliseconds where all of
them can be reached. What takes longer (a route drops packets) is given up, and the next number gets twice the time: the
network may just be slow.
"""
BUILD_S_A_MEMBER = 0.1
FAILING_S = 1800.0
"""Workers that stand still end if no generation could be entered for so long, and in `FEWEST_FAILURES` attempts.

As long as torch's own collectives wait by default: a network that comes back earlier costs nothing but the time.
"""
FEWEST_FAILURES = 5
CLOSE_AFTER_S = 0.5
"""Old groups are closed this much later, so that the first steps of a new size do not compete for cores."""

_log = logging.getLogger("elastic_runtime")


@dataclass(frozen=True)
class Generation:
    """One generation of members; `group` is None if this worker is not a member, or the only one."""

    number: int
    members: tuple[str, ...]
    group: Group | None
    prepare_ms: float = 0.0
    """Milliseconds that connecting the members took, in the background."""

    def includes(self, worker: str) -> bool:
        """Return whether the worker is a member."""
        return worker in self.members


@dataclass(frozen=True)
class Secret:
    """`key()` is the job's; `local`: all of its workers are processes of this machine and of this user."""

    key: Callable[[], bytes] = lambda: b""
    local: bool = False


def check_shard_size(own: int, first: int) -> None:
    """ModelMismatchError if this worker's `shard_size` is not rank 0's; 0: it was not given."""
    if own != first:
        raise ModelMismatchError(
            f"prepare got shard_size={own or None} here, and shard_size={first or None} on rank 0; it is the number of "
            "workers that hold one copy of the model, and must be the same on every worker"
        )


ALONE = Generation(0, ("local",), None)


class Generations:
    """Turns orders into built groups.

    `make_store(number)` gives the rendezvous space of a generation, `secret` is what peers have in common.
    `send(event, **fields)` reaches the coordinator if it is connected; `publish` does in any case, if later.
    """

    def __init__(
        self,
        worker: str,
        make_store: Callable[[int], Store],
        send: Callable[..., None],
        publish: Callable[..., None],
        backend: Callable[[], str],
        secret: Secret | None = None,
    ) -> None:
        self.worker = worker
        self._secret = secret or Secret()
        self.interrupt = Interrupt()
        self.adopted: Generation | None = None
        self.shard_size: int | None = None  # of the replica groups of a sharded training; 0: one group; None: no shards
        self._make_store, self._send, self._publish, self._backend = make_store, send, publish, backend
        self._order = Order("Stay")
        self._entering = 0
        self._building: set[int] = set()
        self._built: dict[int, Generation] = {}
        self._given_up: set[int] = set()  # could not be built: what its store holds of this worker is outdated
        self._overdue = 0  # generations in a row that were given up for their time
        self._failures, self._failing_since = 0, 0.0  # generations in a row that could not be entered
        self._refused: ElasticError | None = None
        self._changed = threading.Condition()

    # The orders' thread

    def on_order(self, order: Order) -> None:
        """Set the order in force, unless it is older than the current one."""
        with self._changed:
            current = self.adopted.number if self.adopted else 0
            if order.kind in {"Propose", "Recover"} and order.generation < max(current, self._order.generation):
                return  # numbers only grow: it was overtaken
            if self._withdraws(order):
                self.interrupt.set()
            self._order = order
            again = order.generation == self._entering  # the order that is being followed, on a new connection
            if order.kind == "Release" or (order.kind == "Recover" and order.generation > current and not again):
                self.interrupt.set()
            if order.kind in {"Propose", "Recover"} and order.generation > current:
                self._start_building(order)
            self._drop_outdated()
            self._changed.notify_all()

    def on_refused(self, error: ElasticError) -> None:
        """Note that the coordinator has refused this process."""
        with self._changed:
            self._refused = error
            self.interrupt.set()
            self._changed.notify_all()

    def _withdraws(self, order: Order) -> bool:
        """Return whether this order means that a joiner waits in a generation that no other worker will enter.

        Other workers may be faster: they are in it already, and the next one may be proposed.
        """
        if self.adopted is not None or not self._entering:
            return False
        return self._entering not in {order.generation, order.base}

    def _start_building(self, order: Order) -> None:
        number = order.generation
        if number in self._building or number in self._built or number in self._given_up:
            return
        if self.worker not in order.members:
            self._built[number] = Generation(number, order.members, None)
            return
        self._building.add(number)
        background.start(partial(self._build_in_time, order), f"elastic-build-{number}")

    def _build_in_time(self, order: Order) -> None:
        limit_s = (BUILD_S + BUILD_S_A_MEMBER * len(order.members)) * 2**self._overdue
        overdue = TimeoutError(f"its {len(order.members)} members were not connected within {limit_s:g} s")
        timer = threading.Timer(limit_s, self._give_up, (order.generation, overdue))
        timer.daemon = True
        timer.start()
        try:
            self._build(order)
        finally:
            timer.cancel()

    def _build(self, order: Order) -> None:
        rank, size = order.members.index(self.worker), len(order.members)
        began = time.perf_counter()
        try:
            store = self._make_store(order.generation)
            self._check_shard_size(store, rank)
            name = f"elastic-{order.generation}"
            before = listening_ports() if self._secret.local else set()
            group = build_group(store, rank, size, name, self._backend(), COLLECTIVE_TIMEOUT)
            second = build_second_connections(store, rank, size, COLLECTIVE_TIMEOUT)
            suspect = partial(check_users, before) if self._secret.local else None
            prove((group, second), rank, size, order.generation, self._secret.key(), suspect)
            inner = self._connect_inner(store, rank, size, order.generation, suspect)
        except ModelMismatchError as error:
            self._give_up(order.generation, error)
            self.on_refused(error)
            return
        except Exception as error:  # noqa: BLE001  (a build that failed without an event would be waited for without end)
            self._give_up(order.generation, error)
            return
        connected = Group(group, rank, size, self.interrupt, second, store=store, inner=inner)
        with self._changed:
            in_time = order.generation in self._building
            if in_time:
                self._building.discard(order.generation)
                took_ms = (time.perf_counter() - began) * 1e3
                self._built[order.generation] = Generation(order.generation, order.members, connected, took_ms)
                self._drop_outdated()
                self._changed.notify_all()
        if in_time:
            self._send("GenerationPrepared", generation=order.generation)
        else:
            connected.close_soon()

    def _check_shard_size(self, store: Store, rank: int) -> None:
        """ModelMismatchError if rank 0 has replica groups of another size: each would wait for groups of its own."""
        if self.shard_size is None:
            return
        if rank == 0:
            store.set("shard_size", str(self.shard_size))
        else:
            check_shard_size(self.shard_size, int(store.get("shard_size")))

    def _connect_inner(
        self, store: Store, rank: int, size: int, number: int, suspect: Callable[[], None] | None
    ) -> Inner | None:
        """Connect the replica groups of generation `number`, if there are any."""
        if not self.shard_size:
            return None
        grid = Grid.of(size, self.shard_size)
        shards = (f"group{grid.group_of(rank)}", grid.same_group(rank))
        replicas = (f"shard{grid.shard_of(rank)}", grid.same_shard(rank))
        found = []
        for kind, ranks in (shards, replicas):
            own, count = ranks.index(rank), len(ranks)
            name = f"elastic-{number}-{kind}"
            group = build_group(store, own, count, name, self._backend(), COLLECTIVE_TIMEOUT)
            prove((group,), own, count, number, self._secret.key(), suspect, f"{kind}-")
            found.append(Group(group, own, count, self.interrupt))
        return Inner(grid, *found)

    def _give_up(self, number: int, error: Exception) -> None:
        """Report that a generation could not be built, unless it was, or that is known. It is never tried again."""
        with self._changed:
            if number not in self._building:
                return
            self._building.discard(number)
            self._given_up.add(number)
            self._overdue += isinstance(error, TimeoutError) and self._order.generation == number
        self.note_failure(number, error)
        self._publish("PreparationFailed", generation=number, why=str(error)[:500])

    def note_failure(self, number: int, error: Exception) -> None:
        """Note that a generation could not be entered: the next one is tried, for a bounded time if all wait for it."""
        with self._changed:
            if number != self._order.generation:
                return  # it was withdrawn
            self._failures += 1
            now = time.monotonic()
            self._failing_since = now if self._failures == 1 else self._failing_since
            failing_s = now - self._failing_since
            if self._order.kind == "Recover" and failing_s > FAILING_S and self._failures >= FEWEST_FAILURES:
                self._refused = RunError(
                    f"the workers could not connect to each other for {failing_s:.0f} s, in {self._failures} attempts; "
                    "a firewall, a network policy or a service mesh's proxy may be between them; the last failure: "
                    f"{error}"
                )
                self._changed.notify_all()
            warns = self._failures & (self._failures - 1) == 0  # the 1st, 2nd, 4th, 8th ...
        log = _log.warning if warns else _log.debug
        log("generation %d could not be entered, the next one is tried: %s", number, error)

    def _drop_outdated(self) -> None:
        """Close groups older than the one in force. A withdrawn one that is newer may have votes: it is kept."""
        current = self.adopted.number if self.adopted else 0
        for number in [n for n in self._built if n < current]:
            generation = self._built.pop(number)
            if generation.group:
                generation.group.close_soon()

    # The loop

    def vote(self) -> Generation | None:
        """Return the generation that this worker is prepared to switch to at the end of this step, or None."""
        with self._changed:
            order, adopted = self._order, self.adopted
            if order.kind != "Propose" or adopted is None or order.base != adopted.number:
                return None
            return self._built.get(order.generation)

    def adopt(self, generation: Generation) -> None:
        """Make `generation` the one in force."""
        with self._changed:
            previous, self.adopted = self.adopted, generation
            self._built.pop(generation.number, None)
            self._overdue = self._failures = 0
            if not (self._order.kind in {"Recover", "Release"} and self._order.generation != generation.number):
                self.interrupt.clear()
            self._drop_outdated()
        if previous and previous.group:
            previous.group.close_soon(CLOSE_AFTER_S)

    def wait_for_next(self, after: int) -> Generation | None:
        """Wait for a generation newer than `after` that this worker must adopt at once; None: it must leave.

        Raises CoordinatorError if the coordinator refused this process, RunError if none could be entered for long.
        """
        with self._changed:
            while True:
                if self._refused:
                    raise self._refused
                if self._order.kind == "Release":
                    _log.warning("the coordinator releases this worker (%s): it ends", self._order.why)
                    return None
                ready = self._built.get(self._order.generation)
                may_adopt = self._order.kind == "Recover" or (self._order.kind == "Propose" and self.adopted is None)
                if ready and may_adopt and ready.number > after:
                    self.interrupt.clear()
                    self._entering = ready.number
                    return ready
                self._changed.wait()

    def wait_for_release(self, timeout_s: float) -> None:
        """Keep connections open until the coordinator releases this worker, or `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._order.kind == "Release", timeout_s)
