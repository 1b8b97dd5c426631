"""A project: a team's queue, its guaranteed quota and what it may borrow."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec
from msgspec.structs import force_setattr

from kfp_gpuquota.api.durations import text_of
from kfp_gpuquota.api.quantity import as_number, show_gpus
from kfp_gpuquota.api.validation import (
    MAX_COUNT,
    MAX_MIB,
    MAX_PRIORITY,
    MAX_RUNTIME_S,
    MAX_SECONDS,
    MAX_WEIGHT,
    Cores,
    Gpus,
    Mebibytes,
    Name,
    Priority,
    RunTime,
    Seconds,
    Weight,
    check_gpus,
    check_name,
    check_range,
)
from kfp_gpuquota.errors import InvalidFieldError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kfp_gpuquota.api.job import JobSpec

DEFAULT_PROJECT_PRIORITY = 100
MAX_LEVELS = 16


class StopPolicy(StrEnum):
    """Whether a project's jobs start, in the words of Kueue's `stopPolicy`.

    HOLD: nothing of the project starts or grows, what runs goes on. HOLD_AND_DRAIN: also what runs is stopped after its
    grace period and waits again, but for what cannot be preempted, which runs until it ends.
    """

    NONE = "None"
    HOLD = "Hold"
    HOLD_AND_DRAIN = "HoldAndDrain"


class Order(StrEnum):
    """The order of a project's waiting jobs of one priority.

    Within the quota and then beyond it, FAIR: by age. FAIR_USERS: the jobs of a user who uses fewer GPUs of the project
    come first, then by age. SHORTEST: jobs that are expected to run for less come first, for a bounded time. STRICT: by
    age alone, and no job passes the first one, but for those that have ended when it starts.
    """

    FAIR = "Fair"
    FAIR_USERS = "FairUsers"
    SHORTEST = "Shortest"
    STRICT = "Strict"


class PoolQuota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A project's quota in one node pool, in GPUs; as a project's own is in nodes of no pool."""

    guaranteed: Gpus = 0
    limit: Gpus | None = None

    def __post_init__(self) -> None:
        _check_quota(self, "pools.")


