"""Gradients: gathered into flat buckets as the backward pass produces them, summed over the workers while it continues.

Why not DistributedDataParallel: its bucket layout depends on the order of the first backward pass (a joiner would have
to rehearse it), it divides by the size it was built with, and it wraps the model.

Between the micro-batches of a step the sums live in the buckets and `parameter.grad` is None, so that whatever a loop
does with gradients in between (clipping, logging) does nothing. After the reduction `grad` is a view into the bucket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from elastic_runtime.errors import CollectiveError, LoopError
from elastic_runtime.reduction.backward_pass import NO_PASS, Pass
from elastic_runtime.reduction.bucket_layout import Bucket, Layout, Slot
from elastic_runtime.reduction.gradient_noise import squared_norm
from elastic_runtime.reduction.sparse_rows import add_rows, check_kind, sum_rows
from elastic_runtime.state.kept_gradients import with_gradient
from elastic_runtime.validation.leftover_gradients import Leftovers, uncleared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from elastic_runtime.membership.process_group import Group, Pending
    from elastic_runtime.reduction.gradient_noise import PartNorms


class GradientReducer:
    """Sums the gradients of a step over a group, together with metadata.

    `current`: the backward pass in force; gradients that arrive while it does not run are strays. `on_stray`: called
    with the parameter's name then, and the gradient stays where it is. `passive`: nothing is done to this step's
    gradients, and `factor` is 1. `norms`: gets each micro-batch's gradients, if the training measures their noise.
    """

    current = NO_PASS
    passive = False
    norms: PartNorms | None = None

    def __init__(self) -> None:
        self.on_stray: Callable[[str], None] = lambda _name: None
        self._leftovers = Leftovers()

    @property
    def metadata(self) -> torch.Tensor:
        """The caller's numbers, to be filled in before `reduce` and read after it. Shape: (metadata_size,)."""
        raise NotImplementedError

    @property
    def in_flight(self) -> bool:
        """Whether something of this step was sent already, so that it cannot be computed again alone."""
        raise NotImplementedError

    @property
    def kept(self) -> frozenset[str]:
        """The names of the parameters that had a gradient of zeros when the step began."""
        return frozenset()

    @property
    def empty(self) -> bool:
        """Whether all workers have skipped the whole step that was summed, in which this one skipped its part."""
        raise NotImplementedError

    def attach(self) -> None:
        """Register hooks for backward passes, if it has any."""

    def release(self) -> None:
        """Leave the model's backward passes alone, until the next `attach`."""

    def begin_pass(self, group: Group | None, begun: Pass) -> None:
        """Collect the gradients of this backward pass next."""
        raise NotImplementedError

    def end_pass(self) -> None:
        """Collect what is missing of its gradients: the backward pass is over."""
        raise NotImplementedError

    def reduce(self) -> None:
        """Sum the gradients and the metadata over all workers, after the last micro-batch of a step.

        Raises CollectiveError if a peer was lost; the gradients are then dropped, and the buffers replaced.
        """
        raise NotImplementedError

    def distribute(self, factor: float) -> None:
        """Set every `grad` to `factor` times the sum over all workers, or to None if no worker has one."""
        raise NotImplementedError

    def summed_square(self) -> float:
        """Return the squared norm of the gradients that `distribute` has set."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Drop the step's gradients; sums in flight keep the old buffers."""
        raise NotImplementedError


