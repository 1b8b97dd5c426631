"""Random histories of growing, shrinking, killing, stopping and a bad network, against real processes.

Hypothesis draws them, the same one for a seed each time. A failing test prints its history, and

    ELASTIC_HISTORY='exact | grow:1 kill:0 run:4' pytest tests/elastic_runtime/test_histories.py

plays that one (play.py defines the words). `ELASTIC_SEEDS=17`, a list or a range (`0:200`, as `make soak`
does) draws and plays those of other seeds, and every third of them also for a sharded training. Looking for a simpler
history that fails as well takes minutes, because each takes seconds: it is done with `ELASTIC_SHRINK=1`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.histories import History, Word, histories
from tests.elastic_runtime.play import Play
from tests.elastic_runtime.training import train
from tests.forked import context
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Reference = Callable[[History], dict[str, Any]]

SHRINKING = bool(os.environ.get("ELASTIC_SHRINK"))
PHASES = [Phase.generate, *([Phase.shrink] if SHRINKING else [])]
pytestmark = pytest.mark.timeout(1800 if SHRINKING else 900)


def asked() -> list[object]:
    """A history, or seeds of some."""
    if "ELASTIC_HISTORY" in os.environ:
        return [pytest.param(st.just(History.parse(os.environ["ELASTIC_HISTORY"])), 0, id="history")]
    seeds = os.environ.get("ELASTIC_SEEDS", "0:2")
    numbers = list(range(*map(int, seeds.split(":"))) if ":" in seeds else map(int, seeds.split(",")))
    return [
        *(pytest.param(histories(), seed, id=str(seed)) for seed in numbers),
        *(pytest.param(histories(sharded=True), seed, id=f"sharded-{seed}") for seed in numbers[::3]),
    ]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What one undisturbed process gets; in a process of its own, because "exact" changes torch's settings for good."""
    known: dict[tuple[Word, ...], dict[str, Any]] = {}

    def find(history: History) -> dict[str, Any]:
        kind = tuple(word for word in history.trained if word.name in {"exact", "stream", "sharded"})
        if kind not in known:
            directory = tmp_path_factory.mktemp("reference")
            plan = History(kind, ()).plan
            if history.has("sharded"):
                options = {name: value for name, value in plan.options.items() if name != "checkpoint_every_s"}
                plan = replace(plan, options={**options, "sharded": ""})
            process = context.Process(target=plan.body or train, args=(plan, 0, directory, None))
            process.start()
            process.join(TIMEOUT_S)
            known[kind] = torch.load(directory / "final-0.pt")
        return known[kind]

    return find


def play(history: History, directory: Path, reference: dict[str, Any]) -> None:
    """All of it, and what must hold at the end."""
    mirror = {"ELASTIC_MIRROR": str(history.number("mirror", 1))}
    with Cluster(directory, history.plan, checkpoints=history.saves, relayed=True, environment=mirror) as cluster:
        played = Play(cluster)
        played.begin(history.number("workers", 2), sharded=history.has("sharded"))
        for word in history.actions:
            played.do(word)
        played.end()
        cluster.check_result(reference)
        digests = {final["sha256"] for final in cluster.finals().values()}
        assert len(digests) == 1, "the workers ended with different states"
        if history.has("exact"):
            assert digests == {reference["sha256"]}


@pytest.mark.slow
@pytest.mark.parametrize(("drawn", "seed"), asked())
def test_any_history_ends_with_the_undisturbed_model(
    tmp_path_factory: pytest.TempPathFactory, reference: Reference, drawn: st.SearchStrategy[History], seed: int
) -> None:
    outcomes: dict[History, Exception | None] = {}

    def outcome(history: History) -> Exception | None:
        try:
            play(history, tmp_path_factory.mktemp("history"), reference(history))
        except Exception as error:  # noqa: BLE001  (kept, and raised below)
            error.add_note(f"ELASTIC_HISTORY='{history}' pytest tests/elastic_runtime/test_histories.py")
            return error
        return None

    @hypothesis.seed(seed)
    @settings(max_examples=1, phases=PHASES, database=None, suppress_health_check=list(HealthCheck))
    @given(drawn)
    def check(history: History) -> None:
        """Run a history once: hypothesis would repeat a failure, and report a timing-dependent one as its own error."""
        if history not in outcomes:
            outcomes[history] = outcome(history)
        if error := outcomes[history]:
            raise error

    check()


@settings(max_examples=50, database=None)
@given(st.one_of(histories(), histories(sharded=True)))
def test_a_history_can_be_read_as_it_is_printed(history: History) -> None:
    assert History.parse(str(history)) == history
