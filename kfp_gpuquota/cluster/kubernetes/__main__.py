"""`python -m kfp_gpuquota.cluster.kubernetes`: the controller."""

from __future__ import annotations

import argparse
import asyncio
import logging

from kfp_gpuquota.cluster.kubernetes.connection import Connection
from kfp_gpuquota.cluster.kubernetes.controller import Controller
from kfp_gpuquota.cluster.kubernetes.kubeconfig import load_credentials


async def _serve(options: argparse.Namespace) -> None:
    async with Connection(load_credentials(options.kubeconfig, options.context)) as connection:
        await Controller(connection).run()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kubeconfig")
    parser.add_argument("--context")
    logging.basicConfig(level=logging.INFO)
    asyncio.run(_serve(parser.parse_args()))


main()
