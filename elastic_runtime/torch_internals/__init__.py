"""The only package that touches torch's private parts: process groups here, the others in `modules` and `fsdp`.

torch has no public way to build a second default process group beside the first one and then to swap them, which is
what keeps a resize off the training loop. Used here, all of `torch.distributed.distributed_c10d` (checked with torch
2.14 and 2.15): `_new_process_group_helper` builds a group without making it the default one, `_update_default_pg` and
`_world` make it so. torch 2.15's own `reconfigure` was rejected as the only way: private as well, experimental, and it
hangs when a collective is in flight. And of `torch.utils.data` what `get_worker_info` returns; and where `fully_shard`
keeps which modules it has wrapped, and GradScaler which optimizers it has seen in a step.
"""

from __future__ import annotations

import inspect
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    PrefixStore,
    ProcessGroupGloo,
    Store,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed import _composable_state as composable
from torch.distributed import distributed_c10d as c10d
from torch.utils.data._utils import worker as data_worker

from elastic_runtime.errors import RunError

__all__ = [
    "Store",
    "all_gather_flat",
    "build_group",
    "build_second_connections",
    "check_torch",
    "drop_group",
    "forget_composable_state",
    "forget_group",
    "forget_unscaled",
    "make_default",
    "name_group",
    "no_worker_info",
    "reduce_scatter_flat",
]

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import timedelta

_LOCK = threading.Lock()
"""torch's registry of groups is plain dictionaries, and groups are built in background threads."""


def check_torch() -> None:
    """RunError where this torch lacks what is needed, naming it."""
    if not dist.is_available():
        raise RunError(f"torch {torch.__version__} was built without torch.distributed; install a build that has it")
    for name in ("_new_process_group_helper", "_update_default_pg", "_world"):
        if not hasattr(c10d, name):
            raise RunError(f"torch {torch.__version__} has no torch.distributed.{name}; use torch 2.14 or 2.15")


def build_group(store: Store, rank: int, size: int, name: str, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """A process group like a default one, under a `name` of its own, that is not yet the default one.

    Blocks until all `size` ranks have come, without the interpreter's lock. Raises what the backend raises.
    """
    extra: dict[str, Any] = {}
    if "group_desc" in inspect.signature(c10d._new_process_group_helper).parameters:  # noqa: SLF001
        extra["group_desc"] = "default_pg"
    group, _ = c10d._new_process_group_helper(  # noqa: SLF001
        size,
        rank,
        [],
        c10d.Backend(backend),
        store,
        cast("Any", name),  # torch 2.15 gives names a type of their own, 2.14 does not
        timeout=timeout,
        **extra,
    )
    return cast("dist.ProcessGroup", group)


def build_second_connections(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return further connections between the members of a group, for tensors on the CPU, unregistered in torch.

    Blocks until all members have connected. Raises what gloo raises.
    """
    return cast("dist.ProcessGroup", ProcessGroupGloo(PrefixStore("second/", store), rank, size, timeout))


def all_gather_flat(group: dist.ProcessGroup, whole: torch.Tensor, part: torch.Tensor) -> dist.Work:
    """Start to gather equal parts of all ranks into `whole`, in order: the public function takes named groups only."""
    return group._allgather_base(whole, part)  # noqa: SLF001


def reduce_scatter_flat(group: dist.ProcessGroup, part: torch.Tensor, whole: torch.Tensor) -> dist.Work:
    """Start to sum `whole` over the ranks and to store this rank's equal part of it in `part`."""
    return group._reduce_scatter_base(part, whole, dist.ReduceScatterOptions())  # noqa: SLF001


def make_default(group: dist.ProcessGroup) -> None:
    """From now on `torch.distributed` means this group where none is named."""
    with _LOCK:
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}  # noqa: SLF001
        c10d._update_default_pg(group)  # noqa: SLF001


def name_group(group: dist.ProcessGroup, ranks: Sequence[int], *, own: bool = False) -> None:
    """Make a group of these ranks of the default one known to torch. `own`: torch has not made it."""
    with _LOCK:
        if own:
            _register_process_group(group.group_name, group)
        c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}  # noqa: SLF001


def drop_group(group: dist.ProcessGroup) -> None:
    """Close a group that is not the default one, or was; takes milliseconds to much longer: not for the loop."""
    forget_group(group)
    group.shutdown()


def forget_group(group: dist.ProcessGroup) -> None:
    """Remove a group from torch's registries, and leave it open."""
    with _LOCK:
        world = c10d._world  # noqa: SLF001
        if world.default_pg is group:
            c10d._update_default_pg(None)  # noqa: SLF001
        for registry in (world.pg_group_ranks, world.pg_map, world.pg_names, world.pg_backend_config):
            registry.pop(group, None)
        tag = world.pg_to_tag.pop(group, None)
        for each in (tag, ""):
            if each is not None and group in world.tags_to_pg.get(each, []):
                world.tags_to_pg[each].remove(group)
        _unregister_process_group(group.group_name)


@contextmanager
def no_worker_info() -> Iterator[None]:
    """An iterable dataset that is asked for its samples here does not leave any to other loader processes."""
    info, data_worker._worker_info = data_worker._worker_info, None  # noqa: SLF001
    try:
        yield
    finally:
        data_worker._worker_info = info  # noqa: SLF001


def forget_composable_state(module: torch.nn.Module) -> None:
    """`fully_shard` may wrap the module again: it refuses those that it finds here."""
    composable._module_state_mapping.pop(module, None)  # noqa: SLF001


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Reset which optimizers the scaler has unscaled and stepped in this step."""
    scaler._per_optimizer_states.clear()  # noqa: SLF001
