"""A real node on this machine: containerd, kubelet and a bridge of its own, with GPUs that exist by name only."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tools import worker_program
from tools.devcluster import image
from tools.devcluster.api import JSON_PATCH
from tools.devcluster.binaries import PLUGINS
from tools.devcluster.control_plane import NODE
from tools.devcluster.processes import Program, await_end

if TYPE_CHECKING:
    from tools.devcluster.api import Api
    from tools.devcluster.layout import Layout, Ports

GPU_MODEL: Final = "NVIDIA-A100-SXM4-40GB"
GPU_MEMORY_MIB: Final = 40_960
BRIDGES: Final = range(1, 250)
_CONTAINERD: Final = """\
version = 2
root = "{root}/containerd"
state = "{root}/run"
[grpc]
  address = "{socket}"
[ttrpc]
  address = "{socket}.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  # where root may not lower a process's out-of-memory score (a container, some virtual machines) runc would fail
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{root}/cni"
[plugins."io.containerd.internal.v1.opt"]
  path = "{root}/opt"
"""


def labels(gpus: int) -> dict[str, str]:
    """Return the labels of NVIDIA's feature discovery."""
    return {
        "nvidia.com/gpu.count": str(gpus),
        "nvidia.com/gpu.memory": str(GPU_MEMORY_MIB),
        "nvidia.com/gpu.product": GPU_MODEL,
    }


def make_bridge() -> tuple[str, str]:
    """(name of a new bridge, its subnet's first three numbers): no two clusters of a machine get the same.

    Its hardware address is fixed. Else it is the lowest of its ports', so when the pod that has this one ends, packets
    of the other pods go to an address that nobody has, until the kernel resolves it again: 35 s were measured.
    """
    for number in BRIDGES:
        name, prefix = f"gpuquota{number}", f"10.88.{number}"
        command = ["ip", "link", "add", name, "address", f"02:00:0a:58:{number:02x}:01", "type", "bridge"]
        made = subprocess.run(command, capture_output=True, check=False)
        if made.returncode == 0:
            _run("ip", "address", "add", f"{prefix}.1/24", "dev", name)
            _run("ip", "link", "set", name, "up")
            return name, prefix
    raise RuntimeError(f"no bridge could be made: {made.stderr.decode().strip()}")


def prepare(layout: Layout, ports: Ports, bridge: str, prefix: str) -> None:
    """Write the configuration of containerd, of its network and of the kubelet, and the images."""
    (layout.root / "cni").mkdir(exist_ok=True)
    layout.sockets.mkdir(parents=True, exist_ok=True)
    text = _CONTAINERD.format(root=layout.root, socket=layout.containerd_socket, pause=image.PAUSE, plugins=PLUGINS)
    (layout.root / "containerd.toml").write_text(text)
    network = json.dumps(_network(bridge, prefix, layout))
    (layout.root / "cni" / "10-bridge.conflist").write_text(network)
    (layout.root / "kubelet.yaml").write_text(json.dumps(_kubelet_configuration(layout, ports)))
    busybox = Path(shutil.which("busybox") or "/bin/busybox")
    programs = {image.BUSYBOX: busybox}
    image.write(layout.root / "pause.tar", image.PAUSE, programs, ["/bin/busybox", "sleep", "2147483647"])
    launchers = {worker_program.PATH: worker_program.provide()}  # of a launcher that runs this machine's Python in it
    image.write(layout.root / "base.tar", image.BASE, programs | launchers, ["/bin/sh"])


def runtime(layout: Layout) -> Program:
    """Start containerd."""
    binary = shutil.which("containerd") or "containerd"
    return Program(name="containerd", argv=(binary, f"--config={layout.root / 'containerd.toml'}"))


def import_images(layout: Layout) -> None:
    """Load the two images; containerd must answer."""
    for name in ("pause", "base"):
        import_image(layout, layout.root / f"{name}.tar")


def import_image(layout: Layout, archive: Path) -> None:
    """Load an image, under the names that its archive gives."""
    _ctr(layout, "images", "import", str(archive))


def signal_container(layout: Layout, container: str, number: signal.Signals) -> None:
    """Send a signal to a container's first process; one that has ended is no error."""
    base = ["ctr", "--address", str(layout.containerd_socket), "--namespace", "k8s.io"]
    subprocess.run([*base, "tasks", "kill", "--signal", number.name, container], capture_output=True, check=False)


