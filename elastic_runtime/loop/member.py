"""This worker as a member of its job: joining, switching, recovering and leaving.

All of it happens in the loop's own thread and between two steps; what takes long was prepared before, by the threads
of `coordinator` and `generations`.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist

from elastic_runtime.errors import CollectiveError, LoopError
from elastic_runtime.loop.repeated_failures import RepeatedFailures
from elastic_runtime.membership import torchrun
from elastic_runtime.membership.coordinator_client import Coordinator, EventOutbox
from elastic_runtime.membership.generations import ALONE, Generation, Generations, Secret, check_shard_size
from elastic_runtime.membership.pair_authentication import raise_open_files
from elastic_runtime.membership.process_group import COLLECTIVE_TIMEOUT, Group, Inner
from elastic_runtime.membership.rendezvous_store import CoordinatorStore
from elastic_runtime.plan.order import mix_seed
from elastic_runtime.plan.replica_groups import Grid
from elastic_runtime.process.preemption import TERMINATED, Preemption, StableState
from elastic_runtime.process.process_exit import at_exit, leave
from elastic_runtime.process.progress_bar import Progress
from elastic_runtime.process.reporting import Reporter
from elastic_runtime.process.stall_watch import StallWatch
from elastic_runtime.process.stopped_peers import StoppedPeers
from elastic_runtime.sharded.checkpoint_schedule import Checkpoints, ReplicatedCheckpoints, ShardedCheckpoints
from elastic_runtime.state.join_exchange import exchange
from elastic_runtime.state.packing import pack
from elastic_runtime.state.random_streams import RandomStreams
from elastic_runtime.torch_internals import Store, check_torch

if TYPE_CHECKING:
    from elastic_runtime.membership.environment import Environment
    from elastic_runtime.plan.position import Position
    from elastic_runtime.reduction.step_modes import Mode
    from elastic_runtime.rehearsal.orders import RehearsedOrders
    from elastic_runtime.sharded.sharding import Sharding
    from elastic_runtime.sharded.wrap import Wrapping
    from elastic_runtime.state.training_state import TrainingState
    from elastic_runtime.validation.agreement import Agreement

RELEASE_S = 5.0

_log = logging.getLogger("elastic_runtime")


class Member:
    """This worker's membership. Without a coordinator it is always rank 0 of 1."""

    def __init__(
        self,
        environment: Environment,
        seed: int,
        *,
        checkpoint_every_s: float,
        keep_checkpoints: int,
        progress: bool | None = None,
    ) -> None:
        self._environment, self._seed = environment, seed
        self.streams = RandomStreams()
        self._outbox = EventOutbox(environment.worker_id, lambda: self._generations.adopted)
        self._holds_state = self.leaving = False
        self._failures = RepeatedFailures()
        secret = Secret(self._key, bool(environment.coordinator) and environment.local)
        self._backend = _backend if not environment.rehearse else lambda: "gloo"  # two workers may share a GPU
        outbox = self._outbox
        self._generations = Generations(
            environment.worker_id, self._store, outbox.send, outbox.publish, self._backend, secret
        )
        shown = Progress(sys.stderr, wanted=progress)
        self._began = time.perf_counter()
        self.reporter = Reporter(environment.report_file, environment.worker_id, self._outbox.publish, shown)
        replicated = ReplicatedCheckpoints(
            environment.checkpoint_dir, self.reporter, every_s=checkpoint_every_s, keep=keep_checkpoints
        )
        self._checkpoints = Checkpoints(replicated, self.streams, self.reporter)
        self._coordinator: Coordinator | RehearsedOrders | None = None
        self.rehearsed: RehearsedOrders | None = None
        if environment.rehearse:
            self._rehearse(environment)
        if environment.coordinator:
            check_torch()
            raise_open_files()
            self._coordinator = Coordinator(
                environment, self._generations.on_order, self._outbox.published, self._generations.on_refused
            )
            self._outbox.coordinator = self._coordinator
            self._coordinator.start()
            at_exit(self._coordinator.close)
        self.stable_state = StableState()
        watched = environment.coordinator and not environment.rehearse
        self._stall_watch = StallWatch(environment.stall_s if watched else 0.0, self._generations.interrupt)
        self._stopped_peers = StoppedPeers(
            environment.stopped_s if watched else 0.0,
            self._generations.interrupt,
            lambda: self.reporter.clock.step_s,
        )
        self._preemption: Preemption | None = None
        lost_with_all = not (environment.checkpoint_dir or environment.checkpoints_elsewhere)
        if lost_with_all and (environment.coordinator or environment.static):
            _log.warning(
                "ELASTIC_CHECKPOINT_DIR is not set: should all workers be lost at once, or the job be preempted, "
                "everything that was trained is lost; set it to a directory that outlives them"
            )
        saves = bool(environment.checkpoint_dir) and (environment.static is None or environment.static[0] == 0)
        if environment.coordinator or saves:
            self._preemption = Preemption(self._on_preempted)
            if environment.coordinator:
                self._preemption.begin()

    def _key(self) -> bytes:
        """Return the secret that only the workers of the job share."""
        return self.rehearsed.key if self.rehearsed else self._environment.token().encode()

    def _rehearse(self, environment: Environment) -> None:
        """Follow the timetable of a rehearsal in place of a coordinator."""
        from elastic_runtime.rehearsal.orders import rehearsed_orders  # noqa: PLC0415  (nothing else needs it)

        check_torch()
        self.rehearsed = rehearsed_orders(environment.rehearse, environment.worker_id, self._generations.on_order)
        self._coordinator = self._outbox.coordinator = self.rehearsed
        self.rehearsed.start()

    @property
    def generation(self) -> int:
        """The number of the generation in force; 0 before the first, and alone."""
        return self._generations.adopted.number if self._generations.adopted else 0

    @property
    def awaited(self) -> bool:
        """Whether something outside of this process waits for the training's end: a cluster, or a checkpoint."""
        return self.coordinated or bool(self._environment.checkpoint_dir or self._environment.report_file)

    @property
    def group(self) -> Group | None:
        """The members of the generation in force, connected; None alone."""
        return self._generations.adopted.group if self._generations.adopted else None

    @property
    def placed(self) -> bool:
        """Whether the rank is determined: with a coordinator, once the loop has begun."""
        return self._coordinator is None or self._generations.adopted is not None

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """Return (rank, world size). LoopError before they are determined."""
        if self._environment.static:
            return self._environment.static
        if self._coordinator is None:
            return 0, 1
        adopted = self._generations.adopted
        if adopted is None:
            raise LoopError("rank and world_size are unknown before the loop begins; use them inside job.epochs(...)")
        return adopted.members.index(self._environment.worker_id), len(adopted.members)

    @property
    def members(self) -> tuple[str, ...]:
        """The workers of the generation in force, by rank; empty before the first, and without a coordinator."""
        return self._generations.adopted.members if self._generations.adopted else ()

    def close(self) -> None:
        """End the connection to the coordinator, once it has read all events."""
        if self._coordinator:
            self._coordinator.close()

    def shard(
        self, state: TrainingState, wrapping: Wrapping, shard_size: int | None, *, every_s: float, keep: int
    ) -> Sharding:
        """Hold the state in shards from now on. `shard_size`: the workers of a replica group; None: all are one."""
        from elastic_runtime.sharded.mirror import Mirror  # noqa: PLC0415
        from elastic_runtime.sharded.sharding import Sharding  # noqa: PLC0415  (FSDP costs a second to import)

        self._generations.shard_size = shard_size or 0
        directory = self._environment.checkpoint_dir
        if directory and self._preemption is None:
            self._preemption = Preemption(self._on_preempted)
        checkpoints = ShardedCheckpoints(directory, self.reporter, every_s=every_s, keep=keep)
        mirror = Mirror(self._environment.mirror if self._coordinator is not None else 0)
        self._checkpoints.sharding = Sharding(
            state, wrapping, self.streams, checkpoints, lambda: self._preempted, mirror
        )
        return self._checkpoints.sharding

    @property
    def sharding(self) -> Sharding | None:
        """The sharding of the state, or None."""
        return self._checkpoints.sharding

    @property
    def coordinated(self) -> bool:
        """Whether a coordinator decides which workers are its peers."""
        return self._coordinator is not None

    def seed_of(self, step: int, stream: int) -> int:
        """Return the seed of one of the random streams of a step."""
        return mix_seed(self._seed, step, stream)

    def check_state(self, state: TrainingState) -> None:
        """Raise StateError, at the start, for a state that would be sent or saved and cannot be pickled."""
        if self.sharding is None and (self._environment.checkpoint_dir or self._coordinator):
            pack(state.capture())

    # Asked by the loop at each step

    def begin_work(self, step: int) -> None:
        """Note that the loop works for a step whose reduction comes next: others wait for it there."""
        if self.group is not None and self.group.size > 1:
            self._stall_watch.begin(step, self.group)
            if not self.sharding:  # its steps wait in other groups
                self.group.work_on(step)

    def end_work(self, *, reduced: bool = False) -> None:
        """Note that others do not wait for this worker's loop; `reduced`: since the step's reduction is complete."""
        if reduced:
            self._stall_watch.reduced()
        else:
            self._stall_watch.pause()
        if self.group is not None:
            self.group.work_on(None)

    @property
    def must_recover(self) -> bool:
        """Whether the generation in force was ended from outside."""
        return self._generations.interrupt.is_set

    def check(self) -> None:
        """Raise CollectiveError if the generation in force was ended from outside."""
        if self.must_recover:
            raise CollectiveError("the coordinator ended this generation")

    def vote(self) -> Generation | None:
        """Return the generation to which this worker is prepared to switch, or None."""
        return self._generations.vote()

    def report_progress(self, position: Position, total_steps: int | None, *, force: bool) -> None:
        """Report this worker's step time and, on rank 0, the progress of the training."""
        rank, workers = self.rank_and_size
        self.reporter.times(position.step, workers, force=force)
        if rank == 0:
            self.reporter.progress(position.step, position.epoch, total_steps, force=force)

    def report_halved(self, failed: int, now: int | None) -> None:
        """Report that an iteration of `failed` samples was out of memory; from now on they have at most `now`."""
        _log.warning("an iteration of %d samples does not fit into memory; going on with at most %s", failed, now)
        self.reporter.line("out_of_memory", samples=failed, max_batch=now)

    # Joining, switching, leaving

    def join(self, state: TrainingState, mode: Mode) -> None:
        """Wait for a generation and take over its state; alone, go on from the newest checkpoint.

        The coordinator is notified only now, when this thread has nothing left to do, because the others wait for a
        proposed worker. Rejected: rehearsing in the threads that build generations. The rehearsal of a second proposal
        overlapped with the state that the first one was receiving.
        """
        if self._environment.static:
            self._join_static(state, *self._environment.static)
        elif self._coordinator is None and self.sharding:
            self._join_static(state, 0, 1)
        elif self._coordinator is None:
            if not self._holds_state:
                self._checkpoints.load(state)
            self._holds_state = True
        elif self._generations.adopted is None:
            if not self.sharding:
                state.rehearse()
            self._outbox.publish("WorkerReady")
            self.reporter.phases.add("load", (time.perf_counter() - self._began) * 1e3)
            self._settle(state, self._next(after=0), "join")
        if self._preemption:
            self._preemption.save_by(
                lambda: self._checkpoints.in_time(state, mode, self.stable_state, leader=self.rank_and_size[0] == 0)
            )
            self._preemption.begin()

    def _join_static(self, state: TrainingState, rank: int, size: int) -> None:
        """Join torchrun's ranks, until they exit. Every worker begins where rank 0's checkpoint ends."""
        if self._generations.adopted is not None:
            return
        if not dist.is_initialized():
            if self._environment.static:
                torchrun.init_process_group(_backend(), rank, size, COLLECTIVE_TIMEOUT)
            else:
                torchrun.init_alone(_backend())
        assert dist.group.WORLD is not None
        group = Group(dist.group.WORLD, rank, size, self._generations.interrupt, inner=self._static_inner(rank, size))
        members = tuple(f"rank{other}" for other in range(size))
        generation = Generation(1, members, group)
        if rank == 0 and not self.sharding:
            self._holds_state = self._checkpoints.load(state)
        self._adopt(state, generation, received=self._exchange(group, 1, state), publish=False)

    def _static_inner(self, rank: int, size: int) -> Inner | None:
        """Connect the replica groups of torchrun's ranks, if there are any."""
        wanted, interrupt = self._generations.shard_size, self._generations.interrupt
        if wanted is None:
            return None
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(sizes, torch.tensor([wanted]))
        check_shard_size(wanted, int(sizes[0]))
        if not wanted:
            return None
        grid = Grid.of(size, wanted)
        shards, replicas = torchrun.inner_groups(grid, rank)
        return Inner(
            grid,
            Group(shards, grid.shard_of(rank), grid.shards, interrupt),
            Group(replicas, grid.group_of(rank), grid.groups, interrupt),
        )

    def switch_to(self, generation: Generation, state: TrainingState) -> None:
        """Make the switch that all members agreed on."""
        adopted = self._generations.adopted
        if self.sharding and adopted and adopted.group and generation.members:
            self.sharding.prepare_switch(adopted.group)
            if not generation.includes(self._environment.worker_id):
                old = {worker: rank for rank, worker in enumerate(adopted.members)}
                self.sharding.hand_over([old.get(worker, -1) for worker in generation.members])
        self._settle(state, generation, "agreed")

    def recover(self, state: TrainingState, error: CollectiveError | None) -> None:
        """Wait for the next generation after the loss of a peer, and enter it.

        Under torchrun there is none: rank 0 saves the state of the step's beginning, and all workers are restarted.
        """
        if self._environment.static:
            if self.rank_and_size[0] == 0 and not self.sharding:
                self._checkpoints.now(state)
            self.leave_if_preempted(state)
            raise error or CollectiveError("this process was asked to end")
        if error:
            members = self._generations.adopted.members if self._generations.adopted else ()
            self._failures.note(error, members, state)
            _log.warning("generation %d: %s; recovering", self.generation, error)
            self._report_failure(self._generations.adopted, state, error)
        else:
            _log.warning("generation %d was ended at step %d; recovering", self.generation, state.position.step)
        self._settle(state, self._next(after=self.generation), "recovered")

    def meet(self, kind: str, state: TrainingState) -> None:
        """Wait for all members at a place of the script outside of steps. CollectiveError where one was lost, LoopError
        where one is at another place.
        """
        if self.group is None or self.group.size == 1:
            return
        if self.sharding:
            self.group.barrier()
        else:
            self.group.meet(kind, state.position.step)

    def all_here(self, state: TrainingState, agreement: Agreement) -> bool:
        """Wait for all members, and compare what they have trained; False where one was lost."""
        try:
            self.meet("the end of the training", state)
            if self.group is not None and self.group.size > 1:
                agreement.check_all(self.group)
        except CollectiveError as error:
            if self._environment.static:
                self.recover(state, error)
            self._report_failure(self._generations.adopted, state, error)
            return False
        return True

    def finish(self, step: int) -> None:
        """Report that the last step is applied."""
        self.reporter.line("finished", step=step)
        self.reporter.close()
        self._outbox.publish("TrainingFinished", step=step)
        self.leave_loop(finished=True)
        self._checkpoints.settle()

    def leave_loop(self, *, finished: bool = False) -> None:
        """Leave SIGTERM to the script, which has left its loop.

        With a coordinator it is a worker to its end: the default action would end one that saves what it has trained.
        Only the script's own action is put back, once the training has finished, and in a pool's process at once.
        """
        preemption = self._preemption
        if preemption and (self._coordinator is None or preemption.is_the_scripts(finished=finished)):
            preemption.end()

    def leave_if_preempted(self, state: TrainingState) -> None:
        """Alone, SIGTERM means: save, and end with the signal's exit code. Others ask the coordinator."""
        # In a sharded job all workers save, so all must have agreed on it.
        preempted = self.sharding.saves.preempted if self.sharding else self._preempted
        if preempted and self._coordinator is None:
            self._note_leaving()
            self._checkpoints.now(state)
            self.reporter.line("left", generation=0, step=state.position.step)
            leave(TERMINATED)

    def _next(self, after: int) -> Generation | None:
        with self.reporter.phases("wait"):
            return self._generations.wait_for_next(after=after)

    def _settle(self, state: TrainingState, generation: Generation | None, cause: str) -> None:
        """Enter `generation`, or whatever comes in its place, or leave."""
        began, stood = time.perf_counter(), state.position.step
        while True:
            if generation is None or not generation.includes(self._environment.worker_id):
                self._leave(state, generation)
            try:
                received = self._enter(state, generation)
                break
            except CollectiveError as error:
                self._give_up(generation, state, error)
                generation = self._next(after=generation.number)
        with self.reporter.phases("adopt"):
            self._adopt(state, generation, received=received)
        self.reporter.clock.restart()
        pause_ms = 0.0 if cause == "join" else (time.perf_counter() - began) * 1e3  # a joiner has no loop yet
        self._outbox.retract("CollectiveFailed")
        self._outbox.retract("PreparationFailed")
        lost = max(stood - state.position.step, 0)  # where a shard was lost
        self._report_change(state, generation, cause, {"pause_ms": pause_ms, "lost_steps": lost})

    def _report_change(self, state: TrainingState, generation: Generation, cause: str, cost: dict[str, float]) -> None:
        """Report a generation that was entered, to the coordinator and in the report file."""
        what = {"generation": generation.number, "members": generation.members, "step": state.position.step, **cost}
        self._outbox.send("GenerationAdopted", **what)
        self.reporter.line(
            "resize",
            cause=cause,
            rank=self.rank_and_size[0],
            prepare_ms=round(generation.prepare_ms, 2),
            phases_ms=self.reporter.phases.take(),
            **what,
        )

    def _enter(self, state: TrainingState, generation: Generation) -> bool:
        """Bring all members to the newest state; return whether this worker received it."""
        group = generation.group
        if self.sharding and group:
            return self._exchange(group, generation.number, state)
        if not self._holds_state and generation.members[0] == self._environment.worker_id:
            state.forget_rehearsal()  # rank 0 without state: the first generation
            self._holds_state = self._checkpoints.load(state)
        if group is None or group.size == 1:
            return False
        return self._exchange(group, generation.number, state)

    def _exchange(self, group: Group, number: int, state: TrainingState) -> bool:
        if self.sharding is None:
            return exchange(group, state, self.reporter.phases, holds_state=self._holds_state)
        with self.reporter.phases("state"):
            received = self.sharding.enter(group, number)
        self._holds_state = not received
        return received

    def _adopt(self, state: TrainingState, generation: Generation, *, received: bool, publish: bool = True) -> None:
        if generation.group and publish:
            generation.group.publish()
        self._generations.adopt(generation)
        self._stall_watch.restart()
        self._stopped_peers.watch(self.group if self.group is not None and self.group.size > 1 else None)
        if received and not self._holds_state:
            self.streams.reseed(self.seed_of(state.position.step, self.rank_and_size[0]))
        self._holds_state = True

    def _give_up(self, generation: Generation, state: TrainingState, error: CollectiveError) -> None:
        self._generations.note_failure(generation.number, error)
        if generation.group:
            generation.group.close_soon()
        if self._generations.adopted is None:
            self._outbox.publish("PreparationFailed", generation=generation.number, why=str(error)[:500])
        else:
            self._report_failure(generation, state, error)

    def _report_failure(self, generation: Generation | None, state: TrainingState, error: CollectiveError) -> None:
        current = generation or ALONE
        self._outbox.publish(
            "CollectiveFailed",
            generation=current.number,
            members=current.members,
            step=state.position.step,
            why=str(error)[:500],
        )

    def _leave(self, state: TrainingState, generation: Generation | None) -> NoReturn:
        self._note_leaving()
        if generation is not None:
            left = len(generation.members)
            _log.info("this worker leaves the job at step %d, which has %d workers then", state.position.step, left)
            if not generation.members and (self.rank_and_size[0] == 0 or self.sharding):
                self._checkpoints.now(state)
            self.reporter.line("left", generation=generation.number, step=state.position.step)
            fields = {"generation": generation.number, "members": generation.members}
            self._outbox.publish("GenerationAdopted", step=state.position.step, **fields)
            self._generations.wait_for_release(RELEASE_S)
        self.close()
        leave(self.rehearsed.exit_code if self.rehearsed else 0)

    # Checkpoints

    def save_if_due(self, state: TrainingState) -> None:
        """Save a checkpoint between two steps, if one is due."""
        self._checkpoints.if_due(state, leader=self.rank_and_size[0] == 0)

    # The coordinator

    def _store(self, generation: int) -> Store:
        if self.rehearsed:
            return self.rehearsed.store(generation)
        return CoordinatorStore(self._environment, generation)

    # SIGTERM

    @property
    def _preempted(self) -> bool:
        return self._preemption is not None and self._preemption.requested.is_set()

    def _on_preempted(self) -> None:
        self._outbox.publish("LeaveRequested")
        if self._environment.static and not self.sharding:
            self._generations.interrupt.set()  # its peers are being ended as well

    def _note_leaving(self) -> None:
        self.leaving = True
        self.reporter.close()
        if self._preemption:
            self._preemption.leaving.set()


def _backend() -> str:
    """Return devices and libraries: NCCL if tensors may be on a GPU. Unchecked on real GPUs so far."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
