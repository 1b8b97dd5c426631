"""The Kubernetes controller on a real API server with fake nodes, everything on this machine.

    python benchmarks/controller.py --case fill|gang|single|reclaim|start|idle [--nodes 500] [--gpus 8] [--compare N]
    python benchmarks/controller.py --case webhook-under-plan [--nodes 250] [--gpus 8]
    python benchmarks/controller.py --case shapes [--nodes 100] [--gpus 8] [--shapes 10000]
    python benchmarks/controller.py --case reconnect [--workers 5000] [--job-size 50] [--shards 4]

fill:    4,000 one-GPU pods created as fast as possible, until all are bound
gang:    one group of 512 pods, until all are bound
single:  one pod at a time on a cluster that runs 3,600; from its creation to bound; 20 times, each time beside a pod
         that is kube-scheduler's alone (`alone_ms`, and the median of their differences, `more_ms`)
reclaim: all GPUs of 250 nodes held by one team's pods, another submits 1,000 within its quota, until all are bound
start:   how long a controller that starts takes to its first plan, on 10,000 nodes and 100,000 pods of which 80,000
         run and 20,000 need no GPU; and by how much it was ever late to renew its Lease (benchmarks/start_bench.py)
shapes:  one team submits --shapes gated pods, each with a nodeSelector of its own that no node matches; meanwhile and
         afterwards another team's pods, one at a time, from their creation to bound (`beside_ms`, `after_ms`), against
         the same before (`alone_ms`). An API server that is flooded is slower for everybody, so those beside are
         compared with pods that are kube-scheduler's alone, in turn with them (`beside_alone_ms`). `leaders`: how
         often the Lease was acquired after the first time
idle:    CPU of the controller over 60 s on a cluster that runs 3,600 pods and where nothing happens, as `writes_per_s`
         tells

reconnect: --workers simulated workers (of jobs of --job-size) on --shards membership shards, whose TLS connections all
         break at once, until all are connected again. `cpu_ms_per_worker` is the shards' CPU time meanwhile, signs of
         life included (`idle_percent_of_a_core` is what these take), `kib_per_worker` their memory for each connection,
         `killed` the workers that they wanted ended. No API server takes part
webhook-under-plan: 50 reviews a second at the webhook's own port, sent by a process of its own, while a reclaim of
         1,000 pods is planned: `p99_ms`, and `quiet_p99_ms` in the ten seconds before it

`writes_per_pod` are all writes of the API server during the case, of any client (also the generator's creation of each
pod, the controller's, kube-scheduler's binding and KWOK's status), by its own metrics.

`controller_ms_per_pod` is CPU time of the controller during the case, `cpu_s` that of every program. Of `seconds`,
`created_s` went by until the last pod was created, `admitted_s` until the last one was let go.

With --alone the pods are not gated and no controller runs: what kube-scheduler alone takes. With --compare N, fill and
gang are measured N times each way in turn in one cluster: `ratio` is the median of ours to kube-scheduler alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

import start_bench
from common import milliseconds, print_conditions, print_result
from kwok_bench import (
    Bench,
    Controller,
    install,
    make_nodes,
    make_team,
    until_quiet,
    until_settled,
    watching,
)
from reconnect import reconnect
from review_load import beside

from kfp_gpuquota.cluster.kubernetes.objects import labels
from tools.devcluster import DevCluster, Options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CASES = ["fill", "gang", "single", "reclaim", "shapes", "start", "idle", "reconnect", "webhook-under-plan"]
IDLE_S = 60.0
ROUNDS = 20
LEASE = "/apis/coordination.k8s.io/v1/namespaces/gpuquota-system/leases/gpuquota-controller"
GATED = {"schedulingGates": [{"name": labels.QUOTA_GATE}]}


def pod(name: str, group: str = "", size: int = 0, node: str = "", *, gated: bool = True) -> dict[str, Any]:
    """A one-GPU pod, gated as the webhook would gate it."""
    return {
        "metadata": {
            "name": name,
            "labels": {labels.POD_GROUP: group} if group else {},
            "annotations": {labels.POD_GROUP_SIZE: str(size)} if group else {},
        },
        "spec": {
            **({"nodeName": node} if node else GATED if gated else {}),
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "main", "image": "none", "resources": {"limits": {labels.GPU_RESOURCE: "1"}}}],
        },
    }


async def burst(bench: Bench, bodies: list[dict[str, Any]], team: str = "team-a") -> dict[str, Any]:
    """Create these pods as fast as possible, and wait until all are bound."""
    started = time.perf_counter()
    names = await bench.create_all(team, bodies)
    created = time.perf_counter()
    await bench.until_bound(names)
    ended = max(bench.bound[name] for name in names)
    return {
        "seconds": round(ended - started, 2),
        "created_s": round(created - started, 2),
        "admitted_s": round(max(bench.let_go[name] for name in names) - started, 2),
        "pods_per_s": round(len(names) / (ended - started)),
        "pods": len(names),
    }


async def fill(bench: Bench, count: int, tag: str = "fill", *, gated: bool = True) -> dict[str, Any]:
    """Run the case and return its figures."""
    return await burst(bench, [pod(f"{tag}-{i}", gated=gated) for i in range(count)])


async def gang(bench: Bench, count: int, tag: str = "gang", *, gated: bool = True) -> dict[str, Any]:
    """Run the case and return its figures."""
    return await burst(bench, [pod(f"{tag}-{i}", tag, count, gated=gated) for i in range(count)])


async def single(bench: Bench, rounds: int) -> dict[str, Any]:
    """Run the case and return its figures."""
    await fill(bench, 3600)
    await until_quiet(bench)
    gated, alone = [], []
    for i in range(rounds):
        gated.append(await one(bench, pod(f"single-{i}")))
        alone.append(await one(bench, pod(f"alone-{i}", gated=False)))
    more = statistics.median(ours - theirs for ours, theirs in zip(gated, alone, strict=True))
    return {
        "latency_ms": milliseconds(gated),
        "alone_ms": milliseconds(alone),
        "more_ms": round(1000 * more, 1),
        "pods": 2 * rounds,
    }


async def one(bench: Bench, body: dict[str, Any], team: str = "team-a") -> float:
    """Seconds from a pod's creation to bound."""
    started = time.perf_counter()
    names = await bench.create_all(team, [body])
    await bench.until_bound(names)
    seconds = bench.bound[names[0]] - started
    await asyncio.sleep(0.2)
    return seconds


