"""The options of defragmentation, which start a cluster with it or show what it would give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kfp_gpuquota.errors import UsageError

if TYPE_CHECKING:
    from kfp_gpuquota.api.defragmentation import Defragmentation

NO_WINDOW: Final = "none"

WindowOption = Annotated[
    str,
    typer.Option(
        "--defragment",
        metavar="WINDOW",
        help="Move jobs to gather free GPUs in this window: 22:00-06:00, Mon-Fri 22:00-06:00 Europe/Berlin; or none.",
    ),
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        "--defragment-budget",
        min=0,
        metavar="GPU-MINUTES",
        help="The work that the moves of a window may lose (default 600).",
    ),
]
PerGpuOption = Annotated[
    float | None,
    typer.Option(
        "--defragment-per-gpu",
        min=0,
        metavar="GPU-MINUTES",
        help="The work that they may lose for each GPU of a node that becomes free (default 15).",
    ),
]


def defragmentation(
    window: str, budget: float | None, per_gpu: float | None, former: Defragmentation | None = None, zone: str = ""
) -> Defragmentation | None:
    """Return the rule of the options, with the values of the former one if they are not given; None: there is none.

    `zone` is the time zone of a window without one. Raises UsageError and InvalidFieldError.
    """
    from msgspec.structs import replace  # noqa: PLC0415

    from kfp_gpuquota.api.defragmentation import Defragmentation  # noqa: PLC0415 (`gpuquota --help` does without)

    if window == NO_WINDOW:
        return None
    given: dict[str, Any] = {"budget_gpu_minutes": budget, "max_gpu_minutes_per_gpu": per_gpu}
    given = {name: value for name, value in given.items() if value is not None}
    if window:
        times, _, last = window.rpartition(" ")
        has_zone = bool(times) and not last[:1].isdigit()
        given |= {"window": times if has_zone else window, "time_zone": last if has_zone else zone}
    elif given and former is None:
        raise UsageError(
            "--defragment-budget and --defragment-per-gpu need a window; give also --defragment 22:00-06:00"
        )
    if former is not None:
        return replace(former, **given)
    return Defragmentation(**given) if given else None
