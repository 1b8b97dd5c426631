"""The map of GPUs: a tile for each node with a cell for each device, colored by state, project or held part. Pure.

A tile is one link with one path for each color, so that 10,000 GPUs are some thousand elements. Colors are classes of
the style sheet; a title has the same in words.
"""

from __future__ import annotations

import itertools
from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple

from markupsafe import Markup, escape

from kfp_gpuquota.api.control_characters import visible
from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.web.rendering import amount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kfp_gpuquota.api.wire import NodeView, ResourceView

COLORS: Final = {"state": "state", "project": "project", "use": "held part"}
STATES: Final = {
    "used": "in use",
    "part": "held in part",
    "idle": "idle",
    "others": "used by others",
    "down": "node not ready",
}
PARTS: Final = {
    "part-0": "idle",
    "part-1": "up to 25 %",
    "part-2": "up to 50 %",
    "part-3": "up to 75 %",
    "part-4": "up to 100 %",
    "part-5": "all of it",
}
NAMED_PROJECTS: Final = 12
ROOMY_GPUS: Final = 512
"""Up to this number of GPUs the tiles are larger, and have their nodes' names."""
MOST_CELLS: Final = 64
"""Of one resource of a node; what pods ask of it may be any number."""
_CELL: Final = 10
_NARROW: Final = 4
_WIDE: Final = 16


class Run(NamedTuple):
    """GPUs of one kind that are drawn as a number of cells; of a resource with many units a cell is several of them."""

    kind: str
    cells: int
    gpus: float


class Projects:
    """The colors of projects: the first `NAMED_PROJECTS` by guarantee and name have one each."""

    def __init__(self, guaranteed: Mapping[str, float]) -> None:
        ordered = sorted(guaranteed, key=lambda name: (-guaranteed[name], name))
        self.kinds = {name: f"project-{i}" for i, name in enumerate(ordered[:NAMED_PROJECTS])}

    def of(self, names: Iterable[str]) -> str:
        """Return the kind of a GPU that these projects hold."""
        found = {self.kinds.get(name, "project-other") for name in names}
        return found.pop() if len(found) == 1 else "project-several" if found else "others"


class Painter:
    """Says the kind of each GPU of a node; `project_of` is the project of a worker."""

    def __init__(self, color: str, projects: Projects, project_of: Callable[[str], str]) -> None:
        self._color, self._projects, self._project_of = color, projects, project_of

    def runs(self, view: NodeView) -> list[Run]:
        """Return the node's devices in their order, then other resources that count as GPUs, what is held first."""
        devices = [Run(self._kind(view, device.index), 1, 1.0) for device in view.node.devices]
        others = (self._runs_of(one, idle=idle_state(view)) for one in view.resources)
        return [*devices, *itertools.chain.from_iterable(others)]

    def _runs_of(self, one: ResourceView, *, idle: str) -> Iterator[Run]:
        units = [(self._kind_of_holder(holder), amount) for holder, amount in one.held.items()]
        free = max(0, one.count - one.in_use)
        units.append((_part_of(0) if self._color == "use" else idle, free))
        part = min(1.0, MOST_CELLS / max(1, free + one.in_use))
        for kind, held in units:
            yield Run(kind, ceil(held * part), held * one.counts_as)

    def _kind_of_holder(self, holder: str) -> str:
        if self._color == "use":
            return _part_of(1)
        if self._color == "state":
            return _state_of_holder(holder)
        return self._projects.of([self._project_of(holder)] if holder else [])

    def _kind(self, view: NodeView, device: int) -> str:
        state = state_of(view, device)
        if self._color == "use":
            return _part_of(view.used.get(device, 0))
        if self._color == "state" or state in {"idle", "down", "others"}:
            return state
        return self._projects.of(map(self._project_of, view.held.get(device, ())))


def state_of(view: NodeView, device: int) -> str:
    """Return the key of `STATES` for one device."""
    used = view.used.get(device, 0)
    if not used:
        return idle_state(view)
    if not view.held.get(device):
        return "others"
    return "part" if used < 1 else "used"


def idle_state(view: NodeView) -> str:
    """Return the state of the node's GPUs that nobody holds."""
    return "idle" if view.node.ready else "down"


def states(view: NodeView) -> set[str]:
    """Return the states of a node's GPUs, and of what else counts as GPUs."""
    found = {state_of(view, device.index) for device in view.node.devices}
    found |= {_state_of_holder(holder) for one in view.resources for holder in one.held}
    return found | {idle_state(view) for one in view.resources if one.in_use < one.count}


def tile(view: NodeView, runs: Iterable[Run], href: str, *, roomy: bool) -> Markup:
    """Return the link to a node with its GPUs as cells."""
    kinds = [run.kind for run in runs for _ in range(run.cells)]
    name = escape(visible(view.node.name))
    words = f"{name}: {amount(view.gpus_in_use)} of {amount(view.gpus)} in use"
    caption = f"<span>{name}</span>" if roomy else ""
    label = f' aria-label="{words}"' if roomy else ""  # else the title is the link's name
    width, height = _shape(len(kinds))
    return Markup(  # noqa: S704 (names are escaped, the rest are numbers and our own words)
        f'<a id="n-{name}" class="tile" href="{href}" title="{words}"{label}><svg width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" aria-hidden="true">{"".join(_paths(kinds))}</svg>{caption}</a>'
    )


def address(base: str, name: str) -> str:
    """Return the path of a node's page."""
    return str(escape(join(base, "nodes", name)))


def summed(runs: Iterable[Run]) -> dict[str, float]:
    """Return the number of GPUs of each kind."""
    counts: dict[str, float] = {}
    for run in runs:
        counts[run.kind] = counts.get(run.kind, 0.0) + run.gpus
    return counts


def _state_of_holder(holder: str) -> str:
    """Return the state of what a pod holds of a resource; "" is one that the reader may not see."""
    return "used" if holder else "others"


def _paths(kinds: Sequence[str]) -> Iterator[str]:
    columns = _columns(len(kinds))
    cells: dict[str, list[str]] = {}
    for i, kind in enumerate(kinds):
        cells.setdefault(kind, []).append(f"M{i % columns * _CELL} {i // columns * _CELL}h8v8h-8z")
    for kind, drawn in cells.items():
        yield f'<path class="{kind}" d="{"".join(drawn)}"/>'


def _shape(gpus: int) -> tuple[int, int]:
    columns = _columns(gpus)
    return min(columns, max(gpus, 1)) * _CELL - 2, max(1, -(-gpus // columns)) * _CELL - 2


def _columns(gpus: int) -> int:
    return _NARROW if gpus <= _WIDE else _WIDE


def _part_of(used: float) -> str:
    if used >= 1:
        return "part-5"
    return f"part-{ceil(4 * used)}" if used > 0 else "part-0"
