"""Which worker process of pytest-xdist runs which tests.

Each test goes to the next free worker, in the order of the files; tests marked `xdist_group` go to one worker together,
so that what they share is started once. xdist's own `--dist loadgroup` appends the group to a test's id, which pytest 9
computes: the groups get lost. Here the workers write them into a file, and the scheduler reads it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController

FILE = "groups_file"


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """The scheduler: a group, or a test without one, is a unit of work."""

    def __init__(self, config: pytest.Config, log: Producer | None, file: Path) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self._file, self._groups = file, dict[str, str]()

    def schedule(self) -> None:
        """Assign tests to workers."""
        self._groups = self._groups or json.loads(self._file.read_text())
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self._groups.get(nodeid, nodeid)


class Distribution:
    """The plugin, in the process that distributes tests and in those that run them."""

    def __init__(self) -> None:
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

    @pytest.hookimpl(tryfirst=True)  # before xdist sends what was collected
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write the groups, in a worker; each writes the same."""
        given: dict[str, Any] = getattr(session.config, "workerinput", {})
        if FILE in given:
            groups = {item.nodeid: mark.args[0] for item in session.items for mark in item.iter_markers("xdist_group")}
            new = Path(f"{given[FILE]}.{given['workerid']}")
            new.write_text(json.dumps(groups))
            new.replace(given[FILE])
