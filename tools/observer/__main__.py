"""Watches a cluster, and makes operations on it if asked to; exits with 1 after a violation."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tools.devcluster.api import Api
from tools.observer.churn import Churn
from tools.observer.rules import GROUP
from tools.observer.watching import Watching


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tools.observer")
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long to watch")
    parser.add_argument("--churn", type=float, default=0.0, metavar="N", help="operations a second")
    parser.add_argument("--seed", type=int, default=0, help="of the operations")
    options = parser.parse_args()
    api = Api.of_kubeconfig(options.kubeconfig)
    with Watching(options.kubeconfig) as watching:
        if options.churn:
            teams = [quota["metadata"]["name"] for quota in api.items(f"/apis/{GROUP}/v1alpha1/gpuquotas")]
            nodes = [node["metadata"]["name"] for node in api.items("/api/v1/nodes")]
            churn = Churn(api, teams, nodes, options.seed)
            churn.run(options.seconds, options.churn)
        else:
            time.sleep(options.seconds)
        found = watching.violations()
    seen = watching.observer
    lines = [f"{violation.at:.1f} {violation.what}: {violation.about}: {violation.why}" for violation in found]
    lines.append(
        f"{seen.admissions} admissions, {seen.evictions} evictions ({seen.moves} moves), {len(found)} violations"
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
