"""Completion in a shell: kinds, statuses, formats, and the names of jobs, projects and nodes.

Names come from the cluster that runs; there are none where none answers soon.

Completion must neither start a cluster nor hold up the shell, so it asks only a daemon that runs, with a short time
limit, and drops every error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from typer import Context  # noqa: TC002 (typer reads annotations at run time)

from kfp_gpuquota.cli.display.output import Format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kfp_gpuquota.server.cluster_api import ClusterApi

TIME_LIMIT_S: Final = 1.0
_SINGULAR: Final = ("job", "node", "project")


def complete_job(incomplete: str) -> list[str]:
    """Return the names of the configured project's jobs that begin with `incomplete`."""
    from kfp_gpuquota.cluster.connect import listed_project  # noqa: PLC0415 (only while a shell completes)

    def names(reached: ClusterApi) -> Iterable[str]:
        return (job.spec.name for job in reached.list_jobs(listed_project()).jobs)

    prefix = next((kind for kind in ("job/", "jobs/") if incomplete.startswith(kind)), "")
    return [prefix + name for name in _beginning_with(incomplete.removeprefix(prefix), names)]


def complete_kind(incomplete: str) -> list[str]:
    """Return the words after `get` that begin with `incomplete`, and after "KIND/" the names of that kind."""
    kind, slash, name = incomplete.partition("/")
    if slash:
        return [f"{kind}/{each}" for each in _names_of(kind, name)]
    return _words(("events", "jobs", "nodes", "projects"), incomplete)


def complete_named(ctx: Context, incomplete: str) -> list[str]:
    """Return the names of the kind that the word before them gives; without one those of jobs, and the kinds."""
    before = ctx.params.get("what") or []
    words = [before] if isinstance(before, str) else list(before)
    if words or "/" in incomplete:
        return complete_kind(incomplete) if "/" in incomplete else _names_of(words[0], incomplete)
    return [*_words(_SINGULAR, incomplete), *complete_job(incomplete)]


def complete_node(incomplete: str) -> list[str]:
    """Return the names of nodes that begin with `incomplete`."""
    return _beginning_with(incomplete, lambda reached: (view.node.name for view in reached.list_nodes()))


def complete_phase(incomplete: str) -> list[str]:
    """Return the statuses of a job that begin with `incomplete`, in any case."""
    from kfp_gpuquota.api import Phase  # noqa: PLC0415 (only while a shell completes)

    return _words([phase.value for phase in Phase], incomplete.capitalize())


def complete_format(incomplete: str) -> list[str]:
    """Return the values of `-o` that begin with `incomplete`."""
    return _words((*Format, "jsonpath="), incomplete)


def complete_project(incomplete: str) -> list[str]:
    """Return the names of projects that begin with `incomplete`."""
    return _beginning_with(incomplete, lambda reached: (view.project.name for view in reached.list_projects()))


def _words(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _names_of(kind: str, incomplete: str) -> list[str]:
    completers = {"job": complete_job, "project": complete_project, "node": complete_node}
    complete = completers.get(kind.removesuffix("s"))
    return [] if complete is None else complete(incomplete)


def _beginning_with(incomplete: str, names: Callable[[ClusterApi], Iterable[str]]) -> list[str]:
    from kfp_gpuquota.cluster.connect import connect, kube_context, runs_here  # noqa: PLC0415

    try:
        if kube_context() is None and not runs_here():
            return []
        reached = connect(retry_for_s=TIME_LIMIT_S)
        return sorted({name for name in names(reached) if name.startswith(incomplete)})
    except Exception:  # noqa: BLE001 (a shell that completes a word has no use for errors)
        return []
