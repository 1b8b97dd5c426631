"""A real Kubernetes on one machine, in seconds, without a container engine: for tests and for trying things out.

    python -m tools.devcluster up DIR [--kubelet] [--gpus N] [--kwok-nodes N] [--gpus-per-node N]
    python -m tools.devcluster down DIR

etcd, kube-apiserver, kube-controller-manager and kube-scheduler are built once from their published Go modules
(go/go.mod names the versions) into a cache folder outside the tree. `--kubelet` adds a real node with containerd,
`--kwok-nodes` any number of fake ones. Several clusters run side by side: ports, bridge and folders are each one's own.

binaries.py   found or built         layout.py   options, folder, ports     supervisor.py   the process above the others
control_plane.py, node.py, fake_nodes.py, image.py   what it starts          cluster.py      its use from outside
helm.py       Helm, built likewise: helm/go.mod
api.py        requests to the API server              built_images.py  our own images, from their Dockerfiles
"""

from tools.devcluster.api import Api, ApiError
from tools.devcluster.binaries import UnavailableError
from tools.devcluster.cluster import ClusterError, DevCluster
from tools.devcluster.layout import Options

__all__ = ["Api", "ApiError", "ClusterError", "DevCluster", "Options", "UnavailableError"]
