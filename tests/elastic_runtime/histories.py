"""A history of an elastic training: what is trained, and what happens to it meanwhile; drawn, printed and read.

As text it is the words of what is trained and then, after a bar, actions with their numbers:

    stream delays:7 | grow:2 run:5 kill:0:1 cut:2 go:3 hold:1:30 run:8
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import hypothesis.strategies as st
from hypothesis import assume

from tests.elastic_runtime import sharded_training
from tests.elastic_runtime.training import Plan

EPOCHS = 4
MOST_AT_ONCE = 4
EXACT = Plan(
    max_batch=None, normalise=True, mixed=True, global_batch=19, options={"reduction": "exact", "shards": 6, "seed": 3}
)


@dataclass(frozen=True)
class Word:
    """A name and numbers, `kill:0:1` as text."""

    name: str
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return ":".join([self.name, *map(str, self.numbers)])

    @classmethod
    def parse(cls, text: str) -> Self:
        name, *numbers = text.split(":")
        return cls(name, tuple(int(number) for number in numbers))


@dataclass(frozen=True)
class History:
    """`trained`: workers:N at the beginning (2), stream (an iterable dataset), exact (its reduction), loaders:N
    (processes of each loader), saved (checkpoints), evaluates (together, again and again), delays:SEED (see delays.py),
    sharded (by FSDP2, with checkpoints, and none of the words before but workers and exact), mirror:N (shards are
    copied to another worker every N steps; 1), groups:N (replica groups of N workers, or all are one). `actions`:
    methods of `play.Play`.
    """

    trained: tuple[Word, ...]
    actions: tuple[Word, ...]

    def __str__(self) -> str:
        return " ".join([*map(str, self.trained), "|", *map(str, self.actions)])

    @classmethod
    def parse(cls, text: str) -> Self:
        trained, actions = (tuple(Word.parse(word) for word in part.split()) for part in text.split("|"))
        return cls(trained, actions)

    def has(self, name: str) -> bool:
        """Whether this is trained."""
        return any(word.name == name for word in self.trained)

    def number(self, name: str, otherwise: int = 0) -> int:
        """What stands behind a word of what is trained."""
        return next((word.numbers[0] for word in self.trained if word.name == name), otherwise)

    @property
    def saves(self) -> bool:
        """Whether there are checkpoints."""
        return self.has("saved") or self.has("sharded")

    @property
    def plan(self) -> Plan:
        """What the workers train."""
        plan = EXACT if self.has("exact") else Plan()
        if self.has("sharded"):  # saved after each step: what a lost shard costs differs, and the tests stay short
            plan = replace(plan, body=sharded_training.train, options={**plan.options, "checkpoint_every_s": 1e-9})
        plan = replace(
            plan,
            epochs=EPOCHS,
            streamed=self.has("stream"),
            evaluates=self.has("evaluates"),
            loader_workers=self.number("loaders"),
            delays=self.number("delays") if self.has("delays") else None,
        )
        if self.has("groups"):
            return replace(plan, options={**plan.options, "shard_size": self.number("groups")})
        return replace(plan, options={**plan.options, "checkpoint_every_s": 0.3}) if self.has("saved") else plan


# What is drawn. Simple things first: hypothesis looks for the simplest history that fails.

_place = st.integers(0, MOST_AT_ONCE - 1)
_places = st.lists(_place, min_size=1, max_size=3, unique=True)


def _word(name: str, *numbers: st.SearchStrategy[int]) -> st.SearchStrategy[Word]:
    return st.tuples(*numbers).map(lambda drawn: Word(name, drawn))


def _words(name: str, numbers: st.SearchStrategy[list[int]]) -> st.SearchStrategy[Word]:
    return numbers.map(lambda drawn: Word(name, tuple(drawn)))


_FAULTS = st.one_of(
    _word("grow", st.integers(1, 2)),
    _word("shrink", _place),
    _word("replace", _place),
    _words("kill", _places),
    _word("abort", st.integers(0, 3)),
    _word("restart", st.integers(0, 12)),
    _words("cut", _places),
    _words("tear", _places),
    _word("slow", _place, st.integers(1, 30)),
    _word("hold", _place, st.integers(1, 70)),
    _word("pause", _place, st.integers(1, 15)),
    _word("stop", _place),
)
_EVICTION = _word("evict")
_PACES = st.sampled_from([[], [], *([Word(name, (n,))] for name in ("run", "go") for n in (1, 2, 4, 8))])


def _optional(word: st.SearchStrategy[Word]) -> st.SearchStrategy[list[Word]]:
    return st.one_of(st.just([]), st.just([]), word.map(lambda drawn: [drawn]))


_WORKERS = st.sampled_from([[], [Word("workers", (3,))]])
_DELAYS: st.SearchStrategy[list[Word]] = st.one_of(
    st.just([]), _word("delays", st.integers(0, 999)).map(lambda drawn: [drawn])
)
_REPLICATED: list[st.SearchStrategy[list[Word]]] = [
    _WORKERS,
    st.sampled_from([[], [Word("stream")]]),
    st.sampled_from([[], [Word("exact")]]),
    _optional(_word("loaders", st.integers(1, 2))),
    _optional(_word("saved")),
    st.sampled_from([[], [Word("evaluates")]]),
    _DELAYS,
]
_MIRROR = st.sampled_from([[], [], [Word("mirror", (3,))], [Word("mirror", (0,))]])
_GROUPS = st.sampled_from(  # "exact" is refused in groups of one worker
    [[Word("groups", (2,))], [], [Word("groups", (1,))], [Word("exact")], [Word("exact"), Word("groups", (2,))]]
)
_SHARDED = [st.just([Word("sharded")]), _GROUPS, _WORKERS, _MIRROR, _DELAYS]


@st.composite
def histories(draw: st.DrawFn, *, sharded: bool = False) -> History:
    """At least three things happen, one right after another or some steps apart, in the run or at rest."""
    assume(draw(st.booleans()))  # hypothesis tries the simplest example first, and one is all that a seed plays
    trained = tuple(word for option in (_SHARDED if sharded else _REPLICATED) for word in draw(option))
    fault = st.one_of(_FAULTS, _FAULTS, _EVICTION) if History(trained, ()).saves else _FAULTS
    happened = draw(st.lists(st.tuples(fault, _PACES), min_size=3, max_size=9))
    return History(trained, tuple(word for what, pace in happened for word in (what, *pace)))
