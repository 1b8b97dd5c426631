"""The gate of a pod that counts nothing is removed; a refusal is repeated with growing pauses."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from kfp_gpuquota.cluster.kubernetes.convert.pod_placement import GateShape
from kfp_gpuquota.cluster.kubernetes.pods.uncounted_pods import FIRST_PAUSE_S, LONGEST_PAUSE_S, UncountedPods
from tests.simulation.loop import simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.reflector import WrittenPods
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.pods.device_claims import DeviceClaims

HOUR_S = 3600


def test_a_refused_removal_of_a_gate_is_repeated_with_growing_pauses() -> None:
    attempts: list[float] = []
    pods = {
        "uid": cast(
            "PodView", SimpleNamespace(uid="uid", namespace="team", name="pod", gate=GateShape(index=0), claimed=None)
        )
    }

    def begin() -> None:
        loop = asyncio.get_running_loop()

        class Refusing:
            def submit(self, _write: object, _done: object, failed: Callable[[Exception], Any]) -> None:
                attempts.append(loop.time())
                loop.call_soon(failed, OSError("refused"))

        claims = cast("DeviceClaims", SimpleNamespace(uncounted=pods.get, exchanged=lambda _: None))
        uncounted = UncountedPods(claims, cast("Writer", Refusing()), cast("WrittenPods", None))
        for at in range(HOUR_S):
            loop.call_later(at, uncounted.let_through, "uid")  # as each event of its claims does
        loop.call_later(HOUR_S, pods.clear)
        loop.call_later(2 * HOUR_S, loop.rested.set)  # type: ignore[attr-defined]

    simulate(begin)
    pauses = [round(b - a) for a, b in pairwise(attempts)]
    assert pauses[:4] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert attempts[-1] < HOUR_S
