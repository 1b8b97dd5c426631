"""Under unmodified torchrun: fixed ranks, and after its restart the training continues at the same step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from elastic_runtime.membership.torchrun import agree_on_round
from tests.elastic_runtime.test_repeat import evaluating
from tests.elastic_runtime.training import Plan, train
from tests.polling import TIMEOUT_S
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPT = """
import os, pathlib, signal, sys
from tests.elastic_runtime import training

rank, killed = int(os.environ["RANK"]), pathlib.Path(sys.argv[1], "killed")
os.environ["ELASTIC_REPORT_FILE"] = f"{sys.argv[1]}/report-{rank}.jsonl"

class Gate:
    def pass_through(self, index, step):
        if rank == 1 and step == 17 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

training.train(training.Plan(), rank, pathlib.Path(sys.argv[1]), Gate())
"""


EVALUATING = """
import os, pathlib, signal, sys
from tests.elastic_runtime import test_repeat
from tests.elastic_runtime.training import Plan

rank, killed = int(os.environ["RANK"]), pathlib.Path(sys.argv[1], "killed")

class Gate:
    def pass_through(self, index, step):
        pass

def die(gate, index):
    if not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)

test_repeat.stay_until_killed = die
plan = Plan(body=test_repeat.evaluating, options={"victim": 1, "when": "after", "step": 17})
test_repeat.evaluating(plan, rank, pathlib.Path(sys.argv[1]), Gate())
"""


def torchrun(python: tuple[str, ...], folder: Path, nodes: int, workers: int, script: str = SCRIPT) -> None:
    """So many of torchrun, as on so many nodes; all end well. `python` runs it and the script."""
    (folder / "script.py").write_text(script)
    command = [*python, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={workers}"]
    command += ["--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    command += ["--no-python", *python, str(folder / "script.py"), str(folder)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path.cwd()),
        "ELASTIC_CHECKPOINT_DIR": str(folder / "checkpoints"),
    }
    with ExitStack() as stack:
        agents = []
        for node in range(nodes):
            log = stack.enter_context((folder / f"node-{node}.log").open("wb"))
            run = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            agents.append(run)
            stack.callback(run.kill)
        codes = [agent.wait(TIMEOUT_S) for agent in agents]
    assert not any(codes), "\n".join((folder / f"node-{n}.log").read_text()[-3000:] for n in range(nodes))


def check_as_alone(folder: Path, body: Callable[[Plan, int, Path, None], None]) -> None:
    """Both workers' models are that of one process which trains by itself."""
    alone = folder / "alone"
    alone.mkdir()
    body(Plan(), 0, alone, None)
    expected = torch.load(alone / "final-0.pt")
    for rank in range(2):
        got = torch.load(folder / f"final-{rank}.pt")
        assert got["step"] == expected["step"]
        for name, value in expected["model"].items():
            torch.testing.assert_close(got["model"][name], value, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_training_that_torchrun_restarts_ends_as_one_that_was_not_disturbed(
    forked_python: tuple[str, ...], tmp_path: Path, nodes: int
) -> None:
    torchrun(forked_python, tmp_path, nodes, workers=2 // nodes)
    check_as_alone(tmp_path, train)
    rows = [json.loads(line) for line in (tmp_path / "report-0.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["event"] == "restored"] == [17]


@pytest.mark.slow
def test_a_worker_that_is_lost_in_an_evaluation_leaves_out_nothing_of_its_iteration(
    forked_python: tuple[str, ...], tmp_path: Path
) -> None:
    """A scheduler steps after it."""
    torchrun(forked_python, tmp_path, nodes=1, workers=2, script=EVALUATING)
    assert (tmp_path / "killed").exists()
    check_as_alone(tmp_path, evaluating)


WAITING = """
import pathlib, sys
from tests.elastic_runtime import training

training.train(training.Plan(), 0, pathlib.Path(sys.argv[1]), None)
"""


def test_a_rank_that_waits_for_lost_ones_ends_by_sigterm_at_once(
    forked_python: tuple[str, ...], tmp_path: Path
) -> None:
    """torchrun would kill it after 30 seconds, at each of its restarts."""
    port = free_port()
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"TORCHELASTIC_RUN_ID": "run", "ELASTIC_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    command = [*forked_python, "-c", WAITING, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as waiting:
        try:
            store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
            del store  # it is there: the rank waits within torch
            waiting.terminate()
            assert waiting.wait(TIMEOUT_S) == -signal.SIGTERM
        finally:
            waiting.kill()


def test_ranks_agree_on_a_round_whatever_earlier_ones_left_in_the_store() -> None:
    store = HashStore()
    rounds = []
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            rounds.append(set(pool.map(partial(agree_on_round, store, size=3), (2, 1, 0))))
    assert [len(names) for names in rounds] == [1, 1, 1]
    assert len(set.union(*rounds)) == 3
