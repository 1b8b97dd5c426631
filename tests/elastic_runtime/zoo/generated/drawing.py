"""Draws scripts and histories, each from its number alone: no other draw changes which one it is.

Hypothesis drew them before. Nothing is shrunk here, since a script takes seconds, and its first examples are nearly
alike: thirty of two hundred were plain scripts through the same three histories.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from random import Random

from tests.elastic_runtime.zoo.generated.lives import ENDS
from tests.elastic_runtime.zoo.generated.parts import KINDS, Part
from tests.elastic_runtime.zoo.generated.recipes import PREFIX, Recipe

__all__ = ["Case", "drawn", "history", "recipe"]

LAST_STEP, STEPS_AN_EPOCH = 18, 4
"""Of the scripts: an event in the last of their twenty steps has no effect."""
MOST_WORKERS = 3


@dataclass(frozen=True)
class Case:
    """One script in one reduction, through several histories."""

    script: str
    reduction: str
    histories: tuple[str, ...]


def drawn(count: int, seed: int) -> list[Case]:
    """Draw different scripts, each with one history of several events."""
    found: dict[tuple[str, str], Case] = {}
    for number in itertools.count():
        if len(found) == count:
            return list(found.values())
        random = Random(f"{seed}-{number}")
        chosen = recipe(random)
        case = Case(f"{PREFIX}{chosen}", random.choice(chosen.modes), (history(random),))
        found.setdefault((case.script, case.reduction), case)
    raise AssertionError


def recipe(random: Random, most: int = 4) -> Recipe:
    """Draw a recipe with up to `most` parts that are not plain, which can be right in one reduction at least."""
    kinds = random.sample(list(KINDS), random.randint(1, most))
    names = [random.choice(_weighted(KINDS[kind])) for kind in kinds]
    while not Recipe.of(names).modes:
        names.pop()
    return Recipe.of(names)


def _weighted(parts: dict[str, Part]) -> list[str]:
    """Return the names of all but the plain part; those that are right in all histories three times."""
    _, *others = parts.values()
    return [part.name for part in others for _ in range(1 if part.refused or part.rehearsed else 3)]


def history(random: Random) -> str:
    """Draw a few events, in the order of their steps: each change is in force before the next event."""
    size = random.choice((1, 1, 2))
    words = ["with:2"] if size == 2 else []
    alone, step = size == 1, 0
    for _ in range(random.choice((2, 2, 2, 3))):
        kind = random.choice(_possible(size, alone=alone))
        step = _step_of(kind, step + random.randint(1, 6))
        if step > LAST_STEP:
            break
        words.append(_word(kind, step, random.randrange(size)))
        if kind.startswith(ENDS):
            size, alone = 1, True
        else:
            size, alone = size + (1 if kind == "join" else -1), False
    return " ".join(words)


def _possible(size: int, *, alone: bool) -> list[str]:
    stops = ["stop", "stop", "stop_before", "stop_after"]
    crashes = ["crash", "crash_after", "evict_after", "evict_left"] if alone else []
    changes = ["join"] * 3 if size < MOST_WORKERS else []
    return stops + crashes + changes + (["leave", "kill", "kill"] if size > 1 else [])


def _step_of(kind: str, step: int) -> int:
    """Return the first step from this one on in which it can happen: the code before an epoch precedes its first one.

    A change after an epoch's last step is in force in the next epoch's first one only, thus the step between.
    """
    if kind.endswith("_before"):
        return (step // STEPS_AN_EPOCH + 1) * STEPS_AN_EPOCH
    if kind.endswith(("_after", "_left")):
        return step // STEPS_AN_EPOCH * STEPS_AN_EPOCH + STEPS_AN_EPOCH - 1
    return step


def _word(kind: str, step: int, rank: int) -> str:
    if kind.endswith(("_before", "_after", "_left")):
        return f"{kind}:{step // STEPS_AN_EPOCH}"
    return f"{kind}:{step}:{rank}" if kind == "kill" else f"{kind}:{step}"
