"""The Nodes page: a map of all GPUs, and the nodes in pages, with what runs on each GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kfp_gpuquota.api.label_selector import selects
from kfp_gpuquota.web.live import Elements
from kfp_gpuquota.web.query import ListChoices, Query, Slice
from kfp_gpuquota.web.rendering import render
from kfp_gpuquota.web.views import gpu_map
from kfp_gpuquota.web.views.board import natural
from kfp_gpuquota.web.views.node import card, project_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from markupsafe import Markup

    from kfp_gpuquota.api.wire import NodeView
    from kfp_gpuquota.web.views.board import Board

SIZES: Final = (10, 20, 50, 100)
SORTS: Final[Mapping[str, tuple[str, Callable[[NodeView], Any]]]] = {
    "name": ("name", lambda view: natural(view.node.name)),
    "idle": ("fewest idle GPUs", lambda view: view.gpus_idle),
    "used": ("fewest GPUs in use", lambda view: view.gpus_in_use),
}
MAPPED_NODES: Final = 2500
"""The map has at most this number of nodes."""
MOST_TILES: Final = 4 * MAPPED_NODES
"""A map in each color, and one with names."""
SHOWN_KEPT_WAITING: Final = 5


@dataclass(frozen=True, kw_only=True)
class Filter(ListChoices):
    """Which nodes are shown: those on which a project has workers, with a type or state of GPU, a name, labels.

    `color` is what the map's colors mean, and `group` the label by which it is grouped, or "pool"; "none" for neither.
    """

    KEYS: ClassVar = ("project", "gpu", "state", "word", "selector", "color", "group", "sort", "size", "page")

    state: str = ""
    color: str = "state"
    group: str = "pool"
    size: int = 10

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Filter:
        """Return the filter of a query string."""
        query = Query(given)
        return cls(
            **cls.common(query, SORTS, max(SIZES)),
            state=query.choice("state", gpu_map.STATES),
            color=query.choice("color", gpu_map.COLORS, "state"),
            group=query.text("group") or "pool",
            problems=tuple(query.problems),
        )

    @property
    def further(self) -> bool:
        """Whether a choice of the form's second part is made."""
        return bool(self.gpu or self.selector or self.sort or self.size != Filter.size)

    def conditions(self, project_of: Callable[[str], str]) -> Iterator[Callable[[NodeView], object]]:
        """Yield what a node has to meet to be shown."""
        if self.word:
            yield lambda view: self.word in view.node.name.lower()
        if self.gpu:
            yield lambda view: self.gpu in view.types
        if self.selector:
            yield lambda view: self.required and selects(self.required, view.node.labels)
        if self.state:
            yield lambda view: self.state in gpu_map.states(view)
        if self.project:
            yield lambda view: self.project in {project_of(holder) for holder in view.holders}

    def group_of(self, view: NodeView) -> str:
        """Return the group that the map has the node in."""
        if self.group == "none":
            return ""
        return view.node.pool if self.group == "pool" else view.node.labels.get(self.group, "")


@dataclass(frozen=True)
class Group:
    """A part of the map: the nodes of a pool or with one value of a label; `list` is the element that has its tiles."""

    list: str
    name: str
    views: Sequence[NodeView]


class Tiles:
    """Rendered tiles and cards of nodes; one is rendered again when its node has changed."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._palette = gpu_map.Projects({})
        self._tiles: dict[tuple[str, str, bool], tuple[NodeView, gpu_map.Projects, Markup, dict[str, float]]] = {}
        self._cards: dict[str, tuple[NodeView, tuple[float | None, ...], Markup]] = {}

    def palette(self, board: Board) -> gpu_map.Projects:
        """Return the colors of projects: the same object as before if these are the same."""
        palette = gpu_map.Projects({view.project.name: view.project.guaranteed for view in board.source.projects()})
        if palette.kinds != self._palette.kinds:
            self._palette = palette
        return self._palette

    def tile(
        self, view: NodeView, painter: gpu_map.Painter, color: str, palette: gpu_map.Projects, *, roomy: bool
    ) -> tuple[Markup, Mapping[str, float]]:
        """Return a node's tile, and the number of its GPUs of each kind."""
        key = (view.node.name, color, roomy)
        found = self._tiles.get(key)
        if found is None or found[0] is not view or found[1] is not palette:
            if len(self._tiles) > MOST_TILES:  # nodes that are gone leave theirs
                self._tiles.clear()
            runs = painter.runs(view)
            made = gpu_map.tile(view, runs, gpu_map.address(self._base, view.node.name), roomy=roomy)
            found = self._tiles[key] = (view, palette, made, gpu_map.summed(runs))
        return found[2], found[3]

    def card(self, board: Board, view: NodeView, idle: Mapping[tuple[str, int], float]) -> Markup:
        """Return what is shown of each of a node's GPUs."""
        name = view.node.name
        since = tuple(idle.get((name, device.index)) for device in view.node.devices)
        found = self._cards.get(name)
        if found is None or found[0] is not view or found[1] != since or view.shares:
            if len(self._cards) > MAPPED_NODES:
                self._cards.clear()
            found = self._cards[name] = (view, since, card(board, view, idle, self._base))
        return found[2]


