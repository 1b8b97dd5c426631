"""A source of jobs and nodes that tests make up, for pages that show lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qsl

from kfp_gpuquota.api import Device, Job, JobSpec, JobStatus, Node, Order, Phase, Project, Worker, WorkerPhase
from kfp_gpuquota.api.wire import NodeView, ProjectView
from kfp_gpuquota.web.pages import Pages
from kfp_gpuquota.web.site_config import SiteConfig
from kfp_gpuquota.web.views.board import Board

if TYPE_CHECKING:
    from kfp_gpuquota.api.history import HeldHours, Usage, UsePoint
    from kfp_gpuquota.web.live import Elements
    from kfp_gpuquota.web.source import RunStep

NOW = 1_000_000.0
SPEC_FIELDS = ("array", "project", "gpus", "node_selector", "priority", "labels", "gpu_fraction", "gpu_memory_mib")


class Cluster:
    """A source of what lists show; tests replace its jobs and nodes."""

    def __init__(self, jobs: list[Job] | None = None, views: list[NodeView] | None = None) -> None:
        self.listed, self.views = tuple(jobs or ()), tuple(views or ())
        self.sizes: dict[str, list[tuple[float, float]]] = {}
        self.used: list[Usage] = []
        self.held: list[HeldHours] = []
        self.steps: tuple[RunStep, ...] = ()
        self.order = Order.FAIR

    def revision(self) -> int:
        return 1

    def now(self) -> float:
        return NOW

    def problem(self) -> str:
        return ""

    def jobs(self) -> tuple[Job, ...]:
        return self.listed

    def nodes(self) -> tuple[NodeView, ...]:
        return self.views

    def projects(self) -> tuple[ProjectView, ...]:
        names = ("team-a", "team-b")
        return tuple(
            ProjectView(
                project=Project(name=name, guaranteed=4, order=self.order), allocated=0, over_quota=0, requested=0
            )
            for name in names
        )

    def idle_since(self) -> dict[tuple[str, int], float]:
        return {}

    def gpu_use(self, _node: str, _device: int) -> tuple[UsePoint, ...]:
        return ()

    def run_steps(self) -> tuple[RunStep, ...]:
        return self.steps

    def sizes_of(self, job: Job) -> list[tuple[float, float]]:
        return self.sizes.get(job.spec.name, [])

    def usage(self, _width_s: int, _since: float) -> list[Usage]:
        return self.used

    def held_hours(self, _since_s: float) -> list[HeldHours]:
        return self.held

    def board(self, *, uses_known: bool = True) -> Board:
        return Board(cast("Any", self), uses_known=uses_known)

    def show(self, address: str) -> Elements:
        path, _, query = address.partition("?")
        names = {"node": path.removeprefix("/nodes/")} if path.startswith("/nodes/") else {}
        pages = Pages(cast("Any", self), SiteConfig("/b", frozenset()))
        return pages.at(f"/b{path}", names, dict(parse_qsl(query))).live.render()


def job(name: str, *, owner: str = "", worker: Worker | None = None, **more: Any) -> Job:
    spec = {key: more.pop(key) for key in SPEC_FIELDS if key in more}
    held = {"workers": (worker,), "gpus": worker.gpus, "phase": Phase.RUNNING} if worker else {}
    made = JobSpec(name=name, command=("true",), **{"project": "team-a", **spec})
    return Job(uid=f"uid-{name}", spec=made, status=JobStatus(**{"submitted_at": NOW, **held, **more}), owner=owner)


def on(name: str, node: str, *devices: int, share: float = 1.0) -> Worker:
    return Worker(
        id=f"{name}-0", job_uid=name, index=0, node=node, devices=devices, share=share, phase=WorkerPhase.RUNNING
    )


def view(name: str, gpus: int = 8, *, held: dict[int, tuple[str, ...]] | None = None, **more: Any) -> NodeView:
    used = more.pop("used", dict.fromkeys(held or {}, 1))
    model, resources = more.pop("model", "A100"), more.pop("resources", ())
    devices = tuple(Device(index=i, model=model) for i in range(gpus))
    return NodeView(node=Node(name=name, devices=devices, **more), held=held or {}, used=used, resources=resources)
