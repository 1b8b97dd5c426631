"""However a script is started it leaves what the plain one leaves, alone and as a worker, or is refused by name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import zipapp
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from elastic_runtime.errors import SettingsError
from elastic_runtime.membership.environment import Environment
from elastic_runtime.process.preemption import Preemption
from tests.effort import soaked
from tests.elastic_runtime.plain_twin.together import LIMITS, Cluster
from tests.elastic_runtime.plain_twin.twins import lines_of
from tests.polling import TIMEOUT_S, until
from tests.standalone_coordinator import StandaloneCoordinator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

JOB = "job"
VARYING = r"(?m)^\[rank0\]: |[0-9]+\.[0-9]+s$|^[EW][0-9]{4} .*?\] |pid: [0-9]+|[0-9]{4}-[0-9]{2}-[0-9]{2}\S+"
"""Times, process ids, and the prefix of torch's own hook."""

TRAIN = """
import os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
print("begins", __name__, sys.argv[1:], flush=True)
ELASTIC, END = os.environ["TWIN"] == "elastic", os.environ["END"]
X = torch.arange(16.0).view(8, 2) / 16

def train():
    torch.manual_seed(3)
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(X, X.sum(1, keepdim=True)), batch_size=8)
    if ELASTIC:
        import elastic_runtime
        job = elastic_runtime.init()
        model, optimizer, loader = job.prepare(model, optimizer, loader)
    count = 1 << 40 if END == "leaves" else 3
    for epoch in job.epochs(count) if ELASTIC else range(count):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            job.backward(loss) if ELASTIC else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 1 and END == "error":
            raise ValueError("of the script")
        if epoch == 1 and END == "exit":
            sys.exit(3)
        if epoch == 1:
            open("trains", "w").close()
    torch.save(model.state_dict(), "model.pt")
    print("trained", flush=True)
"""

MAIN = f"{TRAIN}\nif __name__ == '__main__':\n    train()\n    print('last line')\n"

PROCESS = """
import multiprocessing, sys, train
if __name__ == "__main__":
    child = multiprocessing.get_context("{}").Process(target=train.train)
    child.start(); child.join(); print("ended", child.exitcode); sys.exit(child.exitcode)
"""


@dataclass(frozen=True)
class Way:
    """The arguments of the interpreter, and a script `launch.py` beside `train.py`."""

    arguments: tuple[str, ...] = ("launch.py", "a")
    launch: str = ""
    in_child: bool = False


WAYS = {
    "a file": Way(("train.py", "a")),
    "-c": Way(("-c", MAIN, "a")),
    "-m": Way(("-m", "train", "a")),
    "a zipapp": Way(("app.pyz", "a")),
    "run_path": Way(launch="import runpy; runpy.run_path('train.py', run_name='__main__'); print('after')"),
    "run_module": Way(launch="import runpy; runpy.run_module('train', run_name='__main__'); print('after')"),
    "exec": Way(launch="exec(compile(open('train.py').read(), 'train.py', 'exec')); print('after')"),
    "an import": Way(launch="import train; train.train(); print('after')"),
    "asyncio": Way(launch="import asyncio, train\nasync def main(): train.train()\nasyncio.run(main())"),
    "unittest": Way(("-m", "unittest", "-q", "launch"), "import train, unittest\n"
        "class Case(unittest.TestCase):\n    def test(self): train.train()"),
    "pdb": Way(("-m", "pdb", "-c", "continue", "-c", "quit", "train.py", "a")),
    "cProfile": Way(("-m", "cProfile", "-o", "profile", "train.py", "a")),
    "an interpreter in the script": Way(
        launch="import code; code.InteractiveInterpreter().runsource('import train; train.train()'); print('after')"
    ),
    "a forked process": Way(launch=PROCESS.format("fork"), in_child=True),
    "a pool": Way(launch="import multiprocessing, train\n"
        "with multiprocessing.Pool(1) as pool: pool.apply(train.train)\nprint('after')", in_child=True),
    "an executor of processes": Way(launch="import train\nfrom concurrent.futures import ProcessPoolExecutor\n"
        "with ProcessPoolExecutor(1) as pool: pool.submit(train.train).result()\nprint('after')", in_child=True),
}  # fmt: skip
"""A forked interpreter has them, too."""

