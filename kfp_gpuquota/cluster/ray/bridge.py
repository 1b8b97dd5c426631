"""The process between the daemon and Ray: `python -m kfp_gpuquota.cluster.ray.bridge CONFIG CLUSTER DESCRIBED FD`.

It keeps nothing that the daemon or the actors do not have: when it ends, the next one discovers the actors and follows
the workers again. It ends with the daemon, and when Ray's head does not answer for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.cluster.local.workers.shim import EXIT_CANNOT_EXECUTE
from kfp_gpuquota.cluster.ray import messages
from kfp_gpuquota.cluster.ray.config import RayConfig

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from kfp_gpuquota.cluster.ray.hosts import Hosts

OLDEST_RAY: Final = (2, 49)
REACH_S: Final = 3.0
NODES_EVERY_S: Final = 0.5
NODES_WITHIN_S: Final = 30.0
MEASURED_WITHIN_S: Final = 4.0
CLAIM_EVERY_S: Final = 5.0
RETRY_S: Final = 1.0
_MIB: Final = 1 << 20

log = logging.getLogger("kfp_gpuquota.cluster.ray.bridge")


class Refused(Exception):  # noqa: N818 (a reason to end, no error of this program)
    """The bridge ends with this sentence."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def main(arguments: Sequence[str]) -> int:
    """Serve until the daemon closes its end; returns the exit code."""
    config = msgspec.json.decode(arguments[0], type=RayConfig)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s bridge: %(message)s")
    code = asyncio.run(_serve(config, arguments[1], arguments[2], int(arguments[3])))
    os._exit(code)  # Ray's own end takes seconds, and may wait for a head that is not there


async def _serve(config: RayConfig, cluster: str, described: str, descriptor: int) -> int:
    link = await messages.Link.over(socket.socket(fileno=descriptor))
    try:
        address = connect(config)
        await _with_ray(config, cluster, described, link, address)
    except Refused as refused:
        link.send(messages.Failed(why=refused.why))
        await link.drained()
        return 1
    return 0


