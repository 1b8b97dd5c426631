"""Recipes: which part a script has of each kind. As text: `plateau_of_the_mean+own_random_generator`, "" for a plain
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tests.elastic_runtime.zoo.generated.drafts import Draft
from tests.elastic_runtime.zoo.generated.parts import KINDS, Part
from tests.elastic_runtime.zoo.parts import SCRIPTS, Script

if TYPE_CHECKING:
    from collections.abc import Iterable

PREFIX = "generated:"
_OF_NAME = {name: kind for kind, parts in KINDS.items() for name in parts}
_MODES = ("fast", "exact")


@dataclass(frozen=True)
class Recipe:
    """The parts that are not the plain ones of their kinds, in the order of the kinds."""

    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, names: Iterable[str]) -> Self:
        """Return the recipe with these parts; of two of a kind the last one counts."""
        chosen = {_OF_NAME[name]: name for name in names if name}
        plain = {kind: next(iter(parts)) for kind, parts in KINDS.items()}
        return cls(tuple(chosen[kind] for kind in KINDS if chosen.get(kind, plain[kind]) != plain[kind]))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the recipe whose text this is."""
        return cls.of(text.split("+"))

    def __str__(self) -> str:
        return "+".join(self.names)

    @property
    def parts(self) -> list[Part]:
        """Its part of each kind."""
        chosen = {_OF_NAME[name]: name for name in self.names}
        return [parts[chosen[kind]] if kind in chosen else next(iter(parts.values())) for kind, parts in KINDS.items()]

    @property
    def modes(self) -> tuple[str, ...]:
        """The reductions in which it can be right."""
        return tuple(mode for mode in _MODES if all(mode in part.modes for part in self.parts))

    @property
    def refused(self) -> str:
        """A pattern of what may refuse it; "": nothing may."""
        return "|".join(part.refused for part in self.parts if part.refused)

    @property
    def rehearsed(self) -> str:
        """A pattern of what a rehearsal may find; "": nothing."""
        alone = [part.rehearsed for part in self.parts if part.rehearsed]
        pairs = [words for part in self.parts for other, words in part.rehearsed_with if other in self.names]
        return "|".join([*alone, *pairs])

    @property
    def noted(self) -> str:
        """A pattern of the variables that a rehearsal names in a note; "": none."""
        return "|".join(part.noted for part in self.parts if part.noted)

    def body(self, **init: Any) -> Any:
        """The script."""
        draft = Draft(dict(init))
        for part in self.parts:
            part.add(draft)
        draft.build()
        return draft.train()


def script_named(name: str) -> Script:
    """Return a script of the catalogue, or the generated one whose recipe the name has."""
    if not name.startswith(PREFIX):
        return SCRIPTS[name]
    recipe = Recipe.parse(name.removeprefix(PREFIX))
    return Script(name, recipe.body, recipe.refused, recipe.modes, rehearsed=recipe.rehearsed, noted=recipe.noted)