def runtime_answers(layout: Layout) -> bool:
    """Whether containerd is up."""
    command = ["ctr", "--address", str(layout.containerd_socket), "version"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def kubelet(binaries: Path, layout: Layout, prefix: str, flags: list[str]) -> Program:
    """The kubelet, as the node's own user."""
    return Program(
        name="kubelet",
        argv=(
            str(binaries / "kubelet"),
            f"--config={layout.root / 'kubelet.yaml'}",
            f"--kubeconfig={layout.kubeconfig_of(f'system:node:{NODE}')}",
            f"--root-dir={layout.sockets / 'kubelet'}",
            f"--cert-dir={layout.root / 'kubelet-certificates'}",
            f"--hostname-override={NODE}",
            f"--node-ip={prefix}.1",
            *flags,
        ),
    )


def add_gpus(api: Api, gpus: int) -> None:
    """Give the node GPUs: an extended resource that no device plugin owns is kept by the kubelet as it is."""
    path = f"/api/v1/nodes/{NODE}"
    api.until(path, lambda node: "capacity" in node["status"], timeout_s=60.0)
    operations = [
        {"op": "add", "path": f"/status/{field}/nvidia.com~1gpu", "value": str(gpus)}
        for field in ("capacity", "allocatable")
    ]
    api.patch(f"{path}/status", operations, JSON_PATCH)
    api.patch(path, {"metadata": {"labels": labels(gpus)}})
    api.until(path, ready, timeout_s=60.0)


def ready(node: dict[str, Any]) -> bool:
    """Whether the node takes pods."""
    return any(one["type"] == "Ready" and one["status"] == "True" for one in node["status"].get("conditions", []))


def remove_pods(api: Api) -> None:
    """End the node's pods; return when their objects, containers and mounts are removed."""
    pods = api.items("/api/v1/pods", fieldSelector=f"spec.nodeName={NODE}")
    paths = [f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}" for pod in pods]
    for path in paths:
        api.patch(path, {"metadata": {"finalizers": None}})
        api.delete(path, grace_s=1)
    for path in paths:
        api.until_gone(path, timeout_s=15.0)


def sweep(layout: Layout, bridge: str) -> None:
    """Remove what an orderly end has left: shims, mounts under the folder, the bridge. Never anything of others."""
    for pid in shims(layout):
        with contextlib.suppress(ProcessLookupError):
            for child in _descendants(pid):
                os.kill(child, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
        await_end(pid, 5.0)
    for mount in sorted(_mounts(layout), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)
    shutil.rmtree(layout.sockets, ignore_errors=True)
    for link in Path("/var/log/containers").glob("*.log"):  # the kubelet's own, which follows no option
        if link.is_symlink() and link.readlink().is_relative_to(layout.root):
            link.unlink()
    if bridge:
        subprocess.run(["ip", "link", "delete", bridge], check=False, capture_output=True)


def shims(layout: Layout) -> list[int]:
    """The processes of containerd above each of this node's pods."""
    address = str(layout.containerd_socket).encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            arguments = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
            if arguments and b"containerd-shim" in arguments[0] and address in arguments:
                found.append(int(entry.name))
    return found


def host_python() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(volumes, volumeMounts) with which a pod of the image `BASE` runs this machine's Python, torch and repository.

    The interpreter is `sys.executable`. Nothing can be pulled on a test's machine, and an image with torch in it would
    be gigabytes.
    """
    repository = Path(__file__).parents[2]
    places = {Path("/usr"), Path("/lib"), Path("/lib64"), repository, Path(sys.prefix), Path(sys.base_prefix)}
    inner = [one for one in places if not any(one != other and one.is_relative_to(other) for other in places)]
    volumes, mounts = [], []
    for number, place in enumerate(sorted(path for path in inner if path.exists())):
        volumes.append({"name": f"host-{number}", "hostPath": {"path": str(place)}})
        mounts.append({"name": f"host-{number}", "mountPath": str(place), "readOnly": True})
    return volumes, mounts


def _network(bridge: str, prefix: str, layout: Layout) -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "subnet": f"{prefix}.0/24",
        "rangeStart": f"{prefix}.10",
        "dataDir": str(layout.root / "addresses"),
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    plugin = {"type": "bridge", "bridge": bridge, "isGateway": True, "ipMasq": False, "ipam": addresses}
    return {"cniVersion": "0.4.0", "name": bridge, "plugins": [plugin]}


def _kubelet_configuration(layout: Layout, ports: Ports) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "port": ports.kubelet,
        "healthzPort": ports.kubelet_health,
        "readOnlyPort": 0,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(layout.authority)},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{layout.containerd_socket}",
        "podLogsDir": str(layout.root / "logs"),
        "staticPodPath": "",
        # the machine's own cgroups and limits are not ours to arrange: no tree of ours, nothing enforced on it
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "makeIPTablesUtilChains": False,
        "localStorageCapacityIsolation": False,
        "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
        "syncFrequency": "5s",
        "maxPods": 60,
    }


def _ctr(layout: Layout, *arguments: str) -> None:
    _run("ctr", "--address", str(layout.containerd_socket), "--namespace", "k8s.io", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.decode().strip()}")


def _mounts(layout: Layout) -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    places = (line.split()[1] for line in lines)
    ours = (layout.root, layout.sockets)
    return [place for place in places if any(Path(place).is_relative_to(one) for one in ours)]


def _descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in children:
            found += [int(child), *_descendants(int(child))]
    return found
