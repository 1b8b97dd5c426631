"""The operations of an installation in a Kubernetes cluster, with the user's own credentials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from kfp_gpuquota.cluster.kubernetes.operations import exporting
from kfp_gpuquota.cluster.kubernetes.operations.doctor.examination import examine
from kfp_gpuquota.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kfp_gpuquota.cluster.check_results import Finding
    from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls

_NO_STATE_FILE: Final = (
    "on Kubernetes the state is in objects, not in a file; write the quotas and policies with: "
    "gpuquota --context NAME cluster export"
)


class KubernetesOperations:
    """Implements `cluster.operations.ClusterOperations`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def check(self) -> tuple[Finding, ...]:
        """Return what is wrong with the installation. Raises ClusterUnavailableError if the API server is away."""
        return examine(self._calls)

    def export(self, *, jobs: bool, secrets: bool) -> str:
        """Return quotas, policies, rules and labels of namespaces as a List that kubectl reads, too."""
        return exporting.exported(self._calls, jobs=jobs, secrets=secrets)

    def restore(self, file: Path) -> Iterator[str]:
        """Create or replace each object of a file that `export` wrote."""
        try:
            content = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from None
        for name, outcome in exporting.restored(self._calls, content):
            yield f"{name} {outcome}"

    def back_up(self, file: Path) -> NoReturn:
        """Raise UsageError: there is no state file."""
        del file
        raise UsageError(_NO_STATE_FILE)

    def repair(self) -> NoReturn:
        """Raise UsageError: there is no state file."""
        raise UsageError(_NO_STATE_FILE)

    def set_aside(self) -> NoReturn:
        """Raise UsageError: there is no state file."""
        raise UsageError(_NO_STATE_FILE)

    def discard_set_aside(self) -> NoReturn:
        """Raise UsageError: there is no state file."""
        raise UsageError(_NO_STATE_FILE)
