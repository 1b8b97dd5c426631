"""Completion of job and project names in a shell: from the cluster that runs, and none where none answers soon.

Completion must neither start a cluster nor hold up the shell, so it asks only a daemon that runs, with a short time
limit, and drops every error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kfp_gpuquota.server.cluster_client import ClusterClient

TIME_LIMIT_S: Final = 1.0


def complete_job(incomplete: str) -> list[str]:
    """Return the names of the configured project's jobs that begin with `incomplete`."""
    from kfp_gpuquota.cluster.connect import listed_project  # noqa: PLC0415 (only while a shell completes)

    def names(reached: ClusterClient) -> Iterable[str]:
        return (job.spec.name for job in reached.list_jobs(listed_project()).jobs)

    prefix = next((kind for kind in ("job/", "jobs/") if incomplete.startswith(kind)), "")
    return [prefix + name for name in _beginning_with(incomplete.removeprefix(prefix), names)]


def complete_project(incomplete: str) -> list[str]:
    """Return the names of projects that begin with `incomplete`."""
    return _beginning_with(incomplete, lambda reached: (view.project.name for view in reached.list_projects()))


def _beginning_with(incomplete: str, names: Callable[[ClusterClient], Iterable[str]]) -> list[str]:
    from kfp_gpuquota.cluster.connect import connect, embedded_home, kube_context  # noqa: PLC0415

    try:
        if kube_context() is None and not embedded_home().is_locked():
            return []
        reached = connect(retry_for_s=TIME_LIMIT_S)
        return sorted({name for name in names(reached) if name.startswith(incomplete)})
    except Exception:  # noqa: BLE001 (a shell that completes a word has no use for errors)
        return []
