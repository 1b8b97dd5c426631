"""Which page an address shows, and what of it is static: the values of its filters and forms."""

from __future__ import annotations

import itertools
import secrets
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.api import ReasonCode
from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.errors import NotFoundError
from kfp_gpuquota.web.live import Elements, LivePage
from kfp_gpuquota.web.rendering import render
from kfp_gpuquota.web.views import figures, gpu_map, job, node, nodes, pipelines, queue, submission, teams, timeline
from kfp_gpuquota.web.views.board import Board, label_keys

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from kfp_gpuquota.web.site_config import SiteConfig
    from kfp_gpuquota.web.source import Source

_MEASURED_S: Final = 10.0
"""How often the Teams page is rendered although nothing changed: its charts move on."""
_MEMORY_S: Final = 2.0
_SECOND_S: Final = 5.0
_SUGGESTED: Final = 50


@dataclass(frozen=True)
class Page:
    """One address: what of it is live, and the values that its template needs besides.

    `later` returns further values, which take time and are not part of the stream.
    """

    title: str
    active: str
    template: str
    live: LivePage
    values: Mapping[str, Any] = field(default_factory=dict)
    later: Callable[[], Awaitable[Mapping[str, Any]]] | None = None


class Pages:
    """The pages of one cluster."""

    def __init__(self, source: Source, site: SiteConfig) -> None:
        self._source, self._site, self._base = source, site, site.base
        self._board = Board(source, uses_known=site.uses_known)
        self._rows, self._tiles = queue.Rows(site.base), nodes.Tiles(site.base)

    def at(self, path: str, names: Mapping[str, str], query: Mapping[str, str]) -> Page:
        """Return the page of an address. Raises NotFoundError for a job that does not exist."""
        found = self._at(path, names, query)
        return replace(found, live=self._with_problem(found.live))

    def _with_problem(self, live: LivePage) -> LivePage:
        """Return the page with a banner that says what the cluster cannot do at present."""

        def elements() -> Elements:
            shown = live.render()
            return replace(shown, parts={**shown.parts, "problem": render("problem.html", problem=problem())})

        inputs, problem = live.inputs, self._source.problem
        return replace(live, render=elements, inputs=None if inputs is None else lambda: (problem(), inputs()))

    def _at(self, path: str, names: Mapping[str, str], query: Mapping[str, str]) -> Page:
        if "node" in names:
            return self._node(names["node"])
        if names:
            return self._job(names["project"], names["name"], query)
        match path.removeprefix(self._site.path):
            case "/queue":
                return self._queue(query)
            case "/pipelines":
                return self._pipelines(query.get("namespace") or query.get("project", ""))
            case "/timeline":
                return self._timeline(query)
            case "/nodes":
                return self._nodes(query)
            case _:
                return self._teams(query)

    def _teams(self, query: Mapping[str, str]) -> Page:
        wanted = teams.Filter.of(query)
        live = LivePage(
            lambda: teams.elements(self._board, self._base, wanted), _MEASURED_S, lambda: teams.inputs(self._board)
        )
        flags = [("", "are of any kind"), *teams.FLAGS.items()]
        values = {"wanted": wanted, "projects": self._projects(wanted.project), "flags": flags}
        return Page("Teams", "teams", "teams.html", live, values)

    def _queue(self, query: Mapping[str, str]) -> Page:
        wanted = queue.Filter.of(query)
        live = LivePage(lambda: queue.elements(self._board, wanted, self._rows))
        supposed = submission.Asked.of(query)
        if supposed.like and not supposed.given and "name" not in query:
            supposed = submission.Asked.again(self._source, supposed.like)
        like = None
        with suppress(NotFoundError):  # it was deleted since the form was filled from it: what is typed is shown
            like = supposed.original(self._source)
        values = {
            "wanted": wanted,
            "projects": self._projects(wanted.project),
            "named_projects": [each for each in self._projects("") if each[0]],
            "states": list(queue.STATES.items()),
            "reasons": [("", "any"), *((code.value, code.value.replace("-", " ")) for code in ReasonCode)],
            "models": _choices(self._board.models(), wanted.gpu),
            "users": _choices(self._board.facts.users, wanted.user),
            "sorts": _orders("as queued", {name: words for name, (words, _) in queue.SORTS.items()}),
            "sizes": [(size, str(size)) for size in queue.SIZES],
            "supposed": supposed,
            "request_id": secrets.token_hex(16),
            "carried": "" if like is None else submission.carried(like.spec),
            "refusal": "",
            "outlook": None,
        }

        async def outlook() -> Mapping[str, Any]:
            return {"outlook": await submission.lines(self._source, supposed)}

        later = outlook if supposed.given and self._site.what_if else None
        return Page("Queue", "queue", "queue.html", live, values, later)

    def _pipelines(self, chosen: str) -> Page:
        async def prepare() -> None:
            await self._source.look_up_runs()

        live = LivePage(
            lambda: pipelines.elements(self._source, self._site, chosen),
            _MEASURED_S,
            prepare=prepare,
        )
        return Page(
            "Pipelines", "pipelines", "pipelines.html", live, {"chosen": chosen, "projects": self._projects(chosen)}
        )

    def _timeline(self, query: Mapping[str, str]) -> Page:
        wanted = timeline.Filter.of(query)
        live = LivePage(lambda: timeline.elements(self._board, self._base, wanted), _MEASURED_S, self._board.nodes)
        values = {
            "wanted": wanted,
            "projects": self._projects(wanted.project),
            "spans": [(span, span) for span in teams.SPANS],
            "sizes": [(size, str(size)) for size in timeline.SIZES],
        }
        return Page("Timeline", "timeline", "timeline.html", live, values)

    def _nodes(self, query: Mapping[str, str]) -> Page:
        wanted, views = nodes.Filter.of(query), self._board.nodes()
        shown = nodes.admitted(self._board, wanted)
        shared = any(view.shares for view in views)
        live = LivePage(
            lambda: nodes.elements(self._board, self._base, wanted, self._tiles),
            _MEMORY_S if shared else _MEASURED_S,
            lambda: nodes.inputs(self._board),
        )
        values = {
            "wanted": wanted,
            "projects": self._projects(wanted.project),
            "shared": shared,
            "groups": [group.list for group in nodes.groups(wanted, shown)],
            "roomy": nodes.is_roomy(shown),
            "colors": list(gpu_map.COLORS.items()),
            "states": [("", "in any state"), *gpu_map.STATES.items()],
            "models": _choices(self._board.models(), wanted.gpu),
            "group_keys": [("pool", "pool"), *_choices(label_keys(views), wanted.group, first=("none", "nothing"))],
            "sorts": _orders("name", {name: words for name, (words, _) in nodes.SORTS.items()}),
            "sizes": [(size, str(size)) for size in nodes.SIZES],
        }
        return Page("Nodes and GPUs", "nodes", "nodes.html", live, values)

    def _node(self, name: str) -> Page:
        node.check_exists(self._board, name)
        live = LivePage(
            lambda: node.elements(self._board, self._base, name),
            _MEASURED_S,
            lambda: (node.found(self._board, name), self._board.facts.jobs),
        )
        return Page(name, "nodes", "node_page.html", live, {"name": name})

    def _job(self, project: str, name: str, query: Mapping[str, str]) -> Page:
        found = self._source.job(project, name)
        here = join(self._base, "jobs", project, name)
        view, ending = figures.View.of(query, project, self._source), job.Ending(self._source, project, name)

        async def prepare() -> None:
            await self._source.look_up(project, name)
            await ending.look()

        live = LivePage(
            lambda: job.elements(self._board, self._site, project, name, view, ending),
            _MEASURED_S if found.status.phase.final else _SECOND_S,
            lambda: job.inputs(self._board, project, name, view, ending),
            prepare,
        )
        values = {
            "job": found,
            "here": here,
            "view": view,
            "axes": list(figures.AXES.items()),
            "scales": list(figures.SCALES.items()),
            "smoothings": list(figures.SMOOTHINGS.items()),
            "comparable": self._comparable(project, name),
        }
        return Page(name, "queue", "job.html", live, values)

    def _comparable(self, project: str, name: str) -> list[str]:
        """Return the names of the project's other jobs that have reported something, the newest first."""
        jobs = (each for each in reversed(self._source.jobs()) if each.spec.project == project and each.status.progress)
        return [each.spec.name for each in itertools.islice(jobs, _SUGGESTED + 1) if each.spec.name != name]

    def _projects(self, chosen: str) -> list[tuple[str, str]]:
        """Choices of a form: all, then each by name; also what was chosen and does not exist."""
        names = [view.project.name for view in self._source.projects()]
        return [("", "all"), *((name, name) for name in dict.fromkeys([*names, *filter(None, [chosen])]))]


def _choices(names: Iterable[str], chosen: str, first: tuple[str, str] = ("", "all")) -> list[tuple[str, str]]:
    """Return the options of a form: `first`, then the names, and what was chosen; nothing if there are no names."""
    named = dict.fromkeys([*names, *filter(None, [chosen])])
    special = {first[0], "pool"} if first[0] else set()
    return [first, *((name, name) for name in named if name not in special)] if named else []


def _orders(standard: str, columns: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the options of a form for the order of a list: its own, then by each column in both directions."""
    both = [[(name, f"by {words}"), (f"-{name}", f"by {words}, reversed")] for name, words in columns.items()]
    return [("", standard), *(each for pair in both for each in pair)]
