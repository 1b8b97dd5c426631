"""FSDP's two collectives over a generation's group, by FSDP's own hooks for them.

Why not its defaults: a rank that waits for a peer which is alive but has given the step up would wait for half an hour,
and a lost peer would end the script inside `model(x)`, where the step cannot be rolled back. Therefore a collective
that fails is recorded here, and later ones do nothing: forward and backward pass end with numbers that mean
nothing, as large as usual, and `job.backward` repeats.

On CUDA FSDP's defaults stay: waiting in the host's thread would end their overlap with the computation.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from elastic_runtime.errors import CollectiveError
from elastic_runtime.torch_internals import forget_group, name_group
from elastic_runtime.torch_internals.fsdp import AllGather, ReduceScatter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from elastic_runtime.membership.process_group import Group


_NUMBERS = count()  # a process may run several jobs, one after another: torch refuses a second group of one name


class Link:
    """One generation's connection, and what broke it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.broken: CollectiveError | None = None
        self._replicas: _Replicas | None = None

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
        """The mesh of the generation, which is published; on the CPU sums over its replica groups can be given up."""
        inner = self.group.inner
        if inner is None or device != "cpu":
            return self.group.mesh(device, name)
        self._replicas = _Replicas(self, inner.replicas, f"{name}-replicas{next(_NUMBERS)}")
        name_group(self._replicas, self.group.grid.same_shard(self.group.rank), own=True)
        return self.group.mesh(device, name, self._replicas)

    def close(self) -> None:
        """Make torch forget what it has of this generation."""
        if self._replicas is not None:
            forget_group(self._replicas)
            self._replicas = None

    def install(self, modules: Sequence[FSDPModule]) -> None:
        """Use it for all collectives of these modules."""
        for module in modules:
            module.set_custom_all_gather(_AllGather(self))
            module.set_custom_reduce_scatter(_ReduceScatter(self))


class _Allocating:
    """Memory for a collective: nothing special."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Replicas(dist.ProcessGroup):
    """torch's view of the workers that have the same part in other replica groups, between which FSDP sums."""

    def __init__(self, link: Link, group: Group, name: str) -> None:
        super().__init__(group.rank, group.size)
        self._link, self._group, self._name = link, group, name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Return the name by which a mesh finds it."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """Return the name that torch shows."""
        return "elastic"

    def allreduce(self, tensors: list[torch.Tensor], _options: object = None) -> None:  # type: ignore[override]
        """Sum in place before it returns; after a lost peer the numbers stay this worker's own."""
        for tensor in tensors:
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
