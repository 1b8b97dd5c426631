"""A job that accepts several types of GPUs, the best first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kfp_gpuquota.api import Device, JobSpec, Node, Project, ReasonCode
from kfp_gpuquota.api.affinity import GPU_PRODUCT, NodeTerm, Operator, Requirement
from kfp_gpuquota.cluster.admission import check_fits
from kfp_gpuquota.errors import InvalidFieldError
from kfp_gpuquota.scheduler.state.events import JobRemoved, WorkerGone
from tests.scheduler.test_resources import Cluster

H100, A100, L4 = "NVIDIA-H100-80GB-HBM3", "NVIDIA-A100-SXM4-80GB", "NVIDIA-L4"


def cluster_of(*nodes: tuple[str, int]) -> Cluster:
    """(type, GPUs) of each node: node-0, node-1, ...; team a is guaranteed all of them, team b nothing."""
    cluster = Cluster()
    cluster.project("a", sum(count for _, count in nodes))
    cluster.project("b", 0)
    for number, (product, count) in enumerate(nodes):
        cluster.node(f"node-{number}", count, labels={GPU_PRODUCT: product})
    return cluster


def types_of(cluster: Cluster, job: str) -> list[str]:
    labels = {name: host.labels for name, host in cluster.state.ledger.hosts.items()}
    return [labels[node][GPU_PRODUCT] for node, _ in cluster.where(job)]


def busy(cluster: Cluster, node: int, gpus: int, project: str = "b") -> None:
    for number in range(gpus):
        cluster.submit(f"busy-{node}-{number}", project, node=f"node-{node}")
        cluster.run()


@pytest.mark.parametrize(
    ("taken", "gpus", "types", "expected"),
    [
        (None, 1, (H100, A100), [H100]),
        (None, 1, (A100, H100), [A100]),
        (None, 1, (A100,), [A100]),
        ((0, 2), 1, (H100, A100), [A100]),
        ((0, 1), 2, (H100, A100), [A100, A100]),  # one type for all of its workers
        (None, 3, (H100, A100), [A100, A100, A100]),
        (None, 2, (L4, H100), [H100, H100]),  # a type that no node has
    ],
)
def test_it_starts_with_the_first_type_that_is_free_for_all_of_it(
    taken: tuple[int, int] | None, gpus: int, types: tuple[str, ...], expected: list[str]
) -> None:
    cluster = cluster_of((H100, 2), (A100, 4))
    if taken:
        busy(cluster, *taken)
    cluster.submit("job", gpus=gpus, gpus_per_worker=1, gpu_types=types)
    cluster.run()
    assert types_of(cluster, "job") == expected


def test_what_is_idle_of_a_later_type_comes_before_what_others_would_lose_of_the_first() -> None:
    cluster = cluster_of((H100, 2), (A100, 2))
    busy(cluster, 0, 2)
    cluster.submit("job", gpus=2, gpus_per_worker=1, gpu_types=(H100, A100))
    assert not cluster.run().evict
    assert types_of(cluster, "job") == [A100, A100]


def test_where_nothing_is_idle_it_reclaims_the_first_type() -> None:
    cluster = cluster_of((A100, 4), (H100, 2))
    busy(cluster, 0, 4)
    busy(cluster, 1, 2)
    cluster.submit("job", gpus=2, gpus_per_worker=1, gpu_types=(H100, A100))
    assert len(cluster.run().evict) == 2
    cluster.run()
    assert types_of(cluster, "job") == [H100, H100]


def test_an_elastic_job_grows_on_the_type_that_it_has() -> None:
    cluster = cluster_of((H100, 2), (A100, 4))
    busy(cluster, 0, 2, "a")
    cluster.submit("job", gpus=1, min_gpus=1, max_gpus=6, gpu_types=(H100, A100), cool_down_s=0.0)
    cluster.run()
    for number in range(2):
        (worker,) = cluster.state.jobs[f"busy-0-{number}"].tasks
        cluster.state.apply(WorkerGone(worker))
        cluster.state.apply(JobRemoved(f"busy-0-{number}"))
    for _ in range(6):
        cluster.run()
    assert types_of(cluster, "job") == [A100] * 4


def test_within_a_type_it_keeps_to_one_rack() -> None:
    cluster = Cluster()
    cluster.project("a", 100)
    for name, product, rack, count in (
        ("node-0", H100, "r0", 1),
        ("node-1", H100, "r1", 1),
        ("node-2", A100, "r2", 1),
        ("node-3", A100, "r3", 2),
    ):
        cluster.node(name, count, labels={GPU_PRODUCT: product, "rack": rack})
    cluster.submit("job", gpus=2, gpus_per_worker=1, gpu_types=(H100, A100), required_topology="rack")
    cluster.run()
    assert [node for node, _ in cluster.where("job")] == ["node-3", "node-3"]


def test_a_preferred_rack_does_not_come_before_the_first_type() -> None:
    cluster = Cluster()
    cluster.project("a", 100)
    for name, product, rack, count in (
        ("node-0", H100, "r0", 1),
        ("node-1", H100, "r1", 1),
        ("node-2", A100, "r2", 2),
    ):
        cluster.node(name, count, labels={GPU_PRODUCT: product, "rack": rack})
    cluster.submit("job", gpus=2, gpus_per_worker=1, gpu_types=(H100, A100), preferred_topology="rack")
    cluster.run()
    assert types_of(cluster, "job") == [H100, H100]


@pytest.mark.parametrize(
    ("taken", "gpus", "types", "code", "why"),
    [
        (0, 5, (H100, A100), ReasonCode.TOO_LARGE, f"no GPU type of {H100}, {A100} has room for more than 4 of its 5"),
        (2, 3, (H100, A100), ReasonCode.FRAGMENTED, f"no GPU type of {H100}, {A100} has room for more than 2 of 3"),
        (4, 1, (A100,), ReasonCode.NO_FREE_GPUS, f"0 of type {A100} are idle"),
        (0, 1, (L4, "B200"), ReasonCode.NODE_AFFINITY, "no node that is ready has a GPU type of NVIDIA-L4, B200"),
        (0, 1, (L4,), ReasonCode.NODE_AFFINITY, "no node that is ready has the labels it asks for"),
    ],
)
def test_the_reason_names_the_types(taken: int, gpus: int, types: tuple[str, ...], code: ReasonCode, why: str) -> None:
    cluster = cluster_of((H100, 2), (A100, 4))
    busy(cluster, 1, taken, "a")
    cluster.submit("job", gpus=gpus, gpus_per_worker=1, gpu_types=types)
    found, message = cluster.why("job")
    assert (found, why in message) == (code, True), message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpu_types": ("a", "a")}, "gpu_types is 'a,a', but it has a twice"),
        ({"gpu_types": ("a", "")}, "gpu_types is 'a,', but a type is the value of the node label"),
        ({"gpu_types": ("a b",)}, "gpu_types"),
        ({"gpu_types": ("a",), "gpus": 0}, "the job asks for no GPU"),
    ],
)
def test_types_that_are_none_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidFieldError, match=message):
        JobSpec(name="x", project="a", command=("true",), **fields)


def test_a_type_that_the_cluster_does_not_have_is_refused_with_those_that_it_has() -> None:
    nodes = [Node(name=f"n{i}", devices=(Device(index=0),), labels={GPU_PRODUCT: one}) for i, one in enumerate("ba")]
    project = Project(name="a", guaranteed=2)
    spec = JobSpec(name="x", project="a", command=("true",), gpu_types=("h100", "b"))
    check_fits(spec, project, nodes)
    with pytest.raises(InvalidFieldError, match=r"gpu_types is 'h100,l4', but the types of .* are: a, b"):
        check_fits(replace(spec, gpu_types=("h100", "l4")), project, nodes)


@given(
    nodes=st.lists(st.tuples(st.sampled_from([H100, A100, L4]), st.integers(1, 4)), min_size=1, max_size=6),
    taken=st.lists(st.integers(0, 5), max_size=8),
    types=st.permutations([H100, A100, L4]).flatmap(lambda all_: st.integers(1, 3).map(lambda n: tuple(all_[:n]))),
    workers=st.integers(1, 6),
)
def test_it_is_placed_as_a_job_that_asks_for_the_first_type_with_room(
    nodes: list[tuple[str, int]], taken: list[int], types: tuple[str, ...], workers: int
) -> None:
    """The oracle: one cluster for each type, in which the job asks for that type alone, by its node affinity."""

    def placed(**fields: Any) -> list[str]:
        cluster = cluster_of(*nodes)
        for number, node in enumerate(taken):
            cluster.submit(f"busy-{number}", node=f"node-{node % len(nodes)}")
        cluster.run()
        cluster.submit("job", gpus=workers, gpus_per_worker=1, **fields)
        cluster.run()
        return types_of(cluster, "job")

    alone = [placed(node_affinity=(NodeTerm((Requirement(GPU_PRODUCT, Operator.IN, (one,)),)),)) for one in types]
    assert placed(gpu_types=types) == next((found for found in alone if found), [])
