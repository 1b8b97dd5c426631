"""Variables of the loop that a worker which joins has with other values: the best loss, a counter, kept weights.

Those that exist when the training starts and have changed since, or exist when the loader's loop begins and have
changed in it (a total that begins with 0 in each epoch), in the functions that were running then. Whether a variable
matters cannot be seen. One that is only printed does not, a copy of the model's state does. Attributes of an object
that is neither prepared nor tracked (a meter, a metric, the `self` of a class with the loop) are variables, too.

Targets of `for` loops are left out: they are set in each iteration. But a loop over the loader that counts its
iterations (`enumerate`, `islice`) counts those of this worker, since it joined or resumed. That is found in its source:
a count that is used for more than printing, as each hundredth loss is, is a variable like the others.
"""

from __future__ import annotations

import ast
import dis
import inspect
import re
import sys
import textwrap
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.rehearsal.records import fingerprints_of, flattened

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from types import CodeType, FrameType

    from elastic_runtime.rehearsal.records import Fingerprints

_OURS = ("elastic_runtime.", "torch.", "lightning.", "accelerate.", "transformers.")
_NOT_LOOKED_INTO = {*(name.rstrip(".") for name in _OURS), *sys.stdlib_module_names, "tqdm", "rich", "numpy", "wandb"}
"""Packages whose objects hold no figures of a script."""
_DEPTH = 2  # of objects in objects
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_KINDS = (type(None), int, float, torch.Tensor, dict, list, tuple, deque)
_MOST, _LAST = 512, 8
_SHOWS = (
    {"print", "write", "report", "update", "flush", "save", "append", "format", "item"}
    | {"log", "debug", "info", "warning", "log_metrics", "add_scalar", "add_scalars", "add_image", "on_report"}
    | {"set_description", "set_postfix", "set_postfix_str", "set_description_str"}
)
"""Names of functions whose call as a statement is a log, a progress bar or a file."""
_STORES = {
    **dict.fromkeys(("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF", "STORE_FAST_LOAD_FAST"), 1),
    "STORE_FAST_STORE_FAST": 2,
}
"""Instructions that set variables, those of Python 3.13 two things at once; how many of the names are set."""


class LoopVariables:
    """Of this process. `start` is called within `job.epochs` or `job.steps`. `carried` returns the ids of the objects
    that joiners and checkpoints have: prepared or tracked.
    """

    def __init__(self, models: Sequence[torch.nn.Module], carried: Callable[[], Collection[int]] = frozenset) -> None:
        self._models, self._carried = models, carried
        self._first: dict[CodeType, dict[str, Fingerprints]] = {}
        self._known: dict[CodeType, set[str]] = {}  # those that are not set in the loop
        self._loops: dict[CodeType, list[tuple[ast.For, dict[str, int]]]] = {}
        self._iterations = 0

    def start(self) -> None:
        """Look at the variables of the functions that are running, unless that was done."""
        if not self._first:
            seen = set(self._carried())
            self._first = {frame.f_code: dict(_values(frame, seen)) for frame in _frames()}

    def enter(self) -> None:
        """Look at those that were set since, as the loader's loop begins."""
        seen = set(self._carried())
        for frame in _frames():
            first, known = self._first.setdefault(frame.f_code, {}), self._known.get(frame.f_code)
            wanted = set(frame.f_locals) if known is None else known
            self._known.setdefault(frame.f_code, wanted - set(first))
            first |= dict(_values(frame, seen, self._known[frame.f_code]))

    def iterate(self) -> None:
        """Note that an iteration of the loop over the loader has ended."""
        self._iterations += 1

    def counted(self) -> Fingerprints:
        """Return counts of iterations that the running loops use, as "name (line N)"."""
        found: Fingerprints = {}
        for frame in _frames():
            if frame.f_code not in self._loops:
                self._loops[frame.f_code] = _counting_loops(frame)
            for loop, uses in self._loops[frame.f_code]:
                if loop.lineno <= frame.f_lineno <= (loop.iter.end_lineno or 0):  # it asks for the next batch
                    found |= {f"{name} (line {line})": [float(self._iterations), 0.0] for name, line in uses.items()}
        return found

    def changed(self) -> tuple[Fingerprints, list[str]]:
        """Return those that have changed since, and the names of those that hold a state of a model."""
        changed: Fingerprints = {}
        states: list[str] = []
        seen = set(self._carried())
        keys = [set(model.state_dict()) for model in self._models]
        for frame in _frames():
            first = self._first.get(frame.f_code, {})
            for name, values in _values(frame, seen, set(first)):
                if values != first[name]:
                    changed |= _of_changed(first[name], values) or {name: [0.0, 0.0]}
                    if any(_holds(frame.f_locals[name], names) for names in keys if names):
                        states.append(name)
        return changed, states


