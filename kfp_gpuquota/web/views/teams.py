"""The Teams page: the tree of departments and projects, with what each holds, borrows, lends and waits for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from kfp_gpuquota.api import StopPolicy
from kfp_gpuquota.api.project import run_times_of, stopped_by
from kfp_gpuquota.api.quantity import as_number, show_gpus
from kfp_gpuquota.web.live import Elements
from kfp_gpuquota.web.query import Choices, Query
from kfp_gpuquota.web.rendering import render

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kfp_gpuquota.api.history import Usage
    from kfp_gpuquota.api.wire import ProjectView
    from kfp_gpuquota.web.source import Source
    from kfp_gpuquota.web.views.board import Board

SPANS: Final = {"hour": (3600, 30), "day": (86_400, 600), "week": (604_800, 3600)}
"""How far the charts go back, and how long each of their intervals is, in seconds."""
FLAGS: Final = {
    "waits": "wait",
    "starved": "wait for their guarantee",
    "borrows": "borrow",
    "lends": "lend",
    "idle": "leave GPUs idle",
    "stopped": "are held or drained",
}
CHART_WIDTH: Final = 160
CHART_HEIGHT: Final = 32


@dataclass(frozen=True)
class Amounts:
    """GPUs of a project, or of a department with all below it."""

    held: float
    guaranteed: float
    borrowed: float
    wanted: float
    limit: float | None
    lent: float
    surplus: float = 0.0

    @property
    def own(self) -> float:
        """What is held within the guarantee."""
        return _amount(self.held - self.borrowed)

    @property
    def unused(self) -> float:
        """What is guaranteed and not held."""
        return _amount(self.guaranteed - self.own)

    @property
    def waiting(self) -> float:
        """What jobs ask for and do not hold; what others hold above their request does not meet it."""
        return _amount(self.wanted - (self.held - self.surplus))


@dataclass(frozen=True)
class Team:
    """One line of the tree; `level` is 0 at the top."""

    name: str
    level: int
    department: bool
    amounts: Amounts
    priority: int
    stop_policy: StopPolicy = StopPolicy.NONE
    run_times: str = ""

    def flags(self) -> Iterator[tuple[str, str]]:
        """Yield (kind, words) for what stands out."""
        amounts = self.amounts
        if self.stop_policy is not StopPolicy.NONE:
            yield "stopped", "drained" if self.stop_policy is StopPolicy.HOLD_AND_DRAIN else "held"
        if amounts.waiting and amounts.unused:
            within = amounts.waiting <= amounts.unused
            left = "of its guarantee" if within else f"and has {show_gpus(amounts.unused)} of its guarantee left"
            yield "starved", f"waits for {show_gpus(amounts.waiting)} {left}"
        elif amounts.waiting:
            yield "waits", f"{show_gpus(amounts.waiting)} more asked for"
        if amounts.borrowed:
            yield "borrows", f"borrows {show_gpus(amounts.borrowed)}"
        if amounts.lent:
            yield "lends", f"lends {show_gpus(amounts.lent)}"
        elif amounts.unused and not amounts.waiting:
            yield "idle", f"leaves idle {show_gpus(amounts.unused)}"


@dataclass(frozen=True, kw_only=True)
class Filter(Choices):
    """Which teams are shown, and how far the charts go back: of one project and those below it, with one flag."""

    KEYS: ClassVar = ("project", "span", "show")

    project: str = ""
    span: str = "hour"
    show: str = ""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Filter:
        """Return the filter of a query string."""
        query = Query(given)
        return cls(
            project=query.project(),
            span=query.choice("span", SPANS, "hour"),
            show=query.choice("show", FLAGS),
            problems=tuple(query.problems),
        )

    def admits(self, team: Team) -> bool:
        """Whether the team is shown."""
        return not self.show or self.show in {kind for kind, _ in team.flags()}


def elements(board: Board, base: str, wanted: Filter) -> Elements:
    """Return what the page shows."""
    source = board.source
    everyone = list(tree(source.projects(), wanted.project))
    past = _past(source, wanted.span, everyone)
    teams = [team for team in everyone if wanted.admits(team)]
    scale = max((most(team.amounts) for team in teams), default=0.0) or 1.0
    rows = {
        f"team-{team.name}": render(
            "team.html",
            team=team,
            base=base,
            bar=bar(team.amounts, scale),
            flags=list(team.flags()),
            chart=spark(past.get(team.name, ()), source.now(), wanted.span),
            span=wanted.span,
        )
        for team in teams
    }
    return Elements({"totals": totals(board, base)}, {"teams": rows})


def inputs(board: Board) -> object:
    """Return what the page depends on but for time."""
    return board.source.projects(), board.nodes(), board.facts.waiting


def tree(projects: Sequence[ProjectView], chosen: str = "") -> Iterator[Team]:
    """Yield departments before what is in them; a department's amounts are those of all below it."""
    by_name = {view.project.name: view for view in projects}
    children: dict[str, list[str]] = {}
    for view in projects:
        parent = view.project.parent or ""
        children.setdefault(parent if parent in by_name else "", []).append(view.project.name)

    def below(name: str) -> Iterator[str]:
        yield name
        for child in children.get(name, ()):
            yield from below(child)

    def lines(name: str, level: int) -> Iterator[Team]:
        department = name in children
        views = [by_name[each] for each in below(name)] if department else [by_name[name]]
        project = by_name[name].project
        held = _amount(sum(view.allocated for view in views))
        summed = Amounts(
            held=held,
            guaranteed=project.guaranteed_in_all,
            borrowed=_amount(held - project.guaranteed_in_all if department else by_name[name].over_quota),
            wanted=_amount(sum(view.requested for view in views)),
            limit=None if project.pools else project.limit,
            lent=_amount(sum(view.lent for view in views)),
            surplus=_amount(sum(view.surplus for view in views)),
        )
        by = stopped_by(project, lambda above: by_name[above].project if above in by_name else None)
        policy = StopPolicy.NONE if by is None else by.stop_policy
        yield Team(name, level, department, summed, project.priority, policy, run_times_of(project))
        for child in children.get(name, ()):
            yield from lines(child, level + 1)

    for top in [chosen] if chosen in by_name else children.get("", []) if not chosen else []:
        yield from lines(top, 0)