class Project(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A team's quota, in GPUs: a part of one, such as 0.5, is a quota for jobs that share GPUs.

    `guaranteed` can always be got back. `limit` is the most the project may hold: None borrows all that is idle,
    limit = guaranteed is a static allocation. Idle GPUs are shared by `priority` (higher first), within one
    priority by `over_quota_weight` (0 borrows nothing while others want to). `parent` names a department.

    The same for CPU (cores) and main memory, for jobs that request them: None guarantees every request and sets no
    limit. `pools` has quotas in node pools (of a GPU model, for example), each shared separately: idle GPUs of one are
    borrowed by jobs that request that pool.

    A job that is submitted without a maximum run time gets `default_runtime_s`, or else `max_runtime_s`, which is the
    longest that one may ask for. `stop_policy` holds what is in it, and in the projects below it. `order` is that of
    its own waiting jobs, and of what is lent to them. Its jobs are not stopped for others before a run has lasted for
    `min_runtime_s`, as if each had asked for it. `reserve_after_s` is after how long its first waiting job within the
    guarantee is served before all others; None: that of the cluster, in strict order at once.
    """

    name: Name
    guaranteed: Gpus = 0
    limit: Gpus | None = None
    guaranteed_cpu: Cores | None = None
    limit_cpu: Cores | None = None
    guaranteed_memory_mib: Mebibytes | None = None
    limit_memory_mib: Mebibytes | None = None
    priority: Priority = DEFAULT_PROJECT_PRIORITY
    over_quota_weight: Weight = 1.0
    parent: Name | None = None
    pools: dict[str, PoolQuota] = {}
    default_runtime_s: RunTime | None = None
    max_runtime_s: RunTime | None = None
    min_runtime_s: Seconds | None = None
    reserve_after_s: Seconds | None = None
    stop_policy: StopPolicy = StopPolicy.NONE
    order: Order = Order.FAIR

    def __post_init__(self) -> None:
        check_name("name", self.name)
        self._check_run_times()
        _check_quota(self, "")
        check_range("priority", self.priority, 0, MAX_PRIORITY)
        check_range("over_quota_weight", self.over_quota_weight, 0, MAX_WEIGHT)
        for pool in self.pools:
            check_name("pools", pool)
        _check_amounts("cpu", self.guaranteed_cpu, self.limit_cpu, MAX_COUNT, "cores")
        _check_amounts("memory_mib", self.guaranteed_memory_mib, self.limit_memory_mib, MAX_MIB, "MiB")
        if self.parent is not None:
            check_name("parent", self.parent)
            if self.parent == self.name:
                raise InvalidFieldError("parent", self.parent, "a project cannot be its own parent")

    @property
    def usual_runtime_s(self) -> float | None:
        """The maximum run time of a job that has none of its own."""
        return self.max_runtime_s if self.default_runtime_s is None else self.default_runtime_s

    @property
    def guaranteed_in_all(self) -> int | float:
        """What is guaranteed in all node pools together."""
        return as_number(self.guaranteed + sum(quota.guaranteed for quota in self.pools.values()))

    def quota_in(self, pool: str) -> PoolQuota:
        """Return the quota in a node pool; "": in nodes of none."""
        if pool:
            return self.pools.get(pool, PoolQuota())
        return PoolQuota(guaranteed=self.guaranteed, limit=self.limit)

    def borrowed(self, held: Mapping[str, float]) -> float:
        """Return the GPUs beyond the guarantees, of those that are held by node pool ("": in nodes of none)."""
        return sum(max(0.0, gpus - self.quota_in(pool).guaranteed) for pool, gpus in held.items())

    def _check_run_times(self) -> None:
        for field in ("default_runtime_s", "max_runtime_s"):
            if (value := getattr(self, field)) is not None:
                check_range(field, value, 1, MAX_RUNTIME_S, "s")
        for field in ("min_runtime_s", "reserve_after_s"):
            if (value := getattr(self, field)) is not None:
                check_range(field, value, 0, MAX_SECONDS, "s")
        default, most = self.default_runtime_s, self.max_runtime_s
        if default is not None and most is not None and default > most:
            rule = f"it must be at most max_runtime_s, which is {most:g}"
            raise InvalidFieldError("default_runtime_s", default, rule)


class HasStopPolicy(Protocol):
    """A project, or its queue in the scheduler."""

    @property
    def stop_policy(self) -> StopPolicy:
        """Its own stop policy."""


Stopping = TypeVar("Stopping", bound=HasStopPolicy)


def path_of(project: Project, find: Callable[[str], Project | None]) -> list[Project]:
    """Return the project and its departments, from below. `find` returns a project by its name."""
    path = [project]
    while (name := path[-1].parent) and len(path) <= MAX_LEVELS and (above := find(name)) is not None:
        path.append(above)
    return path


def stopped_by(project: Project, find: Callable[[str], Project | None]) -> Project | None:
    """Return the nearest project, itself or above it, whose stop policy applies to its jobs; None if they start."""
    return strictest(path_of(project, find))


def strictest(path: Iterable[Stopping]) -> Stopping | None:
    """Return the nearest one with the strictest stop policy, of a project and those above it; None if none has any."""
    stopped = (one for one in path if one.stop_policy is not StopPolicy.NONE)
    return min(stopped, key=lambda one: one.stop_policy is not StopPolicy.HOLD_AND_DRAIN, default=None)


def version_of(project: Project) -> str:
    """Return a name of the project's contents, for If-Match: it differs whenever a field does."""
    return '"' + hashlib.sha256(msgspec.json.encode(project, order="deterministic")).hexdigest()[:32] + '"'


def with_run_time(spec: JobSpec, project: Project) -> JobSpec:
    """Return the job with the project's default where it has no maximum run time.

    Raises InvalidFieldError for a longer one than the project allows.
    """
    if spec.max_runtime_s is None:
        return msgspec.structs.replace(spec, max_runtime_s=project.usual_runtime_s)
    check_run_time("max_runtime_s", spec.max_runtime_s, project)
    return spec


def check_run_time(field: str, given: float, project: Project) -> None:
    """Raise InvalidFieldError, which names `field`, for a longer maximum run time than the project allows."""
    most = project.max_runtime_s
    if most is not None and given > most:
        raise InvalidFieldError(field, as_number(given), f"project {project.name!r} allows at most {text_of(most)}")


def run_times_of(project: Project) -> str:
    """Return the run times of the project's jobs: "8h by default, at most 2d, not preempted before 1h"; "" for none."""
    default, most, least = project.default_runtime_s, project.max_runtime_s, project.min_runtime_s
    parts = [] if default is None else [f"{text_of(default)} by default"]
    parts += [] if most is None else [f"at most {text_of(most)}"]
    return ", ".join(parts if not least else [*parts, f"not preempted before {text_of(least)}"])


def check_parents(projects: Mapping[str, Project], project: Project) -> None:
    """Raise NotFoundError or InvalidFieldError where `project` cannot have the parents that it has in `projects`."""
    names = [project.name]
    parent = project.parent
    while parent is not None:
        if parent not in projects:
            raise NotFoundError(f"project {parent!r} does not exist, which project {names[-1]!r} names as its parent")
        if parent in names:
            circle = " -> ".join([*names[names.index(parent) :], parent])
            raise InvalidFieldError("parent", project.parent, f"projects would be their own departments: {circle}")
        names.append(parent)
        if len(names) > MAX_LEVELS:
            raise InvalidFieldError("parent", project.parent, f"departments nest at most {MAX_LEVELS} levels deep")
        parent = projects[parent].parent


def _check_quota(quota: PoolQuota | Project, prefix: str) -> None:
    guaranteed = check_gpus(f"{prefix}guaranteed", quota.guaranteed)
    force_setattr(quota, "guaranteed", guaranteed)  # whole numbers are shown, and sent, as such
    if quota.limit is not None:
        limit = check_gpus(f"{prefix}limit", quota.limit)
        force_setattr(quota, "limit", limit)
        if limit < guaranteed:
            rule = f"it must be at least the guaranteed {show_gpus(guaranteed)}"
            raise InvalidFieldError(f"{prefix}limit", limit, rule)


def _check_amounts(of: str, guaranteed: float | None, limit: float | None, most: int, unit: str) -> None:
    for field, value in ((f"guaranteed_{of}", guaranteed), (f"limit_{of}", limit)):
        if value is not None:
            check_range(field, value, 0, most, unit)
    if guaranteed is not None and limit is not None and limit < guaranteed:
        raise InvalidFieldError(f"limit_{of}", limit, f"it must be at least the guaranteed {guaranteed:g} {unit}")
