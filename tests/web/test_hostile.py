"""Whatever others have written is shown as text: every string of every struct, and every parameter of an address."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from kfp_gpuquota.api import (
    Device,
    Job,
    JobSpec,
    JobStatus,
    Node,
    Phase,
    Progress,
    Project,
    Reason,
    ReasonCode,
    Resize,
    Worker,
    WorkerPhase,
    pipeline_labels,
)
from kfp_gpuquota.api.history import HeldHours, Report, Usage, UsePoint
from kfp_gpuquota.api.wire import Event, EventKind, NodeView, ProjectView, ResourceView, ShareView
from kfp_gpuquota.web.actions import Chosen
from kfp_gpuquota.web.pages import Pages
from kfp_gpuquota.web.rendering import render
from kfp_gpuquota.web.site_config import SiteConfig
from kfp_gpuquota.web.source import Notice, RunStep
from kfp_gpuquota.web.views import confirmation, quota, submission
from kfp_gpuquota.web.views.logs import plain_log
from tests.web.visitor import Tags

if TYPE_CHECKING:
    from kfp_gpuquota.web.pages import Page
    from tests.web.visitor import Visitor

HOSTILE = "\"'><img src=x onerror=alert(1)><script>alert(1)</script>{{ 7 * 7 }}\x1b]52;c;x\x07\u202e"
NOW = 1_000_000.0


def poisoned(value: Any) -> Any:
    """The same with every free string, also of structs in it, hostile; struct validation is gone around."""
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            msgspec.structs.force_setattr(value, field, poisoned(getattr(value, field)))
        return value
    if type(value) is str:
        return HOSTILE
    if isinstance(value, tuple):
        return tuple(poisoned(each) for each in value)
    if isinstance(value, dict):
        return {poisoned(key): poisoned(each) for key, each in value.items()}
    return value


class HostileSource:
    """One job, one project, one node: each string in them is hostile."""

    def __init__(self, phase: Phase) -> None:
        reason = Reason(code=ReasonCode.FRAGMENTED, message="m")
        worker = Worker(id="w", job_uid="u", index=0, node="n", devices=(0,), share=0.5, phase=WorkerPhase.RUNNING)
        progress = Progress(step=3, total_steps=9, at=NOW, metrics={"loss": 1.0}, throughput=5.0, workers=1)
        status = JobStatus(
            phase=phase, reason=reason, gpus=1, progress=progress, workers=(worker,), submitted_at=NOW - 9,
            resizes=(Resize(at=NOW - 2, from_gpus=1, to_gpus=2, generation=1, step=2, reason=reason),),
        )  # fmt: skip
        spec = JobSpec(name="j", project="p", command=("c",), gpu_fraction=0.5)
        self._job: Job = poisoned(Job(uid="u", spec=spec, status=status))
        labels = {pipeline_labels.RUN: HOSTILE, pipeline_labels.TASK: HOSTILE}
        msgspec.structs.force_setattr(self._job.spec, "labels", labels)
        share = ShareView(
            worker="w",
            job="j",
            project="p",
            device=0,
            total_mib=10,
            used_mib=5,
            request_mib=3,
            limit_mib=9,
            granted_mib=9,
        )
        node = Node(name="n", devices=(Device(index=0, model="m", memory_mib=10), Device(index=1)))
        slices = ResourceView(name="r", count=4, counts_as=0.25, type="t", held={HOSTILE: 1})
        view = NodeView(node=node, held={0: ("w",)}, used={0: 0.5}, shares=(share,), resources=(slices,))
        self._node: NodeView = poisoned(view)
        project = ProjectView(project=Project(name="p", guaranteed=1), allocated=2, over_quota=1, requested=3)
        self._project: ProjectView = poisoned(project)
        event = Event(revision=1, at=NOW, kind=EventKind.WORKER_STARTED, worker="w", gpus=1, reason=reason)
        self._event: Event = poisoned(event)

    def revision(self) -> int:
        return 1

    def now(self) -> float:
        return NOW

    def problem(self) -> str:
        return HOSTILE

    def projects(self) -> tuple[ProjectView, ...]:
        return (self._project,)

    def jobs(self) -> tuple[Job, ...]:
        return (self._job,)

    def job(self, project: str, name: str) -> Job:
        return self._job

    def nodes(self) -> tuple[NodeView, ...]:
        return (self._node,)

    def memory_of(self, worker: str, device: int) -> tuple[tuple[float, int], ...]:
        return ((NOW - 10, 4), (NOW, 5))

    def idle_since(self) -> dict[tuple[str, int], float]:
        return {}

    def gpu_use(self, node: str, device: int) -> tuple[UsePoint, ...]:
        return (UsePoint(NOW - 30, 35.0, 5),)

    def run_steps(self) -> tuple[RunStep, ...]:
        return (RunStep(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, NOW, 0, NOW, NOW),)

    def events_of(self, uid: str) -> tuple[Event, ...]:
        return (self._event,)

    def notices_of(self, uid: str) -> tuple[Notice, ...]:
        return (Notice(NOW, HOSTILE, HOSTILE, HOSTILE, warning=True, count=2),)

    def sizes_of(self, _job: Job) -> list[tuple[float, float]]:
        return [(NOW - 5, 1), (NOW - 2, 2)]

    def reports_of(self, uid: str) -> tuple[Report, ...]:
        return (Report(NOW - 1, 1, {HOSTILE: 1.0}), Report(NOW, 2, {HOSTILE: float("nan")}))

    def usage(self, width_s: int, since: float) -> list[Usage]:
        used = Usage(
            project=HOSTILE, at=int(NOW) - 30, width_s=30, seconds=30, held=1, borrowed=0, wanted=1, guaranteed=1
        )
        return [used]

    def held_hours(self, since_s: float) -> list[HeldHours]:
        return [HeldHours(project=HOSTILE, user=HOSTILE, gpu_type=HOSTILE, gpu_hours=1.0)]


def html_of(page: Page) -> str:
    elements = page.live.render()
    lists = {name: "".join(rows.values()) for name, rows in elements.lists.items()}
    first = render(
        page.template, base="/b", site=SiteConfig("/b", frozenset()), title=page.title, active=page.active,
        revision=1, token="t", theme="auto", next_theme="light", now="1", parts=elements.parts,
        lists=dict.fromkeys(lists, ""), **page.values,
    )  # fmt: skip
    return first + "".join(lists.values())


@pytest.mark.parametrize("phase", [Phase.PENDING, Phase.RUNNING, Phase.FAILED])
@pytest.mark.parametrize("address", ["/teams", "/queue", "/pipelines", "/nodes", "/timeline", "node", "job"])
def test_hostile_strings_are_shown_as_text(phase: Phase, address: str) -> None:
    pages = Pages(HostileSource(phase), SiteConfig("/b", frozenset(), run_page="/p/{namespace}/{run}"))  # type: ignore[arg-type]
    everything = {"state": "all", "project": "", "word": "", "gpus": HOSTILE, "min_gpus": HOSTILE, "color": "project"}
    lists = ("selector", "group", "gpu", "user", "reason", "sort", "size", "page", "span", "show")
    choices = (*lists, "color", "compare", "x", "scale")
    names = {"job": {"project": HOSTILE, "name": HOSTILE}, "node": {"node": HOSTILE}}.get(address, {})
    html = "".join(
        html_of(pages.at(f"/b{address}", names, query)) for query in (everything, dict.fromkeys(choices, HOSTILE))
    )
    tags = Tags(html)
    assert "<img src=x" in tags.text
    assert "49" not in tags.text
    assert not {"\x1b", "\x07", "\u202e"} & set(html)
    for tag, attributes in tags.tags:
        assert tag != "img"
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        assert tag != "script" or attributes.get("src") == "/b/static/page.js"


@pytest.mark.parametrize("fixed", ["", HOSTILE])
def test_hostile_strings_of_forms_are_shown_as_text(fixed: str) -> None:
    source, site = cast("Any", HostileSource(Phase.RUNNING)), SiteConfig("/b", frozenset())
    common = {
        "base": "/b", "site": site, "token": "t", "theme": "auto", "next_theme": "light", "now": "1", "revision": "",
        "title": HOSTILE, "active": "queue",
    }  # fmt: skip
    stopped = confirmation.values(source, site, "delete", [Chosen(HOSTILE, HOSTILE)])
    quotas = quota.values(source, HOSTILE)
    asked = submission.Asked.again(source, f"{HOSTILE}/{HOSTILE}")
    queue = Pages(source, site).at("/b/queue", {}, {"like": f"{HOSTILE}/{HOSTILE}"})
    pages = (
        render("confirmation.html", back="/b/queue", **common, **stopped),
        render("quota.html", fixed=fixed, **common, **quotas),
        html_of(queue),
    )
    html = "".join(pages)
    tags = Tags(html)
    assert "onerror" in asked.command
    assert "<img src=x" in tags.text
    assert not {"\x1b", "\x07", "\u202e"} & set(html)
    for tag, attributes in tags.tags:
        assert tag != "img"
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)


def test_hostile_parameters_are_shown_as_text_or_refused(visitor: Visitor) -> None:
    hostile = "%22%3E%3Cimg%20src=x%20onerror=alert(1)%3E"
    for address in (
        f"/queue?word={hostile}&project={hostile}&gpus={hostile}&what-if=1&min_gpus={hostile}",
        f"/teams?project={hostile}&span={hostile}",
        f"/nodes?namespace={hostile}",
        f"/pipelines?project={hostile}",
        f"/jobs/{hostile}/{hostile}",
        f"/jobs/{hostile}/x/log?worker={hostile}&q={hostile}",
        f"/{hostile}",
        f"/enter?token={hostile}",
    ):
        assert "img" not in {tag for tag, _ in Tags(visitor.get(address).text).tags}, address


def test_a_log_loses_colors_keeps_the_end_of_a_progress_bar_and_shows_what_a_terminal_would_obey() -> None:
    raw = b"\x1b[1;31mred\x1b[0m\r\n10%\r20%\r30%\r\n\x1b]52;c;x\x07 \xff \xe2\x80\xae<b>"
    assert plain_log(raw) == "red\n30%\n\\x1b]52;c;x\\x07 \ufffd \\u202e<b>"
