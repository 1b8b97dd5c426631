"""The dump of a cluster's state in a file that `--state` names, and what-if questions to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.api.wire import ProjectView
from kfp_gpuquota.cluster.whatif import outlook
from kfp_gpuquota.errors import NotFoundError, UsageError
from kfp_gpuquota.scheduler.dump import decode_dump, load_state

if TYPE_CHECKING:
    from pathlib import Path

    from kfp_gpuquota.api.wire import Outlook, Supposition
    from kfp_gpuquota.scheduler.dump import StateDump


class DumpedCluster:
    """A cluster's state at one time: it answers, and cannot be changed. Raises UsageError for a damaged dump."""

    def __init__(self, dump: StateDump) -> None:
        self._dump, self._state = dump, load_state(dump)

    def get_project(self, name: str) -> ProjectView:
        """Return one project, without what it holds. Raises NotFoundError."""
        project = self._state.projects.get(name)
        if project is None:
            raise NotFoundError(f"the state has no project {name!r}")
        return ProjectView(project=project, allocated=0, over_quota=0, requested=0)

    def what_if(self, supposed: Supposition) -> Outlook:
        """Return the effect of hypothetical changes. Raises NotFoundError for an unknown job or node."""
        return outlook(self._state, supposed, self._dump.at)


def read_dump(path: Path) -> StateDump:
    """Return the dump in the file. Raises UsageError for a file that cannot be read, or another one."""
    try:
        return decode_dump(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read --state {str(path)!r}: {error.strerror}") from error
