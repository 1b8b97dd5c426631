"""A real control plane, shared by the tests of this folder; each test works in a namespace of its own.

Each process of xdist starts a control plane of its own; the tests of a real node run in one process, and those of an
installation, each on a node of its own, in another one.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.cluster.kubernetes.objects.paths import WORKLOAD_POLICIES
from kfp_gpuquota.cluster.kubernetes.operations.definitions import custom_resource_definitions
from tests.kubernetes.controlled import LEASE, Controlled
from tests.kubernetes.installation import QUOTAS, install, install_kubeflow, jobs_of, live_webhook
from tests.kubernetes.kuberay import RAY
from tools.devcluster import DevCluster, Options, binaries, built_images

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

REQUIRED = "GPUQUOTA_REQUIRE_KUBERNETES"
RAY_DEFINITIONS = "GPUQUOTA_KUBERAY_CRDS"
HERE = Path(__file__).parent
GROUPS = {
    "kubelet_cluster": "kubelet",
    "kubeflow_cluster": "kubeflow",
    "standalone": "kubeflow",
    "ray_cluster": "kuberay",  # definitions of megabytes, which an API server takes seconds for
}
SLOW = {"kubelet_cluster", "standalone"}  # containers that start, run and end; a control plane more
LOG_LINES, LINE_LENGTH = 12, 500
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in (item for item in items if item.path.is_relative_to(HERE)):
        used = getattr(item, "fixturenames", ())
        if group := next((group for fixture, group in GROUPS.items() if fixture in used), None):
            item.add_marker(pytest.mark.xdist_group(group))
        if not SLOW.isdisjoint(used):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a failure how the logs of its cluster's programs end."""
    report = yield
    if report.failed:
        used = getattr(item, "funcargs", {}).values()
        for root in {one.layout.root for one in used if isinstance(one, DevCluster)}:
            for log in sorted(root.glob("*.log")):
                end = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                report.sections.append((f"end of {log}", "\n".join(line[:LINE_LENGTH] for line in end)))
    return report


def skip_or_fail(lack: object) -> NoReturn:
    """Skip the test for what the machine lacks; fail it where nothing may be skipped."""
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{REQUIRED}=1, but {lack}")
    pytest.skip(str(lack))


def start_or_skip(directory: Path, options: Options) -> DevCluster:
    """A cluster; where the machine cannot run one, the test is skipped, or fails where it must not be."""
    lack = binaries.missing(kubelet=options.kubelet)
    if not lack and not binaries.built():
        lack = "the control plane is not built yet; build it with: python -m tools.devcluster build"
    if lack:
        skip_or_fail(lack)
    return DevCluster.start(directory, options)


def built_or_skip(name: str) -> Path:
    """The archive of one of this project's images; skipped, or failed, as `start_or_skip` does."""
    if lack := built_images.missing():
        skip_or_fail(lack)
    return built_images.provide(name)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    """A control plane with KWOK and no nodes: a test adds those that it needs, and removes them."""
    running = start_or_skip(tmp_path_factory.mktemp("cluster"), Options(kwok_nodes=0))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def kubelet_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    """A control plane and a real node with 2 GPUs, on which containers run."""
    running = start_or_skip(tmp_path_factory.mktemp("kubelet"), Options(kubelet=True, gpus=2))
    yield running
    running.stop()


@pytest.fixture
def namespace(cluster: DevCluster) -> Iterator[str]:
    """A namespace that is deleted, with its content, after the test (without waiting for it)."""
    name = cluster.make_namespace(f"test-{uuid.uuid4().hex[:8]}")
    yield name
    cluster.api.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture(scope="session")
def crds_cluster(cluster: DevCluster) -> DevCluster:
    """The control plane with our two kinds."""
    install_crds(cluster)
    return cluster


def install_crds(cluster: DevCluster) -> None:
    """Apply our kinds, and return when the API server serves them."""
    for definition in custom_resource_definitions():
        name = definition["metadata"]["name"]
        cluster.api.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}", definition)
    cluster.api.until_served(QUOTAS)
    cluster.api.until_served(jobs_of("default"))
    cluster.api.until_served(WORKLOAD_POLICIES)


@pytest.fixture(scope="session")
def kubeflow_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    """A control plane of its own with manifests/overlays/kubeflow installed, Kubeflow's part and a live webhook."""
    running = start_or_skip(tmp_path_factory.mktemp("kubeflow"), Options(kwok_nodes=1))
    try:
        install_kubeflow(running)
        install(running, "kubeflow")
        with live_webhook(running):
            yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def system_cluster(crds_cluster: DevCluster) -> DevCluster:
    """The control plane with our kinds and the controller's namespace."""
    crds_cluster.make_namespace("gpuquota-system")
    crds_cluster.make_namespace("gpuquota-reservations", RESTRICTED)
    return crds_cluster


@pytest.fixture(scope="session")
def ray_cluster(system_cluster: DevCluster) -> DevCluster:
    """The control plane with KubeRay's kinds."""
    folder = os.environ.get(RAY_DEFINITIONS)
    if not folder:
        pytest.skip(f"{RAY_DEFINITIONS} does not name KubeRay's definitions (CONTRIBUTING.md)")
    for name in ("rayclusters", "rayjobs", "rayservices"):
        definition = yaml.load((Path(folder) / f"{name}.yaml").read_text(), yaml.CSafeLoader)
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        system_cluster.api.apply(f"{path}/{definition['metadata']['name']}", definition)
        system_cluster.api.until_served(f"{RAY}/{name}")
    return system_cluster


@pytest.fixture
def controlled(system_cluster: DevCluster, tmp_path: Path) -> Iterator[Controlled]:
    """Without nodes and without a controller yet; checked and taken away when the test ends."""
    running = Controlled(system_cluster, tmp_path)
    yield running
    running.close()


@pytest.fixture
def electing(system_cluster: DevCluster, tmp_path: Path) -> Iterator[Controlled]:
    """The same, of controllers that elect a leader; the next test's have another Lease."""
    running = Controlled(system_cluster, tmp_path, arguments=["--leader-elect"])
    yield running
    running.close()
    if system_cluster.api.exists(LEASE):
        system_cluster.api.delete(LEASE)


@pytest.fixture(scope="session")
def kubelet_system(kubelet_cluster: DevCluster) -> DevCluster:
    """The cluster with a real node, our kinds and the controller's namespace."""
    install_crds(kubelet_cluster)
    kubelet_cluster.make_namespace("gpuquota-system")
    kubelet_cluster.make_namespace("gpuquota-reservations", RESTRICTED)
    kubelet_cluster.make_namespace("gpuquota-node-agents")
    return kubelet_cluster


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Make a shell script the only kubectl; it notes its arguments and its pid in files of the returned directory."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def write(script: str) -> Path:
        program = tmp_path / "kubectl"
        program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\necho $$ > {tmp_path}/pid\n{script}\n')
        program.chmod(0o755)
        return tmp_path

    return write


def address_of(cluster: DevCluster) -> str:
    """Where the pods of its real node reach this machine."""
    node = cluster.api.get("/api/v1/nodes/real-0")
    return str(next(a["address"] for a in node["status"]["addresses"] if a["type"] == "InternalIP"))
