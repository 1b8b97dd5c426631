"""The base classes of FSDP2's collectives, which `FSDPModule.set_custom_all_gather` wants, and where its objects live.

The setters are public, the classes that they take are not. Checked with torch 2.14 and 2.15.
"""

from typing import Final

from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

__all__ = ["HOLDERS", "PACKAGE", "AllGather", "ReduceScatter"]

PACKAGE: Final = "torch.distributed.fsdp."
"""The prefixes of its module names: those of its hooks, and of the objects that hold shards."""

HOLDERS: Final = frozenset({"FSDPState", "FSDPParamGroup", "FSDPParam"})
"""The classes of the objects that hold shards."""
