"""What Trainer and Fabric have in common: the device of a worker, and Lightning's `rank_zero_only`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import rank_zero

if TYPE_CHECKING:
    from elastic_runtime.loop.job import Job


def device_of(accelerator: Any) -> torch.device:
    """Return the device of a worker with Lightning's accelerator of this kind, of Trainer's or of Fabric's."""
    kind = "cpu" if accelerator is None else accelerator.name()
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def follow_rank(job: Job) -> None:
    """Let Lightning's loggers, and all that is `rank_zero_only`, act on the rank 0 of now."""
    only: Any = rank_zero.rank_zero_only
    only.rank = job.rank if job.placed else 0