def _of_changed(before: Fingerprints, after: Fingerprints) -> Fingerprints:
    """Leave out an object's attributes that have not changed: they may name the worker."""
    names = {variable_of(path) for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    return {path: value for path, value in after.items() if variable_of(path) in names}


def _frames() -> Iterator[FrameType]:
    """The script's own functions on the stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if not f"{frame.f_globals.get('__name__', '')}.".startswith(_OURS):
            yield frame
        frame = frame.f_back


def _values(frame: FrameType, seen: set[int], names: set[str] | None = None) -> Iterator[tuple[str, Fingerprints]]:
    """`seen`: ids of objects that are carried, or were looked into under another name."""
    left_out = _targets(frame.f_code)
    for name, value in list(frame.f_locals.items()):
        wanted = (names is None or name in names) and name not in left_out and not name.startswith("__")
        if wanted and (isinstance(value, _KINDS) or _is_looked_into(value, seen)):
            yield name, fingerprints_of(flattened(_short(value, seen), name))


def _short(value: Any, seen: set[int], depth: int = 0) -> Any:
    """Return lists as their length and their last elements: one that collects a number in each step grows long. Return
    objects as their attributes, each name with a colon before it.

    Leave out shards, which no worker can look at alone, and groups of an optimizer.
    """
    if isinstance(value, torch.Tensor) and (type(value) not in _PLAIN or value.is_meta):
        return None
    if isinstance(value, dict) and "params" in value:
        return None
    if isinstance(value, list | tuple | deque):
        return {"length": len(value), "last": [_short(each, seen, depth) for each in list(value)[-_LAST:]]}
    if isinstance(value, dict):
        return {str(key): _short(each, seen, depth) for key, each in list(value.items())[:_MOST]}
    if isinstance(value, _KINDS) or depth == _DEPTH or not _is_looked_into(value, seen):
        return value
    seen.add(id(value))
    own = list(object.__getattribute__(value, "__dict__").items())[:_MOST]
    return {f":{name}": _short(each, seen, depth + 1) for name, each in own if not name.startswith("_")}


def _is_looked_into(value: object, seen: Collection[int]) -> bool:
    """Whether attributes of an object are variables of the script. By its type: proxies answer for other objects."""
    package = type(value).__module__.partition(".")[0]
    return type(value).__dictoffset__ != 0 and package not in _NOT_LOOKED_INTO and id(value) not in seen


def variable_of(path: str) -> str:
    """Return how a script writes the variable that a path of fingerprints is a part of: "best", "self.meter.total"."""
    return re.split(r"\.(?!:)|\[", path)[0].replace(":", "")


def _holds(value: Any, names: set[str]) -> bool:
    """Whether it is a state_dict with these names, or has one among its last elements."""
    if isinstance(value, dict):
        return names <= set(value) or any(_holds(each, names) for each in list(value.values())[:_LAST])
    return isinstance(value, list | tuple | deque) and any(_holds(each, names) for each in list(value)[-_LAST:])


def _counting_loops(frame: FrameType) -> list[tuple[ast.For, dict[str, int]]]:
    """Return loops of this function over something enumerated or cut, and the line that uses each count."""
    try:
        lines, first = inspect.getsourcelines(frame)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, ValueError):
        return []
    ast.increment_lineno(tree, max(first, 1) - 1)
    loops = [(node, _uses(node)) for node in ast.walk(tree) if isinstance(node, ast.For)]
    return [(loop, uses) for loop, uses in loops if uses]


def _uses(loop: ast.For) -> dict[str, int]:
    """Return the counts of one loop that matter: by name, the line."""
    called = [node for node in ast.walk(loop.iter) if isinstance(node, ast.Call)]
    found = {name: loop.lineno for name in map(_name_of, called) if name == "islice"}
    if any(_name_of(call) == "zip" and any(_is_range(each) for each in call.args) for call in called):
        found["range"] = loop.lineno
    if any(_name_of(call) == "enumerate" for call in called) and isinstance(loop.target, ast.Tuple):
        count = loop.target.elts[0]
        line = _line_of_use(loop.body, count.id) if isinstance(count, ast.Name) else 0
        found |= {count.id: line} if line and isinstance(count, ast.Name) else {}
    return found


def _is_range(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _name_of(node) == "range"


def _name_of(call: ast.Call) -> str:
    function = call.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _line_of_use(body: Sequence[ast.stmt], name: str) -> int:
    """Return the first line that uses the name for more than to show something; 0: none does."""
    for statement in body:
        inner = [part for field in ("body", "orelse", "finalbody") for part in getattr(statement, field, [])]
        if _shows(statement):
            continue
        own = [part for part in ast.iter_child_nodes(statement) if part not in inner]
        if any(isinstance(node, ast.Name) and node.id == name for part in own for node in ast.walk(part)):
            return statement.lineno
        if line := _line_of_use(inner, name):
            return line
    return 0


def _shows(statement: ast.stmt) -> bool:
    """Whether it shows something, maybe under a condition and with variables that are set for it, and nothing else."""
    if isinstance(statement, ast.If):
        inner = [*statement.body, *statement.orelse]
        return any(_shows(each) for each in inner) and all(_shows(each) or _sets(each) for each in inner)
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and _name_of(statement.value) in _SHOWS
    )


def _sets(statement: ast.stmt) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return bool(targets) and all(isinstance(each, ast.Name | ast.Tuple) for each in targets)


def _targets(code: CodeType) -> set[str]:
    """Names that a `for` sets. A comprehension in the function's own code, since Python 3.12, restores its names."""
    found: set[str] = set()
    restored: set[str] = set()
    within = False
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        within = name == "FOR_ITER" or (within and name.startswith(("STORE_", "UNPACK_", "SWAP", "EXTENDED_ARG")))
        if name == "LOAD_FAST_AND_CLEAR":
            restored.add(instruction.argval)
        elif name in _STORES:
            given = [instruction.argval] if isinstance(instruction.argval, str) else instruction.argval
            stored = set(given[: _STORES[name]])
            found |= (stored - restored) if within else set()
            restored -= set() if within else stored
        within &= name != "STORE_FAST_LOAD_FAST"
    return found
