"""Runs scheduling cases in the format of a shared case file and reports which pass.

    python benchmarks/conformance.py CASES.json [--tier core] [--id ID] [--verbose]

The last line is JSON: passed, total, failed (ids).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kfp_gpuquota.scheduler.actions.cycle import Cycle
from kfp_gpuquota.scheduler.state.model import (
    GPU,
    UNLIMITED,
    Amount,
    Group,
    Host,
    Job,
    Queue,
    Request,
    Status,
    Task,
    Topology,
)
from kfp_gpuquota.scheduler.state.state import State

Case = dict[str, Any]

ACTIONS = {
    "allocate": "allocate",
    "consolidation": "consolidate",
    "reclaim": "reclaim",
    "preempt": "preempt",
    "stalegangeviction": "evict_stale",
}
OCCUPIES = {"Running": Status.HELD, "Bound": Status.HELD, "Releasing": Status.LEAVING, "StuckInReleasing": Status.HELD}
AFTER = {Status.BOUND: "Binding", Status.NOMINATED: "Pipelined", Status.LEAVING: "Releasing"}


@dataclass(frozen=True)
class Where:
    """A task's state word, node and devices."""

    state: str
    node: str = ""
    devices: tuple[int, ...] = ()


@dataclass
class Bench:
    """One case being run: the words for each task, and the engine's records of this round."""

    case: Case
    where: dict[str, Where] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        for job in self.case["jobs"]:
            for task in job["tasks"]:
                self.where[task["name"]] = Where(task["state"], task.get("node", ""))
        _seat(self)

    def round(self) -> None:
        """Run one cycle of the case's actions; `where` returns the location of each task."""
        state, tasks = build(self)
        below = [j for j in state.jobs.values() if 0 < j.active < j.gang]
        # The field lets a job that is over its queue's share hold back the jobs behind it.
        cycle = Cycle(state.ledger, below=below, now=self.now, in_order=True)
        cycle.run([ACTIONS[a] for a in self.case["actions"]])
        copies = {t.moved: t for t in cycle.changed() if t.moved is not None and t.status is Status.BOUND}
        for name, task in tasks.items():
            self.where[name] = _after(self.where[name], task, copies.get(task))

    def carry_out(self) -> None:
        """What the cluster does between two rounds."""
        self.now += 1
        stuck = {t["name"] for j in self.case["jobs"] if j.get("delete_in_test") for t in j["tasks"]}
        for name, where in self.where.items():
            if where.state == "Binding":
                self.where[name] = replace(where, state="Running")
            elif where.state == "Pipelined" or (where.state == "Releasing" and name not in stuck):
                self.where[name] = Where("Pending")

    def wrong(self) -> list[str]:
        """What differs from the expectation."""
        expected = self.case["expected"]
        found = []
        tasks = {t["name"]: j["name"] for j in self.case["jobs"] for t in j["tasks"]}
        for name, job in tasks.items():
            want = expected.get("tasks", {}).get(name) or expected.get("jobs", {}).get(job)
            if want is not None:
                found += _compare(name, self.where[name], want)
        for name, want in expected.get("nodes", {}).items():
            found += self._compare_node(name, want)
        return found

    def _compare_node(self, name: str, want: dict[str, float]) -> list[str]:
        state, _ = build(self)
        host = state.ledger.hosts[name]
        releasing = sum(leaving > 0 and not used for used, leaving, _ in host.taken.values())
        have = {"idle_gpus": host.idle_whole, "releasing_gpus": releasing}
        return [f"{name} {key}: {have[key]} is not {value}" for key, value in want.items() if have[key] != value]


def _after(before: Where, task: Task, copy: Task | None) -> Where:
    if copy is not None and copy.node is not None:
        return Where("Pipelined", copy.node.name, copy.devices)
    if task.status in AFTER and AFTER[task.status] != before.state and before.state != "StuckInReleasing":
        node = task.node.name if task.node is not None else ""
        return Where(AFTER[task.status], node, task.devices)
    return before


def _compare(name: str, have: Where, want: dict[str, Any]) -> list[str]:
    if have.state != want["status"]:
        return [f"{name}: {have.state}@{have.node} is not {want['status']}@{want.get('node', '')}"]
    if want.get("node") and have.node != want["node"]:
        return [f"{name}: {have.state} on {have.node}, not on {want['node']}"]
    return []


