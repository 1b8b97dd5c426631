"""The bridge's actors. One that holds GPUs runs one worker at a time, stays warm for a while, and is then ended.

Actors are detached: they outlive the bridge, and the next bridge discovers them by their names. Each node also has an
agent without GPUs, which ends with the bridge: it stops workers that have no actor, and reads and deletes files.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kfp_gpuquota.cluster.ray import runtime_environments
from kfp_gpuquota.cluster.ray.host import WorkerHost
from kfp_gpuquota.cluster.ray.runtime_environments import SURVIVE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.cluster.ray.config import RayConfig

HELLO_S: Final = 20.0
PLACEMENT_S: Final = 60.0
"""How long an actor may wait for its process, once its GPUs were free."""
FREE_FOR_START_S: Final = 10.0
"""How long a start waits for GPUs: an actor that was ended holds them until its process has exited."""
FREE_FOR_ADOPTION_S: Final = 2.0
"""How long a worker whose actor died runs on while its GPUs are not free: other work of Ray may use them by then."""
STEADY_S: Final = 1.0
"""How long they must have been idle then: work that waits for them gets them within that time."""
ADOPTION_S: Final = 15.0
"""As PLACEMENT_S, for a worker that runs: other work may take its GPUs between the look and the actor's request."""
LOOK_EVERY_S: Final = 0.1
CALLS_AT_ONCE: Final = 100
PLAIN: Final = {"env_vars": SURVIVE}

log = logging.getLogger(__name__)


class NotPlacedError(Exception):
    """The node's GPUs could not be held."""


@dataclass(eq=False)
class Host:
    """An actor that holds GPUs; `worker` is "" while it is warm, `warm_since` in monotonic seconds then.

    `environment` identifies the runtime environment that it runs in.
    """

    name: str
    actor: Any
    node_id: str
    gpus: int
    environment: str = ""
    worker: str = ""
    warm_since: float = 0.0
    ready: bool = False


