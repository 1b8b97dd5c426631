"""FSDP's two collectives over a generation's group, by FSDP's own hooks for them.

Why not its defaults: a rank that waits for a peer which is alive but has given the step up would wait for half an hour,
and a lost peer would end the script inside `model(x)`, where the step cannot be rolled back. Therefore a collective
that fails is recorded here, and later ones do nothing: forward and backward pass end with numbers that mean
nothing, as large as usual, and `job.backward` repeats.

On CUDA FSDP's defaults stay: waiting in the host's thread would end their overlap with the computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from elastic_runtime.errors import CollectiveError, SettingsError, UsageError
from elastic_runtime.torch_internals import forget_group, name_group
from elastic_runtime.torch_internals.fsdp import AllGather, ReduceScatter, sum_type

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from elastic_runtime.membership.process_group import Group


_NUMBERS = count()  # a process may run several jobs, one after another: torch refuses a second group of one name


class Link:
    """One generation's connection, and what broke it. `exact`: gradients are exchanged in place of being summed, and
    `received` is what the last exchange brought; None: it failed.
    """

    def __init__(self, group: Group, *, exact: bool = False) -> None:
        self.group, self.exact = group, exact
        self.broken: CollectiveError | None = None
        self.received: Received | None = None
        self._views: list[dist.ProcessGroup] = []  # torch's, of connections

    def does(self, collective: Callable[[], None]) -> bool:
        """Run a collective; return whether it succeeded. After a failure no other one is tried."""
        if self.broken is None:
            try:
                collective()
            except CollectiveError as error:
                self.broken = error
        return self.broken is None

    def check(self) -> None:
        """CollectiveError where a collective of this generation has failed."""
        if self.broken is not None:
            raise self.broken

    def mesh(self, device: str, name: str) -> DeviceMesh:
        """The mesh of the generation, which is published. On the CPU sums over its replica groups can be given up, and
        with `exact` sums over shards are refused.
        """
        if device != "cpu":
            return self.group.mesh(device, name)
        inner, grid, rank = self.group.inner, self.group.grid, self.group.rank
        replicas = shards = None
        if inner is not None:
            replicas = _Replicas(self, inner.replicas, f"{name}-replicas{next(_NUMBERS)}")
            self._show(replicas, grid.same_shard(rank))
        if self.exact:
            shards = _Shards(self.group.shards, f"{name}-shards{next(_NUMBERS)}")
            self._show(shards, grid.same_group(rank))
        return self.group.mesh(device, name, replicas, shards)

    def _show(self, view: dist.ProcessGroup, ranks: list[int]) -> None:
        self._views.append(view)
        name_group(view, ranks, own=True)

    def close(self) -> None:
        """Make torch forget what it has of this generation."""
        while self._views:
            forget_group(self._views.pop())

    def install(self, modules: Sequence[FSDPModule], device: str) -> None:
        """Use it for all collectives of these modules; on CUDA for the exchanges of gradients only."""
        for module in modules:
            if device == "cpu":
                module.set_custom_all_gather(_AllGather(self))
            if self.exact:
                _check_sum_type(module)
                module.set_custom_reduce_scatter(_Exchange(self))
            elif device == "cpu":
                module.set_custom_reduce_scatter(_ReduceScatter(self))


class _Allocating:
    """Memory for a collective: nothing special."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _View(dist.ProcessGroup):
    """torch's view of some workers, of a name by which a mesh finds it."""

    def __init__(self, group: Group, name: str) -> None:
        super().__init__(group.rank, group.size)
        self._group, self._name = group, name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Return the name by which a mesh finds it."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """Return the name that torch shows."""
        return "elastic"


class _Shards(_View):
    """Those that share the state, where sums over shards would depend on their number: it gathers only."""

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], _options: object = None
    ) -> dist.Work:
        """Gather DTensors' parts."""
        return self._group.torch_group.allgather_into_tensor_coalesced(outputs, inputs)

    def allreduce(self, _tensors: list[torch.Tensor], _options: object = None) -> None:  # type: ignore[override]
        """Raise UsageError."""
        raise UsageError(
            "a sum or norm over sharded parameters or gradients, as of torch.nn.utils.clip_grad_norm_, depends on the "
            "number of workers, which reduction='exact' excludes; clip by job.clip_grad_norm_, and compute others from "
            "parameter.full_tensor() or parameter.grad.full_tensor()"
        )


class _Replicas(_View):
    """The workers that have the same part in other replica groups, between which FSDP sums."""

    def __init__(self, link: Link, group: Group, name: str) -> None:
        super().__init__(group, name)
        self._link = link

    def allreduce(self, tensors: list[torch.Tensor], _options: object = None) -> None:  # type: ignore[override]
        """Sum in place before it returns; after a lost peer the numbers stay this worker's own."""
        for tensor in [] if self._link.exact else tensors:
            self._link.does(partial(self._sum, tensor))

    def _sum(self, tensor: torch.Tensor) -> None:
        self._group.wait([self._group.all_reduce(tensor)])


class _AllGather(_Allocating, AllGather):
    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        group = self._link.group.shards
        if not self._link.does(lambda: group.all_gather_into(output_tensor, input_tensor)):
            output_tensor.view(group.size, -1).copy_(input_tensor.clone().view(1, -1))


class _ReduceScatter(_Allocating, ReduceScatter):
    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        if not self._link.does(lambda: self._link.group.shards.reduce_scatter_into(output_tensor, input_tensor)):
            output_tensor.zero_()


def _check_sum_type(module: FSDPModule) -> None:
    """Raise SettingsError where gradients are summed in another type than that of the parameters."""
    assert isinstance(module, torch.nn.Module)
    found, types = sum_type(module), {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
    if found is not None and types and found not in types:
        wanted = ", ".join(sorted(map(str, types)))
        raise SettingsError(
            f"reduction='exact' sums the gradients of shards in the type of the parameters, {wanted}, but mp_policy "
            f"sums them in {found}; give fully_shard an mp_policy=MixedPrecisionPolicy(..., reduce_dtype={wanted})"
        )


class _Exchange(_Allocating, ReduceScatter):
    """Each rank gets its part of every rank's gradients. In replica groups too: no sum between the groups follows."""

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        self._link.received = None
        self._link.does(partial(self._exchange, output_tensor, input_tensor))

    def _exchange(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        group = self._link.group
        sent = whole if group.grid.groups == 1 else whole.repeat(group.grid.groups)
        received, parts = torch.empty_like(sent), [part.numel()] * group.size
        group.wait([group.all_to_all(received, sent, parts, parts)])
        self._link.received = Received(part, received.view(group.size, -1))


@dataclass(frozen=True)
class Received:
    """What an exchange has brought. `part`: the memory that FSDP takes for the sum. Shape of `rows`: (ranks, part)."""

    part: torch.Tensor
    rows: torch.Tensor

    def of(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Return each rank's summand of a shard's gradient, which FSDP shows as a view of `part`."""
        assert gradient.untyped_storage().data_ptr() == self.part.untyped_storage().data_ptr()
        offset = gradient.storage_offset() - self.part.storage_offset()
        size, stride = gradient.size(), gradient.stride()
        return [row.as_strided(size, stride, row.storage_offset() + offset) for row in self.rows]