def connect(config: RayConfig) -> str:
    """Connect to Ray; returns the cluster's address. Raises Refused."""
    if config.token_file:  # read when ray is imported
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": config.token_file}
    try:
        import ray  # noqa: PLC0415 (whether it is there is the question)
    except ImportError:
        raise Refused("Ray is not installed; run: pip install 'kfp-gpuquota[ray]'") from None
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < OLDEST_RAY:
        oldest = ".".join(map(str, OLDEST_RAY))
        raise Refused(f"Ray {ray.__version__} is too old; run: pip install 'ray>={oldest}' on every node")
    if config.address == "auto" and not config.token_file:
        _use_own_token()
    address = _found(config.address)
    _check_answers(address)
    try:
        context: Any = ray.init(address=address, namespace="gpuquota", log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise Refused(_sentence(config, address, error)) from error
    return str(context.address_info["gcs_address"])


def _use_own_token() -> None:
    """Authenticate with the token that Ray itself has for this user, if there is one and RAY_AUTH_MODE is not set.

    Since 2.60 `ray.init()` creates one, and `ray start` uses it from then on; Ray's look-up of "auto" does not. As with
    `ray.init()`, a cluster that is named by its address is not sent it.
    """
    try:
        from ray._private.authentication.authentication_token_setup import (  # noqa: PLC0415
            maybe_enable_token_auth_if_token_available,
        )
    except ImportError:
        return
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _found(address: str) -> str:
    """Return HOST:PORT of the cluster that Ray finds for auto. Raises Refused if it finds none.

    Ray's own connection waits for a recorded head that has ended, and then aborts the process.
    """
    if address != "auto":
        return address
    from ray._private.services import canonicalize_bootstrap_address  # noqa: PLC0415

    try:
        return canonicalize_bootstrap_address(address) or address
    except ConnectionError:
        raise Refused(f"no Ray cluster was found at {address!r}; start one with: ray start --head") from None


def _check_answers(address: str) -> None:
    """Raise Refused if no server listens: Ray itself waits for a minute, and then ends the process."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise Refused(
            f"nothing answers at {address} ({why}); give the address that `ray start --head` printed"
        ) from None


def _sentence(config: RayConfig, address: str, error: Exception) -> str:
    if isinstance(error, ConnectionError):  # though a server listens there
        wanted = "it may want a token: --ray-token-file ~/.ray/auth_token"
        token = "its token is another one" if config.token_file else wanted
        return f"Ray at {address} does not accept the connection; {token}"
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"Ray at {address} cannot be used: {first}"


async def _with_ray(config: RayConfig, cluster: str, described: str, link: messages.Link, address: str) -> None:
    from kfp_gpuquota.cluster.ray import ownership  # noqa: PLC0415 (imports ray)
    from kfp_gpuquota.cluster.ray.hosts import Hosts  # noqa: PLC0415

    if why := await ownership.claim(cluster, described):
        raise Refused(why)
    hosts = Hosts(config, ownership.namespace_of(cluster), time.time_ns())
    await hosts.discover()
    bridge = Bridge(hosts, link)
    await bridge.connected(address)
    watching = asyncio.create_task(bridge.watch_nodes())
    claiming = asyncio.create_task(_keep_claim(cluster, described))
    receiving = asyncio.create_task(bridge.receive())
    done, _ = await asyncio.wait({watching, claiming, receiving}, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    hosts.drop_warm()
    if not hosts.workers():
        with contextlib.suppress(Exception):
            await ownership.resign(cluster)


async def _keep_claim(cluster: str, described: str) -> None:
    from kfp_gpuquota.cluster.ray import ownership  # noqa: PLC0415

    while True:
        await asyncio.sleep(CLAIM_EVERY_S)
        try:
            why = await ownership.claim(cluster, described)
        except Exception as error:  # noqa: BLE001 (the head may be restarting: the nodes report its loss)
            log.warning("the claim was not renewed: %s", error)
            continue
        if why:
            raise Refused(why)


class Bridge:
    """Carries out what the daemon sends, and reports what happens."""

    def __init__(self, hosts: Hosts, link: messages.Link) -> None:
        self._hosts, self._link = hosts, link
        self._follows: dict[str, messages.Follow] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopping: dict[str, bool] = {}
        self._once: set[asyncio.Task[None]] = set()
        self._alive: set[str] = set()

    async def connected(self, address: str) -> None:
        """Send what the daemon has to learn first."""
        import ray  # noqa: PLC0415

        here = await asyncio.to_thread(ray.util.get_node_ip_address)
        self._link.send(messages.Connected(address=address, here=here, version=ray.__version__))

    async def watch_nodes(self) -> None:
        """Send the nodes again and again. Raises Refused when the head does not answer any more."""
        before: messages.NodesSeen | None = None
        while True:
            try:
                seen = await asyncio.wait_for(asyncio.to_thread(self._seen), NODES_WITHIN_S)
            except Exception as error:
                raise Refused(f"Ray's head does not answer any more: {error}") from error
            self._alive = {node.id for node in seen.nodes}
            self._hosts.retain(self._alive)
            self._link.send(messages.NodesUnchanged() if seen == before else seen)
            before = seen
            await asyncio.sleep(NODES_EVERY_S)

    async def receive(self) -> None:
        """Carry out what the daemon sends, until it closes its end."""
        async for message in self._link.receive(messages.ToBridge):
            match message:
                case messages.Follow():
                    self._follow(message)
                case messages.Signal():
                    self._stop(message)
                case messages.Forget():
                    self._forget(message.worker)
                case messages.ReadLog():
                    self._run(self._read_log(message))
                case messages.RemoveFiles():
                    self._run(self._remove(message.directory))
                case messages.ListWorkers():
                    self._run(self._list_workers(message.jobs))
                case messages.EndWorkers():
                    self._hosts.drop_all(message.workers)
                    self._run(self._end_workers(message))
                case messages.MeasureUse():
                    self._run(self._measure(message.workers))

    # Workers

    def _follow(self, wanted: messages.Follow) -> None:
        worker = wanted.task.worker
        if worker in self._tasks:
            return
        self._follows[worker] = wanted
        self._tasks[worker] = asyncio.create_task(self._following(wanted))

    def _forget(self, worker: str) -> None:
        self._stopping.pop(worker, None)
        self._follows.pop(worker, None)
        if task := self._tasks.pop(worker, None):
            task.cancel()
        if host := self._hosts.of(worker):
            self._hosts.drop(host)

    async def _following(self, wanted: messages.Follow) -> None:
        """Follow the worker until it has ended, over as many actors as that takes."""
        from ray.exceptions import ActorDiedError  # noqa: PLC0415

        worker, actor_died = wanted.task.worker, False
        while True:
            try:
                report = await self._followed(wanted, actor_died=actor_died)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 (actor, node or head is lost: whichever, it is tried again)
                first_death = isinstance(error, ActorDiedError) and not actor_died
                actor_died = isinstance(error, ActorDiedError)
                log.warning("worker %s: %s", worker, str(error).strip().splitlines()[:1])
                if host := self._hosts.of(worker):
                    self._hosts.drop(host)
                if not first_death:  # else Ray may give its GPUs to other work at once, and the agent is needed
                    self._hosts.forget_agent(wanted.node_id)
                    await asyncio.sleep(RETRY_S)
            else:
                self._tasks.pop(worker, None)
                self._follows.pop(worker, None)
                self._stopping.pop(worker, None)
                self._link.send(report)
                return

    async def _followed(self, wanted: messages.Follow, *, actor_died: bool) -> messages.FromBridge:
        from kfp_gpuquota.cluster.ray.hosts import NotPlacedError  # noqa: PLC0415
        from kfp_gpuquota.cluster.ray.runtime_environments import NotSetUpError  # noqa: PLC0415

        worker = wanted.task.worker
        if not wanted.start and self._hosts.of(worker) is None:
            return await self._ended_by_agent(wanted, "it was not started")
        try:
            host = await self._hosts.take(
                worker, wanted.node_id, wanted.gpus, wanted.task.runtime_env, adopts=actor_died
            )
        except NotPlacedError as error:
            return await self._ended_by_agent(wanted, str(error))
        except NotSetUpError as error:
            why = f"Ray could not set up its runtime environment: {error}"
            fails = messages.WorkerEnded(worker=worker, code=EXIT_CANNOT_EXECUTE, why=why)
            return await self._ended_by_agent(wanted, why, fails)
        state, number, why = await self._ensured(host.actor, wanted, start=wanted.start)
        if state == "running":
            self._link.send(messages.WorkerStarted(worker=worker, pid=number))
            if worker in self._stopping:
                await host.actor.stop.remote(worker, kill=self._stopping[worker])
            number, why = await host.actor.wait_end.remote(worker)
            state = "ended"
        reported = await host.actor.release.remote(worker)
        self._hosts.release(host)
        if state == "ended":
            return _end(worker, number, why, reported)
        return messages.WorkerNotStarted(worker=worker, why=why)

    async def _ended_by_agent(
        self, wanted: messages.Follow, why: str, never: messages.FromBridge | None = None
    ) -> messages.FromBridge:
        """Make sure, without holding GPUs, that the worker does not run any more. Returns `never` if it never did.

        One that was not asked to stop is killed: its GPUs are other work's.
        """
        worker = wanted.task.worker
        agent = await self._hosts.agent(wanted.node_id)
        state, number, lost = await self._ensured(agent, wanted, start=False)
        if state == "not-started":
            raise RuntimeError("it is being started just now")
        if state == "running":
            await agent.stop.remote(worker, kill=self._stopping.get(worker, wanted.start))
            number, lost = await agent.wait_end.remote(worker)
        reported = await agent.release.remote(worker)
        if state == "never" and never is not None:
            return never
        if state == "never" or (state == "running" and wanted.start):
            return messages.WorkerLost(worker=worker, why=why)
        return _end(worker, number, lost, reported)

    async def _ensured(self, actor: Any, wanted: messages.Follow, *, start: bool) -> tuple[str, int, str]:
        return await actor.ensure.remote(self._hosts.epoch, msgspec.to_builtins(wanted.task), start=start)  # type: ignore[no-any-return]

    def _stop(self, message: messages.Signal) -> None:
        worker = message.worker
        wanted = self._follows.get(worker)
        if wanted is None:
            return
        self._stopping[worker] = message.kill or self._stopping.get(worker, False)
        host = self._hosts.of(worker)
        if host is not None and host.ready:
            self._run(self._stop_now(host.actor, worker))
            return
        self._forget(worker)  # its actor waits for GPUs: the agent prevents it
        self._stopping[worker] = message.kill
        self._follow(msgspec.structs.replace(wanted, start=False))

    async def _stop_now(self, actor: Any, worker: str) -> None:
        await actor.stop.remote(worker, kill=self._stopping.get(worker, False))

    async def _measure(self, workers: Sequence[str]) -> None:
        """Ask the workers' actors; one that does not know, or is of a release that cannot, reports nothing."""
        await asyncio.gather(*map(self._measure_one, workers), return_exceptions=True)

    async def _measure_one(self, worker: str) -> None:
        host = self._hosts.of(worker)
        if host is not None and host.ready:
            found = await asyncio.wait_for(_result(host.actor.use.remote(worker)), MEASURED_WITHIN_S)
            if found is not None:
                self._link.send(messages.UseMeasured(worker=worker, used=found[0], figures=found[1]))

    # Files

    async def _read_log(self, message: messages.ReadLog) -> None:
        """Read by the worker's own actor, else by its node's agent: the actor ends with the worker, at any moment."""
        host = self._hosts.of(message.worker)
        if host is not None and host.ready:
            with contextlib.suppress(Exception):
                self._link.send(await self._read_by(host.actor, message))
                return
        try:
            self._link.send(await self._read_by_agent(message))
        except Exception as error:  # noqa: BLE001 (whatever it was is the answer)
            self._hosts.forget_agent(message.node_id)
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._link.send(messages.LogRead(number=message.number, why=why))

    async def _read_by_agent(self, message: messages.ReadLog) -> messages.LogRead:
        """Read by the node's agent; by a new one if that has died, which only a call shows."""
        from ray.exceptions import ActorDiedError  # noqa: PLC0415

        try:
            return await self._read_by(await self._hosts.agent(self._alive_id(message)), message)
        except ActorDiedError:
            self._hosts.forget_agent(message.node_id)
            return await self._read_by(await self._hosts.agent(self._alive_id(message)), message)

    def _alive_id(self, message: messages.ReadLog) -> str:
        if message.node_id not in self._alive:
            raise FileNotFoundError("its node has left the Ray cluster, and its log with it")
        return message.node_id

    async def _read_by(self, actor: Any, message: messages.ReadLog) -> messages.LogRead:
        text, begin = await actor.read_log.remote(message.directory, message.offset)
        return messages.LogRead(number=message.number, text=text, begin=begin)

    async def _remove(self, directory: str) -> None:
        for node_id in list(self._alive):
            agent = await self._hosts.agent(node_id)
            await agent.remove.remote(directory)

    async def _list_workers(self, jobs: str) -> None:
        for node_id in list(self._alive):
            agent = await self._hosts.agent(node_id)
            found = await agent.running.remote(jobs)
            self._link.send(messages.WorkersFound(node_id, tuple(found)))

    async def _end_workers(self, message: messages.EndWorkers) -> None:
        agent = await self._hosts.agent(message.node_id)
        await agent.end.remote(message.workers)

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_logging_errors(coroutine))
        self._once.add(task)
        task.add_done_callback(self._once.discard)

    # Nodes

    def _seen(self) -> messages.NodesSeen:
        import ray  # noqa: PLC0415
        from ray._private.state import available_resources_per_node, state  # noqa: PLC0415

        free = available_resources_per_node()
        draining = state.get_draining_nodes()
        alive = [node for node in ray.nodes() if node["Alive"]]
        return messages.NodesSeen(nodes=tuple(self._node(node, free, draining) for node in alive))

    def _node(self, node: dict[str, Any], free: dict[str, Any], draining: dict[str, int]) -> messages.RayNode:
        node_id, resources, labels = node["NodeID"], node["Resources"], node["Labels"]
        kinds = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
        return messages.RayNode(
            id=node_id,
            address=node["NodeManagerAddress"],
            hostname=node["NodeManagerHostname"],
            name=node.get("NodeName", ""),
            gpus=int(resources.get("GPU", 0)),
            free=free.get(node_id, {}).get("GPU", 0.0),
            held=self._hosts.held(node_id),
            cpus=resources.get("CPU", 0.0),
            memory_mib=int(resources.get("memory", 0) // _MIB),
            gpu_type=labels.get("ray.io/accelerator-type", kinds[0] if kinds else ""),
            draining=node_id in draining,
            labels={name: value for name, value in labels.items() if name != messages.NODE_ID},
        )


async def _result(reference: Any) -> Any:
    return await reference


def _end(worker: str, code: int, lost: str, error: str | None) -> messages.FromBridge:
    """Return how the worker ended; an actor of an older release reports no error."""
    if lost:
        return messages.WorkerLost(worker=worker, why=lost)
    return messages.WorkerEnded(worker=worker, code=code, error=error or "")


async def _logging_errors(coroutine: Coroutine[Any, Any, None]) -> None:
    try:
        await coroutine
    except Exception as error:  # noqa: BLE001 (one node's trouble must not end the bridge)
        log.warning("%s", (str(error).strip().splitlines() or [type(error).__name__])[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