async def reclaim(bench: Bench, gpus: int, count: int) -> dict[str, Any]:
    """Run the case and return its figures."""
    held = await bench.create_all("team-a", [pod(f"held-{i}") for i in range(gpus)])
    await bench.until_bound(held)
    await until_quiet(bench)
    return await burst(bench, [pod(f"back-{i}") for i in range(count)], "team-b")


async def webhook_under_plan(bench: Bench, gpus: int, count: int) -> dict[str, Any]:
    """Run the case and return its figures."""
    held = await bench.create_all("team-a", [pod(f"held-{i}") for i in range(gpus)])
    await bench.until_bound(held)
    await until_quiet(bench)
    async with beside(bench.cluster.kubeconfig) as load:
        await load.ask("begin")
        await asyncio.sleep(10)
        quiet = await load.ask("end")
        await load.ask("begin")
        result = await burst(bench, [pod(f"back-{i}") for i in range(count)], "team-b")
        return {**result, **await load.ask("end"), "quiet_p99_ms": quiet["p99_ms"]}


async def shapes(bench: Bench, count: int) -> dict[str, Any]:
    """Run the case and return its figures."""
    alone = [await one(bench, pod(f"alone-{i}"), "team-b") for i in range(ROUNDS)]
    started = time.perf_counter()
    creating = asyncio.create_task(bench.create_all("team-a", [shaped(i) for i in range(count)]))
    beside: list[float] = []
    beside_alone: list[float] = []
    while not creating.done():
        beside.append(await one(bench, pod(f"beside-{len(beside)}"), "team-b"))
        beside_alone.append(await one(bench, pod(f"ungated-{len(beside)}", gated=False), "team-b"))
    created_s = time.perf_counter() - started
    await creating
    after = [await one(bench, pod(f"after-{i}"), "team-b") for i in range(ROUNDS)]
    lease = msgspec.json.decode(await bench.api.call("GET", LEASE))
    return {
        "alone_ms": milliseconds(alone),
        "beside_ms": milliseconds(beside),
        "beside_alone_ms": milliseconds(beside_alone),
        "after_ms": milliseconds(after),
        "times_beside": round(statistics.median(beside) / statistics.median(beside_alone), 1),
        "times_after": round(statistics.median(after) / statistics.median(alone), 1),
        "created_s": round(created_s, 1),
        "leaders": lease["spec"].get("leaseTransitions", 0),
        "pods": count + len(alone) + len(beside) + len(after),
    }


