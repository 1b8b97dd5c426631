"""How much of each project's guarantee others hold. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api.quantity import as_number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.api.wire import ProjectView


def with_lent(views: Iterable[ProjectView], gpus: float | None = None) -> tuple[ProjectView, ...]:
    """Return the views with `lent` set; `gpus` is what the cluster has.

    What is borrowed comes first from GPUs that are guaranteed to nobody (none, if `gpus` is unknown), then from
    guarantees that are not used, of each project in proportion: an idle GPU belongs to no project. A department lends
    what the projects below it lend.
    """
    views = tuple(views)
    parents = {view.project.parent for view in views}
    projects = [view for view in views if view.project.name not in parents]
    within = {view.project.name: view.allocated - view.over_quota for view in projects}
    guaranteed = {view.project.name: view.project.guaranteed_in_all for view in projects}
    unused = {name: max(0.0, of_it - within[name]) for name, of_it in guaranteed.items()}
    unguaranteed = max(0.0, (gpus or 0.0) - sum(guaranteed.values()))
    taken = max(0.0, sum(view.over_quota for view in projects) - unguaranteed)
    part = min(1.0, taken / (sum(unused.values()) or 1.0))
    return tuple(
        msgspec.structs.replace(view, lent=as_number(unused.get(view.project.name, 0.0) * part)) for view in views
    )
