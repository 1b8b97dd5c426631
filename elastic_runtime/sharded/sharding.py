"""A training whose state is sharded over the ranks of a generation (FSDP2), and its transfer to the next generation.

On entry to a generation the workers first exchange what they hold. The result is always a model wrapped for the new
group with this rank's parts in it:

    all parts exist on members or leaving workers     resharding in memory (`transfer`)
    a part is lost with its worker                    its copy in another worker's memory (`mirror`), else all return
                                                      to the newest complete checkpoint
    no worker holds state, the training begins        a checkpoint, or else rank 0's model, cut into parts
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import CheckpointError, CollectiveError
from elastic_runtime.plan.replica_groups import Grid
from elastic_runtime.sharded import files, mirror
from elastic_runtime.sharded.agreed_saves import AgreedSaves
from elastic_runtime.sharded.collectives import Link
from elastic_runtime.sharded.files import Saved
from elastic_runtime.sharded.holdings import (
    Holding,
    complete,
    exchange,
    free_for_copies,
    new_number,
    others_wait_in_round,
    round_of,
)
from elastic_runtime.sharded.shared_memory import Address, open_segment
from elastic_runtime.sharded.state import Parts, own_parts, places, received_parts, shared_parts, take_apart
from elastic_runtime.sharded.transfer import Resharding
from elastic_runtime.state import checkpoint
from elastic_runtime.state.join_exchange import OTHER_MODEL, check_same
from elastic_runtime.state.transfer import receive_state, send_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from elastic_runtime.membership.process_group import Group
    from elastic_runtime.sharded.checkpoint_schedule import ShardedCheckpoints
    from elastic_runtime.sharded.mirror import Mirror, Source
    from elastic_runtime.sharded.wrap import Wrapping
    from elastic_runtime.state.random_streams import RandomStreams
    from elastic_runtime.state.training_state import TrainingState

_NOTHING = Saved(-1, 0, 0)

_log = logging.getLogger("elastic_runtime")


@dataclass
class _Move:
    """From the ranks of an `old` generation, of which new rank r was `held[r]`, or none (-1). `tree`: the state as this
    rank holds it, `whole` where it is not sharded yet. `source`: the copies from which the state comes instead.
    """

    held: list[int]
    old: Grid
    tree: dict[str, Any] | None = None
    whole: bool = False
    source: Source | None = None


class Sharding:
    """One worker's part of a sharded training. `is_preempted`: whether this worker was asked to leave. `exact`: whether
    gradients are exchanged instead of summed.
    """

    exact = False

    def __init__(
        self,
        state: TrainingState,
        wrapping: Wrapping,
        streams: RandomStreams,
        checkpoints: ShardedCheckpoints,
        is_preempted: Callable[[], bool],
        mirror: Mirror,
    ) -> None:
        self.wrapping, self.checkpoints, self.is_preempted = wrapping, checkpoints, is_preempted
        self._mirror = mirror
        self._mirrors: bool | None = None  # whether copies are made; None: not known yet
        self._state, self._streams = state, streams
        self._fingerprint = state.fingerprint()  # later, names may be of unsharded parameters of another type
        self.device = next(state.model.parameters()).device
        self._initial: dict[str, Any] | None = None  # the whole state, until the training has begun
        self._held: tuple[int, int, Grid] | None = None  # generation, rank and all ranks
        self._wrapped = self._began = False
        self._old_group: Group | None = None  # of a switch that is being made
        self._link: Link | None = None
        self.saves = AgreedSaves(checkpoints, state, lambda: self.link.group, self._capture, self._capture_standing)

    @property
    def link(self) -> Link:
        """The connection of the generation in force."""
        assert self._link is not None
        return self._link

    # Changes of membership

    def prepare_switch(self, group: Group) -> None:
        """Keep the group for the switch that all its members agreed on: leaving workers still send their parts."""
        self._old_group = group

    def hand_over(self, held: Sequence[int]) -> None:
        """Send this leaving worker's parts to those that stay, if none of them has the same. `held`: of each new rank
        its old one, or -1.
        """
        group, self._old_group = self._old_group, None
        if group is None or self._held is None:
            return
        self._mirror.leave_generation(agreed=True)
        parts = take_apart(self._state.capture(), {})
        resharding = Resharding(parts.sharded, group.grid, held, Grid.of(len(held), None), self.device)
        try:
            resharding.hand_over(group, group.rank, parts.shards)
        except CollectiveError as error:
            _log.warning("the shards of this worker could not be handed over: %s", error)

    def give_up(self) -> None:
        """Hold no state until the next generation: what is held is in the middle of a step."""
        self._held = None

    def enter(self, group: Group, number: int) -> bool:
        """Wrap for this group, with the newest state; whether this worker's random streams are to be new ones.

        Raises CollectiveError where a member was lost, CheckpointError where a shard is and no checkpoint is there.
        """
        old_group, self._old_group = self._old_group, None
        self._mirror.leave_generation(agreed=old_group is not None)
        if not self._wrapped and self._initial is None:
            self._initial = self._state.capture()
        holdings = self._exchange_holdings(group, bridged=old_group is not None)
        received = self._enter(group, number, holdings, old_group)
        self._start_mirror(group, number, holdings)
        return received

    def _enter(self, group: Group, number: int, holdings: list[Holding], old_group: Group | None) -> bool:
        newest = max(each.number for each in holdings)
        held = [each.old if each.number == newest > 0 else -1 for each in holdings]
        if complete(holdings, held):
            old = next(Grid(each.ranks, each.shards) for each in holdings if each.number == newest)
            self._initial = None
            fresh = held[group.rank] < 0
            self._move(group, number, _Move(held, old, None if fresh else self._state.capture()), old_group)
            if old_group is None and sum(each >= 0 for each in held) < old.ranks:
                _log.warning("generation %d: a worker was lost; others have its shards: no step is lost", number)
            return fresh
        fresh, before = not any(each.began for each in holdings), holdings[group.rank].step
        if not fresh and (source := self._copies(group, round_of(holdings))) is not None:
            return self._restore_copies(group, number, source, before)
        saved = self._restore(group, number)
        if saved is not None:
            self._mirror.forget_all_but(None)
            self._report_restored(number, saved, before, fresh=fresh)
            return group.rank > 0
        if not fresh or not holdings[0].whole:
            raise CheckpointError(
                f"generation {number}: a worker was lost, its shards of the model with it, and there is neither a copy "
                "of them nor a checkpoint; set ELASTIC_CHECKPOINT_DIR, or lower checkpoint_every_s"
            )
        first = self._initial if group.rank == 0 else None
        self._move(group, number, _Move([0] + [-1] * (group.size - 1), Grid(1, 1), first, whole=True), None)
        return group.rank > 0

    def _exchange_holdings(self, group: Group, *, bridged: bool) -> list[Holding]:
        number, old, grid = self._held or (0, -1, Grid(0, 0))
        step = self._state.position.step if self._held or self._began else -1
        whole = self._initial is not None
        probe = self._mirror.probe
        copies = (self._mirror.every, self._mirror.nbytes > 0, mirror.node_number(), *mirror.free_memory())
        mine = Holding(
            step,
            self._fingerprint,
            number,
            old,
            grid.ranks,
            grid.shards,
            bridged,
            whole,
            self._began,
            new_number(),
            *copies,
            self._state.rounds,
            self._state.in_round,
            probe.pid,
            probe.descriptor,
            probe.token,
        )
        holdings = exchange(group, mine)
        self.saves.begin_generation(holdings[0].save)
        source = max(range(group.size), key=lambda rank: (holdings[rank].number, -rank))
        check_same(group, source, [each.fingerprint for each in holdings], OTHER_MODEL)
        self._state.rounds = max(each.rounds for each in holdings)
        self._state.awaited = self._began and not mine.in_round and others_wait_in_round(holdings)
        in_rounds = {each.rounds for each in holdings if each.in_round}
        reached = all(each.in_round for each in holdings) or self._state.position.index > 0  # in the epoch of the step
        self._state.round_is_shared = len(in_rounds) <= 1 and reached and all(each.began for each in holdings)
        return holdings

    def _move(self, group: Group, number: int, move: _Move, old_group: Group | None) -> dict[str, Any]:
        """Bring the parts of the old ranks to those of the new group; return the state as this rank has it now."""
        mesh = self._rewrap(group, number)
        parts, shards = self._share_structure(group, move)
        provided = move.source.provided if move.source else None
        moving = Resharding(parts.sharded, move.old, move.held, group.grid, self.device, provided)
        parts.shards = moving.run(group, old_group, shards)
        tree = self._take(parts, mesh)
        self._hold(group, number)
        return tree

    def _rewrap(self, group: Group, number: int) -> DeviceMesh:
        """From here on this worker holds nothing, until it holds its part of the new layout."""
        self._held, self._wrapped = None, True
        if self._link is not None:
            self._link.close()
        group.publish()
        self._link = Link(group, exact=self.exact)
        mesh = self._link.mesh(self.device.type, f"elastic{number}")
        self.wrapping.rewrap(mesh)
        self._link.install(self.wrapping.modules, self.device.type)
        return mesh

    def _hold(self, group: Group, number: int) -> None:
        self._held, self._began, self._initial = (number, group.rank, group.grid), True, None

    def _share_structure(self, group: Group, move: _Move) -> tuple[Parts, dict[int, list[torch.Tensor]]]:
        """All but the shards: from the first rank that holds some to those that hold none. And the shards that this
        rank has, by their part.
        """
        source = next(rank for rank, old in enumerate(move.held) if old >= 0)
        tree, move.tree = move.tree, None  # its shards are given up one after another
        parts, shards = self._mirror.part(move.source.copied) if move.source else (None, {})
        if tree is not None:
            parts = take_apart(tree, self._places(tree) if move.whole else {})
            shards = {move.old.shard_of(move.held[group.rank]): parts.shards}
        if parts is None:
            return received_parts(receive_state(group, source)), {}
        if group.rank == source:
            shared = shared_parts(parts)
            for rank in [rank for rank, old in enumerate(move.held) if old < 0]:
                send_state(group, rank, shared)
        return parts, shards

    def _places(self, tree: dict[str, Any]) -> dict[str, int]:
        return places(tree, self.wrapping.aliases, self.wrapping.dims, self.wrapping.order)

    def _take(self, parts: Parts, mesh: DeviceMesh) -> dict[str, Any]:
        """Load model and training state from the parts; return everything that was captured."""
        tree: dict[str, Any] = parts.tree(mesh)
        self._state.check(tree)
        self.wrapping.assign(tree["model"])
        self._state.freeze(tree)
        others = {name: value for name, value in tree["model"].items() if name not in self.wrapping.aliases}
        self._state.model.load_state_dict(others, strict=False)
        self._state.load_parts(tree)
        return tree

    # The mirror

    def begin_step(self, streams: dict[str, Any]) -> None:
        """Copy this worker's part for another worker, if it is due. `streams`: random, of the step's beginning."""
        capture = lambda: take_apart({**self._state.capture(), "streams": streams}, {})  # noqa: E731
        self._mirror.begin_step(self._state.position.step, capture)

    def end_step(self) -> None:
        """Before the step's sum: wait for the copies. Raises CollectiveError if a peer was lost."""
        self._mirror.settle()

    def begin_round(self) -> None:
        """Copy this worker's part before work of all workers. Raises CollectiveError if a peer was lost."""
        if self._mirror.in_flight:  # of a step that the script has left by `break`
            self._mirror.settle()
            self.link.group.barrier()
        self._mirror.begin_round(self._state.rounds, self._state.position.step, self._capture)
        self._mirror.settle()

    def end_round(self) -> None:
        """Drop these copies: all workers have completed the work."""
        self._mirror.end_round()

    def _start_mirror(self, group: Group, number: int, holdings: list[Holding]) -> None:
        """Have copies made in this generation, if all workers want them and have memory. All decide alike, by what they
        have exchanged only: a worker that made copies alone would wait for the others without end.
        """
        every = max(each.every for each in holdings)
        if group.size == 1 or not all(each.every for each in holdings):
            return
        size = sum(parameter.numel() * parameter.element_size() for parameter in self.wrapping.parameters().values())
        need = mirror.needed(size, group.grid)
        free = free_for_copies(holdings, need)
        has_room = free >= need
        if has_room != self._mirrors and group.rank == 0:
            self._report_mirror(every, need, free, group.grid, has_room=has_room)
        self._mirrors = has_room
        if has_room and group.grid.groups > 1:
            self._mirror.enter(group, number, [], every)
        elif has_room:
            to = mirror.mirrors_of([each.node for each in holdings])
            ward = holdings[to.index(group.rank)]
            near = ward.node == holdings[group.rank].node
            maps = near and open_segment(Address(ward.pid, ward.descriptor, 0, ward.token)) is not None
            maps_ward = group.all_gather(torch.tensor([maps]))[:, 0].tolist()
            self._mirror.enter(group, number, to, every, [maps_ward[rank] for rank in to])

    def _report_mirror(self, every: int, need: int, free: int, grid: Grid, *, has_room: bool) -> None:
        own = grid.groups > 1  # another group has the shards too: a worker copies its own
        if has_room:
            steps, to = "step" if every == 1 else f"{every} steps", "host memory" if own else "another worker"
            _log.info("each worker's shards are copied to %s every %s: %s of memory", to, steps, _mib(need))
            return
        _log.warning(
            "the workers' shards are not copied to %s: the copies need %s of host memory on each, and %s are free; "
            "%s costs the steps since the last checkpoint (ELASTIC_MIRROR=off ends this)",
            "host memory" if own else "other workers",
            _mib(need),
            _mib(free),
            "a worker that is lost when only some others have applied a step" if own else "a lost worker",
        )

    def _copies(self, group: Group, current_round: int) -> Source | None:
        """Return the copies from which the state can be restored, if they are not older than the newest checkpoint."""
        directory = self.checkpoints.directory
        saved = next(iter(files.whole_ones(directory)), None) if directory and group.rank == 0 else None
        return self._mirror.source(group, saved.step if saved else -1, current_round)

    def _restore_copies(self, group: Group, number: int, source: Source, before: int) -> bool:
        step, shards = source.copied.step, source.copied.shards
        tree = self._move(group, number, _Move(source.held, Grid(shards, shards), source=source), None)
        self._mirror.forget_all_but(source.copied)
        received = source.held[group.rank] < 0
        if not received:
            self._streams.load(tree["streams"])
        _log.warning(
            "generation %d: a worker was lost; its shards of the model come from the copies of step %d: %d steps are "
            "repeated",
            number,
            step,
            max(before - step, 0),
        )
        return received

    # Checkpoints

    def _capture_standing(self) -> dict[str, Any]:
        """Return the state during a step, when modules have gathered parameters, possibly of another type."""
        return {**self._state.capture(self.wrapping.standing()), "fingerprint": self._fingerprint}

    def _capture(self) -> Parts:
        return take_apart({**self._state.capture(), "streams": self._streams.capture()}, {})

    def _restore(self, group: Group, number: int) -> Saved | None:
        """Load the parts of the newest checkpoint that all workers can read; None: there is none."""
        self.checkpoints.settle()
        directory = self.checkpoints.directory
        candidates = iter(files.whole_ones(directory) if directory and group.rank == 0 else [])
        mesh: DeviceMesh | None = None
        while True:
            mine = next(candidates, _NOTHING)
            saved = Saved(*group.all_gather(torch.tensor(dataclasses.astuple(mine), dtype=torch.int64))[0].tolist())
            if saved == _NOTHING:
                return None
            mesh = mesh or self._rewrap(group, number)
            parts = self._read(saved, group)
            if int(group.all_gather(torch.tensor([parts is not None])).min()) and parts is not None:
                break
        parts.shards = [shard.to(self.device) for shard in parts.shards]
        tree = self._take(parts, mesh)
        if group.rank == 0:
            self._streams.load(tree["streams"])
        self._hold(group, number)
        return saved

    def _read(self, saved: Saved, group: Group) -> Parts | None:
        directory, grid = self.checkpoints.directory, group.grid
        shard = grid.shard_of(group.rank)
        try:
            if saved.ranks:
                return files.read_parts(directory, saved, shard, grid.shards)
            tree = checkpoint.load(saved.path(directory, 0))[1]
            self._state.check(tree)
            return own_parts(take_apart(tree, self._places(tree)), shard, grid.shards)
        except CheckpointError as error:
            _log.warning("%s; falling back to the one before", error)
            return None

    def _report_restored(self, number: int, saved: Saved, before: int, *, fresh: bool) -> None:
        if not fresh:
            _log.warning(
                "generation %d: a worker was lost, its shards of the model with it: back to %s; %d steps are repeated",
                number,
                saved,
                max(before - saved.step, 0),
            )
        self.checkpoints.note_restored(saved.step)


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"
