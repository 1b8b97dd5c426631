"""What happens to a simulated cluster, as data: `draw(low, high)` chooses each number, from a seed or by hypothesis."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec

from kfp_gpuquota.api import JobSpec, Kind, Order, Project, StopPolicy
from kfp_gpuquota.api.affinity import GPU_PRODUCT
from kfp_gpuquota.api.defragmentation import Defragmentation
from kfp_gpuquota.api.job import USER_LABEL
from kfp_gpuquota.api.policy import IdleRule
from kfp_gpuquota.api.project import PoolQuota
from kfp_gpuquota.api.start_conditions import ArrayTask
from kfp_gpuquota.scheduler import RESERVE_AFTER_S
from tests.simulation.trainings import ELASTIC, EPOCH, Pace

if TYPE_CHECKING:
    from collections.abc import Callable

    Draw = Callable[[int, int], int]

KILLED = 0.2
"""Of submissions and changes of quotas the part in which the process ends between two requests; of deletions, after."""
TIMED = 0.5
"""Of the jobs that are no sessions, the part with a maximum run time."""
IDLE_EVERY = 3
USED_FOR_S = 30.0
HELD = 0.15
"""Of what happens, the part before which a project's stop policy is set."""
CONDITIONAL = 0.4
"""Of the jobs, the part whose start has a condition."""
TYPES: tuple[str, ...] = ("P", "Q")
TYPES_EVERY = 4
ORDERS_EVERY = 2
SEGMENTS_EVERY = 3
SEGMENT = 2
ROW = "example.com/row"
POOL = "x"
POOLS_EVERY = 5
POOLED = 0.4
"""Of the jobs in a cluster with a node pool, the part that runs in it."""
HOLDS_EVERY = 2
"""Each second history has projects that are held: the others go on for longer."""
PROJECTS = ("a", "b", "c")
DEPARTMENTS = ("d", "e")
DEPARTMENTS_EVERY = 6
MOVES = 0.3
"""Of the changes of quotas in a cluster with departments, the part that moves the project to another one."""


class Happening(msgspec.Struct, frozen=True, tag=True):
    """Base of what happens; jobs and workers are chosen by a number, modulo those that there are then."""


class Submit(Happening, frozen=True, tag=True):
    spec: JobSpec
    pace: tuple[float, float, float | None, float | None]
    steps: int | None = None
    lease_s: float = 0.0  # of a lease that nobody renews; 0: none


class Delete(Happening, frozen=True, tag=True):
    jobs: tuple[int, ...]


class Suspend(Happening, frozen=True, tag=True):
    job: int


class Resume(Happening, frozen=True, tag=True):
    job: int


class Update(Happening, frozen=True, tag=True):
    job: int
    low: int
    high: int
    priority: int | None = None  # instead of the sizes; on Kubernetes, where these are fixed, always


class SetQuota(Happening, frozen=True, tag=True):
    project: Project


class Crash(Happening, frozen=True, tag=True):
    worker: int
    code: int


class Silence(Happening, frozen=True, tag=True):
    worker: int


class LoseNode(Happening, frozen=True, tag=True):
    node: int
    returns_after_s: float


class Restart(Happening, frozen=True, tag=True):
    """`loses`: a node that is lost meanwhile, on Kubernetes; there is none to be lost without its machine elsewhere."""

    away_s: float
    loses: int | None = None


class Kill(Happening, frozen=True, tag=True):
    """The process ends instead of asking one more worker to leave than `asks`, and is started again at once."""

    asks: int


Any_ = Submit | Delete | Suspend | Resume | Update | SetQuota | Crash | Silence | LoseNode | Restart | Kill


