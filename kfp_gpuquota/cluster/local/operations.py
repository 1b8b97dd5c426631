"""The operations of the embedded cluster: its state file, and the checks of one machine."""

from __future__ import annotations

import os
import shutil
import sqlite3
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.check_results import fail, ok, warn
from kfp_gpuquota.cluster.local.storage import database, exporting
from kfp_gpuquota.cluster.local.storage.store import Store
from kfp_gpuquota.errors import ConflictError, GpuQuotaError, StateFileError, UsageError
from kfp_gpuquota.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kfp_gpuquota.cluster.check_results import Finding
    from kfp_gpuquota.cluster.local.home import Home
    from kfp_gpuquota.server.cluster_api import ClusterApi


LEAST_FREE_GIB: Final = 2.0
_GIB: Final = 1 << 30


class LocalOperations:
    """Implements `cluster.operations.ClusterOperations`. `elsewhere`: the daemon's files are not those in `home`."""

    def __init__(self, home: Home, client: Callable[[], ClusterApi], *, elsewhere: bool) -> None:
        self._home, self._client, self._elsewhere = home, client, elsewhere

    def check(self) -> tuple[Finding, ...]:
        """Return what is wrong with the daemon, its directory and its state file."""
        return tuple(_daemon(self._client()) if self._elsewhere else _examine(self._home, self._client))

    def export(self, *, jobs: bool, secrets: bool) -> str:
        """Return projects, policies, all jobs and the history as JSON."""
        if jobs:
            raise UsageError("--jobs is for Kubernetes: on this machine all jobs are exported; leave it out")
        return exporting.exported(self._files().database, secrets=secrets)

    def restore(self, file: Path) -> Iterator[str]:
        """Replace the state by a backup. Raises ConflictError while the daemon runs."""
        self._require_stopped("restored")
        if file.is_file():  # one that is none is refused before anything is made
            self._home.create()
        former = database.restore(file.absolute(), self._home.database)
        yield f"the state was restored from {file}" + (f"; the former one is {former}" if former else "")

    def back_up(self, file: Path) -> None:
        """Copy the state to a file."""
        database.back_up(self._files().database, file.absolute())

    def repair(self) -> str:
        """Repair the state file if it is damaged and not in use."""
        if self._files().is_locked():
            return ""
        try:
            database.open_database(self._home.database).close()
        except (StateFileError, sqlite3.DatabaseError) as error:
            if "newer version" in str(error):
                raise
            damaged, kept = database.salvage(self._home.database)
            counts = ", ".join(f"{count} {name}" for name, count in kept.items() if count)
            return f"the state file was damaged and is now {damaged}; kept were {counts or 'no records'}"
        return ""

    def set_aside(self) -> tuple[tuple[str, str, str], ...]:
        """Return the records that were set aside, the oldest first."""
        return tuple((one.kind, one.key, one.why) for one in exporting.quarantined(self._files().database))

    def discard_set_aside(self) -> int:
        """Delete the records that were set aside. Raises ConflictError while the daemon runs."""
        self._require_stopped("repaired")
        store = Store(self._home.database)
        try:
            return store.discard_quarantined()
        finally:
            store.close()

    def _files(self) -> Home:
        """Return the directory of the cluster's files. Raises UsageError for a cluster that has them elsewhere."""
        if self._elsewhere:
            raise UsageError(
                "this reads the cluster's files, and the chosen cluster is reached by its socket alone; name its "
                "directory in GPUQUOTA_HOME, as its owner (root of one that users of this machine share: "
                "/var/lib/gpuquota)"
            )
        return self._home

    def _require_stopped(self, what: str) -> None:
        if self._files().is_locked():
            raise ConflictError(f"a running cluster cannot be {what}; stop it first: gpuquota cluster stop")


def _examine(home: Home, client: Callable[[], ClusterApi]) -> Iterator[Finding]:
    """Yield the findings about the cluster in `home`; `client` is called if its daemon runs."""
    yield from _directory(home)
    if home.is_locked():
        yield from _daemon(client())
    else:
        yield warn("daemon", "the cluster does not run", "start it: gpuquota cluster start")
    if home.database.exists():
        yield from _state(home)


def _directory(home: Home) -> Iterator[Finding]:
    existing = next(path for path in (home.root, *home.root.parents) if path.exists())
    free = shutil.disk_usage(existing).free / _GIB
    if not os.access(existing, os.W_OK):
        remedy = "name a directory of yours in GPUQUOTA_HOME, or run this as its owner"
        yield fail("directory", f"{existing} cannot be written to: it is read-only for you", remedy)
    elif free < LEAST_FREE_GIB:
        remedy = "delete ended jobs (gpuquota delete), or lower --log-limit and --keep-ended-days"
        yield warn("directory", f"{home.root} has {free:.1f} GiB left for logs and checkpoints", remedy)
    else:
        yield ok("directory", f"{home.root}, {free:.0f} GiB free")


def _daemon(client: ClusterApi) -> Iterator[Finding]:
    """Yield the findings about the daemon that the client reaches."""
    try:
        health, nodes = client.health(), client.list_nodes()
    except GpuQuotaError as error:
        yield fail("daemon", error.message, "see daemon.log in the directory; gpuquota cluster stop, then start")
        return
    if health.version != __version__:
        remedy = "gpuquota cluster stop, then start: jobs keep running"
        yield warn("daemon", f"it is of version {health.version}, this command of {__version__}", remedy)
    else:
        yield ok("daemon", f"pid {health.pid}, version {health.version}")
    if health.problem:
        yield fail("connection", health.problem, "jobs continue, and nothing starts until it is back; see daemon.log")
    devices = [device for view in nodes for device in view.node.devices]
    models = ", ".join(sorted({device.model for device in devices}))
    if not devices:
        yield fail("gpus", "the cluster has no devices", "gpuquota cluster start --gpus N")
    elif not all(view.node.ready for view in nodes):
        yield warn("gpus", "some nodes are not ready", "see: gpuquota list nodes")
    else:
        yield ok("gpus", f"{len(devices)} ({models})")


def _state(home: Home) -> Iterator[Finding]:
    try:
        aside = exporting.quarantined(home.database)
    except GpuQuotaError as error:
        yield fail("state", error.message, "gpuquota cluster stop, then: gpuquota cluster repair")
        return
    if aside:
        yield warn("state", f"{len(aside)} records cannot be used", "see: gpuquota cluster repair")
    else:
        yield ok("state", str(home.database))
