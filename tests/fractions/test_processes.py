"""The pod of a process, by its cgroup: as kubelets and all container runtimes write them."""

from __future__ import annotations

import os

import pytest

from kfp_gpuquota.fractions.processes import ContainerIdentity, container_in, container_of

POD = "0a1b2c3d-0000-4000-8000-00000000000f"
STATIC = "3b0a9c1d" * 4
CONTAINER = "0123456789abcdef" * 4
UNDERSCORED = POD.replace("-", "_")
OTHER = "ffffffff-0000-4000-8000-00000000000f"


@pytest.mark.parametrize(
    ("cgroups", "place"),
    [
        (f"0::/kubepods/burstable/pod{POD}/{CONTAINER}\n", ContainerIdentity(POD, CONTAINER)),
        (
            f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/cri-containerd-{CONTAINER}.scope\n",
            ContainerIdentity(POD, CONTAINER),
        ),
        (
            f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORED}.slice/crio-{CONTAINER}.scope",
            ContainerIdentity(POD, CONTAINER),
        ),
        (
            f"11:memory:/kubepods/besteffort/pod{POD}/{CONTAINER}\n1:name=systemd:/kubepods/besteffort/pod{POD}/{CONTAINER}\n"
            "0::/\n",
            ContainerIdentity(POD, CONTAINER),
        ),
        (
            f"12:pids:/system.slice/containerd.service/kubepods-pod{UNDERSCORED}.slice:cri-containerd:{CONTAINER}\n",
            ContainerIdentity(POD, CONTAINER),
        ),
        (f"0::/kubepods/pod{STATIC}/docker-{CONTAINER}.scope\n", ContainerIdentity(STATIC, CONTAINER)),
        (f"4:memory:/k8s.io/{CONTAINER}\n0::/k8s.io/{CONTAINER}\n", ContainerIdentity("", CONTAINER)),
        ("0::/user.slice/user-1000.slice/session-2.scope\n", ContainerIdentity("", "")),
        ("0::/\n", ContainerIdentity("", "")),
        ("", ContainerIdentity("", "")),
    ],
)
def test_a_process_is_its_pods_and_its_containers(cgroups: str, place: ContainerIdentity) -> None:
    assert container_in(cgroups) == place


def test_a_container_cannot_pass_for_another_pod_by_a_cgroup_of_its_own() -> None:
    below = f"0::/kubepods/pod{POD}/{CONTAINER}/kubepods/pod{OTHER}/{'f' * 64}\n"
    assert container_in(below) == ContainerIdentity(POD, CONTAINER)


def test_a_process_that_has_ended_is_nobodys() -> None:
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert container_of(child) == ContainerIdentity("", "")
