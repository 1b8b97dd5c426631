"""The embedded cluster's daemon: `python -m kfp_gpuquota.cluster.local.daemon HOME READY_FD [CONFIG]`.

It may be killed at any moment. The next one reads SQLite, adopts running workers through the shims, and continues.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from kfp_gpuquota.api.wire import Health
from kfp_gpuquota.cluster.local.audit_log import AuditLog
from kfp_gpuquota.cluster.local.cluster import LocalCluster
from kfp_gpuquota.cluster.local.daemon_log import write_log_to
from kfp_gpuquota.cluster.local.devices import ClusterConfig, discover_nodes, sharing_rules
from kfp_gpuquota.cluster.local.driver import Driver, Settings
from kfp_gpuquota.cluster.local.gpu_meter import GpuMeter
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.page.server import PageServer
from kfp_gpuquota.cluster.local.page.source import LocalPages
from kfp_gpuquota.cluster.local.shared.accounts import ROOT, group_id
from kfp_gpuquota.cluster.local.shared.files import close_to_users, open_to_users
from kfp_gpuquota.cluster.local.shared.guard import UserAccess
from kfp_gpuquota.cluster.local.shared.service import notify_ready
from kfp_gpuquota.cluster.local.start import READY
from kfp_gpuquota.cluster.local.storage.state import ClusterState
from kfp_gpuquota.cluster.local.storage.store import Store
from kfp_gpuquota.cluster.local.unused_jobs import UnusedJobs
from kfp_gpuquota.cluster.local.workers import cgroups
from kfp_gpuquota.cluster.local.workers.device_locks import hold
from kfp_gpuquota.cluster.notifications import Notifications
from kfp_gpuquota.errors import ClusterStartError, ConflictError, GpuQuotaError, InvalidFieldError, UsageError
from kfp_gpuquota.server.app import build_app
from kfp_gpuquota.server.transport.connections import SHARED_LIMITS, LimitedRunner, Limits, raise_descriptor_limit
from kfp_gpuquota.server.transport.unix_sockets import BACKLOG, listen
from kfp_gpuquota.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kfp_gpuquota.api import Node
    from kfp_gpuquota.cluster.local.shared.config import SharedConfig
    from kfp_gpuquota.cluster.ray.runtime import RayRuntime

SHUTDOWN_TIMEOUT_S: Final = 1.0

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Serve until a request or a signal to stop; return the exit code."""
    home, ready = Home(Path(arguments[0])), int(arguments[1])
    config = msgspec.json.decode(arguments[2], type=ClusterConfig) if len(arguments) > 2 else None
    open_files = raise_descriptor_limit()
    try:
        _check_kernel()
        home.create()
        write_log_to(home.log_file)
        with home.lock():
            asyncio.run(serve(home, config, ready, open_files))
    except GpuQuotaError as error:
        log.error("%s", error.message)
        _say(ready, error.message)
        return error.exit_code
    except OSError as error:
        message = f"the cluster cannot use {home.root}: {error}; is its disk full (df -h, df -i)?"
        log.error("%s", message)
        _say(ready, message)
        return 1
    return 0