def _amount(gpus: float) -> float:
    """Return a sum of parts of GPUs, at least 0, without the digits that such a sum only has as binary numbers."""
    return max(0.0, float(as_number(gpus)))


def most(amounts: Amounts) -> float:
    """Return the largest amount that a team's bar has to show."""
    return max(amounts.guaranteed, amounts.held + amounts.waiting)


def bar(amounts: Amounts, scale: float) -> dict[str, str]:
    """Return the parts of a bar in percent of its width: where each begins, and how wide it is."""

    def percent(value: float) -> str:
        return f"{min(100.0, 100.0 * value / scale):.2f}".rstrip("0").rstrip(".")

    limit = amounts.limit
    return {
        "own": percent(amounts.own),
        "borrowed": percent(amounts.borrowed),
        "held": percent(amounts.held),
        "waiting": percent(amounts.waiting),
        "guaranteed": percent(amounts.guaranteed),
        "limit": percent(limit) if limit is not None and limit <= scale else "",
    }


def totals(board: Board, base: str) -> str:
    """Return the line of figures above the tree, each with a link to the list of what it counts."""
    views, nodes = board.source.projects(), board.nodes()
    idle = sum(max(0.0, view.gpus - view.gpus_in_use) for view in nodes if view.node.ready)
    waiting = board.facts.waiting
    figures = [
        ("GPUs", sum(view.gpus for view in nodes), "", "/nodes"),
        ("in use", sum(view.gpus_in_use for view in nodes), "", "/nodes?state=used"),
        ("idle", idle, "", "/nodes?state=idle"),
        ("borrowed", sum(view.over_quota for view in views), "borrowed", "/teams?show=borrows"),
        ("jobs that wait", waiting, "waiting" if waiting else "", "/queue?state=waiting"),
    ]
    return render("totals.html", figures=figures, base=base)


def spark(past: Sequence[Usage], now: float, span: str) -> dict[str, object] | None:
    """Return a small chart of GPUs held, as bars of SVG, with the guarantee as a line; None without any measurement."""
    if not past:
        return None
    span_s, width_s = SPANS[span]
    begin = now - span_s
    top = max(max(one.held, one.guaranteed) for one in past) or 1.0
    step = CHART_WIDTH * width_s / span_s

    def y(value: float) -> float:
        return round(CHART_HEIGHT * (1 - value / top), 1)

    bars = "".join(
        f"M{(one.at - begin) / span_s * CHART_WIDTH:.1f} {CHART_HEIGHT}V{y(one.held)}h{step:.2f}V{CHART_HEIGHT}Z"
        for one in past
        if one.held
    )
    mean = sum(one.held * one.seconds for one in past) / (sum(one.seconds for one in past) or 1.0)
    return {"bars": bars, "guaranteed": y(past[-1].guaranteed), "mean": round(mean, 1), "top": round(top, 1)}


def _past(source: Source, span: str, teams: Sequence[Team]) -> Mapping[str, list[Usage]]:
    """Return the usage of each team in the span; a department's is that of all below it together."""
    span_s, width_s = SPANS[span]
    found: dict[str, list[Usage]] = {}
    for one in source.usage(width_s, source.now() - span_s):
        found.setdefault(one.project, []).append(one)
    for i, team in enumerate(teams):
        if team.department:
            below = itertools.takewhile(lambda each: each.level > team.level, teams[i + 1 :])  # noqa: B023 (used at once)
            members = [team.name, *(each.name for each in below)]
            found[team.name] = _together(team, [one for name in members for one in found.get(name, ())])
    return found


def _together(team: Team, parts: Iterable[Usage]) -> list[Usage]:
    """Return the sum of what several projects held in each interval."""
    held: dict[int, float] = {}
    last: dict[int, Usage] = {}
    for part in parts:
        held[part.at] = held.get(part.at, 0.0) + part.held
        last[part.at] = part
    return [
        msgspec.structs.replace(last[at], project=team.name, held=held[at], guaranteed=team.amounts.guaranteed)
        for at in sorted(last)
    ]
