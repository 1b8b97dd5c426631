"""The worker actors of one attempt at a training: starts and monitors them, and reports the members to the coordinator.

How many train, Ray decides. As many actors exist as are wanted; those for which no node has resources wait in Ray's own
queue, like any other work (where there is an autoscaler, it sees them), and join the training once they are placed. The
least that a training begins with is one placement group, so that two trainings never each hold a part of what they
need. Polling for free resources was rejected: what is free now may be taken when the actor starts.

Invariant: a worker that has trained counts as exited only after Ray reports that its process has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError, RuntimeEnvSetupError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic_runtime.integrations.ray.ray_internals import draining_nodes
from elastic_runtime.integrations.ray.worker import FAILED, FINISHED, Outcome, TrainWorker

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_EVERY_S = 1.0
OTHER_FAILURES_S = 1.0
"""After one worker's error: it is usually that of all."""
LONGEST_DELAY_S = 30.0
DEATHS_COUNT_S = 60.0
WARN_AFTER_S = 10.0
WARN_AGAIN_S = 60.0
END_S = 10.0
TOO_FEW = ": add nodes, or lower ScalingConfig(num_workers=...)"

_log = logging.getLogger("ray.train.elastic_runtime")


@dataclass(frozen=True)
class Shape:
    """How many workers there may be, and what each of them holds."""

    least: int
    most: int
    resources: dict[str, float]
    strategy: str
    selector: dict[str, str] | None
    runtime_env: dict[str, Any]

    def options(self) -> dict[str, Any]:
        """Return the actor options for one worker's resources."""
        rest = dict(self.resources)
        known = {"num_cpus": rest.pop("CPU", 0), "num_gpus": rest.pop("GPU", 0)}
        if "memory" in rest:
            known["memory"] = rest.pop("memory")
        return {**known, "resources": rest, "runtime_env": self.runtime_env, "max_restarts": 0, "max_task_retries": 0}


@dataclass(eq=False)
class Slot:
    """One worker actor. `bundle` of the placement group, or None; `node` is "" until it is placed."""

    worker: str
    actor: Any
    bundle: int | None
    node: str = ""
    draining: bool = False
    released: bool = False
    ended: bool = False

    @property
    def trains(self) -> bool:
        """Whether its training function runs."""
        return bool(self.node) and not self.ended

    @property
    def usable(self) -> bool:
        """Whether it counts for the size that is wanted."""
        return not (self.ended or self.draining or self.released)


@dataclass(frozen=True)
class End:
    """How an attempt ended: with rank 0's value, or with errors by rank."""

    value: Any
    errors: dict[int, BaseException]
    text: str = ""


