"""Kubernetes' label selectors: "app=web,tier!=db,env in (prod,test),stage notin (old),gpu,!legacy,rank>3". Pure.

An API server accepts the same texts and selects the same objects; tests compare them. See
https://kubernetes.io/docs/concepts/overview/working-with-objects/labels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from kfp_gpuquota.api.affinity import check_label_key, check_labels
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMS: Final = "K=V, K!=V, 'K in (V,V)', 'K notin (V,V)', K, !K, K>N and K<N, joined by commas"
_TOKEN: Final = re.compile(r"\s*(==|!=|=|!|,|\(|\)|<|>|[^\s=!,()<>]+)")
_SYMBOLS: Final = frozenset({"==", "!=", "=", "!", ",", "(", ")", "<", ">"})
_INTEGER: Final = re.compile(r"[+-]?[0-9]+")
_INT64: Final = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class Requirement:
    """What a label must be. `operator`: in, notin, exists, !, > or <."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def met_by(self, labels: Mapping[str, str]) -> bool:
        """Return whether the labels meet it. A label that is absent meets `notin` and `!` only."""
        if self.key not in labels:
            return self.operator in {"notin", "!"}
        value = labels[self.key]
        if self.operator in {"in", "notin"}:
            return (value in self.values) == (self.operator == "in")
        if self.operator in {">", "<"}:
            number, bound = _integer(value), int(self.values[0])
            return number is not None and (number > bound if self.operator == ">" else number < bound)
        return self.operator == "exists"


def selects(selector: tuple[Requirement, ...], labels: Mapping[str, str]) -> bool:
    """Return whether the labels meet all requirements."""
    return all(requirement.met_by(labels) for requirement in selector)


def parse_selector(text: str) -> tuple[Requirement, ...]:
    """Return the requirements of a selector; none if it is empty, which selects all. Raises InvalidFieldError."""
    return _Parser(text).parsed()


class _Parser:
    """Recursive descent: one method for each part of the grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _TOKEN.findall(text)

    def parsed(self) -> tuple[Requirement, ...]:
        found: list[Requirement] = []
        while self._tokens:
            found.append(self._requirement())
            if not self._tokens:
                break
            self._expect(",")
            if not self._tokens:
                self._refuse("a comma at its end")
        return tuple(found)

    def _requirement(self) -> Requirement:
        absent = self._skip("!")
        key = self._word("a label's key")
        check_label_key("selector", key)
        if absent:
            return Requirement(key, "!")
        if self._next() in {"", ","}:
            return Requirement(key, "exists")
        operator = self._tokens.pop(0)
        if operator in {"=", "==", "!="}:
            return self._checked(Requirement(key, "notin" if operator == "!=" else "in", (self._value(),)))
        if operator in {">", "<"}:
            return self._checked(Requirement(key, operator, (self._value(),)))
        if operator not in {"in", "notin"}:
            self._refuse(f"{operator!r} behind {key!r}")
        return self._checked(Requirement(key, operator, self._values()))

    def _values(self) -> tuple[str, ...]:
        self._expect("(")
        values = [self._value()]
        while self._skip(","):
            values.append(self._value())
        self._expect(")")
        return tuple(values)

    def _value(self) -> str:
        """Return the next word; "" where none stands, which Kubernetes takes as the empty value."""
        return self._tokens.pop(0) if self._next() and self._next() not in _SYMBOLS else ""

    def _checked(self, requirement: Requirement) -> Requirement:
        for value in requirement.values:
            check_labels("selector", {requirement.key: value})
        if requirement.operator in {">", "<"} and _integer(requirement.values[0]) is None:
            self._refuse(f"{requirement.values[0]!r} behind {requirement.operator}, which compares whole numbers")
        return requirement

    def _word(self, what: str) -> str:
        if not self._next() or self._next() in _SYMBOLS:
            self._refuse(f"{self._next()!r} where {what} is expected" if self._next() else f"no key where {what} is")
        return str(self._tokens.pop(0))

    def _next(self) -> str:
        return self._tokens[0] if self._tokens else ""

    def _skip(self, symbol: str) -> bool:
        if self._next() != symbol:
            return False
        self._tokens.pop(0)
        return True

    def _expect(self, symbol: str) -> None:
        if not self._skip(symbol):
            self._refuse(f"{self._next()!r} where {symbol!r} is expected" if self._tokens else f"no {symbol!r}")

    def _refuse(self, problem: str) -> NoReturn:
        raise InvalidFieldError("selector", self._text, f"it has {problem}; it consists of {FORMS}")


def _integer(text: str) -> int | None:
    """Return a signed 64-bit integer as Go parses it, or None."""
    if not text.isascii() or not _INTEGER.fullmatch(text):
        return None
    number = int(text) if len(text) < 32 else 1 << 64
    return number if number in _INT64 else None