class Hosts:
    """All actors of one cluster, by the namespace of its own."""

    def __init__(self, config: RayConfig, namespace: str, epoch: int) -> None:
        self._config, self._namespace, self.epoch = config, namespace, epoch
        self._hosts: list[Host] = []
        self._agents: dict[str, Any] = {}

    async def discover(self) -> None:
        """Find the actors of earlier bridges; what does not answer is ended, and its worker gets another one."""
        named = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
        names = [each["name"] for each in named if each["namespace"] == self._namespace]
        await asyncio.gather(*(self._discover(name) for name in names))

    async def take(self, worker: str, node_id: str, gpus: int, runtime_env: dict[str, Any], *, adopts: bool) -> Host:
        """Return the actor that has the worker, else a warm one in the same runtime environment, else a new one.

        A new one is started when its GPUs are free; `adopts`: the worker runs, and its actor died. Raises
        NotPlacedError if the GPUs are not free in time, NotSetUpError, RayError.
        """
        if (host := self.of(worker)) is not None:
            return host
        prepared = PLAIN if not runtime_env else await asyncio.to_thread(runtime_environments.uploaded, runtime_env)
        environment = runtime_environments.digest(prepared) if runtime_env else ""
        warm = [host for host in self._hosts if not host.worker and host.node_id == node_id]
        if fitting := [host for host in warm if (host.gpus, host.environment) == (gpus, environment)]:
            fitting[0].worker = worker
            return fitting[0]
        for host in warm:  # it holds GPUs that the new one may need
            self.drop(host)
        free_within_s, steady_s = (FREE_FOR_ADOPTION_S, STEADY_S) if adopts else (FREE_FOR_START_S, 0.0)
        await self._await_free(node_id, gpus, free_within_s, steady_s)
        name = f"{node_id}-{gpus}-{uuid.uuid4().hex}-{environment}"
        host = Host(name=name, actor=None, node_id=node_id, gpus=gpus, environment=environment, worker=worker)
        self._hosts.append(host)
        within_s = (ADOPTION_S if adopts else PLACEMENT_S) + runtime_environments.setup_s(runtime_env)
        try:
            host.actor = await asyncio.to_thread(self._create, node_id, gpus, name, prepared)
            await asyncio.wait_for(_result(host.actor.hello.remote(self.epoch)), within_s)
            host.ready = True
        except ray.exceptions.RuntimeEnvSetupError as error:
            self.drop(host)
            raise runtime_environments.NotSetUpError(_sentence(error)) from None
        except TimeoutError:
            self.drop(host)
            raise NotPlacedError(f"its GPUs were not free for Ray within {within_s:g} s") from None
        except BaseException:
            self.drop(host)
            raise
        return host

    async def _await_free(self, node_id: str, gpus: int, within_s: float, steady_s: float) -> None:
        """Return when the node has had that many idle GPUs for `steady_s`. Raises NotPlacedError after `within_s`.

        Ray is asked, not the plan: other work may have taken the GPUs since, and an actor that waits for them would
        look to the plan as if it held them.
        """
        began = time.monotonic()
        idle_since: float | None = None
        while True:
            idle = await asyncio.to_thread(_free_gpus, node_id) >= gpus
            now = time.monotonic()
            idle_since = (idle_since or now) if idle else None
            if idle_since is not None and now - idle_since >= steady_s:
                return
            if idle_since is None and now - began >= within_s:
                raise NotPlacedError(f"other work of Ray holds its GPUs: they were not free within {within_s:g} s")
            await asyncio.sleep(LOOK_EVERY_S)

    def of(self, worker: str) -> Host | None:
        """Return the actor that has the worker."""
        return next((host for host in self._hosts if host.worker == worker), None)

    async def agent(self, node_id: str) -> Any:
        """Return the agent of a live node."""
        if node_id not in self._agents:
            self._agents[node_id] = await asyncio.to_thread(self._create, node_id, 0, None, PLAIN)
        return self._agents[node_id]

    def release(self, host: Host) -> None:
        """Keep the actor warm: its worker has ended."""
        host.worker, host.warm_since = "", time.monotonic()
        if not self._config.warm_s:
            self.drop(host)

    def drop(self, host: Host) -> None:
        """End the actor; its worker continues until its lease ends."""
        if host in self._hosts:
            self._hosts.remove(host)
        if host.actor is not None:
            ray.kill(host.actor)

    def retain(self, alive: Iterable[str]) -> None:
        """Drop the actors of nodes that left, and end actors whose warm time is over."""
        nodes = set(alive)
        self._agents = {node_id: agent for node_id, agent in self._agents.items() if node_id in nodes}
        now = time.monotonic()
        for host in list(self._hosts):
            if host.node_id not in nodes and not host.worker:
                self._hosts.remove(host)
            elif not host.worker and now - host.warm_since >= self._config.warm_s:
                self.drop(host)

    def drop_warm(self) -> None:
        """End the actors without workers."""
        for host in [host for host in self._hosts if not host.worker]:
            self.drop(host)

    def drop_all(self, workers: Iterable[str]) -> None:
        """End the actors of these workers."""
        for worker in workers:
            if (host := self.of(worker)) is not None:
                self.drop(host)

    def forget_agent(self, node_id: str) -> None:
        """Start another agent next time."""
        self._agents.pop(node_id, None)

    def held(self, node_id: str) -> int:
        """Return how many GPUs of the node the actors hold, or wait for."""
        return sum(host.gpus for host in self._hosts if host.node_id == node_id)

    def workers(self) -> set[str]:
        """Return the workers that have an actor."""
        return {host.worker for host in self._hosts if host.worker}

    async def _discover(self, name: str) -> None:
        node_id, gpus, _, environment = [*name.split("-"), ""][:4]
        actor: Any = await asyncio.to_thread(ray.get_actor, name, self._namespace)
        try:
            found = await asyncio.wait_for(_result(actor.hello.remote(self.epoch)), HELLO_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            log.warning("an actor of an earlier connection does not answer, and is ended: %s", error)
            ray.kill(actor)
            return
        host = Host(name=name, actor=actor, node_id=node_id, gpus=int(gpus), environment=environment)
        host.worker = found["worker"]
        host.warm_since, host.ready = time.monotonic(), True
        self._hosts.append(host)

    def _create(self, node_id: str, gpus: int, name: str | None, runtime_env: dict[str, Any]) -> Any:
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": gpus,
            "max_concurrency": CALLS_AT_ONCE,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
            "runtime_env": runtime_env,
        }
        if name is not None:
            options |= {"name": name, "namespace": self._namespace, "lifetime": "detached"}
        return ray.remote(WorkerHost).options(**options).remote(self._config.silence_s, gpus)


def _free_gpus(node_id: str) -> float:
    """Return the GPUs of a node that nothing holds, as Ray's head has them: at most a second old."""
    from ray._private.state import available_resources_per_node  # noqa: PLC0415

    return float(available_resources_per_node().get(node_id, {}).get("GPU", 0.0))


def _sentence(error: Exception) -> str:
    """What Ray says of it, without the traceback of its agent."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


async def _result(reference: Any) -> Any:
    return await reference
