"""Computes what the ClusterQueues and Cohorts of Kueue may hold, by its rules of nominal quota and borrowing. Pure.

For one amount, such as the GPUs of a flavor:

    subtree  the nominal quota, of a Cohort with what its members lend
    lent     the part of the subtree's quota that others may borrow: at most the lendingLimit
    most     what is held if nothing else is: what is not lent, and of what the Cohort above has at most as much as was
             lent and the borrowingLimit

So a Cohort's members together never hold more than its quota and theirs, also on a larger cluster. A tree of limits
(`limit`) admits the same if no quota has a lendingLimit, and in a Cohort of two queues. With more of them what is not
lent depends on who holds it: then each alone gets no more than in Kueue, but together they may.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T", bool, float)


class Quota(NamedTuple):
    """A quota of one amount; None is no limit."""

    nominal: float = 0.0
    borrowing: float | None = None
    lending: float | None = None

    def plus(self, other: Quota) -> Quota:
        """Return the quota of both, for example of two kinds of GPUs of one flavor."""
        borrowing, lending = _sum(self.borrowing, other.borrowing), self.lending
        if self.lending is not None or other.lending is not None:
            lending = _given(self.lending, self.nominal) + _given(other.lending, other.nominal)
        return Quota(self.nominal + other.nominal, borrowing, lending)


def _computed_once(method: Callable[[Member, str], T]) -> Callable[[Member, str], T]:
    """Compute it once for each member and amount, when the tree is complete: each queue asks it of the Cohort above."""

    @wraps(method)
    def computed(member: Member, amount: str) -> T:
        key = method.__name__, amount
        if key not in member.computed:
            member.computed[key] = method(member, amount)
        found: T = member.computed[key]
        return found

    return computed


@dataclass(eq=False)
class Member:
    """A ClusterQueue, or a Cohort with its members."""

    kind: str
    name: str
    quotas: dict[str, Quota] = field(default_factory=dict)
    weight: float | None = None
    parent: Member | None = None
    members: list[Member] = field(default_factory=list)
    computed: dict[tuple[str, str], Any] = field(default_factory=dict, repr=False)

    @property
    def title(self) -> str:
        """Return its kind and name."""
        return f"{self.kind} {self.name}"

    def join(self, cohort: Member) -> None:
        """Become a member of a Cohort."""
        self.parent = cohort
        cohort.members.append(self)

    def above(self) -> Iterator[Member]:
        """Yield the Cohorts above it, the nearest first; the first one that comes again is the last one."""
        seen, at = set[int](), self.parent
        while at is not None:
            yield at
            if id(at) in seen:
                return
            seen.add(id(at))
            at = at.parent

    @_computed_once
    def has(self, amount: str) -> bool:
        """Return whether it, or any below it, has a quota of the amount; a queue without one may hold nothing."""
        return amount in self.quotas or any(one.has(amount) for one in self.members)

    @_computed_once
    def guaranteed(self, amount: str) -> float:
        """Return the nominal quota, with those below."""
        return self._quota(amount).nominal + sum(one.guaranteed(amount) for one in self.members)

    def limit(self, amount: str) -> float | None:
        """Return what it and those below hold at most; None if the Cohort above cannot hold more."""
        if self.kind == "ClusterQueue" and not self.has(amount):
            return 0.0
        largest = self.largest(amount)
        return largest if self.parent is None or largest < self.parent.largest(amount) else None

    @_computed_once
    def keeps(self, amount: str) -> bool:
        """Return whether it, or any below it, lends less than its quota."""
        return self.kept(amount) > 0 or any(one.keeps(amount) for one in self.members)

    def _quota(self, amount: str) -> Quota:
        return self.quotas.get(amount, Quota())

    @_computed_once
    def subtree(self, amount: str) -> float:
        """Return the nominal quota, of a Cohort with what its members lend."""
        return self._quota(amount).nominal + sum(one.lent(amount) for one in self.members)

    def lent(self, amount: str) -> float:
        """Return the part of the subtree's quota that others may borrow."""
        return min(self.subtree(amount), _given(self._quota(amount).lending, float("inf")))

    def kept(self, amount: str) -> float:
        """Return the part of the subtree's quota that is not lent."""
        return self.subtree(amount) - self.lent(amount)

    @_computed_once
    def most(self, amount: str) -> float:
        """Return what it holds if nothing else does, of a Cohort without what its members keep."""
        if self.parent is None:
            return self.subtree(amount)
        borrowed = self.lent(amount) + _given(self._quota(amount).borrowing, float("inf"))
        return self.kept(amount) + min(borrowed, self.parent.most(amount))

    def largest(self, amount: str) -> float:
        """Return the most that it holds, with what those below do not lend to it."""
        return self.most(amount) + self.kept_below(amount)

    @_computed_once
    def kept_below(self, amount: str) -> float:
        """Return what those below do not lend to it."""
        return sum(one.kept(amount) + one.kept_below(amount) for one in self.members)


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def _given(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