def _seat(bench: Bench) -> None:
    """Choose devices for the initially running tasks: fractions by their group, whole GPUs on idle devices."""
    groups: dict[tuple[str, str], int] = {}
    used: dict[str, set[int]] = {}
    specs = [t for j in bench.case["jobs"] for t in j["tasks"] if t["state"] in OCCUPIES and t.get("node")]
    for task in specs:
        allocator: list[int] = []
        taken = used.setdefault(task["node"], set())
        shared = task.get("gpu_fraction") or task.get("gpu_memory_mib")
        count = task.get("fraction_devices", 1) if shared else int(task["gpu"])
        for group in task.get("gpu_groups") or [""] * count:
            key = (task["node"], group)
            if not group or key not in groups:
                device = next(i for i in range(10_000) if i not in taken)
                taken.add(device)
                if group:
                    groups[key] = device
                allocator.append(device)
            else:
                allocator.append(groups[key])
        bench.where[task["name"]] = Where(task["state"], task["node"], tuple(allocator))


def build(bench: Bench) -> tuple[State, dict[str, Task]]:
    """Return the engine's records for the case, with each task at its location in `bench`."""
    state = State()
    state.ledger.one_by_one = True
    for node in bench.case["nodes"]:
        state.ledger.put_host(_host(node))
    _add_queues(state, bench.case["queues"])
    tasks: dict[str, Task] = {}
    topologies = {
        t["ObjectMeta"]["Name"]: tuple(level["NodeLabel"] for level in t["Spec"]["Levels"])
        for t in bench.case.get("topologies") or []
    }
    for job_spec in bench.case["jobs"]:
        spec = {**job_spec, "nodes": bench.case["nodes"]}
        grace_s = 0.0 if bench.case["kind"] == "integration" else 60.0
        job = _job(spec, state.ledger.queues[spec["queue"]], grace_s, topologies)
        for task in _tasks(spec, job):
            where = bench.where[task.id]
            tasks[task.id] = task
            if where.state in OCCUPIES:
                job.tasks[task.id] = task
                state.ledger.set(task, OCCUPIES[where.state], state.ledger.hosts[where.node], where.devices)
            elif where.state == "Pending":
                job.pending.append(task)
        job.pending.sort(key=lambda t: -t.priority)
        state.add_job(job)
    return state, tasks


def _host(node: dict[str, Any]) -> Host:
    return Host(
        name=node["name"],
        devices=tuple(range(node["gpus"])),
        gpu_memory_mib=node["gpu_memory_mib"],
        cpu=node["cpu"] * 1000,
        memory=node["memory_bytes"],
        max_tasks=node["max_pods"],
        labels=node.get("labels") or {},
    )


def _add_queues(state: State, specs: list[dict[str, Any]]) -> None:
    left = {q["name"]: q for q in specs}
    while left:
        for name, spec in list(left.items()):
            parent = spec.get("parent")
            if parent in left:
                continue
            del left[name]
            state.add_queue(_queue(spec), state.ledger.queues[parent] if parent else None)


def _queue(spec: dict[str, Any]) -> Queue:
    def amount(kind: str) -> Amount:
        gpu, cpu, memory = (spec[f"{kind}_{r}"] for r in ("gpus", "cpu", "memory"))
        return Amount(
            UNLIMITED if gpu == -1 else gpu * GPU,
            UNLIMITED if cpu == -1 else cpu,
            UNLIMITED if memory == -1 else memory * 1_000_000,
        )

    weight = spec["over_quota_weight"]
    return Queue(
        name=spec["name"],
        deserved=amount("deserved"),
        limit=amount("limit"),
        priority=spec["priority"],
        weights=(1.0 if weight < 0 else weight, 1.0, 1.0),
        created=spec["creation_order"],
    )


def _groups(spec: dict[str, Any], topologies: dict[str, tuple[str, ...]]) -> Group | None:
    """The job's sets of tasks, where it has more than one, or a topology."""
    root = spec.get("subgroups")
    return None if not root else _group(root, topologies, spec["min_available"])


