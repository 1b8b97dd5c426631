"""What a part is, and the list of all: the first of each kind is the plain one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.elastic_runtime.zoo.generated.drafts import Draft


@dataclass(frozen=True)
class Part:
    """`refused`, `rehearsed`: patterns of what a run or a rehearsal says of a script with it; "": it is right.
    `refused_in`: a history in which it is refused; "": it is alone. `rehearsed_with`: the pattern with another part.

    `noted`: a variable that a rehearsal names in a note, for whether it matters cannot be seen.
    `modes`: the reductions under which it can be right at all, or is refused.
    """

    name: str
    add: Callable[[Draft], None]
    refused: str = ""
    rehearsed: str = ""
    modes: tuple[str, ...] = ("fast", "exact")
    refused_in: str = ""
    rehearsed_with: tuple[tuple[str, str], ...] = ()
    noted: str = ""


_NAMES = (
    "model optimizer scheduler sampler loss cut evaluation average counter noise prologue epilogue count_of_the_loop "
    "clearing skipping hook"
)
KINDS: dict[str, dict[str, Part]] = {name: {} for name in _NAMES.split()}


def part(
    kind: str,
    *,
    refused: str = "",
    rehearsed: str = "",
    modes: tuple[str, ...] = ("fast", "exact"),
    refused_in: str = "",
    rehearsed_with: tuple[tuple[str, str], ...] = (),
    noted: str = "",
) -> Callable[[Any], Any]:
    """Enter a function into KINDS under its kind and its name."""

    def enter(add: Any) -> Any:
        KINDS[kind][add.__name__] = Part(
            add.__name__, add, refused, rehearsed, modes, refused_in, rehearsed_with, noted
        )
        return add

    return enter
