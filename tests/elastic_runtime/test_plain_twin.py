"""What a process leaves behind, and what it does twice: as the plain script does, but for what `documented` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.effort import effort
from tests.elastic_runtime.plain_twin import parts, together
from tests.elastic_runtime.plain_twin.parts import (
    AFTER_LOOP,
    BEFORE_LOOP,
    BEFORE_PREPARE,
    END,
    EVALUATION,
    LATER,
    LOOP,
    START,
)
from tests.elastic_runtime.plain_twin.twins import Draft, compare, draw

if TYPE_CHECKING:
    from pathlib import Path

BOTH = frozenset(together.WORKERS)

FOUND = {
    "the handler of SIGTERM is put back": Draft((), (END, "SIGTERM"), "once", "checkpoint"),
    "one that the script has put back later calls the script's": Draft(
        ((START, "term handler"), (LOOP, "term handler put back")), (END, "SIGTERM"), "once", "checkpoint"
    ),
    "one that chains to ours ends": Draft(((LOOP, "term handler chained"),), (END, "SIGTERM"), "once", "checkpoint"),
    "a handler between two loops chains once": Draft(
        ((LATER, "term handler chained"), (EVALUATION, "term sent and handled")), (END, "SIGTERM"), "twice", "alone"
    ),
    "a loop that was left leaves SIGTERM to the script": Draft(
        ((AFTER_LOOP, "term sent and handled"),), (LOOP, "breaks"), "once", "checkpoint"
    ),
    "SIGTERM is ignored before the loop": Draft(
        ((START, "term ignored"),), (BEFORE_LOOP, "SIGTERM"), "once", "checkpoint"
    ),
    "exact mode leaves the algorithms": Draft(
        ((END, "nondeterministic operation"),), (END, "returns"), "once", "exact"
    ),
    "a training in another one": Draft((), (END, "returns"), "within another", "exact"),
    "a plain loop follows one that failed": Draft(
        (), (LOOP, "error"), "plain on the same model after a failure", "alone"
    ),
    "hooks are put back": Draft(((LOOP, "excepthook put back"),), (END, "error"), "twice", "alone"),
    "a hook that was set during a training is called": Draft(
        ((LOOP, "excepthook chained"), (LATER, "group of its own")), (END, "error"), "three folds", "alone"
    ),
    "no standard error": Draft(((START, "stderr none"),), (END, "returns"), "once", "alone"),
    "a closed standard error": Draft(((START, "stderr closed"),), (END, "returns"), "once", "report"),
    "a child exits": Draft(((EVALUATION, "fork that exits"),), (END, "returns"), "once", "worker"),
    "a child exits before the loop": Draft(((BEFORE_PREPARE, "fork that exits"),), (END, "returns"), "once", "worker"),
    "a child fails": Draft(((LOOP, "fork that fails"),), (END, "returns"), "once", "worker"),
    "exit() before the loop": Draft((), (BEFORE_LOOP, "exit(6)"), "once", "worker"),
}

TOGETHER = {
    "a handler of SIGTERM is called after the training": together.Pair(
        Draft(((START, "term handler exits"),), (AFTER_LOOP, "SIGTERM"), "once", "worker"), BOTH
    ),
    "without a handler SIGTERM lets the script end": together.Pair(
        Draft((), (END, "SIGTERM"), "in a function with finally", "worker"), BOTH
    ),
    "one is interrupted and the other one goes on": together.Pair(
        Draft(((LOOP, "excepthook chained"),), (LOOP, "SIGINT"), "guarded", "worker"), frozenset({"w0"})
    ),
    "both exit in an evaluation": together.Pair(Draft((), (EVALUATION, "sys.exit(3)"), "once", "worker"), BOTH),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_script_leaves_what_the_plain_one_leaves(name: str, forked_python: tuple[str, ...], tmp_path: Path) -> None:
    assert compare(forked_python, FOUND[name], tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(effort(24, 2000)))
def test_generated_scripts_leave_what_the_plain_ones_leave(
    seed: int, forked_python: tuple[str, ...], tmp_path: Path
) -> None:
    draft = draw(seed)
    assert compare(forked_python, draft, tmp_path) == [], draft


@pytest.mark.parametrize("name", TOGETHER)
def test_two_workers_leave_what_the_plain_script_leaves(
    name: str, forked_python: tuple[str, ...], tmp_path: Path
) -> None:
    assert list(together.compare(forked_python, TOGETHER[name], tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(effort(12, 1000)))
def test_generated_scripts_of_two_workers_leave_what_the_plain_ones_leave(
    seed: int, forked_python: tuple[str, ...], tmp_path: Path
) -> None:
    pair = together.draw_pair(seed)
    assert list(together.compare(forked_python, pair, tmp_path)) == [], pair


def test_every_part_is_one_of_its_kind() -> None:
    assert set(parts.WITH_ONE) <= set(parts.MAINS)
    assert set(parts.GOES_ON) <= set(parts.ENDS)
