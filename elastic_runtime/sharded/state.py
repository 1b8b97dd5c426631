"""A training's state as one rank of a sharded job holds it: what is sharded, and what every rank has.

It has the structure of `TrainingState.capture`, with each tensor either one that all ranks have (buffers, the counters
of optimizers, random streams) or this rank's part of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from elastic_runtime.errors import CollectiveError
from elastic_runtime.sharded.layout import Sharded
from elastic_runtime.sharded.wrap import as_dtensor, shard_dim
from elastic_runtime.state.codec import Skeleton
from elastic_runtime.state.packing import holes, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class Parts:
    """`kinds`: of each tensor of the skeleton, in order; None: all ranks have it. Tensors are in the same order."""

    skeleton: Skeleton
    kinds: list[Sharded | None]
    shards: list[torch.Tensor]
    replicated: list[torch.Tensor]

    @property
    def sharded(self) -> list[Sharded]:
        """Return the tensors of which `shards` are the parts."""
        return [kind for kind in self.kinds if kind is not None]

    def tree(self, mesh: DeviceMesh | None) -> Any:
        """The state again, its sharded tensors DTensors over `mesh`; without one the parts are the whole."""
        shards, replicated = iter(self.shards), iter(self.replicated)
        tensors = []
        for kind in self.kinds:
            if kind is None:
                tensors.append(next(replicated))
            else:
                tensors.append(next(shards) if mesh is None else as_dtensor(kind, next(shards), mesh))
        return unpack(self.skeleton, tensors)


def take_apart(tree: object, dims: Mapping[str, int]) -> Parts:
    """A captured state: DTensors are sharded by their placements; others along `dims`, by their path, or not at all.

    The tensors are the state's own. UsageError where a DTensor is laid out in a way that cannot be resharded.
    """
    skeleton, tensors = pack(tree)
    parts = Parts(skeleton, [], [], [])
    paths = holes(skeleton) if dims else []  # which take as long as all of the rest
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            dim = shard_dim(partial(_path, skeleton, index), tensor)
        else:
            dim = dims.get(paths[index]) if dims else None
        kind = None if dim is None else Sharded(tensor.dtype, tuple(tensor.shape), dim)
        parts.kinds.append(kind)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        (parts.replicated if kind is None else parts.shards).append(local)
    return parts


def _path(skeleton: Skeleton, index: int) -> str:
    return holes(skeleton)[index]


def shared_parts(parts: Parts) -> dict[str, Any]:
    """All but the shards, as it is sent to a rank that holds none."""
    kinds = [None if kind is None else (kind.dtype, kind.shape, kind.dim) for kind in parts.kinds]
    return {"skeleton": parts.skeleton, "kinds": kinds, "replicated": parts.replicated}


def received_parts(shared: dict[str, Any]) -> Parts:
    """Return the parts that `shared_parts` has sent. Raises CollectiveError for anything else."""
    if not isinstance(shared.get("skeleton"), Skeleton):
        raise CollectiveError("a peer sent something else than the structure of its state")
    kinds = [None if kind is None else Sharded(*kind) for kind in shared["kinds"]]
    return Parts(shared["skeleton"], kinds, [], shared["replicated"])


def places(
    tree: Mapping[str, Any], aliases: Mapping[str, str], dims: Mapping[str, int], order: Mapping[str, list[str]]
) -> dict[str, int]:
    """Along which dimension each tensor of a whole, unsharded state is to be sharded, by its place.

    `aliases`: each name that a parameter has, and the one it has in `dims`; `order`: of each optimizer its parameters'
    names, as its state_dict counts them. What an optimizer keeps in a parameter's shape is sharded as that one is.
    """
    found = {f"/'model'/{alias!r}": dims[name] for alias, name in aliases.items()}
    shapes = {name: tree["model"][name].shape for name in dims}
    for part, names in order.items():
        for index, kept in tree["parts"][part].get("state", {}).items():
            name = names[index]
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and value.shape == shapes[name]:
                    found[f"/'parts'/{part!r}/'state'/{index!r}/{key!r}"] = dims[name]
    return found


def own_parts(whole: Parts, rank: int, ranks: int) -> Parts:
    """Return copies of one rank's parts of a complete state."""
    shards = []
    for kind, tensor in zip(whole.sharded, whole.shards, strict=True):
        start, stop = kind.part(rank, ranks)
        shards.append(tensor.narrow(kind.dim, start, stop - start).clone())
    return Parts(whole.skeleton, whole.kinds, shards, whole.replicated)
