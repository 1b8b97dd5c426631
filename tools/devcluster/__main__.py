"""`python -m tools.devcluster up DIR`, `down DIR` and `build`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.devcluster import binaries, helm
from tools.devcluster.binaries import UnavailableError
from tools.devcluster.cluster import ClusterError, DevCluster, stop
from tools.devcluster.layout import Options


def main(arguments: list[str] | None = None) -> int:
    """Start or stop one; the exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        if parsed.command == "build":
            return _build()
        if parsed.command == "down":
            stop(parsed.directory)
            return 0
        options = Options(
            kubelet=parsed.kubelet,
            gpus=parsed.gpus,
            kwok_nodes=parsed.kwok_nodes,
            gpus_per_node=parsed.gpus_per_node,
            attached=False,
        )
        cluster = DevCluster.start(parsed.directory, options)
    except (ClusterError, UnavailableError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"export KUBECONFIG={cluster.kubeconfig}\n")
    return 0


def _build() -> int:
    if lack := binaries.missing():
        sys.stdout.write(f"without Kubernetes: {lack}\n")
    elif not binaries.built():
        sys.stdout.write("Building a Kubernetes control plane, once: about six minutes\n")
        sys.stdout.flush()
        binaries.provide()
    if not lack:
        helm.provide()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.devcluster", description=sys.modules[__package__].__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build what is started, where it is not built yet and can be")
    up = commands.add_parser("up", help="start one; prints the line that makes kubectl use it")
    up.add_argument("--kubelet", action="store_true", help="a real node, with containerd (root)")
    up.add_argument("--gpus", type=int, default=2, help="GPUs of the real node")
    up.add_argument("--kwok-nodes", type=int, help="fake nodes")
    up.add_argument("--gpus-per-node", type=int, default=8, help="GPUs of each fake node")
    down = commands.add_parser("down", help="end it, with everything that runs in it")
    for command in (up, down):
        command.add_argument("directory", type=Path, metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
