"""Where the program `gpuquota` begins: a missing extra is a sentence, not a traceback."""

from __future__ import annotations

import importlib.util
import os
import sys


def main() -> None:
    """Run the command line, if what it needs is installed."""
    if missing := [name for name in ("typer", "msgspec") if importlib.util.find_spec(name) is None]:
        sys.stderr.write(f"Error: {', '.join(missing)} is not installed; run: pip install 'kfp-gpuquota[cluster]'\n")
        sys.exit(1)
    from kfp_gpuquota.cli.main import main as run  # noqa: PLC0415

    run()


def kubectl_plugin() -> None:
    """`kubectl gpuquota ...`: the same on the kubeconfig's current context."""
    os.environ.setdefault("GPUQUOTA_CONTEXT", ".")
    main()
