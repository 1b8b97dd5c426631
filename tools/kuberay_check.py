"""Verifies Ray clusters under quota against an installed KubeRay: `python -m tools.kuberay_check LENDER BORROWER`.

Both namespaces have a quota that guarantees at least 1 GPU. The borrower's RayCluster takes all idle GPUs, the lender
takes one back, and only the named worker may have left; then a RayJob of the borrower is suspended and resumed. It ends
with exit code 1 and a sentence where that is not so, and deletes what it created.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls
from kfp_gpuquota.cluster.kubernetes.user_client.connection import Connection
from kfp_gpuquota.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable

Json = dict[str, Any]
RAY: Final = "/apis/ray.io/v1"
NAME: Final = "gpuquota-check"
POLL_S: Final = 0.5


class Check:
    """The calls and the expectations of one run; `timeout_s` is for each expectation."""

    def __init__(self, calls: Calls, image: str, timeout_s: float) -> None:
        self._calls, self._image, self._timeout_s = calls, image, timeout_s
        self._created: list[str] = []
        self._began = time.monotonic()

    def create(self, namespace: str, kind: str, spec: Json, *, elastic: bool = False) -> str:
        """Create an object; return its path."""
        collection = f"{RAY}/namespaces/{namespace}/{kind.lower()}s"
        written = {labels.ELASTIC: "true"} if elastic else {}
        meta = {"name": NAME, "labels": written}
        self._calls.create(collection, {"apiVersion": "ray.io/v1", "kind": kind, "metadata": meta, "spec": spec})
        self._created.append(f"{collection}/{NAME}")
        return self._created[-1]

    def cluster_spec(self, least: int, replicas: int, most: int) -> Json:
        """Return the specification of a RayCluster with one group of workers of one GPU."""
        group = {"groupName": "gpu", "minReplicas": least, "replicas": replicas, "maxReplicas": most}
        return {
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": self.template("ray-head", gpus=0)},
            "workerGroupSpecs": [{**group, "rayStartParams": {}, "template": self.template("ray-worker", gpus=1)}],
        }

    def template(self, name: str, *, gpus: int) -> Json:
        """Return the template of a pod."""
        limits = {"resources": {"limits": {labels.GPU_RESOURCE: gpus}}} if gpus else {}
        return {"spec": {"containers": [{"name": name, "image": self._image, **limits}]}}

    def workers(self, namespace: str) -> set[str]:
        """Return the names of the running GPU workers."""
        return {name for name, pod in self._pods(namespace).items() if _runs(pod) and not _is_head(pod)}

    def heads(self, namespace: str) -> set[str]:
        """Return the uids of the head pods."""
        return {str(pod["metadata"]["uid"]) for pod in self._pods(namespace).values() if _is_head(pod)}

    def get(self, path: str) -> Json:
        """Return an object."""
        return self._calls.get(path)

    def expect(self, what: str, condition: Callable[[], object]) -> None:
        """Wait for the condition, and print when it was fulfilled. Raises SystemExit after the timeout."""
        end = time.monotonic() + self._timeout_s
        while not condition():
            if time.monotonic() > end:
                raise SystemExit(f"not within {self._timeout_s:g} s: {what}")
            time.sleep(POLL_S)
        print(f"{time.monotonic() - self._began:7.1f} s  {what}")  # noqa: T201

    def delete(self, path: str) -> None:
        """Delete an object."""
        self._created.remove(path)
        self._calls.delete(path)

    def close(self) -> None:
        """Delete what was created."""
        for path in self._created:
            try:
                self._calls.delete(path)
            except NotFoundError:
                continue

    def _pods(self, namespace: str) -> dict[str, Json]:
        found = self._calls.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector="ray.io/group")
        ours = (pod for pod in found["items"] if pod["metadata"]["labels"]["ray.io/cluster"].startswith(NAME))
        return {pod["metadata"]["name"]: pod for pod in ours}


def check_cluster(check: Check, lender: str, borrower: str, most: int) -> None:
    """Check a RayCluster that borrows, shrinks by name, and grows again."""
    path = check.create(borrower, "RayCluster", check.cluster_spec(1, 1, most), elastic=True)
    check.expect("the RayCluster runs with 1 worker or more", lambda: check.workers(borrower))
    check.expect(f"it has borrowed: {most} workers run", lambda: len(check.workers(borrower)) == most)
    before, heads = check.workers(borrower), check.heads(borrower)
    taken = check.create(lender, "RayCluster", check.cluster_spec(1, 1, 1))
    check.expect("the lender's worker runs", lambda: check.workers(lender))
    check.expect("one worker has left", lambda: len(check.workers(borrower)) == most - 1)
    left = before - check.workers(borrower)
    group = check.get(path)["spec"]["workerGroupSpecs"][0]
    if left != set(group.get("scaleStrategy", {}).get("workersToDelete", ())) or check.heads(borrower) != heads:
        raise SystemExit(f"other pods have left than those named in workersToDelete: {sorted(left)}")
    check.delete(taken)
    check.expect("it has grown again", lambda: len(check.workers(borrower)) == most)
    check.delete(path)
    check.expect("its pods are deleted", lambda: not check.workers(borrower))


def check_job(check: Check, lender: str, borrower: str, most: int) -> None:
    """Check a RayJob that is suspended for the lender, and resumed."""
    spec = {"entrypoint": "sleep 3600", "shutdownAfterJobFinishes": True, "rayClusterSpec": None}
    job = check.create(borrower, "RayJob", {**spec, "rayClusterSpec": check.cluster_spec(most, most, most)})
    check.expect(f"the RayJob runs with {most} workers", lambda: len(check.workers(borrower)) == most)
    taken = check.create(lender, "RayCluster", check.cluster_spec(1, 1, 1))
    check.expect("it is suspended", lambda: check.get(job)["spec"].get("suspend"))
    check.expect("the lender's worker runs", lambda: check.workers(lender))
    check.delete(taken)
    check.expect("it is resumed", lambda: not check.get(job)["spec"].get("suspend"))
    check.expect(f"it runs with {most} workers again", lambda: len(check.workers(borrower)) == most)


def _runs(pod: Json) -> bool:
    return pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]


def _is_head(pod: Json) -> bool:
    return bool(pod["metadata"]["labels"].get("ray.io/node-type") == "head")


def main(arguments: list[str]) -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description="Verify Ray clusters under quota against an installed KubeRay.")
    parser.add_argument("lender", help="namespace with a guaranteed quota of 1 GPU or more, which holds none")
    parser.add_argument("borrower", help="namespace with a quota, which may borrow")
    parser.add_argument("--gpus", type=int, default=2, help="GPUs that the borrower may get, all that are idle (2)")
    parser.add_argument("--image", default="rayproject/ray:2.60.0", help="image of Ray's containers")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of each expectation (600)")
    parser.add_argument("--kubeconfig", default=None)
    parser.add_argument("--context", default=None)
    given = parser.parse_args(arguments)
    calls = Calls(Connection.open(given.kubeconfig, given.context), retry_for_s=30.0)
    check = Check(calls, given.image, given.timeout)
    try:
        check_cluster(check, given.lender, given.borrower, given.gpus)
        check_job(check, given.lender, given.borrower, given.gpus)
    finally:
        check.close()


if __name__ == "__main__":
    main(sys.argv[1:])
