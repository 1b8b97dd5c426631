"""Nodes that exist as objects only, for scale: KWOK plays their kubelets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tools.devcluster import node
from tools.devcluster.processes import Program

if TYPE_CHECKING:
    from tools.devcluster.api import Api
    from tools.devcluster.layout import Layout

STAGES: Final = Path(__file__).with_name("stages.yaml")
MARK: Final = "kwok.x-k8s.io/node"


def kwok(binaries: Path, layout: Layout) -> Program:
    """KWOK, for the nodes with the mark only: a real node beside them keeps its own kubelet.

    Without leases: a KWOK that is started again would leave its nodes alone until the lease of the one before expires.
    Without a server: nothing asks it, and a port that is taken would end it.
    """
    return Program(
        name="kwok",
        argv=(
            str(binaries / "kwok"),
            f"--kubeconfig={layout.kubeconfig_of('kwok')}",
            f"--config={STAGES}",
            "--manage-all-nodes=false",
            f"--manage-nodes-with-annotation-selector={MARK}=fake",
            "--node-lease-duration-seconds=0",
            "--v=WARN",  # it has a line for every pod otherwise
        ),
    )


def add(api: Api, count: int, gpus: int, first: int = 0) -> None:
    """Make `count` nodes, fake-FIRST and on, with `gpus` GPUs each; returns when they are Ready."""
    names = [f"fake-{number}" for number in range(first, first + count)]
    for name in names:
        api.create("/api/v1/nodes", fake_node(name, gpus))
    for name in names:
        api.until(f"/api/v1/nodes/{name}", node.ready, timeout_s=60.0)


def fake_node(name: str, gpus: int) -> dict[str, Any]:
    """One node as a kubelet with `gpus` GPUs would have registered it."""
    amounts = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "1Ti", "pods": "250", "nvidia.com/gpu": str(gpus)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {MARK: "fake"},
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                "type": "kwok",
                **node.labels(gpus),
            },
        },
        "status": {"capacity": amounts, "allocatable": amounts},
    }
