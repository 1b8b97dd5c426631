"""What no cluster of these nodes ever starts: plans and reasons agree with what a plan does where nothing else runs."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api import Device, JobSpec, Node, Project
from kfp_gpuquota.api.affinity import GPU_PRODUCT, Taint, TaintEffect, Toleration
from kfp_gpuquota.api.project import PoolQuota
from kfp_gpuquota.scheduler import JobSubmitted, NodeChanged, NodeRemoved, QuotaChanged, State, WorkerStarted, plan
from kfp_gpuquota.scheduler.actions.cycle import Cycle
from kfp_gpuquota.scheduler.explain import shortage
from kfp_gpuquota.scheduler.fairness.rotation import IMPOSSIBLE
from kfp_gpuquota.scheduler.state.groups import next_tasks
from tests.effort import effort

if TYPE_CHECKING:
    from collections.abc import Iterable

LEVELS = ("zone", "rack")
SEEDS = 40


def some_node(chance: Random, name: str) -> Node:
    gpus = chance.choice([0, 1, 2, 4])
    labels = {level: f"{level}-{chance.randint(1, 2)}" for level in LEVELS if chance.random() < 0.8}
    labels[GPU_PRODUCT] = chance.choice(["a", "b"])
    return Node(
        name=name,
        devices=tuple(Device(index=i, memory_mib=1000) for i in range(gpus)),
        ready=chance.random() < 0.9,
        cpu=chance.choice([None, 2, 8]),
        memory_mib=chance.choice([None, 100, 1000]),
        max_workers=chance.choice([None, None, 1, 3]),
        max_sharers=chance.choice([100, 2]),
        labels=labels,
        taints=(Taint(key="special", effect=TaintEffect.NO_SCHEDULE),) if chance.random() < 0.2 else (),
        pool=chance.choice(["", "", "", "other"]),
    )


def some_spec(chance: Random, name: str) -> JobSpec:
    more: dict[str, object] = {}
    kind = chance.choice(["whole", "whole", "whole", "share"])
    if kind == "share":
        more["gpu_fraction"] = chance.choice([0.25, 0.5, 0.75])
        more["gpu_devices"] = chance.choice([None, 2])
    else:
        each = chance.choice([1, 1, 2, 4])
        more["gpus_per_worker"], more["gpus"] = each, each * chance.choice([1, 1, 2, 3, 4])
        if chance.random() < 0.4:
            more[chance.choice(["required_topology", "preferred_topology"])] = chance.choice(LEVELS)
        elif chance.random() < 0.2 and more["gpus"] == 4 * each:
            more["segment"], more["segment_topology"] = 2, "rack"
        elif chance.random() < 0.2:
            more["gpu_types"] = chance.choice([("a",), ("b", "a")])
        more["spread"] = chance.random() < 0.1
    more["cpu"] = chance.choice([None, None, 1, 3])
    more["memory_mib"] = chance.choice([None, None, 60, 600])
    if chance.random() < 0.2:
        more["node_selector"] = {"zone": f"zone-{chance.randint(1, 3)}"}
    if chance.random() < 0.5:
        more["tolerations"] = (Toleration(key="special"),)
    return JobSpec(
        name=name,
        project="team",
        command=("true",),
        node_pool=chance.choice(["", "", "", "other"]),
        **{key: value for key, value in more.items() if value is not None},  # type: ignore[arg-type]
    )


@dataclass
class Parts:
    """A job whose workers differ, as pods of one group do."""

    spec: JobSpec
    parts: dict[str, JobSpec]


def some_job(chance: Random, name: str) -> Parts:
    if chance.random() < 0.7:
        return Parts(some_spec(chance, name), {})
    specs = [some_spec(chance, name) for _ in range(2)]
    parts = {f"part-{number}": spec for number, spec in enumerate(specs)}
    return Parts(specs[0], parts if specs[0].node_pool == specs[1].node_pool else {})


def state_of(nodes: Iterable[Node]) -> State:
    state = State()
    for node in nodes:
        state.apply(NodeChanged(node))
    quota = Project(name="team", guaranteed=100, pools={"other": PoolQuota(guaranteed=100)})
    state.apply(QuotaChanged(quota))
    return state


def starts_alone(nodes: Iterable[Node], job: Parts) -> bool:
    state = state_of(nodes)
    state.apply(JobSubmitted("job", job.spec, 0.0, parts=job.parts))
    return bool(plan(state, 1.0).bind)


def fill(state: State, chance: Random, jobs: Iterable[tuple[str, Parts]]) -> None:
    """Start what fits of these jobs, so that most nodes are in use."""
    for uid, job in jobs:
        state.apply(JobSubmitted(uid, job.spec, 0.0, parts=job.parts))
        if chance.random() < 0.8:
            for bind in plan(state, 1.0).bind:
                for number, at in enumerate(bind.placements):
                    state.apply(WorkerStarted(f"{bind.job}-{number}", bind.job, at.node, at.devices, 1.0, part=at.part))


def answers(state: State, uid: str) -> tuple[bool, bool]:
    """Return whether plans take it that the job can start some day, and whether its reason does."""
    job = state.jobs[uid]
    state.ledger.settle()
    cycle = Cycle(state.ledger)
    return not cycle.can_never_start(job), shortage.impossible(state.ledger, next_tasks(job)) is None


def play(seed: int) -> None:
    chance = Random(seed)
    nodes = {f"n{number}": some_node(chance, f"n{number}") for number in range(chance.randint(1, 5))}
    state = state_of(nodes.values())
    fill(state, chance, [(f"other-{number}", some_job(chance, f"other-{number}")) for number in range(4)])
    asked = {f"job-{number}": some_job(chance, f"job-{number}") for number in range(3)}
    for uid, job in asked.items():
        state.apply(JobSubmitted(uid, job.spec, 2.0, parts=job.parts))
    for _ in range(3):
        for uid, job in asked.items():
            alone = starts_alone(nodes.values(), job)
            assert answers(state, uid) == (alone, alone), f"seed {seed}: {uid} {job} on {nodes}"
            reason = plan(state, 3.0).waiting.get(uid)
            assert reason is None or not (alone and reason.code in IMPOSSIBLE), f"seed {seed}: {reason} {job}"
        change(state, chance, nodes)


def change(state: State, chance: Random, nodes: dict[str, Node]) -> None:
    """Change, add or remove a node."""
    name = f"n{chance.randint(0, 5)}"
    if name in nodes and chance.random() < 0.4:
        del nodes[name]
        state.apply(NodeRemoved(name))
    else:
        nodes[name] = some_node(chance, name)
        state.apply(NodeChanged(nodes[name]))


@pytest.mark.parametrize("part", range(effort(3, 100)))
def test_plans_and_reasons_agree_on_what_can_never_start(part: int) -> None:
    for seed in range(part * SEEDS, (part + 1) * SEEDS):
        play(seed)
