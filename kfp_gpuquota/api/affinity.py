"""Which nodes a worker may use, in Kubernetes' words: node selector, node affinity, taints and tolerations.

Only requirements are here: preferences (`preferredDuringScheduling...`, PreferNoSchedule) exclude no node.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NODE_NAME: Final = "metadata.name"
"""As a requirement's key: the node's name instead of a label, as Kubernetes' `matchFields` has it."""

GPU_PRODUCT: Final = "nvidia.com/gpu.product"
"""The label that has the type of a node's GPUs, as NVIDIA's GPU feature discovery writes it."""

_NAME: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_NAME}")
_VALUE = re.compile(rf"({_NAME})?")
_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)


class Operator(StrEnum):
    """The operator that compares a label with the values of a requirement."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GT = "Gt"
    LT = "Lt"


class Requirement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One condition on a node's label. `Gt` and `Lt` compare whole numbers; a missing label satisfies `NotIn`."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_label_key("node_affinity.key", self.key)
        if self.operator in {Operator.EXISTS, Operator.DOES_NOT_EXIST}:
            self._refuse_unless(not self.values, "takes no values")
        elif self.operator in {Operator.IN, Operator.NOT_IN}:
            self._refuse_unless(bool(self.values), "needs at least one value")
        else:
            whole = len(self.values) == 1 and _INTEGER.fullmatch(self.values[0]) is not None
            self._refuse_unless(whole, "needs one value, a whole number")

    def _refuse_unless(self, fine: bool, rule: str) -> None:  # noqa: FBT001 - a predicate's value
        if not fine:
            raise InvalidFieldError("node_affinity.values", list(self.values), f"operator {self.operator.value} {rule}")

    def admits(self, name: str, labels: Mapping[str, str]) -> bool:
        """A node of that name and with these labels satisfies it."""
        value = name if self.key == NODE_NAME else labels.get(self.key)
        match self.operator:
            case Operator.IN:
                return value in self.values
            case Operator.NOT_IN:
                return value not in self.values
            case Operator.EXISTS:
                return value is not None
            case Operator.DOES_NOT_EXIST:
                return value is None
            case Operator.GT | Operator.LT:
                return self._compares(value)

    def _compares(self, value: str | None) -> bool:
        if value is None or not _INTEGER.fullmatch(value):
            return False
        have, bound = int(value), int(self.values[0])
        return have > bound if self.operator is Operator.GT else have < bound


class NodeTerm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requirements that a node must all satisfy; of several terms one suffices. An empty term admits no node."""

    requirements: tuple[Requirement, ...]

    def admits(self, name: str, labels: Mapping[str, str]) -> bool:
        """A node of that name and with these labels satisfies all of it."""
        return bool(self.requirements) and all(r.admits(name, labels) for r in self.requirements)


def within(terms: tuple[NodeTerm, ...], others: tuple[NodeTerm, ...]) -> tuple[NodeTerm, ...]:
    """Return the conjunction of two lists of alternative terms; () stands for any node.

    Applying `others` twice changes nothing if they are one term, as those of volumes are.
    """
    if not terms or not others:
        return terms or others
    both = ((*one.requirements, *other.requirements) for one in terms for other in others)
    return tuple(dict.fromkeys(NodeTerm(tuple(dict.fromkeys(requirements))) for requirements in both))


class TaintEffect(StrEnum):
    """The effect of a taint on workers that do not tolerate it. The first only makes a node less preferred."""

    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_SCHEDULE = "NoSchedule"
    NO_EXECUTE = "NoExecute"


class Taint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keeps off a node what does not tolerate it."""

    key: str
    effect: TaintEffect
    value: str = ""

    def __post_init__(self) -> None:
        check_label_key("taints.key", self.key)


class TolerationOperator(StrEnum):
    """`Equal` compares values, `Exists` does not."""

    EQUAL = "Equal"
    EXISTS = "Exists"


class Toleration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tolerated taint. An empty key with `Exists` tolerates every taint, an empty effect each effect."""

    key: str = ""
    operator: TolerationOperator = TolerationOperator.EQUAL
    value: str = ""
    effect: TaintEffect | None = None

    def __post_init__(self) -> None:
        exists = self.operator is TolerationOperator.EXISTS
        if self.key:
            check_label_key("tolerations.key", self.key)
        elif not exists:
            raise InvalidFieldError("tolerations.key", self.key, "only operator Exists may leave it out")
        if exists and self.value:
            raise InvalidFieldError("tolerations.value", self.value, "operator Exists takes no value")

    def tolerates(self, taint: Taint) -> bool:
        """The taint does not keep this worker off."""
        if self.effect not in {None, taint.effect} or (self.key and self.key != taint.key):
            return False
        return self.operator is TolerationOperator.EXISTS or self.value == taint.value


def keeps_off(taints: Sequence[Taint], tolerations: Sequence[Toleration]) -> Taint | None:
    """The first of the taints that keeps a worker with these tolerations off the node."""
    binding = (taint for taint in taints if taint.effect is not TaintEffect.PREFER_NO_SCHEDULE)
    return next((taint for taint in binding if not any(t.tolerates(taint) for t in tolerations)), None)


def check_label_key(field: str, key: str) -> None:
    """A label's key as Kubernetes has it: an optional DNS prefix, and a name of up to 63 characters."""
    if not _KEY.fullmatch(key):
        raise InvalidFieldError(
            field, key, "a label's key is [PREFIX/]NAME, of letters, digits, '-', '_' and '.'",
            hint="for example 'nvidia.com/gpu.product'",
        )  # fmt: skip


def check_labels(field: str, labels: Mapping[str, str]) -> None:
    """Keys and values that Kubernetes takes as labels."""
    for key, value in labels.items():
        check_label_key(field, key)
        if not _VALUE.fullmatch(value):
            raise InvalidFieldError(
                f"{field}.{key}", value, "a label's value is up to 63 letters, digits, '-', '_' and '.'"
            )
