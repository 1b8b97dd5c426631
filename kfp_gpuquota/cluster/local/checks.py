"""Checks of the embedded cluster: `gpuquota doctor` on one machine."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.check_results import fail, ok, warn
from kfp_gpuquota.cluster.local.storage.exporting import quarantined
from kfp_gpuquota.errors import GpuQuotaError
from kfp_gpuquota.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kfp_gpuquota.cluster.check_results import Finding
    from kfp_gpuquota.cluster.local.home import Home
    from kfp_gpuquota.server.cluster_api import ClusterApi

LEAST_FREE_GIB: Final = 2.0
_GIB: Final = 1 << 30


def examine(home: Home, client: Callable[[], ClusterApi]) -> Iterator[Finding]:
    """Yield the findings about the cluster in `home`; `client` is called if its daemon runs."""
    yield from _directory(home)
    if home.is_locked():
        yield from daemon(client())
    else:
        yield warn("daemon", "the cluster does not run", "start it: gpuquota cluster start")
    if home.database.exists():
        yield from _state(home)


def _directory(home: Home) -> Iterator[Finding]:
    existing = next(path for path in (home.root, *home.root.parents) if path.exists())
    free = shutil.disk_usage(existing).free / _GIB
    if free < LEAST_FREE_GIB:
        remedy = "delete ended jobs (gpuquota delete), or lower --log-limit and --keep-ended-days"
        yield warn("directory", f"{home.root} has {free:.1f} GiB left for logs and checkpoints", remedy)
    else:
        yield ok("directory", f"{home.root}, {free:.0f} GiB free")


def daemon(client: ClusterApi) -> Iterator[Finding]:
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
        aside = quarantined(home.database)
    except GpuQuotaError as error:
        yield fail("state", error.message, "gpuquota cluster stop, then: gpuquota cluster repair")
        return
    if aside:
        yield warn("state", f"{len(aside)} records cannot be used", "see: gpuquota cluster repair")
    else:
        yield ok("state", str(home.database))
