"""What an administrator does with a whole cluster of any kind; `connect.operations` returns those of the chosen one.

`cluster.local.operations.LocalOperations` works on the embedded cluster's files, also while it does not run, and
`cluster.kubernetes.operations.installed.KubernetesOperations` calls the API server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kfp_gpuquota.cluster.check_results import Finding


class ClusterOperations(Protocol):
    """What one kind of cluster cannot do raises UsageError with a sentence that says what to do instead."""

    def check(self) -> tuple[Finding, ...]:
        """Return what is wrong with the cluster, and what is fine. Changes nothing."""

    def export(self, *, jobs: bool, secrets: bool) -> str:
        """Return projects, policies and jobs as JSON; without `secrets` without values of environment variables."""

    def restore(self, file: Path) -> Iterator[str]:
        """Restore what a file has, and yield a sentence about each part of it."""

    def back_up(self, file: Path) -> None:
        """Copy the cluster's state to a file, also while it runs."""

    def repair(self) -> str:
        """Repair the state file if it is damaged, and return what was kept; "" if it is not damaged."""

    def set_aside(self) -> tuple[tuple[str, str, str], ...]:
        """Return (kind, name, reason) of each record that was set aside because it cannot be used."""

    def discard_set_aside(self) -> int:
        """Delete what was set aside, and return the number of these records."""
