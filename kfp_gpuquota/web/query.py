"""The query string of a page: what it chooses, what of it cannot be read, and addresses with another choice.

A value that cannot be read counts as not given, and a sentence on the page says so. A selector that cannot be read
selects nothing.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import urlencode

from kfp_gpuquota.api.label_selector import parse_selector
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kfp_gpuquota.api.label_selector import Requirement

MAX_TEXT: Final = 500
MAX_PAGE: Final = 999_999


class Query:
    """Reads the fields of a query string; `problems` has a sentence for each that cannot be read."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given
        self.problems: list[str] = []

    def text(self, *names: str) -> str:
        """Return the first of these fields that is not empty, without spaces around it."""
        return next((found for name in names if (found := self._given.get(name, "").strip()[:MAX_TEXT])), "")

    def project(self) -> str:
        """Return the project, which Kubeflow's dashboard calls a namespace."""
        return self.text("namespace", "project")

    def choice(self, name: str, choices: Collection[str], default: str = "") -> str:
        """Return a field that has to be one of `choices`."""
        found = self.text(name)
        if found and found not in choices and found != default:
            self._refuse(name, found, f"it must be one of {', '.join(filter(None, choices))}")
            return default
        return found or default

    def number(self, name: str, default: int, most: int = MAX_PAGE) -> int:
        """Return a field that has to be a whole number from 1 to `most`."""
        found = self.text(name)
        if not found:
            return default
        if found.isascii() and found.isdecimal() and len(found) <= len(str(most)) and 1 <= int(found) <= most:
            return int(found)
        self._refuse(name, found, f"it must be a whole number from 1 to {most:,}")
        return default

    def selector(self, name: str) -> tuple[Requirement, ...]:
        """Return the requirements of a label selector."""
        try:
            return parse_selector(self.text(name))
        except InvalidFieldError as error:
            self.problems.append(error.message)
            return ()

    def _refuse(self, name: str, value: str, rule: str) -> None:
        self.problems.append(f"{InvalidFieldError(name, value, rule).message}; it is ignored")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """What a query string chooses: a field for each of its keys, which are `KEYS` in the order of an address."""

    KEYS: ClassVar[tuple[str, ...]] = ()

    sort: str = ""
    size: int = 0
    page: int = 1
    problems: tuple[str, ...] = ()

    def link(self, **changes: Any) -> str:
        """Return the query string with some choices changed, on its first page; what is default is left out."""
        changed = dataclasses.replace(self, **{"page": 1, **changes})
        standard = type(self)()
        chosen = [(key, getattr(changed, key)) for key in self.KEYS if getattr(changed, key) != getattr(standard, key)]
        return f"?{urlencode(chosen)}"

    def sorted_by(self, column: str) -> str:
        """Return the query string of a click on a column: ascending, then descending, then in the page's own order."""
        following = {column: f"-{column}", f"-{column}": ""}
        return self.link(sort=following.get(self.sort, column))

    def direction(self, column: str) -> str:
        """Return the value of `aria-sort` for a column."""
        return {column: "ascending", f"-{column}": "descending"}.get(self.sort, "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListChoices(Choices):
    """What a list shows: things of a project, with a type of GPU, a word in the name, labels; in pages, in an order."""

    project: str = ""
    gpu: str = ""
    word: str = ""
    selector: str = ""
    required: tuple[Requirement, ...] = ()

    @classmethod
    def common(cls, query: Query, sorts: Collection[str], most: int) -> dict[str, Any]:
        """Return the values of these fields; `sorts` are the columns, `most` is the largest page."""
        return {
            "required": query.selector("selector"),
            "selector": query.text("selector"),
            "project": query.project(),
            "gpu": query.text("gpu"),
            "word": query.text("word").lower(),
            "sort": query.choice("sort", [*sorts, *(f"-{name}" for name in sorts)]),
            "size": query.number("size", cls.size, most),
            "page": query.number("page", 1),
        }


@dataclasses.dataclass(frozen=True)
class Slice:
    """The part of a list that one page shows: `begin` to `end` (excluded) of `total`."""

    begin: int
    end: int
    total: int
    page: int
    pages: int

    @classmethod
    def of(cls, chosen: Choices, total: int) -> Slice:
        """Return the part that is chosen; it is empty beyond the last page."""
        begin = min(total, (chosen.page - 1) * chosen.size)
        end = min(total, begin + chosen.size)
        return cls(begin, end, total, chosen.page, max(1, -(-total // chosen.size)))
