"""Decodes a server's answers; fields of a newer server are left out, so that an older client goes on working.

Types that requests and answers share refuse unknown fields, because in a request one is a mistake. Rejected: a second
set of types for answers, and walking the types beside the document. An answer of the client's own version, which is all
but every one, is decoded at once.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from kfp_gpuquota.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")

_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<field>[^`]*)`(?: - at `(?P<path>[^`]*)`)?$")
_STEP: Final = re.compile(r"\.(\w+)|\[(\.\.\.|\d+)\]")
_MOST: Final = 1000
"""Unknown fields of an answer, each counted once for all elements of a list."""


def decoded(raw: bytes, kind: type[T]) -> T:
    """Return the answer. Raises RunError for one that this version cannot read."""
    try:
        answer: T = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        return _without_unknown_fields(raw, kind, error)
    except msgspec.DecodeError as error:
        raise _unreadable(error) from error
    return answer


def _without_unknown_fields(raw: bytes, kind: type[T], error: msgspec.ValidationError) -> T:
    document = msgspec.json.decode(raw)
    for _ in range(_MOST):
        found = _UNKNOWN.search(str(error))
        if found is None:
            break
        for part in _parts(document, _STEP.findall(found["path"] or "")):
            part.pop(found["field"], None)
        try:
            answer: T = msgspec.json.decode(msgspec.json.encode(document), type=kind)
        except msgspec.ValidationError as next_one:
            error = next_one
        else:
            return answer
    raise _unreadable(error) from error


def _parts(node: Any, steps: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield the objects at a path of msgspec, such as `$.jobs[...].spec`; `[...]` is each element."""
    if not steps:
        if isinstance(node, dict):
            yield node
        return
    (name, index), rest = steps[0], steps[1:]
    if name:
        below = [node[name]] if isinstance(node, dict) and name in node else []
    elif index == "...":
        below = list(node.values() if isinstance(node, dict) else node or ())
    else:
        below = [node[int(index)]]
    for each in below:
        yield from _parts(each, rest)


def _unreadable(error: Exception) -> RunError:
    return RunError(
        f"the answer of the server cannot be read ({error}); it may be newer than this program: upgrade kfp-gpuquota"
    )