def shaped(number: int) -> dict[str, Any]:
    """A gated pod that no other one is like, and that no node admits."""
    body = pod(f"shape-{number}")
    body["spec"]["nodeSelector"] = {"shape": f"s{number}"}
    return body


async def run_case(bench: Bench, options: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Nodes, teams, the controller and the case."""
    gpus = options.nodes * options.gpus
    await bench.api.call("POST", "/api/v1/namespaces", {"metadata": {"name": "gpuquota-system"}})
    await make_team(bench, "team-a", gpus // 2)
    await make_team(bench, "team-b", gpus // 2)
    await make_nodes(bench, options.nodes, options.gpus)
    await until_settled(bench)
    if options.compare:
        return await compared(bench, options, log)
    if options.alone:
        return await measured(bench, None, options.case, gpus)
    async with controlling(bench, log, *(["--leader-elect"] if options.case == "shapes" else [])) as controller:
        return await measured(bench, controller, options.case, gpus, shapes_=options.shapes)


@contextlib.asynccontextmanager
async def controlling(bench: Bench, log: Path, *arguments: str) -> AsyncIterator[Controller]:
    """A controller that has admitted its first pod."""
    controller = Controller(bench.cluster.kubeconfig, log, *arguments)
    try:
        await bench.until_bound(await bench.create_all("team-a", [pod("first")]))
        await bench.empty()
        yield controller
    finally:
        controller.stop()


async def compared(bench: Bench, options: argparse.Namespace, log: Path) -> dict[str, Any]:
    """The case by kube-scheduler alone and with the controller, in turn."""
    gpus = options.nodes * options.gpus
    alone, ours = [], []
    for i in range(options.compare):
        alone.append(await measured(bench, None, options.case, gpus, f"alone{i}"))
        await bench.empty()
        await until_quiet(bench)
        async with controlling(bench, log) as controller:
            await until_quiet(bench)
            ours.append(await measured(bench, controller, options.case, gpus, f"ours{i}"))
        await bench.empty()
        await until_quiet(bench)
        print(f"round {i}: alone {alone[-1]}\n         ours {ours[-1]}", flush=True)
    ratios = [mine["seconds"] / theirs["seconds"] for mine, theirs in zip(ours, alone, strict=True)]
    return {
        **min(ours, key=lambda one: abs(one["seconds"] - statistics.median(o["seconds"] for o in ours))),
        "alone_s": statistics.median(one["seconds"] for one in alone),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
    }


async def measured(
    bench: Bench, controller: Controller | None, case: str, gpus: int, tag: str = "pod", shapes_: int = 0
) -> dict[str, Any]:
    """One of the cases that a running controller is there for; without one it is kube-scheduler's alone."""
    before, cpu_before = await bench.writes(), bench.cpu_s(controller)
    result = await (shapes(bench, shapes_) if case == "shapes" else measure(bench, controller, case, gpus, tag))
    writes, cpu_s = await bench.writes() - before, bench.cpu_s(controller)
    print("writes:", dict(writes.most_common(8)))
    made = max(1, writes["POST pods/"])  # those that fill the cluster first, too
    result["writes_per_pod"] = round(writes.total() / made, 2)
    result["cpu_s"] = {name: round(used - cpu_before[name], 1) for name, used in cpu_s.items()}
    if controller is not None:
        result["controller_ms_per_pod"] = round(1000 * (cpu_s["controller"] - cpu_before["controller"]) / made, 2)
        result["peak_mib"], result["pss_mib"] = controller.peak_mib(), controller.pss_mib()
    return result


async def measure(bench: Bench, controller: Controller | None, case: str, gpus: int, tag: str) -> dict[str, Any]:
    """The case itself."""
    gated = controller is not None
    if case == "fill":
        return await fill(bench, min(gpus, 4000), tag, gated=gated)
    if case == "gang":
        return await gang(bench, min(gpus, 512), tag, gated=gated)
    if controller is None:
        raise SystemExit(f"case {case} is not measured without the controller")
    if case == "reclaim":
        return await reclaim(bench, gpus, gpus // 2)
    if case == "webhook-under-plan":
        return await webhook_under_plan(bench, gpus, gpus // 2)
    if case == "single":
        return await single(bench, 20)
    return await idle(bench, controller)


async def idle(bench: Bench, controller: Controller) -> dict[str, Any]:
    """Run the case. No component marks nodes NotReady whose heartbeats are late, as they are on a busy machine."""
    with bench.cluster.frozen("kube-controller-manager"):
        await fill(bench, 3600)
        await until_quiet(bench)
        writes, before = await bench.writes(), controller.cpu_s()
        await asyncio.sleep(IDLE_S)
        used, writes = controller.cpu_s() - before, await bench.writes() - writes
    print("writes while idle:", dict(writes.most_common(4)))
    idle_percent = round(used / IDLE_S * 100, 2)
    return {"idle_percent": idle_percent, "writes_per_s": round(writes.total() / IDLE_S, 1), "pods": 3600}


async def main(options: argparse.Namespace) -> None:
    """One case on a cluster of its own."""
    if options.case == "start":
        await start_bench.main(options.nodes, options.gpus)
        return
    with tempfile.TemporaryDirectory(prefix="gpuquota-bench-") as folder:
        if options.case == "reconnect":
            sizes = {"workers": options.workers, "job_size": options.job_size, "shards": options.shards}
            print_conditions("controller", case=options.case, **sizes)
            result = await reconnect(options, Path(folder))
            print(f"load at the end: {os.getloadavg()[0]:.1f}")
            print_result(case=options.case, **result)
            return
        cluster = DevCluster.start(Path(folder) / "cluster", Options(kwok_nodes=0))
        try:
            install(cluster)
            print_conditions("controller", case=options.case, nodes=options.nodes, gpus_per_node=options.gpus)
            async with watching(cluster) as bench:
                result = await run_case(bench, options, Path(folder) / "controller.log")
        finally:
            cluster.stop()
    print(f"load at the end: {os.getloadavg()[0]:.1f}")
    print_result(case=options.case, **result)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="fill")
    parser.add_argument("--nodes", type=int, default=0, help="default: depends on the case")
    parser.add_argument("--gpus", type=int, default=8, help="of each node")
    parser.add_argument("--alone", action="store_true", help="kube-scheduler alone (fill, gang)")
    parser.add_argument("--compare", type=int, default=0, metavar="N", help="N times each way in turn (fill, gang)")
    parser.add_argument("--shapes", type=int, default=10_000, help="pods of different shapes (shapes)")
    parser.add_argument("--workers", type=int, default=5000, help="simulated ones (reconnect)")
    parser.add_argument("--job-size", type=int, default=50, help="workers of each job (reconnect)")
    parser.add_argument("--shards", type=int, default=4, help="membership processes (reconnect)")
    options = parser.parse_args()
    nodes = {"reclaim": 250, "webhook-under-plan": 250, "start": 10_000}
    options.nodes = options.nodes or nodes.get(options.case, 500)
    return options


if __name__ == "__main__":
    asyncio.run(main(parse()))
