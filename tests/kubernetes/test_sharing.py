"""GPUs that several pods share, through the real API server and controller: reservations and starts."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from kfp_gpuquota.api.share import limit_mib, request_mib
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.sharing import reservation_pods, share_annotations
from tests.kubernetes.controlled import Controlled, holds
from tests.kubernetes.sharing import RESERVATIONS, config_of, reservations, share


def environment(pod: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in pod["spec"]["containers"][0]["env"]}


def test_a_reservation_comes_with_the_first_sharer_and_goes_with_the_last(controlled: Controlled) -> None:
    (node,) = controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=2)
    controlled.start()
    first, second = (share(controlled, team, name) for name in ("first", "second"))
    controlled.until_bound(first)
    controlled.until_bound(second)
    ((name, reservation),) = reservations(controlled).items()
    assert name == reservation_pods.name_of(node, 0)
    assert reservation["spec"]["nodeName"] == node
    assert config_of(controlled, first) == config_of(controlled, second)
    controlled.cluster.api.delete(first)
    controlled.cluster.api.until_gone(first)
    controlled.until_bound(share(controlled, team, "third"))
    assert reservations(controlled)[name]["metadata"]["uid"] == reservation["metadata"]["uid"]
    for left in ("second", "third"):
        controlled.cluster.api.delete(f"/api/v1/namespaces/{team}/pods/{left}")
    controlled.wait(lambda: not reservations(controlled))


def test_a_sharer_learns_which_gpu_is_reserved_and_what_is_noted_of_it_stands_there(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start()
    pod = controlled.until_bound(share(controlled, team, "a", 0.25, notes={"gpu-fraction-limit": "0.8"}))
    (reservation,) = reservations(controlled).values()
    gpu = f"GPU-{reservation['metadata']['uid']}"  # as reported by a fake node's kubelet for the first container
    path = f"/api/v1/namespaces/{team}/pods/a"
    assert config_of(controlled, path) == {"NVIDIA_VISIBLE_DEVICES": gpu, "CUDA_VISIBLE_DEVICES": gpu}
    assert pod["metadata"]["annotations"][labels.GPUS] == gpu

    def noted() -> share_annotations.ShareNote | None:
        (found,) = reservations(controlled).values()
        notes = share_annotations.read(found["metadata"]["annotations"].get(labels.SHARERS, ""))
        return next((note for note in notes if note.uid), None)

    controlled.wait(lambda: noted() is not None)
    note = noted()
    assert note is not None
    assert (note.uid, note.pod, note.gpus) == (pod["metadata"]["uid"], f"{team}/a", (gpu,))
    assert (request_mib(note, 40_000), limit_mib(note, 40_000)) == (10_000, 32_000)


def test_its_config_goes_with_the_pod(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start()
    path = share(controlled, team, "a")
    name = controlled.until_bound(path)["metadata"]["annotations"][labels.GPU_CONFIG]
    controlled.cluster.api.delete(path)
    controlled.cluster.api.until_gone(path)
    controlled.cluster.api.until_gone(f"/api/v1/namespaces/{team}/configmaps/{name}")


def test_a_pod_that_wants_the_whole_gpu_waits_until_nobody_shares_it(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=2)
    controlled.start()
    sharer = share(controlled, team, "part", 0.2)
    controlled.until_bound(sharer)
    whole = controlled.pod(team, "whole")
    controlled.until(f"/apis/gpuquota.dev/v1alpha1/gpuquotas/{team}", lambda q: q.get("status", {}).get("waiting") == 1)
    assert not holds(controlled.cluster.api.get(whole))
    controlled.cluster.api.delete(sharer)
    controlled.until_bound(whole)
    assert not reservations(controlled)


def test_one_share_of_several_gpus_reserves_each_of_them(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=4)
    team = controlled.team(guaranteed=4)
    controlled.start()
    path = share(controlled, team, "wide", 0.5, notes={"gpu-fraction-num-devices": "3"})
    controlled.until_bound(path)
    held = {f"GPU-{one['metadata']['uid']}" for one in reservations(controlled).values()}
    assert set(config_of(controlled, path)["CUDA_VISIBLE_DEVICES"].split(",")) == held
    assert len(held) == 3


def test_an_elastic_jobs_worker_shares_a_gpu_too(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start()
    job = controlled.job(team, "half", gpuFraction=0.5, gpuFractionLimit=0.75, gracePeriodSeconds=1)
    controlled.until_phase(job, "Running")
    controlled.until_bound(share(controlled, team, "beside"))
    pod = controlled.pods(team)["half-0"]
    (reservation,) = reservations(controlled).values()
    assert environment(pod)["NVIDIA_VISIBLE_DEVICES"] == f"GPU-{reservation['metadata']['uid']}"
    assert environment(pod)["RUNAI_GPU_MEMORY_LIMIT"] == "0.75"
    assert "nvidia.com/gpu" not in pod["spec"]["containers"][0].get("resources", {}).get("limits", {})


@pytest.mark.slow
def test_who_runs_on_the_gpu_of_a_reservation_that_somebody_deletes_is_made_anew_on_the_next_one(
    controlled: Controlled,
) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start()
    controlled.until_phase(controlled.job(team, "worker", gpuFraction=0.5, gracePeriodSeconds=1), "Running")
    alone = controlled.until_bound(share(controlled, team, "alone"))  # no owner would create it again
    ((name, before),) = reservations(controlled).items()
    controlled.kill()
    controlled.cluster.api.delete(f"{RESERVATIONS}/{name}")
    controlled.start()
    controlled.wait(lambda: "worker-1" in controlled.bound(team), lambda: controlled.log()[-3000:])
    (after,) = reservations(controlled).values()
    gpu = f"GPU-{after['metadata']['uid']}"  # a fake node's kubelet reports another one for each reservation
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert environment(controlled.pods(team)["worker-1"])["NVIDIA_VISIBLE_DEVICES"] == gpu
    assert controlled.pods(team)["alone"]["metadata"]["uid"] == alone["metadata"]["uid"]
    reported = f"it runs on GPU-{before['metadata']['uid']}; the recreated reservation has {gpu}"
    controlled.wait(lambda: f"Pod {team}/alone: GpuChanged: {reported}" in controlled.log())

    def noted() -> dict[str, str]:
        (found,) = reservations(controlled).values()
        notes = share_annotations.read(found["metadata"]["annotations"].get(labels.SHARERS, ""))
        return {note.uid: note.pod for note in notes}

    def pods() -> dict[str, str]:
        return {pod["metadata"]["uid"]: f"{team}/{name}" for name, pod in controlled.pods(team).items()}

    controlled.wait(lambda: noted() == pods(), lambda: f"{noted()} for {pods()}")


def _uids(controlled: Controlled) -> set[str]:
    return {one["metadata"]["uid"] for one in reservations(controlled).values()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_controller_that_is_killed_at_any_moment_leaves_no_second_and_no_orphaned_reservation(
    controlled: Controlled, seed: int
) -> None:
    chance = random.Random(seed)
    controlled.add_nodes(2, gpus=2)
    team = controlled.team(guaranteed=4)
    controlled.start()
    made: list[str] = []
    for turn in range(4):
        made += [share(controlled, team, f"p{turn}-{i}", 0.5) for i in range(2)]
        for path in chance.sample(made, k=chance.randrange(2)):
            made.remove(path)
            controlled.cluster.api.delete(path)
        moment = chance.random() * 0.2
        time.sleep(moment)  # any moment: nothing is waited for
        controlled.kill()
        controlled.start()
    controlled.wait(lambda: len(controlled.bound(team)) == len(made), lambda: f"{controlled.bound(team)} of {made}")
    used = {
        (p["spec"]["nodeName"], p["metadata"]["annotations"][labels.DEVICES]) for p in controlled.pods(team).values()
    }
    controlled.wait(lambda: _reserved(controlled) == used, lambda: f"{_reserved(controlled)} for {used}")
    for path in made:
        _is_on_a_reserved_gpu_or_told(controlled, path)
        controlled.cluster.api.delete(path)
    controlled.wait(lambda: not reservations(controlled))


def _is_on_a_reserved_gpu_or_told(controlled: Controlled, path: str) -> None:
    """A controller's last call may be done after the next one has looked: then a bare pod, which nobody makes again, is
    told.
    """
    if config_of(controlled, path)["CUDA_VISIBLE_DEVICES"] in {f"GPU-{uid}" for uid in _uids(controlled)}:
        return
    team, name = path.split("/")[4], path.split("/")[6]
    events = f"/api/v1/namespaces/{team}/events"
    controlled.wait(
        lambda: any(
            one["reason"] == "GpuChanged" and one["involvedObject"]["name"] == name
            for one in controlled.cluster.api.items(events)
        ),
        lambda: f"{path}\n{controlled.log()}",
    )


def _reserved(controlled: Controlled) -> set[tuple[str, str]]:
    return {
        (one["metadata"]["annotations"][labels.RESERVES_ON], one["metadata"]["labels"][labels.RESERVES])
        for one in reservations(controlled).values()
    }
