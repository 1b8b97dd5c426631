"""Under torchrun: rendezvous with the other ranks.

A store that torchrun's agent keeps (`TORCHELASTIC_USE_AGENT_STORE`) outlives the workers, and holds the addresses of
those that were ended: torch's own rendezvous then connects to the dead. Here the ranks first agree on a name that
nobody has used. `TORCHELASTIC_RESTART_COUNT` is no such name: each node counts its own restarts.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from elastic_runtime.errors import RunError

if TYPE_CHECKING:
    from elastic_runtime.plan.replica_groups import Grid
    from elastic_runtime.torch_internals import Store

MEETING_S = 300.0
_POLL_S = 0.02
_ROUND = "elastic/round"


def init_process_group(backend: str, rank: int, size: int, timeout: timedelta) -> None:
    """torch's default group over all ranks, from the environment. RunError where not all come within 5 minutes."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=MEETING_S),
    )
    name = agree_on_round(store, rank, size)
    dist.init_process_group(
        backend, store=PrefixStore(f"elastic/{name}", store), rank=rank, world_size=size, timeout=timeout
    )


def init_alone(backend: str) -> None:
    """torch's default group of this process alone, which a mesh needs."""
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def inner_groups(grid: Grid, rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's replica group, and the group of the ranks that hold the same part; all ranks call this."""
    groups = [grid.same_group(first) for first in range(0, grid.ranks, grid.shards)]
    replicas = [grid.same_shard(shard) for shard in range(grid.shards)]
    of_shards = [dist.new_group(ranks) for ranks in groups][grid.group_of(rank)]
    of_replicas = [dist.new_group(ranks) for ranks in replicas][grid.shard_of(rank)]
    return cast("dist.ProcessGroup", of_shards), cast("dist.ProcessGroup", of_replicas)


def agree_on_round(store: Store, rank: int, size: int) -> str:
    """A name that these `size` processes have in common, and no process before them.

    Rank 0 names the round; the others answer with names of their own, and go on only when rank 0 has repeated theirs:
    keys of earlier processes in the store do not affect them.
    """
    end = time.monotonic() + MEETING_S
    return _lead(store, size, end) if rank == 0 else _follow(store, rank, end)


def _lead(store: Store, size: int, end: float) -> str:
    name = uuid.uuid4().hex
    answers = [f"elastic/{name}/{rank}" for rank in range(1, size)]
    store.set(_ROUND, name)
    while answers and not store.check(answers):
        _wait(end, "ranks to answer")
    store.set(f"elastic/{name}/all", json.dumps([store.get(answer).decode() for answer in answers]))
    return name


def _follow(store: Store, rank: int, end: float) -> str:
    own = uuid.uuid4().hex
    while True:
        name = store.get(_ROUND).decode()
        store.set(f"elastic/{name}/{rank}", own)
        complete = f"elastic/{name}/all"
        if store.check([complete]) and own in json.loads(store.get(complete)):
            return name
        _wait(end, "rank 0 to begin")


def _wait(end: float, what: str) -> None:
    if time.monotonic() > end:
        raise RunError(f"waited {MEETING_S:g} s for {what}; look at the logs of the other ranks")
    time.sleep(_POLL_S)
