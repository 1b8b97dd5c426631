"""Names of the stand-in nodes of autoscaled pools (see autoscaled_pools.py). Pure, and quick to import."""

from __future__ import annotations

from typing import Final

PREFIX: Final = "autoscaled."


def stand_in_name(pool: str, number: int) -> str:
    """Return the name of a stand-in: a prefix, the pool and the number. No real node has such a name."""
    return f"{PREFIX}{pool}.{number}"


def pool_of(node: str) -> str:
    """Return the pool that the node is a stand-in of; "" for a real node."""
    if not node.startswith(PREFIX):
        return ""
    pool, dot, number = node.removeprefix(PREFIX).rpartition(".")
    return pool if dot and number.isdecimal() and len(number) < 8 else ""