REAL = {
    "-O": Way(("-O", "train.py", "a")),
    "-X dev": Way(("-X", "dev", "train.py", "a")),
    "-W error": Way(("-W", "error:::train", "train.py", "a")),
    "torchrun": Way(("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "train.py", "a")),
    "torchrun -m": Way(("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "train", "a")),
    "accelerate launch": Way(("-m", "accelerate.commands.launch", "--cpu", "train.py", "a")),
    "a spawned process": Way(launch=PROCESS.format("spawn"), in_child=True),
    "a process of a forkserver": Way(launch=PROCESS.format("forkserver"), in_child=True),
}

THREADS = {
    "a thread": "import threading, train\nthread = threading.Thread(target=train.train)\n"
    "thread.start(); thread.join(); print('after')",
    "an executor of threads": "import train\nfrom concurrent.futures import ThreadPoolExecutor\n"
    "with ThreadPoolExecutor(1) as pool: pool.submit(train.train).result()",
    "asyncio.to_thread": "import asyncio, train\nasync def main(): await asyncio.to_thread(train.train)\n"
    "asyncio.run(main())",
}


def start(python: Sequence[str], way: Way, end: str, folder: Path, more: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the script in a new folder."""
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(MAIN)
    (folder / "launch.py").write_text(way.launch)
    (folder / "app").mkdir()
    (folder / "app" / "__main__.py").write_text(MAIN)
    zipapp.create_archive(folder / "app", folder / "app.pyz")
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1", "END": end, **more}
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        return subprocess.Popen(
            [*python, *way.arguments], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )


def left(process: subprocess.Popen[bytes], folder: Path) -> dict[str, object]:
    """Wait for the process's end, and return what it leaves."""
    code = process.wait(TIMEOUT_S)
    texts = {name: (folder / name).read_text().replace(str(folder), "FOLDER") for name in ("stdout", "stderr")}
    model = torch.load(folder / "model.pt") if (folder / "model.pt").exists() else {}
    return {
        "code": code,
        **{name: lines_of(re.sub(VARYING, "", text)) for name, text in texts.items()},
        "files": {each.name for each in folder.iterdir()} - {"token", "error", "__pycache__"},
        "model": {name: value.tolist() for name, value in model.items()},
    }


def plain(python: Sequence[str], way: Way, end: str, folder: Path) -> dict[str, object]:
    """Run the script without elastic_runtime, and return what it leaves."""
    return left(start(python, way, end, folder, {"TWIN": "plain"}), folder)


@contextmanager
def worker(python: Sequence[str], way: Way, end: str, folder: Path) -> Iterator[tuple[Any, StandaloneCoordinator]]:
    """Start it as the only worker of a job; yield the process and the coordinator."""
    cluster, token = Cluster(), folder.with_name("token")
    token.write_text("secret")
    with StandaloneCoordinator(cluster, limits=LIMITS) as coordinator:
        coordinator.call(lambda service: service.open(JOB, "secret"))
        coordinator.call(lambda service: service.set_target(JOB, ["w0"]))
        environment = {
            "TWIN": "elastic", "JOB_NAME": JOB, "ELASTIC_COORDINATOR": coordinator.url(JOB), "ELASTIC_WORKER_ID": "w0",
            "ELASTIC_TOKEN_FILE": str(token), "ELASTIC_ERROR_FILE": f"{folder}/error",
        }  # fmt: skip
        process = start(python, way, end, folder, environment)
        try:
            yield process, coordinator
        finally:
            process.kill()
            process.wait()
    assert not cluster.killed


def compare(python: Sequence[str], way: Way, end: str, folder: Path) -> None:
    """Run it plain, alone and as a worker: all leave the same, and a worker's error is reported."""
    expected = plain(python, way, end, folder / "plain")
    alone = folder / "alone"
    assert left(start(python, way, end, alone, {"TWIN": "elastic"}), alone) == expected
    with worker(python, way, end, folder / "worker") as (process, _):
        assert left(process, folder / "worker") == expected
    error = folder / "worker" / "error"
    assert (error.read_text() if error.exists() else "") in {"", "ValueError: of the script"}


@pytest.mark.parametrize("end", ["returns", "error"])
@pytest.mark.parametrize("way", WAYS)
def test_a_script_leaves_what_the_plain_one_leaves(
    way: str, end: str, forked_python: tuple[str, ...], tmp_path: Path
) -> None:
    compare(forked_python, WAYS[way], end, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("end", [pytest.param("returns", marks=soaked), "error", pytest.param("exit", marks=soaked)])
@pytest.mark.parametrize("way", REAL)
def test_an_interpreter_of_its_own_leaves_what_the_plain_one_leaves(way: str, end: str, tmp_path: Path) -> None:
    compare((sys.executable,), REAL[way], end, tmp_path)


@pytest.mark.parametrize("way", [name for name, way in WAYS.items() if not way.in_child and name != "pdb"])
def test_nothing_of_the_script_runs_after_a_worker_has_left(
    way: str, forked_python: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "worker"
    with worker(forked_python, WAYS[way], "leaves", folder) as (process, coordinator):
        until((folder / "trains").exists, "its training")
        coordinator.call(lambda service: service.set_target(JOB, []))
        found = left(process, folder)
    assert (found["code"], found["model"]) == (0, {})
    assert not {"after", "last line"} & set(cast("list[str]", found["stdout"]))


@pytest.mark.parametrize("way", THREADS)
def test_a_training_in_a_thread_is_that_of_the_main_thread_alone_and_refused_on_a_cluster(
    way: str, forked_python: tuple[str, ...], tmp_path: Path
) -> None:
    started = Way(launch=THREADS[way])
    expected = plain(forked_python, started, "returns", tmp_path / "plain")
    alone = start(forked_python, started, "returns", tmp_path / "alone", {"TWIN": "elastic"})
    assert left(alone, tmp_path / "alone") == expected
    with worker(forked_python, started, "returns", tmp_path / "worker") as (process, _):
        found = left(process, tmp_path / "worker")
    assert (found["code"], found["model"]) == (2, {})
    assert "call it in the main thread" in (tmp_path / "worker" / "stderr").read_text()


def test_a_thread_is_warned_that_sigterm_saves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    preemption = Preemption(lambda: None)
    for _ in range(2):
        thread = threading.Thread(target=preemption.begin)
        thread.start()
        thread.join()
    assert [record.message.startswith("the training runs in a thread") for record in caplog.records] == [True]


def test_several_processes_for_one_worker_are_refused() -> None:
    given = {"ELASTIC_COORDINATOR": "http://localhost/job", "ELASTIC_WORKER_ID": "w0", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(SettingsError, match=r"started 2 processes.*--nproc-per-node=1"):
        Environment.read(given)
    assert Environment.read({**given, "LOCAL_WORLD_SIZE": "1"}).worker_id == "w0"