class History(msgspec.Struct, frozen=True):
    """A cluster, and what happens to it: (seconds since the last one, what)."""

    nodes: tuple[int, ...]
    projects: tuple[Project, ...]
    happenings: tuple[tuple[float, Any_], ...]
    seed: int = 0
    reserve_after_s: float = RESERVE_AFTER_S
    usage_half_life_s: float | None = None
    idle: IdleRule | None = None
    pooled: tuple[str, ...] = ()  # the nodes of POOL
    defragmentation: Defragmentation | None = None

    def with_defragmentation(self, epoch: float = EPOCH) -> History:
        """Return the same history on more nodes, which gathers free GPUs always or in a window of some minutes.

        `epoch`: when it begins, in seconds since 1970.
        """
        chance = random.Random(self.seed)
        start = int(epoch // 60) + chance.randint(-1, 3)
        texts = [f"{minute // 60 % 24:02}:{minute % 60:02}" for minute in (start, start + chance.randint(1, 5))]
        rule = Defragmentation(
            window=chance.choice(("00:00-24:00", "-".join(texts))),
            time_zone="UTC",
            budget_gpu_minutes=chance.choice((1.0, 5.0, 30.0, 1000.0)),
            max_gpu_minutes_per_gpu=chance.choice((1.0, 3.0, 10.0)),
            min_age_s=chance.choice((1.0, 5.0, 20.0)),
        )
        return msgspec.structs.replace(self, nodes=(*self.nodes, 2, 2, 4), defragmentation=rule)

    def with_reservations(self) -> History:
        """Return the same history in a cluster in which a job gets a reservation soon; many have a maximum run time."""
        chance, found = random.Random(self.seed), list[tuple[float, Any_]]()
        after_s = chance.choice((0.0, 0.5, 2.0, 5.0, 15.0, 40.0))
        for wait_s, happening in self.happenings:
            if isinstance(happening, Submit) and happening.spec.may_be_preempted and chance.random() < TIMED:
                most_s = chance.choice((20.0, 60.0, 200.0))
                spec = msgspec.structs.replace(happening.spec, max_runtime_s=most_s)
                found.append((wait_s, msgspec.structs.replace(happening, spec=spec)))
            else:
                found.append((wait_s, happening))
        return msgspec.structs.replace(self, reserve_after_s=after_s, happenings=tuple(found))

    def with_conditions(self) -> History:
        """Return the same history, in which some jobs begin later, wait for others, or have a turn in an array."""
        chance, found = random.Random(self.seed), list[tuple[float, Any_]]()
        at, limit, earlier = 0.0, chance.randint(1, 2), list[JobSpec]()
        for wait_s, happening in self.happenings:
            at += wait_s
            if not isinstance(happening, Submit):
                found.append((wait_s, happening))
                continue
            spec = happening.spec
            if chance.random() < CONDITIONAL:
                spec = _with_condition(chance, spec, at, limit, [s.name for s in earlier if s.project == spec.project])
            found.append((wait_s, msgspec.structs.replace(happening, spec=spec)))
            earlier.append(spec)
        return msgspec.structs.replace(self, happenings=tuple(found))

    def with_orders(self) -> History:
        """Return the same history, in which each project has an order, a minimum run time and reservations of its own.

        In most past use counts.
        """
        chance = random.Random(self.seed)
        rules = {
            project.name: {
                "order": chance.choice(tuple(Order)),
                "min_runtime_s": chance.choice((None, None, 5.0, 30.0)),
                "reserve_after_s": chance.choice((None, None, 0.0, 20.0)),
            }
            for project in self.projects
        }

        def ruled(project: Project) -> Project:
            return msgspec.structs.replace(project, **rules[project.name])

        found = tuple(
            (at, SetQuota(ruled(happening.project)) if isinstance(happening, SetQuota) else happening)
            for at, happening in self.happenings
        )
        half_life_s = chance.choice((None, 60.0, 300.0))
        projects = tuple(map(ruled, self.projects))
        return msgspec.structs.replace(self, projects=projects, happenings=found, usage_half_life_s=half_life_s)

    def with_types(self) -> History:
        """Return the same history, in which some jobs accept several types of GPUs, or one."""
        chance, found = random.Random(self.seed), list[tuple[float, Any_]]()
        for wait_s, happening in self.happenings:
            accepted = chance.choice(((), (), TYPES, TYPES[::-1], TYPES[:1]))
            if isinstance(happening, Submit) and accepted:
                spec = msgspec.structs.replace(happening.spec, gpu_types=accepted)
                found.append((wait_s, msgspec.structs.replace(happening, spec=spec)))
            else:
                found.append((wait_s, happening))
        return msgspec.structs.replace(self, happenings=tuple(found))

    def with_segments(self) -> History:
        """Return the same history, in which jobs with workers of one GPU have sizes of whole segments."""
        found = list[tuple[float, Any_]]()
        for wait_s, happening in self.happenings:
            if isinstance(happening, Submit) and _has_equal_workers(happening.spec):
                sizes = {name: SEGMENT * getattr(happening.spec, name) for name in ("gpus", "min_gpus", "max_gpus")}
                more = {"gpus_per_worker": 1, "segment": SEGMENT, "segment_topology": ROW}
                spec = msgspec.structs.replace(happening.spec, **sizes, **more)
                found.append((wait_s, msgspec.structs.replace(happening, spec=spec)))
            elif isinstance(happening, Update):
                low, high = SEGMENT * happening.low, SEGMENT * happening.high
                found.append((wait_s, msgspec.structs.replace(happening, low=low, high=high)))
            else:
                found.append((wait_s, happening))
        return msgspec.structs.replace(self, happenings=tuple(found))

    def with_pools(self) -> History:
        """Return the same history, in which one or two of several nodes are a pool, in which projects have quotas."""
        if len(self.nodes) == 1:
            return self
        chance, found = random.Random(self.seed), list[tuple[float, Any_]]()
        names = [f"n{i}" for i in range(len(self.nodes))]
        pooled = tuple(sorted(chance.sample(names, chance.randint(1, len(names) - 1))))
        gpus = sum(self.nodes[names.index(name)] for name in pooled)

        def with_pool(project: Project) -> Project:
            guaranteed = chance.randint(0, max(1, gpus // 2))
            quota = PoolQuota(
                guaranteed=guaranteed, limit=chance.choice((None, None, guaranteed + chance.randint(0, 3)))
            )
            return msgspec.structs.replace(project, pools={POOL: quota} if chance.randint(0, 3) else {})

        for wait_s, happening in self.happenings:
            if isinstance(happening, Submit) and chance.random() < POOLED:
                spec = msgspec.structs.replace(happening.spec, node_pool=POOL)
                found.append((wait_s, msgspec.structs.replace(happening, spec=spec)))
            elif isinstance(happening, SetQuota):
                found.append((wait_s, SetQuota(with_pool(happening.project))))
            else:
                found.append((wait_s, happening))
        projects = tuple(map(with_pool, self.projects))
        return msgspec.structs.replace(self, projects=projects, happenings=tuple(found), pooled=pooled)

    def with_departments(self) -> History:
        """Return the same history, in which projects belong to departments, which change as projects do."""
        chance, found = random.Random(self.seed), list[tuple[float, Any_]]()
        parents: dict[str, str | None] = {}

        def department(name: str) -> Project:
            guaranteed = chance.randint(0, max(1, sum(self.nodes) // 2))
            limit = chance.choice((None, guaranteed + chance.randint(0, 3)))
            priority = chance.choice((100, 200))
            return Project(name=name, guaranteed=guaranteed, limit=limit, priority=priority, parent=parents[name])

        def placed(project: Project) -> Project:
            if project.name not in parents or chance.random() < MOVES:
                parents[project.name] = chance.choice((None, *DEPARTMENTS, *DEPARTMENTS))
            return msgspec.structs.replace(project, parent=parents[project.name])

        parents |= {"d": None, "e": chance.choice((None, "d"))}
        departments = tuple(map(department, DEPARTMENTS))
        projects = tuple(map(placed, self.projects))
        for wait_s, happening in self.happenings:
            if isinstance(happening, SetQuota):
                changed = placed(happening.project) if chance.random() < 0.5 else department(chance.choice(DEPARTMENTS))
                found.append((wait_s, SetQuota(changed)))
            else:
                found.append((wait_s, happening))
        return msgspec.structs.replace(self, projects=(*departments, *projects), happenings=tuple(found))

    def pool_of(self, node: str) -> str:
        """Return the pool of a node; "" if it is in none."""
        return POOL if node in self.pooled else ""

    def labels_of(self, node: str) -> dict[str, str]:
        """Return the labels of a node, without that of its pool."""
        return {GPU_PRODUCT: type_of(node), ROW: row_of(node)}

    def with_idle_rule(self) -> History:
        """Return the same history in a cluster that suspends jobs whose GPUs are unused."""
        chance = random.Random(self.seed)
        warn_after_s = chance.choice((1.0, 10.0, 25.0))
        rule = IdleRule(warn_after_s=warn_after_s, suspend_after_s=warn_after_s + chance.choice((1.0, 10.0, 30.0)))
        return msgspec.structs.replace(self, idle=rule)

    def uses(self, job: str, at: float) -> bool:
        """Return whether a job uses its GPUs at a time in seconds: always, never, or every other half minute."""
        kind = (crc32(job.encode()) + self.seed) % 4
        return kind in {0, 1} or (kind == 2 and int(at / USED_FOR_S) % 2 == 0)

    def with_holds(self) -> History:
        """Return the same history, in which projects are held, drained, and let go again."""
        chance, found = random.Random(self.seed), list[tuple[float, Any_]]()
        projects = {project.name: project for project in self.projects}
        for after_s, happening in self.happenings:
            happens = happening
            if isinstance(happening, SetQuota):
                before = projects[happening.project.name]
                project = msgspec.structs.replace(happening.project, stop_policy=before.stop_policy)
                projects[project.name], happens = project, SetQuota(project)
            elif chance.random() < HELD:
                name = chance.choice(list(projects))
                policy = chance.choice((StopPolicy.NONE, *StopPolicy))
                projects[name] = msgspec.structs.replace(projects[name], stop_policy=policy)
                found.append((chance.choice((0.0, 0.5, 5.0)), SetQuota(projects[name])))
            found.append((after_s, happens))
        return msgspec.structs.replace(self, happenings=tuple(found))

    def with_kills(self) -> History:
        """Return the same history, in which the process ends before some of its requests."""
        chance, found = random.Random(self.seed), list[tuple[float, Any_]]()
        for after_s, happening in self.happenings:
            if isinstance(happening, Submit | SetQuota) and chance.random() < KILLED:
                found += [(after_s, Kill(chance.randint(0, 2))), (0.0, happening)]
            elif isinstance(happening, Delete) and chance.random() < KILLED:
                found += [(after_s, happening), (0.1, Restart(0.0))]  # its workers are still exiting
            elif isinstance(happening, LoseNode) and chance.random() < KILLED:
                found.append((after_s, Restart(1.0, happening.node)))
            else:
                found.append((after_s, happening))
        return msgspec.structs.replace(self, happenings=tuple(found))


def type_of(node: str) -> str:
    """Return the type of a node's GPUs: every other node has another one."""
    return TYPES[int(node[1:]) % 2]


def row_of(node: str) -> str:
    """Return the row of a node: the first two are in one."""
    return f"row-{int(node[1:]) // 2}"


def _has_equal_workers(spec: JobSpec) -> bool:
    return spec.min_gpus is not None and spec.max_gpus is not None and spec.worker_gpus == 1


def from_seed(seed: int, *, most: int = 24) -> History:
    """Return the history of a seed."""
    return draw_history(random.Random(seed).randint, seed, most=most)


def hard_history(seed: int) -> History:
    """Return the history of a seed with all that makes it harder."""
    history = from_seed(seed).with_conditions().with_reservations()
    history = history.with_orders() if seed % ORDERS_EVERY == 1 else history
    history = history.with_idle_rule() if seed % IDLE_EVERY == 0 else history
    history = history.with_types() if seed % TYPES_EVERY == 0 else history
    history = history.with_segments() if seed % SEGMENTS_EVERY == 1 else history
    history = history.with_pools() if seed % POOLS_EVERY == 0 else history
    history = history.with_departments() if seed % DEPARTMENTS_EVERY == DEPARTMENTS_EVERY - 1 else history
    return (history.with_holds() if seed % HOLDS_EVERY == 0 else history).with_kills()


def draw_history(draw: Draw, seed: int, *, most: int = 24) -> History:
    """Return a history of at most `most` happenings."""
    nodes = tuple((1, 2, 4, 4, 8)[draw(0, 4)] for _ in range(draw(1, 3)))
    gpus = sum(nodes)
    projects = tuple(_project(draw, name, gpus) for name in PROJECTS[: draw(1, 3)])
    found: list[tuple[float, Any_]] = []
    for number in range(draw(2, most)):
        after_s = (0.0, 0.0, 0.5, 2.0, 5.0, 15.0, 40.0)[draw(0, 6)]
        found.append((after_s, _happening(draw, projects, nodes, number)))
    return History(nodes, projects, tuple(found), seed)


def _with_condition(chance: random.Random, spec: JobSpec, at: float, limit: int, earlier: list[str]) -> JobSpec:
    kind, changes = chance.randint(0, 4), dict[str, Any]()
    if kind in {0, 1}:
        changes["begin_at"] = EPOCH + at + chance.choice((0.0, 1.0, 10.0, 60.0))
    if kind in {1, 2, 3} and earlier:
        others = chance.sample(earlier, min(len(earlier), chance.randint(1, 2)))
        changes["after"] = tuple(chance.choice(("", "any:")) + other for other in others)
    if kind in {3, 4}:
        changes["array"] = ArrayTask(name="sweep", index=int(spec.name[1:]), limit=limit)
    return msgspec.structs.replace(spec, **changes)


def _project(draw: Draw, name: str, gpus: int) -> Project:
    guaranteed = draw(0, max(1, gpus // 2))
    limit = None if draw(0, 3) else guaranteed + draw(0, 4)
    order = Order.FAIR if name == "a" else Order.FAIR_USERS
    return Project(name=name, guaranteed=guaranteed, limit=limit, priority=(100, 100, 200)[draw(0, 2)], order=order)


def _happening(draw: Draw, projects: tuple[Project, ...], nodes: tuple[int, ...], number: int) -> Any_:
    kind = draw(0, 31)
    if kind < 17 or number < 2:
        return _submit(draw, projects, max(nodes), number)
    one = draw(0, 20)
    if kind < 20:
        return Delete(tuple(draw(0, 20) for _ in range(draw(1, 2))))
    if kind < 22:
        return Suspend(one)
    if kind < 24:
        return Resume(one)
    if kind < 25:
        low = draw(1, 3)
        return Update(one, low, low + draw(0, 4))
    if kind < 26:
        return SetQuota(_project(draw, projects[one % len(projects)].name, sum(nodes)))
    if kind < 28:
        return Crash(one, (1, 2, 137, 0)[draw(0, 3)])
    if kind < 29:
        return Silence(one)
    if kind < 30:
        return LoseNode(one, (0.0, 20.0, 60.0)[draw(0, 2)])
    return Restart((0.0, 1.0, 30.0)[draw(0, 2)])


def _submit(draw: Draw, projects: tuple[Project, ...], largest: int, number: int) -> Submit:
    """One of: elastic, one worker with several GPUs, a gang, a session, a share."""
    project, kind, size = projects[draw(0, len(projects) - 1)].name, draw(0, 9), draw(1, largest)
    more: dict[str, Any] = {}
    command = "works"
    if kind < 4:
        command = ELASTIC if draw(0, 4) else "works"
        more = {
            "min_gpus": draw(1, size),
            "max_gpus": size + draw(0, 3),
            "preemptible": False if number % 5 == 4 else None,
        }
    elif kind < 6:
        size = draw(1, largest)
    elif kind < 7:
        more = {"gpus_per_worker": 1}
    elif kind < 8:
        more = {"kind": Kind.BUILD}
    else:
        size, more = 1, {"gpu_fraction": (0.25, 0.5, 0.3)[draw(0, 2)]}
    if not draw(0, 4):
        more["priority"] = (10, 60, 90)[draw(0, 2)] if more.get("kind") is not Kind.BUILD else 100
    if not draw(0, 7):
        more["min_run_time_s"] = 20.0
    more["labels"] = {USER_LABEL: ("ann", "bob", "")[number % 3]}
    spec = JobSpec(name=f"j{number:02}", project=project, command=(command,), gpus=size, grace_period_s=10.0, **more)
    works_s = (None, 1.0, 20.0, 60.0)[draw(0, 3)]
    pace = Pace(
        starts_s=(0.0, 0.3, 2.0, 30.0)[draw(0, 3)],
        joins_s=(0.0, 1.0, 8.0)[draw(0, 2)],
        works_s=works_s,
        ends_s=(0.0, 0.5, 5.0, None)[draw(0, 3)],
    )
    steps = (None, 30, 100)[draw(0, 2)]
    return Submit(spec, (pace.starts_s, pace.joins_s, pace.works_s, pace.ends_s), steps)
