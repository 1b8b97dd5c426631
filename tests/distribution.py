"""Which worker process of pytest-xdist runs which tests.

Each test goes to the next free worker. Tests marked `xdist_group` go to one worker together, so that what they share is
started once; the largest groups go first, so that none is left for one worker at the end. Tests of Kubernetes wait much
and compute little, and run beside trainings, which compute much: half of the workers run the ones and half the others,
until one half has nothing left. So half of them start a control plane. The modules of the other folders are mixed.

xdist's own `--dist loadgroup` appends the group to a test's id, which pytest 9 computes: the groups get lost. Here the
workers write them into a file, and the scheduler reads it.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, deque
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import forked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xdist.remote import Producer
    from xdist.workermanage import WorkerController

FILE = "groups_file"
WITH_CONTROL_PLANE = "tests/kubernetes/"
LONG_FILES = {
    "test_chart.py",
    "test_churn.py",
    "test_coordinator_attack.py",
    "test_elastic_job.py",
    "test_examples.py",
    "test_failover.py",
    "test_generated.py",
    "test_install_tutorial.py",
    "test_node_cut_off.py",
    "test_release_images.py",
    "test_step_in_pods.py",
    "test_train.py",
    "test_training_under_attack.py",
    "test_two_versions.py",
    "test_walkthrough.py",
}
"""With a test of more than half a minute: they go first, or the other workers would wait for one of them at the end."""


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """The scheduler: a group, or a test without one, is a unit of work."""

    def __init__(self, config: pytest.Config, log: Producer | None, file: Path) -> None:
        super().__init__(config, log)
        self._file, self._groups = file, dict[str, str]()
        self._queues: dict[bool, deque[str]] = {}  # the units with and without a control plane

    def schedule(self) -> None:
        """Assign tests to workers."""
        self._groups = self._groups or json.loads(self._file.read_text())
        super().schedule()

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Assign the next unit of the worker's half, of the other half if there is none."""
        if not self._queues:
            self._queues = {True: deque(), False: deque()}
            for name, unit in self.workqueue.items():
                self._queues[next(iter(unit)).startswith(WITH_CONTROL_PLANE)].append(name)
        half = self.nodes.index(node) % 2 == 0
        if queue := self._queues[half] or self._queues[not half]:  # empty: a unit of a worker that has crashed is left
            self.workqueue.move_to_end(queue.popleft(), last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        return self._groups.get(nodeid, nodeid)


def mixed(tests: Sequence[str]) -> dict[str, float]:
    """Return a position for each module of these tests' ids: each folder's modules in order, spread over 0 to 1."""
    modules = Counter(module_of(test) for test in tests)
    totals, before, found = Counter(folder_of(test) for test in tests), Counter[str](), dict[str, float]()
    for module, count in modules.items():
        folder = folder_of(module)
        found[module] = (before[folder] + count / 2) / totals[folder]
        before[folder] += count
    return found


def module_of(test: str) -> str:
    """Return the file of a test's id."""
    return test.partition("::")[0]


def folder_of(test: str) -> str:
    """Return the folder of a test's id."""
    return str(PurePosixPath(module_of(test)).parent)


class Distribution:
    """The plugin, in the process that distributes tests and in those that run them."""

    def __init__(self, config: pytest.Config) -> None:
        if FILE in (given := getattr(config, "workerinput", {})):
            forked.share(Path(given[FILE]).parent)
        self._folder = tempfile.TemporaryDirectory(prefix="groups-")
        self._file = Path(self._folder.name) / "groups.json"

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Producer) -> Groups:
        """Use this scheduler."""
        return Groups(config, log, self._file)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        """Send the file's name to a worker."""
        node.workerinput[FILE] = str(self._file)

    @pytest.hookimpl(trylast=True)  # of those that are left
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Mix the modules of all folders, in a worker; each in the same way."""
        if FILE in getattr(config, "workerinput", {}):
            position = mixed([item.nodeid for item in items])
            items.sort(key=lambda item: (item.path.name not in LONG_FILES, position[module_of(item.nodeid)]))

    @pytest.hookimpl(tryfirst=True)  # before xdist sends what was collected
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write the groups, in a worker; each writes the same."""
        given: dict[str, Any] = getattr(session.config, "workerinput", {})
        if FILE in given:
            groups = {item.nodeid: mark.args[0] for item in session.items for mark in item.iter_markers("xdist_group")}
            new = Path(f"{given[FILE]}.{given['workerid']}")
            new.write_text(json.dumps(groups))
            new.replace(given[FILE])
