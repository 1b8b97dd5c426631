"""Random histories of growing, shrinking, killing and stopping against real processes.

One command replays one: `ELASTIC_SEEDS=17 pytest tests/elastic_runtime/test_histories.py`; a list or a range (`0:200`,
as `make soak` does) runs more of them. Even seeds add random delays where the runtime's threads meet; those divisible
by three read a stream.
"""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.training import Plan, train

if TYPE_CHECKING:
    from pathlib import Path

PLAN = Plan(epochs=4)


def seeds() -> list[int]:
    asked = os.environ.get("ELASTIC_SEEDS", "1,2,3")
    if ":" in asked:
        return list(range(*(int(bound) for bound in asked.split(":"))))
    return [int(seed) for seed in asked.split(",")]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Any]]:
    """What one undisturbed process gets, from a stream or not."""
    threads = torch.get_num_threads()
    found = {}
    for streamed in (False, True):
        directory = tmp_path_factory.mktemp("reference")
        train(replace(PLAN, streamed=streamed), 0, directory, None)
        found[streamed] = torch.load(directory / "final-0.pt")
    torch.set_num_threads(threads)
    return found


class History:
    """Draws what happens next; one worker always stays, so that the state is never lost."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.random = cluster, random.Random(seed)
        self.wanted = [0, 1]
        self.fresh = 2

    def grow(self) -> None:
        if self.fresh < 8:
            self.wanted.append(self.fresh)
            self.fresh += 1
            self.cluster.target(*self.wanted)

    def shrink(self) -> None:
        if len(self.wanted) > 1:
            self.wanted.remove(self.random.choice(self.wanted))
            self.cluster.target(*self.wanted)

    def kill(self) -> None:
        self._lose(signal.SIGKILL)

    def stop(self) -> None:
        self._lose(signal.SIGSTOP)

    def restart(self) -> None:
        self.cluster.restart_coordinator()

    def _lose(self, number: int) -> None:
        members = self.cluster.commits[-1].members if self.cluster.commits else ()
        trained = [i for i in self.wanted if f"w{i}" in members]
        if len(trained) > 1:
            victim = self.random.choice(trained)
            self.cluster.kill(f"w{victim}", number)
            self.wanted.remove(victim)
            self.cluster.target(*self.wanted)

    def next(self) -> None:
        self.random.choice([self.grow, self.grow, self.shrink, self.kill, self.stop, self.restart])()


@pytest.mark.parametrize("seed", seeds())
def test_any_history_ends_with_the_undisturbed_model(
    tmp_path: Path, references: dict[bool, dict[str, Any]], seed: int
) -> None:
    plan = replace(PLAN, delays=None if seed % 2 else seed, streamed=seed % 3 == 0)
    with Cluster(tmp_path, plan) as cluster:
        history = History(cluster, seed)
        cluster.hold_at(3)
        cluster.target(*history.wanted)
        cluster.wait_until_at(3, 0, 1)
        for step in range(8, 48, 8):
            history.next()
            cluster.hold_at(step)
            cluster.wait_until_somebody_is_at(step)
        cluster.let_go()
        cluster.wait_for_end(*history.wanted)
        for worker, process in cluster.processes.items():
            process.join(30)
            assert process.exitcode is not None, f"{worker} still runs\n{cluster.logs()}"
        cluster.check_result(references[plan.streamed])
