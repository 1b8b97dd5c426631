"""The base classes of FSDP2's collectives, which `FSDPModule.set_custom_all_gather` wants, where its objects live, and
what it was asked for.

The setters are public, the classes that they take are not. Checked with torch 2.14 and 2.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import FSDPModule

__all__ = ["HOLDERS", "PACKAGE", "AllGather", "ReduceScatter", "sum_type"]

PACKAGE: Final = "torch.distributed.fsdp."
"""The prefixes of its module names: those of its hooks, and of the objects that hold shards."""

HOLDERS: Final = frozenset({"FSDPState", "FSDPParamGroup", "FSDPParam"})
"""The classes of the objects that hold shards."""


def sum_type(module: FSDPModule) -> torch.dtype | None:
    """Return the type in which `mp_policy` sums the gradients; None: in that of the parameters."""
    policy = module._get_fsdp_state()._mp_policy  # noqa: SLF001
    return policy.reduce_dtype or policy.param_dtype
