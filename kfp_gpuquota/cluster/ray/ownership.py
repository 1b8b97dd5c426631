"""One daemon for each Ray cluster: two would plan with the same GPUs.

A detached actor remembers which daemon renewed its claim last. Another one is refused while that is fresh, and while
workers of the first one may run, which are actors in the namespace of its own.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import ray

NAMESPACE: Final = "gpuquota"
NAME: Final = "owner"
FRESH_S: Final = 30.0
ANSWER_S: Final = 60.0


class Owner:
    """The actor. Times are its own, monotonic."""

    def __init__(self) -> None:
        self._cluster, self._described, self._renewed_at = "", "", 0.0

    def claim(self, cluster: str, described: str) -> tuple[str, str, float]:
        """Make the cluster the owner unless another one is; return the owner, and the age of its renewal."""
        age = time.monotonic() - self._renewed_at
        if self._cluster in {"", cluster}:
            self._cluster, self._described, self._renewed_at = cluster, described, time.monotonic()
            return cluster, described, 0.0
        return self._cluster, self._described, age

    def resign(self, cluster: str) -> None:
        """Release the ownership of the Ray cluster."""
        if cluster == self._cluster:
            self._cluster = ""


def namespace_of(cluster: str) -> str:
    """Return the namespace of a cluster's actors."""
    return f"{NAMESPACE}-{cluster}"


async def claim(cluster: str, described: str) -> str:
    """Claim the Ray cluster; returns why that is refused, "" where it is not."""
    actor = await asyncio.to_thread(_owner)
    held_by, where, age_s = await _answer(actor.claim.remote(cluster, described))
    if held_by == cluster:
        return ""
    named = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
    workers = sum(each["namespace"] == namespace_of(held_by) for each in named)
    if age_s < FRESH_S or workers:
        what = f"with {workers} workers" if workers else f"which renewed its claim {age_s:.0f} s ago"
        return (
            f"the Ray cluster is managed by another daemon already, {where}, {what}; use that one, or delete its jobs "
            "and stop it there with: gpuquota cluster stop"
        )
    await _answer(actor.resign.remote(held_by))
    return await claim(cluster, described)


async def resign(cluster: str) -> None:
    """Leave the Ray cluster to another daemon, once no worker of this one is left."""
    actor = await asyncio.to_thread(_owner)
    await _answer(actor.resign.remote(cluster))


def _owner() -> Any:
    options = {"name": NAME, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    return ray.remote(Owner).options(num_cpus=0, max_restarts=-1, **options).remote()


async def _answer(reference: Any) -> Any:
    async def awaited() -> Any:
        return await reference

    return await asyncio.wait_for(awaited(), ANSWER_S)