def elements(board: Board, base: str, wanted: Filter, tiles: Tiles) -> Elements:
    """Return what the page shows."""
    shown = admitted(board, wanted)
    part = Slice.of(wanted, len(shown))
    idle = board.source.idle_since()
    rows = {f"node-{view.node.name}": tiles.card(board, view, idle) for view in shown[part.begin : part.end]}
    mapped, parts = _map(board, wanted, shown, tiles)
    parts["fragments"] = render("fragments.html", base=base, **fragmentation(board))
    parts["found"] = render("node_counts.html", part=part, total=len(board.nodes()), mapped=MAPPED_NODES)
    parts["pager"] = render("pager.html", part=part, chosen=wanted, sizes=SIZES, things="nodes")
    return Elements(parts, {**mapped, "nodes": rows})


def inputs(board: Board) -> object:
    """Return what the page depends on but for time."""
    return board.nodes(), board.facts.fragmented


def admitted(board: Board, wanted: Filter) -> Sequence[NodeView]:
    """Return the nodes that the filter admits, in the order that it asks for."""
    found = list(board.nodes())
    for condition in wanted.conditions(lambda worker: project_of(board, worker)):
        found = [view for view in found if condition(view)]
    column = wanted.sort.removeprefix("-")
    if column:
        found.sort(key=SORTS[column][1], reverse=wanted.sort.startswith("-"))
    return found


def groups(wanted: Filter, shown: Iterable[NodeView]) -> list[Group]:
    """Return the parts of the map, each with its nodes in the order given."""
    found: dict[str, list[NodeView]] = {}
    for view in list(shown)[:MAPPED_NODES]:
        found.setdefault(wanted.group_of(view), []).append(view)
    return [Group(f"map-{i}", name, found[name]) for i, name in enumerate(sorted(found, key=natural))]


def is_roomy(shown: Iterable[NodeView]) -> bool:
    """Return whether the map has space for the nodes' names."""
    return sum(view.gpus for view in shown) <= gpu_map.ROOMY_GPUS


def fragmentation(board: Board) -> dict[str, object]:
    """Return how many GPUs of ready nodes are idle, at most on one, and which jobs wait for that reason."""
    views = board.nodes()
    free = {view.node.name: view.gpus_idle for view in views if view.node.ready}
    largest = max(free, key=lambda name: free[name], default="")
    return {
        "idle": sum(free.values()),
        "parts": sum(1 for view in views for used in view.used.values() if 0 < used < 1),
        "largest": free.get(largest, 0),
        "largest_node": largest,
        "kept_waiting": board.facts.fragmented[:SHOWN_KEPT_WAITING],
    }


def _map(
    board: Board, wanted: Filter, shown: Sequence[NodeView], tiles: Tiles
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return the map's lists of tiles, and its further elements."""
    palette = tiles.palette(board)
    painter = gpu_map.Painter(wanted.color, palette, lambda worker: project_of(board, worker))
    roomy = is_roomy(shown)
    lists: dict[str, dict[str, str]] = {}
    parts: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for group in groups(wanted, shown):
        made = [tiles.tile(view, painter, wanted.color, palette, roomy=roomy) for view in group.views]
        lists[group.list] = {f"n-{v.node.name}": html for v, (html, _) in zip(group.views, made, strict=True)}
        for _, gpus in made:
            counts.update(gpus)
        used = sum(view.gpus_in_use for view in group.views)
        total = sum(view.gpus for view in group.views)
        name = group.name or ("no pool" if wanted.group == "pool" else f"without {wanted.group}")
        title = "" if wanted.group == "none" else name
        parts[f"{group.list}-title"] = render(
            "map_title.html", id=f"{group.list}-title", title=title, used=used, total=total, nodes=len(group.views)
        )
    parts["legend"] = render("map_legend.html", legend=list(_legend(wanted, counts, palette)))
    return lists, parts


def _legend(
    wanted: Filter, counts: Mapping[str, float], palette: gpu_map.Projects
) -> Iterable[tuple[str, str, float, str]]:
    """Yield (kind, words, GPUs, the query string that shows only these)."""
    if wanted.color == "use":
        yield from ((kind, words, counts.get(kind, 0), "") for kind, words in gpu_map.PARTS.items())
        return
    if wanted.color == "project":
        for name, kind in palette.kinds.items():
            if counts.get(kind):
                yield kind, name, counts[kind], wanted.link(project=name)
        others = {"project-other": "other projects", "project-several": "several projects"}
        yield from ((kind, words, counts[kind], "") for kind, words in others.items() if counts.get(kind))
    for state, words in gpu_map.STATES.items():
        if (wanted.color == "state" and state in {"used", "idle"}) or counts.get(state):
            yield state, words, counts.get(state, 0), wanted.link(state=state)