class Group:
    """See the module. `send(order, **fields)` reaches the coordinator; `begin(worker, provisional)` makes a Task."""

    def __init__(
        self,
        run: str,
        shape: Shape,
        name_worker: Callable[[], str],
        begin: Callable[[str, tuple[str, ...]], Any],
        send: Callable[..., None],
        on_end: Callable[[str], None],
    ) -> None:
        self._shape, self._name_worker, self._begin, self._send, self._on_end = shape, name_worker, begin, send, on_end
        self._run = run
        self._controller = ray.get_runtime_context().current_actor
        self._slots: list[Slot] = []
        self._follows: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._target: list[str] = []
        self._outcomes: list[Outcome] = []
        self._deaths: list[tuple[float, str, BaseException]] = []
        self._broken: BaseException | None = None
        self._draining: set[str] = set()
        self._began = self._warned = time.monotonic()
        self.most = shape.most
        bundles = [shape.resources] * shape.least
        selectors = [shape.selector] * shape.least if shape.selector else None
        self._gang = placement_group(bundles, strategy=shape.strategy, bundle_label_selector=selectors)

    async def run(self) -> End:
        """Run until the training has ended, however."""
        try:
            while (end := self._end()) is None:
                self._note_draining()
                self._fill()
                self._set_target()
                self._warn()
                await self._wait(LOOK_EVERY_S)
            if end.errors and self._follows:
                await asyncio.wait(self._follows, timeout=OTHER_FAILURES_S)
            return self._end() or end
        finally:
            await self._stop()

    def limit(self, most: int) -> None:
        """Limit the number of workers to `most` from now on."""
        self.most = most
        self._changed.set()

    def kill(self, worker: str, why: str) -> None:
        """End a worker's process, as the coordinator wants it."""
        for slot in self._slots:
            if slot.worker == worker and not slot.ended:
                _log.warning("worker %s is ended: %s", worker, why)
                ray.kill(slot.actor)

    def fail(self, error: BaseException) -> None:
        """End the attempt: something beside the workers failed."""
        self._broken = self._broken or error
        self._changed.set()

    def node_of(self, worker: str) -> str:
        """Return the id of the worker's node; "" for one that is not placed."""
        return next((slot.node for slot in self._slots if slot.worker == worker), "")

    # What should be

    def _note_draining(self) -> None:
        self._draining = draining_nodes()
        for slot in self._slots:
            slot.draining = slot.node in self._draining

    def _fill(self) -> None:
        """Start or release slots until their number is the wanted one: waiting ones first, then the newest."""
        if any(outcome.kind == FINISHED for outcome in self._outcomes):
            return
        usable = sorted((slot for slot in self._slots if slot.usable), key=lambda slot: not slot.node)
        for slot in usable[self.most :]:
            slot.released = True
            if not slot.node:
                ray.kill(slot.actor)
        if time.monotonic() >= self._start_again_at():
            self._move_into_bundles()
            for _ in range(self.most - sum(slot.usable for slot in self._slots)):
                self._start()

    def _move_into_bundles(self) -> None:
        """Start a worker that waits for resources in the placement group's, where some of them are free again.

        A bundle whose worker left a draining node moves with the node's end, and holds what nothing else can use.
        """
        waiting = [slot for slot in self._slots if slot.usable and not slot.node and slot.bundle is None]
        for slot in waiting[: len(self._free_bundles())]:
            slot.released = True
            ray.kill(slot.actor)

    def _start_again_at(self) -> float:
        """Return when a lost worker is replaced: at once, and later and later where one after the other is lost."""
        now = time.monotonic()
        recent = [at for at, _, _ in self._deaths if now - at < DEATHS_COUNT_S]
        return recent[-1] + min(LONGEST_DELAY_S, 2.0 ** (len(recent) - 2)) if len(recent) > 1 else 0.0

    def _start(self) -> None:
        bundle = next(iter(self._free_bundles()), None)
        options = self._shape.options()
        if bundle is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._gang, bundle)
        else:
            options["scheduling_strategy"] = "SPREAD" if "SPREAD" in self._shape.strategy else "DEFAULT"
            options["label_selector"] = self._shape.selector
        worker = self._name_worker()
        actor = ray.remote(TrainWorker).options(**options).remote(f"{self._run} {worker}")
        slot = Slot(worker, actor, bundle)
        self._slots.append(slot)
        task = asyncio.create_task(self._follow(slot))
        self._follows.add(task)
        task.add_done_callback(self._follows.discard)

    def _free_bundles(self) -> list[int]:
        """Return the bundles of the placement group that have no worker, and are not on a node that drains."""
        held = {slot.bundle for slot in self._slots if not slot.ended}
        free = [index for index in range(self._shape.least) if index not in held]
        if not (free and self._draining):
            return free
        nodes = placement_group_table(self._gang)["bundles_to_node_id"]
        return [index for index in free if nodes.get(index) not in self._draining]

    def _set_target(self) -> None:
        """Name the workers that should train: those on nodes that stay, or where there are none, all."""
        trains = [slot for slot in self._slots if slot.trains and not slot.released]
        target = [slot.worker for slot in trains if not slot.draining] or [slot.worker for slot in trains]
        enough = self._target or len(target) >= self._shape.least
        if enough and target and target != self._target and not self._outcomes_of(FINISHED):
            self._target = target
            self._send("target", workers=target)

    def _warn(self) -> None:
        now = time.monotonic()
        if self._target or now - self._began < WARN_AFTER_S or now - self._warned < WARN_AFTER_S:
            return
        self._warned = now + WARN_AGAIN_S - WARN_AFTER_S
        if placement_group_table(self._gang)["state"] == "CREATED":
            return  # they have what they need, and start
        least, each, there = self._shape.least, self._shape.resources, ray.cluster_resources()
        lacks = any(least * amount > there.get(name, 0) for name, amount in each.items())
        _log.warning(
            "the training waits for %d workers with %s each; the cluster has %s, of which %s is free%s",
            least, each, _countable(there), _countable(ray.available_resources()), TOO_FEW if lacks else "",
        )  # fmt: skip

    # What happens

    async def _wait(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return
        self._changed.clear()

    async def _follow(self, slot: Slot) -> None:
        """Start the training function once the actor is placed, and wait for its end."""
        outcome: Outcome | None = None
        try:
            slot.node = await slot.actor.place.remote()
            provisional = self._expected()
            self._changed.set()
            task = self._begin(slot.worker, provisional if slot.worker in provisional else (slot.worker,))
            outcome = await slot.actor.run.remote(self._controller, task)
        except RuntimeEnvSetupError as error:
            outcome = Outcome(FAILED, 0, error=error, text=str(error))
        except ActorUnavailableError as error:
            await self._until_dead(slot)
            self._lost(slot, error)
        except RayTaskError as error:
            outcome = Outcome(FAILED, 0, error=error.cause or error, text=str(error))
        except RayError as error:
            self._lost(slot, error)
        except Exception as error:  # noqa: BLE001  (what cannot be sent to a worker: a callback, a config)
            self.fail(error)
        slot.ended = True
        if outcome is not None:
            self._outcomes.append(outcome)
        if outcome is None or outcome.kind != FAILED:
            ray.kill(slot.actor)
            self._note_end(slot, finished=outcome is not None and outcome.kind == FINISHED)
        self._changed.set()

    def _note_end(self, slot: Slot, *, finished: bool) -> None:
        """Let the others continue without it.

        After an error of the loop they must not: the attempt has failed. Neither its end is reported, nor is its
        process ended before all others are (`_stop`): its broken connections would be taken for a lost worker's.
        """
        if slot.node and self._broken is None:
            self._send("gone", worker=slot.worker, finished=finished)
        self._on_end(slot.worker)

    def _expected(self) -> tuple[str, ...]:
        """Return the workers that train as far as is known; before the training, those that it begins with."""
        begins = not self._target
        return tuple(
            slot.worker
            for slot in self._slots
            if not slot.released and (slot.trains or (begins and slot.bundle is not None and not slot.ended))
        )

    def _lost(self, slot: Slot, error: BaseException) -> None:
        if slot.node and not slot.released:
            _log.warning("worker %s is lost: %s", slot.worker, str(error).partition("\n")[0])
            self._deaths.append((time.monotonic(), slot.worker, error))

    async def _until_dead(self, slot: Slot) -> None:
        """End a worker that Ray cannot reach, and return when Ray reports its end."""
        ray.kill(slot.actor)
        while True:
            try:
                await slot.actor.place.remote()
            except ActorUnavailableError:
                await asyncio.sleep(LOOK_EVERY_S)
            except RayActorError:
                return

    def _outcomes_of(self, kind: str) -> list[Outcome]:
        return [outcome for outcome in self._outcomes if outcome.kind == kind]

    def _end(self) -> End | None:
        """Return how the attempt has ended; None while it runs."""
        if self._broken is not None:
            return End(None, {-1: self._broken}, str(self._broken))
        if failed := self._outcomes_of(FAILED):
            errors = {outcome.rank: outcome.error for outcome in failed if outcome.error is not None}
            return End(None, errors, "\n".join(f"[Rank {outcome.rank}]:\n{outcome.text}" for outcome in failed))
        if any(slot.trains for slot in self._slots):
            return None
        if finished := self._outcomes_of(FINISHED):
            return End(min(finished, key=lambda outcome: outcome.rank).value, {})
        if not self._target:
            return None
        errors = {rank: error for rank, (_, _, error) in enumerate(self._deaths)}
        why = "; ".join(f"{worker}: {str(error).partition(chr(10))[0]}" for _, worker, error in self._deaths)
        return End(None, errors or {0: RuntimeError("all workers were asked to end")}, f"all workers were lost: {why}")

    async def _stop(self) -> None:
        for slot in self._slots:
            if not slot.ended:
                ray.kill(slot.actor)
        if self._follows:
            await asyncio.wait(self._follows, timeout=END_S)
        for slot in self._slots:
            ray.kill(slot.actor)  # of those whose loop had an error; the others have ended
        remove_placement_group(self._gang)


def _countable(resources: dict[str, float]) -> dict[str, float]:
    """Return the resources that people count, without those that name a node or a placement group."""
    hidden = ("node:", "object_store_memory", "memory", "bundle_")
    return {name: amount for name, amount in resources.items() if not name.startswith(hidden) and "_group_" not in name}
