"""The programs of this project as functions of their arguments, for `tests.forked`."""

from __future__ import annotations

import sys


def gpuquota(arguments: list[str]) -> None:
    """The command line."""
    from kfp_gpuquota.cli import entry  # noqa: PLC0415 (only the server imports what its programs need)

    sys.argv = ["gpuquota", *arguments]
    entry.main()


def kubectl_gpuquota(arguments: list[str]) -> None:
    """The plugin of kubectl."""
    from kfp_gpuquota.cli import entry  # noqa: PLC0415

    sys.argv = ["kubectl-gpuquota", *arguments]
    entry.kubectl_plugin()


def daemon(arguments: list[str]) -> int:
    """The embedded cluster's daemon: HOME, [CONFIG], READY_FD."""
    from kfp_gpuquota.cluster.local import daemon as program  # noqa: PLC0415

    home, *config, ready = arguments
    return program.main([home, ready, *config])


def controller(arguments: list[str]) -> int:
    """The controller on Kubernetes."""
    from kfp_gpuquota.cluster.kubernetes import __main__ as program  # noqa: PLC0415

    return program.main(arguments)


def membership_shard(arguments: list[str]) -> int:
    """One of the membership's own processes."""
    from kfp_gpuquota.cluster.kubernetes.shards import __main__ as program  # noqa: PLC0415

    return program.main(arguments)


def node_agent(arguments: list[str]) -> int:
    """A node's agent."""
    from kfp_gpuquota.cluster.kubernetes.sharing import node_agent as program  # noqa: PLC0415

    return program.main(arguments)