async def serve(home: Home, config: ClusterConfig | None, ready: int, open_files: int) -> None:
    """Start all parts in the order of their dependencies, report readiness, and wait for the end."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        store = Store(home.database)
        stack.callback(store.close)
        shape = config or store.load_config()
        settings = Settings(open_files, shape.log_limit_mib << 20, shared=shape.shared is not None)
        socket = _prepare_socket(home, shape.shared)
        runtime = None
        if shape.ray is not None:
            runtime = await _connect_to_ray(home, store, shape, settings, changed=config is not None)
            stack.callback(runtime.close)
            nodes = tuple(runtime.nodes.values())
        else:
            nodes = nodes_of(store, shape, changed=config is not None)
            locks = stack.enter_context(hold(nodes, home.device_locks))
            service = shape.shared is not None and "INVOCATION_ID" in os.environ
            settings = replace(settings, device_locks=locks, cgroups=cgroups.prepare(service=service))
        half_life_s, room = shape.usage_half_life_s, home.give_up_reserve
        rules = {
            "moves": shape.moves,
            "reserve_after_s": shape.reserve_after_s,
            "defragmentation": shape.defragmentation,
        }
        state = ClusterState(store, nodes, half_life_s, room, sharing=sharing_rules(shape), rules=rules)
        notifications = Notifications(home.notifications, private=True)
        stack.push_async_callback(notifications.close)
        state.notify = notifications.notify
        driver = Driver(home, state, shape.memory_policy, settings, give_up=stop.set, runtime=runtime)
        stack.callback(driver.close)
        if runtime is not None:
            await stack.enter_async_context(runtime.serving(driver, driver.membership))
        meter = GpuMeter(home, state, elsewhere=runtime)
        cluster = LocalCluster(home, store, state, driver, shape, meter=meter)
        unused = UnusedJobs(meter, store, state, driver.decisions, asyncio.get_running_loop())
        stack.callback(unused.close)
        audit = AuditLog(home.audit_file)
        stack.callback(audit.close)
        problem = runtime.problem if runtime is not None else str
        page = PageServer(home, LocalPages(store, state, cluster, problem), audit)
        stack.push_async_callback(page.close)
        app = build_app(
            cluster,
            token=home.read_or_make_token(),
            health=Health(
                version=__version__,
                pid=os.getpid(),
                home=str(home.root),
                started_at=time.time(),
                shared=shape.shared is not None,
            ),
            extra_routes=driver.membership.routes(),
            on_shutdown=stop.set,
            open_page=None if shape.shared else page.open,
            audit=audit,
            problem=problem,
            access=UserAccess(cluster, shape.shared) if shape.shared else None,
        )
        app.cleanup_ctx.append(driver.membership.lifespan)
        runner = LimitedRunner(
            app,
            SHARED_LIMITS if shape.shared else Limits(),
            handler_cancellation=True,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            access_log=None,
        )
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        driver.recover()
        home.take_reserve()
        await web.SockSite(runner, listen(*socket), backlog=BACKLOG).start()
        if not shape.shared:
            await page.resume()
        log.info("serving %s", socket[0])
        _say(ready, READY)
        notify_ready(os.environ)
        await stop.wait()
        log.info("stopping; what runs goes on")
    driver.health.check()


def _prepare_socket(home: Home, shared: SharedConfig | None) -> tuple[Path, int, int]:
    """Return the socket to listen at, its mode and its group. Raises StateFileError, UsageError."""
    if shared is None:
        close_to_users(home)
        return home.socket_file, 0o600, -1
    if os.geteuid() != ROOT:
        raise UsageError("only root can start jobs as their users: sudo gpuquota cluster start --shared")
    if shared.admin_group:
        group_id("admin_group", shared.admin_group)
    group = group_id("group", shared.group) if shared.group else -1
    open_to_users(home, Path(shared.socket))
    return Path(shared.socket), 0o660 if shared.group else 0o666, group


async def _connect_to_ray(
    home: Home, store: Store, shape: ClusterConfig, settings: Settings, *, changed: bool
) -> RayRuntime:
    """Return the runtime over a Ray cluster. Raises ClusterStartError, ConflictError.

    A cluster that ran already starts without its Ray cluster, too, and waits for it.
    """
    from kfp_gpuquota.cluster.ray.runtime import CONNECT_S, FIRST_CONNECT_S, RayRuntime  # noqa: PLC0415 (Ray only)

    assert shape.ray is not None
    before = store.load_config().ray
    if changed and (before is None or before.address != shape.ray.address):
        running = sum(record.alive for record in store.load_workers())
        if running:
            raise ConflictError(
                f"{running} workers still run on {f'Ray at {before.address}' if before else 'this machine'}; delete "
                "their jobs before the cluster moves to another one"
            )
    runtime = RayRuntime(home, shape.ray, home.cluster_id(), store.load_nodes(), settings=settings)
    try:
        await runtime.connect(FIRST_CONNECT_S if changed else CONNECT_S)
    except ClusterStartError as error:
        if changed or not runtime.nodes:
            runtime.close()
            raise
        log.error("%s; what runs goes on, and the connection is tried again", error.message)
    with store.transaction():
        store.save_nodes(runtime.nodes.values())  # workers are recorded by their names
        if changed:
            store.save_config(shape)
    return runtime


def nodes_of(store: Store, shape: ClusterConfig, *, changed: bool) -> tuple[Node, ...]:
    """The nodes as configured; a new shape is remembered. Raises ConflictError when it would lose running workers."""
    nodes = discover_nodes(shape)
    before, after = _uuids(_earlier_nodes(store) if changed else nodes), _uuids(nodes)
    for record in store.load_workers():
        worker = record.worker
        places = [(worker.node, index) for index in worker.devices]
        lost = any(place not in after or after[place] != before.get(place, "") for place in places)
        if record.alive and (lost or worker.node not in {node.name for node in nodes}):
            where = f"GPUs {list(worker.devices)} of {worker.node}" if places else worker.node
            raise ConflictError(
                f"a worker still runs on {where}, which the new shape does not have; delete its job first, or start "
                "the cluster without --nodes and --gpus-per-node"
            )
    if changed:
        with store.transaction():
            store.save_config(shape)
    return nodes


def _earlier_nodes(store: Store) -> tuple[Node, ...]:
    """Return the nodes of the stored shape; none if the machine does not have its GPUs any more."""
    try:
        return discover_nodes(store.load_config())
    except InvalidFieldError:
        return ()


def _uuids(nodes: Iterable[Node]) -> dict[tuple[str, int], str]:
    """Return the UUID of each device by node and index; "" for a slot."""
    return {(node.name, device.index): device.uuid for node in nodes for device in node.devices}


def _check_kernel() -> None:
    """Raise ClusterStartError if processes cannot be held: of one that cannot, the end would be unknown."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        raise ClusterStartError(
            f"this kernel, or the filter of this container, refuses pidfd_open ({error.strerror}); the embedded "
            "cluster needs Linux 5.3 or newer"
        ) from error


def _say(ready: int, line: str) -> None:
    with suppress(OSError):
        os.write(ready, f"{line}\n".encode())
        os.close(ready)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
