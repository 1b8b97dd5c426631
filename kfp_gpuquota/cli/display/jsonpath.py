"""`-o jsonpath=TEMPLATE`, in the grammar of kubectl: "{.spec.name}", "{range .items[*]}{.uid}{"\\n"}{end}". Pure.

Fields, `[0]`, `[-1]`, `[1:3]`, `[*]`, `['a key']`, `..name`, `[?(@.a=="b")]`, `range` and `end`, and texts in quotes
are read; another text is refused. A list is its own `.items`, so that templates written for kubectl's lists work. See
https://kubernetes.io/docs/reference/kubectl/jsonpath.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kfp_gpuquota.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Step = Callable[[Any], Iterator[Any]]
    Path = tuple[Step, ...]

_PIECE: Final = re.compile(r"""\{((?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^{}"'])*)\}|([^{]+)""")
_STEP: Final = re.compile(
    r"""(?P<deep>\.\.)?\.?(?:(?P<name>[\w/-]+(?:\\\.[\w/-]+)*)|(?P<all>\*)|\[(?P<inside>(?:"[^"]*"|'[^']*'|[^\]"'])*)\])"""
)
_CONDITION: Final = re.compile(r"\?\(\s*@(?P<path>[^=!<>]*?)\s*(?:(?P<sign>==|!=|<=|>=|<|>)\s*(?P<value>.+?))?\s*\)")
_SLICE: Final = re.compile(r"(-?\d+)?:(-?\d+)?")
_SIGNS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip

_OBJECTS: Final = ({"uid", "spec", "status"}, {"node", "held"}, {"project", "allocated"})
"""Fields by which jobs, nodes and projects are recognized: another field is a mistake, an absent label is none."""


class JsonPath(str):
    """A template, as it was typed. Raises UsageError for one that cannot be read."""

    def __init__(self, template: str) -> None:
        bare = template[:1] in {".", "$", "["} and "{" not in template
        self._pieces = _pieces(f"{{{template}}}" if bare else template)

    def of(self, content: object) -> str:
        """Return the text for JSON's `content`. Raises UsageError for a field that the objects do not have."""
        return "".join(_written(self._pieces, content))


def _pieces(template: str) -> list[tuple[str, Any]]:
    """Return ("text", text), ("path", path), ("range", (path, pieces)) in their order."""
    open_ranges: list[tuple[Path, list[tuple[str, Any]]]] = []
    found: list[tuple[str, Any]] = []
    at = 0
    while at < len(template):
        piece = _PIECE.match(template, at)
        if piece is None:
            _refuse(template, f"a brace at {template[at:]!r} without its other one")
        at = piece.end()
        inside = None if piece[1] is None else piece[1].strip()
        if inside is None:
            found.append(("text", piece[2]))
        elif inside == "end":
            if not open_ranges:
                _refuse(template, "{end} without {range}")
            path, before = open_ranges.pop()
            before.append(("range", (path, found)))
            found = before
        elif inside.startswith("range "):
            open_ranges.append((_path(template, inside.removeprefix("range ").strip()), found))
            found = []
        elif inside[:1] in {'"', "'"}:
            found.append(("text", _text(template, inside)))
        else:
            found.append(("path", _path(template, inside)))
    if open_ranges:
        _refuse(template, "{range} without {end}")
    return found


def _written(pieces: list[tuple[str, Any]], content: object) -> Iterator[str]:
    for kind, value in pieces:
        if kind == "text":
            yield value
        elif kind == "path":
            yield " ".join(map(_shown, _followed(value, content)))
        else:
            path, inner = value
            for each in _followed(path, content):
                yield from _written(inner, each)


def _followed(path: Path, content: object) -> Iterator[Any]:
    if not path:
        yield content
        return
    for each in path[0](content):
        yield from _followed(path[1:], each)


def _path(template: str, text: str) -> Path:
    """Return the steps of ".a[0]['b']"."""
    steps: list[Step] = []
    rest = text.removeprefix("$").removeprefix("@")
    while rest and rest != ".":
        found = _STEP.match(rest)
        if found is None:
            _refuse(template, repr(rest))
        if found["deep"]:
            steps.append(_descendants)
        steps.append(_step(template, found, deep=bool(found["deep"])))
        rest = rest[found.end() :]
    return tuple(steps)


def _step(template: str, found: re.Match[str], *, deep: bool) -> Step:
    if found["name"]:
        return _field(found["name"].replace("\\.", "."), deep=deep)
    if found["all"]:
        return _every
    inside = found["inside"].strip()
    if inside == "*":
        return _every
    if inside[:1] in {'"', "'"}:
        return _field(_text(template, inside), deep=deep)
    if re.fullmatch(r"-?\d+", inside):
        return _elements(slice(int(inside), int(inside) + 1 or None))
    if bounds := _SLICE.fullmatch(inside):
        return _elements(slice(*(None if each is None else int(each) for each in bounds.groups())))
    condition = _CONDITION.fullmatch(inside)
    if condition is None:
        _refuse(template, f"[{inside}]")
    return _filtered(template, condition)


def _field(name: str, *, deep: bool) -> Step:
    def step(content: Any) -> Iterator[Any]:
        if isinstance(content, list | tuple) and name == "items":
            yield content
        elif isinstance(content, dict) and name in content:
            yield content[name]
        elif isinstance(content, dict) and not deep and any(known <= content.keys() for known in _OBJECTS):
            raise UsageError(f"-o jsonpath: there is no field {name!r} here; there are {', '.join(content)}")

    return step


def _elements(chosen: slice) -> Step:
    return lambda content: iter(content[chosen] if isinstance(content, list | tuple) else ())


def _every(content: Any) -> Iterator[Any]:
    if isinstance(content, dict | list | tuple):
        yield from content.values() if isinstance(content, dict) else content


def _descendants(content: Any) -> Iterator[Any]:
    """Yield each object in it, itself first."""
    if isinstance(content, dict):
        yield content
    for each in _every(content):
        yield from _descendants(each)


def _filtered(template: str, condition: re.Match[str]) -> Step:
    path = _path(template, condition["path"].strip())
    sign = condition["sign"]
    wanted: Any = None if sign is None else _literal(template, condition["value"])

    def holds(each: object) -> bool:
        found = list(_followed(path, each))
        if sign is None:
            return bool(found)
        try:
            return any(_SIGNS[sign](value, wanted) for value in found)
        except TypeError:
            return False

    return lambda content: (each for each in _every(content) if holds(each))


def _literal(template: str, text: str) -> object:
    try:
        return _text(template, text) if text[:1] in {'"', "'"} else json.loads(text)
    except ValueError:
        _refuse(template, repr(text))


def _text(template: str, quoted: str) -> str:
    try:
        text = ast.literal_eval(quoted)
    except (SyntaxError, ValueError):
        text = None
    return text if isinstance(text, str) else _refuse(template, quoted)


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _refuse(template: str, what: str) -> NoReturn:
    raise UsageError(f"-o jsonpath={template!r} has {what}, which is not understood; for example '{{.spec.name}}'")
