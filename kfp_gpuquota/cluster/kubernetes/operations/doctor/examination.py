"""All checks, in the order in which they are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.operations.doctor import checks_cluster, checks_installation
from kfp_gpuquota.cluster.kubernetes.operations.doctor.facts import Facts, Reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kfp_gpuquota.cluster.check_results import Finding
    from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls

CHECKS: Final[tuple[Callable[[Facts], Iterator[Finding]], ...]] = (
    checks_installation.readable,
    checks_installation.kubernetes_version,
    checks_installation.programs,
    checks_installation.leader,
    checks_installation.clocks,
    checks_installation.webhook,
    checks_installation.kinds,
    checks_installation.policies,
    checks_installation.rights,
    checks_cluster.gpus,
    checks_cluster.quotas,
    checks_cluster.resource_quotas,
    checks_cluster.kueue,
    checks_cluster.unmanaged,
    checks_cluster.autoscaled_pools,
    checks_cluster.unused_gpus,
)


def examine(calls: Calls) -> tuple[Finding, ...]:
    """Return the findings about the cluster. Raises ClusterUnavailableError if it does not respond."""
    return judge(Reader(calls).read())


def judge(facts: Facts) -> tuple[Finding, ...]:
    """Return the findings about these facts."""
    return tuple(finding for check in CHECKS for finding in check(facts))
