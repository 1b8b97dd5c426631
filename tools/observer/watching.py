"""Feeds an observer from watches, one thread for each kind, until it is stopped."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Final, Self

from tools.devcluster.api import Api, ApiError
from tools.observer.rules import GROUP, Observer, Violation

if TYPE_CHECKING:
    from pathlib import Path

KINDS: Final = {
    "pods": "/api/v1/pods",
    "nodes": "/api/v1/nodes",
    "events": "/api/v1/events",
    "gpuquotas": f"/apis/{GROUP}/v1alpha1/gpuquotas",
    "jobs": "/apis/batch/v1/jobs",
    "elasticjobs": f"/apis/{GROUP}/v1alpha1/elasticjobs",
}
WATCH_S: Final = 5.0
LOOK_EVERY_S: Final = 0.5


class Watching:
    """The threads. `observer` is locked while it is used."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._follow, args=item, daemon=True) for item in KINDS.items()]
        self._threads.append(threading.Thread(target=self._look, daemon=True))
        self._listed: dict[str, set[str]] = {}
        self.observer = Observer()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def violations(self) -> list[Violation]:
        """Return the violations so far."""
        with self._lock:
            return list(self.observer.violations)

    def _follow(self, kind: str, path: str) -> None:
        api = Api.of_kubeconfig(self._kubeconfig)
        while not self._stop.is_set():
            with contextlib.suppress(ApiError, OSError):
                self._watch(api, kind, path)
            self._stop.wait(0.1)

    def _watch(self, api: Api, kind: str, path: str) -> None:
        """List, forget what is not listed any more, then watch for a while."""
        listing = api.get(path)
        found = {item["metadata"]["uid"]: item for item in listing["items"]}
        with self._lock:
            if kind == "pods":
                for uid in self.observer.pods.keys() - found.keys():
                    self.observer.pods.pop(uid)
            for item in found.values():
                self.observer.see(kind, "MODIFIED", item, time.monotonic())
        query = {"resourceVersion": listing["metadata"]["resourceVersion"]}
        for event, item in api.watch(path, query, timeout_s=WATCH_S):
            if event in {"ADDED", "MODIFIED", "DELETED"}:
                with self._lock:
                    self.observer.see(kind, event, item, time.monotonic())

    def _look(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            with self._lock:
                self.observer.look(time.monotonic())
