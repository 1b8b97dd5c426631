"""`python -m kfp_gpuquota.cluster.kubernetes.web` serves the web page of a Kubernetes cluster."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.kubernetes.client.process import logging_setup
from kfp_gpuquota.cluster.kubernetes.client.process.tasks import until_stopped
from kfp_gpuquota.cluster.kubernetes.web.options import parsed
from kfp_gpuquota.cluster.kubernetes.web.server import serve
from kfp_gpuquota.errors import GpuQuotaError

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal arrives; return the exit code."""
    try:
        options = parsed(arguments)
        logging_setup.configure(options.log_format, options.log_level)
        asyncio.run(until_stopped(serve(options)))
    except GpuQuotaError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