class BucketReducer(GradientReducer):
    """The common part of reducers over flat buckets.

    The layout is made for the parameters that are trained; it is made again where others are trained from a step on.
    """

    _layout: Layout
    _group: Group | None = None
    _launched = 0  # buckets whose sum was started
    _uncleared: frozenset[str] = frozenset()
    _kept: frozenset[str] = frozenset()

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        metadata_size: int,
        sparse: frozenset[torch.nn.Parameter] = frozenset(),
    ) -> None:
        super().__init__()
        self._parameters, self._metadata_size, self._sparse = list(parameters), metadata_size, sparse
        self._lay_out()

    def attach(self) -> None:
        """Register the hooks on the parameters. What gradients they have now is no part of the training."""
        self._leftovers = Leftovers()
        if self._layout.outdated:  # layers were frozen since it was made
            self._lay_out()
        else:
            self._layout.hook(self._receive)

    def release(self) -> None:
        """Remove the hooks from the parameters."""
        self._layout.unhook()

    @property
    def metadata(self) -> torch.Tensor:
        """The caller's numbers, at the end of the last bucket. Shape: (metadata_size,)."""
        return self._layout.metadata

    @property
    def kept(self) -> frozenset[str]:
        """The names of the parameters that had a gradient of zeros when the step began."""
        return self._kept

    @property
    def empty(self) -> bool:
        """Whether all workers have skipped the whole step that was summed, in which this one skipped its part."""
        return self.passive or self._layout.empty

    def summed_square(self) -> float:
        """Return the squared norm of the sums in the buckets, which no type of a parameter has rounded."""
        return squared_norm([slot.view for slot in self._layout.slots])

    def begin_pass(self, group: Group | None, begun: Pass) -> None:
        """Begin a micro-batch's pass. The gradients of padding count for nothing."""
        self.current = begun
        if begun.first:
            self._begin_step()
            self._launched = 0
        self._group = group if group is not None and group.size > 1 else None
        self._layout.begin_pass(first=begun.first)

    def _begin_step(self) -> None:
        if self._layout.outdated:
            self._layout.unhook()
            self._lay_out()
        self._uncleared = self._leftovers.look(self._parameters)
        self._kept = with_gradient(self._parameters)
        self._layout.keep()

    def _lay_out(self) -> None:
        self._layout = Layout(self._parameters, self._metadata_size, self._sparse)
        self._layout.hook(self._receive)

    def _receive(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Pass a gradient on. LoopError for two gradients of one parameter in one iteration."""
        if not self.current.running:
            self.on_stray(slot.name)
            return
        if slot.name in self._uncleared:
            raise uncleared(slot.name)
        if slot.fired == self._layout.iteration:
            raise LoopError(
                f"parameter {slot.name!r} got two gradients in one iteration; call job.backward once per iteration, "
                "and use torch.utils.checkpoint with use_reentrant=False"
            )
        check_kind(slot, gradient)
        self._on_gradient(slot, gradient.detach())  # with create_graph=True it has a graph

    def _on_gradient(self, slot: Slot, gradient: torch.Tensor) -> None:
        raise NotImplementedError

    def _collect(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Gather a bucket once it is complete: one operation on many tensors costs less than many on one."""
        bucket = self._layout.buckets[slot.bucket]
        bucket.arrived.append(slot)
        bucket.gradients.append(gradient)
        if bucket.complete:
            self._gather(bucket)
            if self._group is not None and self.current.micro.last and not self.current.held:
                self._launch_ready(self._group)

    def _gather(self, bucket: Bucket) -> None:
        raise NotImplementedError

    def _launch_ready(self, group: Group) -> None:
        """Start the sums of complete buckets, except the last one: its metadata is complete after the backward pass."""
        buckets = self._layout.buckets
        while self._launched < len(buckets) - 1 and buckets[self._launched].complete:
            self._launch(group, self._launched)
            self._launched += 1

    def _launch(self, group: Group, index: int) -> None:
        raise NotImplementedError

    def _finish(self, group: Group) -> None:
        raise NotImplementedError

    def _sum_over(self, group: Group) -> None:
        try:
            while self._launched < len(self._layout.buckets):
                self._launch(group, self._launched)
                self._launched += 1
            self._finish(group)
        except CollectiveError:
            self.abandon()
            raise

    @property
    def in_flight(self) -> bool:
        """Whether the sum of a bucket was started."""
        return self._launched > 0


class FastReducer(BucketReducer):
    """Sums by all-reduce: equal to one worker's sum within rounding."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        metadata_size: int,
        sparse: frozenset[torch.nn.Parameter] = frozenset(),
    ) -> None:
        super().__init__(parameters, metadata_size, sparse)
        self._works: list[Pending] = []
        self._all_used = False  # by this worker, in this step: no other worker's flags are needed

    def begin_pass(self, group: Group | None, begun: Pass) -> None:
        """Use autograd's own gradients with one worker, if one micro-batch is a step."""
        super().begin_pass(group, begun)
        self.passive = self._group is None and begun.first and begun.micro.last and not begun.micro.padding

    def end_pass(self) -> None:
        """Gather the gradients of buckets that are not complete."""
        for bucket in self._layout.buckets:
            if not bucket.complete:
                self._gather(bucket)

    def reduce(self) -> None:
        """Sum the buckets over the workers, and wait for those that are summed already."""
        if self.passive:
            return
        used = self._layout.used.fill_(1)
        complete = not self._layout.sparse and all(bucket.complete for bucket in self._layout.buckets)
        touched = [] if complete else self._layout.touched()
        self._all_used = all(touched)
        if not self._all_used:
            used.copy_(self._layout.present(touched))
            for slot, was_touched in zip(self._layout.slots, touched, strict=True):
                if not was_touched:
                    slot.view.zero_()
                    slot.rows = None
        if self._group is not None:
            self._sum_over(self._group)

    def distribute(self, factor: float) -> None:
        """Set each `grad` to `factor` times its view of the summed bucket."""
        if self.passive:
            self._layout.fill_kept()
        else:
            self._layout.distribute(factor, all_used=self._all_used)

    def abandon(self) -> None:
        """Drop the step's gradients; sums in flight keep the old buckets."""
        self._works, self._launched = [], 0
        self._layout.forget()

    def _on_gradient(self, slot: Slot, gradient: torch.Tensor) -> None:
        if not self.passive:
            slot.fired = self._layout.iteration
            if slot.sparse:
                self._collect_rows(slot, gradient)
            else:
                self._collect(slot, gradient)

    def _collect_rows(self, slot: Slot, gradient: torch.Tensor) -> None:
        first, padding = slot.touched != self._layout.step, self.current.micro.padding
        if not padding:
            add_rows(slot, gradient, scale=self.current.scale, first=first)
        elif first:
            slot.rows = None
        slot.touched = self._layout.step
        slot.parameter.grad = None

    def _gather(self, bucket: Bucket) -> None:
        """Write the bucket's gradients into it: copied if they are the step's first, else added."""
        step, scale, padding = self._layout.step, self.current.scale, self.current.micro.padding
        gradients, bucket.gradients = bucket.gradients, []
        if self.norms is not None:
            self.norms.add(gradients, scale)
        pairs = list(zip(bucket.arrived, gradients, strict=True))
        fresh = [(slot.view, gradient) for slot, gradient in pairs if slot.touched != step]
        more = [(slot.view, gradient) for slot, gradient in pairs if slot.touched == step and not padding]
        if fresh and padding:
            torch._foreach_zero_([view for view, _ in fresh])
        elif fresh:
            torch._foreach_copy_([view for view, _ in fresh], [gradient for _, gradient in fresh])
            if scale != 1.0:
                torch._foreach_mul_([view for view, _ in fresh], scale)
        if more:
            torch._foreach_add_([view for view, _ in more], [gradient for _, gradient in more], alpha=scale)
        for slot in bucket.arrived:
            slot.touched = step
            slot.parameter.grad = None

    def _launch(self, group: Group, index: int) -> None:
        self._works.append(group.all_reduce(self._layout.buckets[index].flat))

    def _finish(self, group: Group) -> None:
        if self._layout.sparse:
            sum_rows(self._layout.sparse, group)
        group.wait(self._works)
        self._works, self._launched = [], 0
