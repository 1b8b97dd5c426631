"""Extended resources that are known to be GPUs: what one of each counts as, and the node label with its type. Pure.

| resource                  | counts as                                  | type                                 |
|---------------------------|--------------------------------------------|--------------------------------------|
| nvidia.com/mig-1g.10gb    | its compute slices, in sevenths of a GPU   | nvidia.com/gpu.product               |
| nvidia.com/...            | 1                                          | nvidia.com/gpu.product               |
| amd.com/gpu               | 1                                          | amd.com/gpu.product-name             |
| gpu.intel.com/i915, /xe   | 1                                          | gpu.intel.com/product                |
| habana.ai/gaudi           | 1                                          |                                      |
| google.com/tpu            | 1                                          | cloud.google.com/gke-tpu-accelerator |
| DeviceClass *.nvidia.com  | 1                                          | nvidia.com/gpu.product               |
| any other                 | 1                                          |                                      |

These are defaults of rows of the QuotaPolicy's table: only resources that it lists are counted. How many slices share
an `nvidia.com/gpu.shared` is the admin's choice, which no name states. The API server's policies compute the same
number of GPUs (manifests/base/device-policies.yaml).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.convert.device_parts import MEMORY
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.device_types import CLASS_PREFIX
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import GpuResource

MIG_PATTERN: Final = r"^nvidia[.]com/mig-[1-7](c[.][1-7])?g[.][0-9]+gb"
"""A MIG profile; the digit after the dash is the number of its compute slices, also of a compute instance (1c.3g)."""
SLICES: Final = 7  # of a whole GPU; A30 has 4: there the table says 0.25

_TYPE_LABELS: Final = {
    "amd.com/gpu": "amd.com/gpu.product-name",
    "gpu.intel.com/i915": "gpu.intel.com/product",
    "gpu.intel.com/xe": "gpu.intel.com/product",
    "google.com/tpu": "cloud.google.com/gke-tpu-accelerator",
}
_NVIDIA_TYPE: Final = f"{labels.VENDOR}/gpu.product"
_MIG: Final = re.compile(MIG_PATTERN, re.ASCII)
_NVIDIA_CLASS: Final = re.compile(rf"{re.escape(CLASS_PREFIX)}[a-z0-9.-]*[.]nvidia[.]com$", re.ASCII)
_FIRST_DIGIT: Final = len("nvidia.com/mig-")


def counts_as(row: GpuResource) -> float:
    """Return the number of GPUs that one of the resource counts as: the row's, by default what its name states."""
    if row.counts_as is not None:
        return row.counts_as
    return int(row.name[_FIRST_DIGIT]) / SLICES if _MIG.match(row.name) else 1.0


def type_label(row: GpuResource) -> str:
    """Return the label of nodes whose value is the type of the resource's GPUs; "" if none is known."""
    if row.type_label is not None:
        return row.type_label
    nvidia = row.name.startswith(f"{labels.VENDOR}/") or _NVIDIA_CLASS.match(row.name)
    return _NVIDIA_TYPE if nvidia else _TYPE_LABELS.get(row.name, "")


def divided_of(table: Iterable[GpuResource]) -> tuple[tuple[str, str], ...]:
    """Return the resources that may be devices of DRA drivers, without a number that each device counts as.

    With each is the counter or capacity of which a device's part is its part of a GPU. Raises InvalidFieldError.
    """
    found: dict[str, str] = {}
    for row in table:
        if row.counts_as is None:
            found[row.name] = row.counts_by or MEMORY
        elif row.counts_by is not None:
            field = f"gpuResources.{row.name}"
            raise InvalidFieldError(
                field, row.counts_by, "it has countsAs and countsBy", hint="leave out one of the two"
            )
    return tuple(sorted(found.items()))