def _group(spec: dict[str, Any], topologies: dict[str, tuple[str, ...]], gang: int = 0) -> Group:
    below = [*(spec.get("sub_groups") or []), *(spec.get("pod_sets") or [])]
    wanted = spec.get("topology")
    topology = None
    if wanted:
        levels = topologies[wanted["Topology"]]
        required, preferred = wanted.get("RequiredLevel"), wanted.get("PreferredLevel")
        at = [levels.index(key) if key else None for key in (required, preferred)]
        topology = Topology(levels, at[0], at[1])
    return Group(
        "" if gang and not below else spec["name"],
        gang=spec.get("min_available", gang),
        children=tuple(_group(child, topologies) for child in below),
        fewest=spec.get("min_sub_group"),
        topology=topology,
    )


def _job(spec: dict[str, Any], queue: Queue, grace_s: float, topologies: dict[str, tuple[str, ...]]) -> Job:
    live = [t for t in spec["tasks"] if t["state"] not in ("Failed", "Succeeded")]
    done = sum(t["state"] == "Succeeded" for t in spec["tasks"])
    return Job(
        uid=f"{spec['table_order']:04}-{spec['name']}",
        name=spec["name"],
        queue=queue,
        gang=spec["min_available"] - done,
        wanted=len(live),
        most=len(live),
        request=_request(spec, spec["tasks"][0]),
        groups=_groups(spec, topologies),
        priority=spec["priority"],
        preemptible=spec["preemptible"],
        overlapping=True,
        submitted_at=spec["age_rank"],
        waiting_since=-60.0 * spec["age_minutes"],
        preemption_delay_s=spec.get("preemption_delay_s", 0),
        below_since=-spec["stale_for_s"] if "stale_for_s" in spec else None,
        stale_after_s=spec.get("staleness_grace_s", grace_s),
    )


def _tasks(spec: dict[str, Any], job: Job) -> list[Task]:
    return [
        Task(
            job=job,
            request=_request(spec, t),
            index=i,
            id=t["name"],
            priority=t.get("priority", 0),
            group=t.get("subgroup", ""),
        )
        for i, t in enumerate(spec["tasks"])
    ]


def _request(spec: dict[str, Any], task: dict[str, Any]) -> Request:
    fraction, memory = task.get("gpu_fraction"), task.get("gpu_memory_mib")
    shared = task.get("fraction_devices", 1) if fraction or memory else 0
    nodes = task.get("node_affinity")
    return Request(
        devices=shared or int(task["gpu"]),
        share=round(fraction * GPU) if fraction else GPU,
        memory_mib=memory or 0,
        cpu=0 if spec.get("best_effort") else int(spec.get("cpu_per_task", 1) * 1000),
        memory=0 if spec.get("best_effort") else int(spec.get("memory_per_task_bytes", 1e9)),
        nodes=_named(nodes, spec["nodes"]) if nodes else None,
    )


def _named(allowed: list[str], nodes: list[dict[str, Any]]) -> frozenset[str]:
    """The nodes with one of these names, or with a label of one of these values."""
    return frozenset(n["name"] for n in nodes if {n["name"], *(n.get("labels") or {}).values()} & set(allowed))


def run(case: Case) -> list[str]:
    """What came out wrong; nothing when the case is right."""
    bench = Bench(case)
    if case["kind"] == "unit":
        bench.round()
        return bench.wrong()
    for _ in range(case["rounds_until_match"]):
        bench.round()
        bench.carry_out()
    wrong = bench.wrong()
    for _ in range(case["rounds_after_match"]):
        if wrong:
            return wrong
        bench.round()
        bench.carry_out()
        wrong = [f"later {w}" for w in bench.wrong()]
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Run the cases of a file; 1 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--tier", help="only cases of this tier")
    parser.add_argument("--id", help="only the case whose id has this prefix")
    parser.add_argument("--verbose", action="store_true", help="print the differences")
    options = parser.parse_args(arguments)
    cases = [c for c in json.loads(options.cases.read_text()) if _selected(c, options)]
    failed = []
    for case in cases:
        try:
            wrong = run(case)
        except (KeyError, AssertionError) as error:
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            failed.append(case["id"])
            if options.verbose:
                print(case["id"], case["tier"], ",".join(case.get("features") or []), *wrong, sep="\n    ")
    print(json.dumps({"passed": len(cases) - len(failed), "total": len(cases), "failed": failed}))
    return 1 if failed else 0


def _selected(case: Case, options: argparse.Namespace) -> bool:
    return (not options.tier or case["tier"] == options.tier) and (not options.id or case["id"].startswith(options.id))


if __name__ == "__main__":
    sys.exit(main())
