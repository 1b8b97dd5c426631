"""What a Prometheus has of the past: the GPU-hours of each project, and the use of each GPU.

The controller adds up GPU-seconds while it leads and keeps none of them, so that only the Prometheus that scrapes it
has a history. A gap in which no controller led counts nothing. What GPUs did is measured by NVIDIA's exporter
(dcgm-exporter), if the same Prometheus scrapes it; it names the pod that holds the GPU, and not those that share one.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.api.history import (
    GPU_USE_WIDTH_S,
    DeviceUse,
    GpuHours,
    HeldHours,
    Holder,
    UsePoint,
    held_hours_of,
)
from kfp_gpuquota.api.request_paths import join, with_query
from kfp_gpuquota.cluster.kubernetes.unused_gpus.dcgm import BUSY, LONGEST_INDEX, MEMORY
from kfp_gpuquota.errors import ClusterUnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SAMPLED_EVERY_S: Final = 60
HELD: Final = "sum by (project, kind) (increase(gpuquota_gpu_seconds_total[{since}s]))"
HELD_BY: Final = "sum by (project, user, gpu_type) (increase(gpuquota_user_gpu_seconds_total[{since}s]))"
IDLE: Final = "sum(increase(gpuquota_idle_gpu_seconds_total[{since}s]))"
UNUSED: Final = (
    f"{SAMPLED_EVERY_S} * sum by (namespace, exported_namespace) "
    f"(sum_over_time((DCGM_FI_DEV_GPU_UTIL == bool 0)[{{since}}s:{SAMPLED_EVERY_S}s]))"
)
USED: Final = f"max by (Hostname, gpu) ({' or '.join(f'{100 / whole:g} * {name}' for name, whole in BUSY.items())})"
PART: Final = "Hostname, gpu, UUID, GPU_I_ID, modelName"
"""What is one GPU, or one MIG instance of it; each pod that has a share of it has a sample."""
MEMORY_USED: Final = f"sum by (Hostname, gpu) (max by ({PART}) ({MEMORY}))"
MEMORY_OF: Final = (
    f"sum by (Hostname, gpu, modelName) (max by ({PART}) (last_over_time({MEMORY}[{{since}}s]))"
    f" + max by ({PART}) (last_over_time(DCGM_FI_DEV_FB_FREE[{{since}}s])))"
)
IDLE_NAME: Final = "(idle)"
TIMEOUT_S: Final = 60.0
_HOUR_S: Final = 3600.0


def gpu_hours_from(prometheus: str, since_s: float) -> list[GpuHours]:
    """Return the projects' GPU-hours, the most first, then the idle ones.

    Raises UsageError for a URL that is not Prometheus', ClusterUnavailableError if it does not respond.
    """
    since, held = int(since_s), dict[str, dict[str, float]]()
    unused = _unused(prometheus, since)
    for labels, seconds in _query(prometheus, HELD.format(since=since)):
        held.setdefault(labels.get("project", ""), {})[labels.get("kind", "")] = seconds / _HOUR_S
    rows = [
        GpuHours(
            project=project,
            guaranteed=round(kinds.get("guaranteed", 0.0), 2),
            borrowed=round(kinds.get("borrowed", 0.0), 2),
            total=round(sum(kinds.values()), 2),
            unused=None if unused is None else round(min(unused.get(project, 0.0), sum(kinds.values())), 2),
        )
        for project, kinds in held.items()
    ]
    idle = sum(seconds for _, seconds in _query(prometheus, IDLE.format(since=since))) / _HOUR_S
    rows.sort(key=lambda row: (-row.total, row.project))
    return [*rows, GpuHours(project=IDLE_NAME, total=round(idle, 2), unused=None if unused is None else 0.0)]


def held_hours_from(prometheus: str, since_s: float) -> Sequence[HeldHours]:
    """Return the GPU-hours of each user and type of GPU, the most first. Raises as `gpu_hours_from`."""
    return held_hours_of(
        {
            Holder(labels.get("project", ""), labels.get("user", ""), labels.get("gpu_type", "")): seconds
            for labels, seconds in _query(prometheus, HELD_BY.format(since=int(since_s)))
        }
    )


def _unused(prometheus: str, since: int) -> dict[str, float] | None:
    """Return the GPU-hours by namespace in which held GPUs were not used; None if nobody measured them.

    Where Prometheus does not honor labels, the measured pod's namespace is the label `exported_namespace`, and
    `namespace` is that of the exporter.
    """
    unused = dict[str, float]()
    for labels, seconds in _query(prometheus, UNUSED.format(since=since)):
        namespace = labels.get("exported_namespace") or labels.get("namespace", "")
        unused[namespace] = unused.get(namespace, 0.0) + seconds / _HOUR_S
    return unused or None


def gpu_use_from(prometheus: str, since_s: float) -> list[DeviceUse]:
    """Return the use of each GPU, by node and the number that the node has for it. Raises as `gpu_hours_from`.

    Each value is that of the last scrape before the end of its interval.
    """
    end = time.time() // GPU_USE_WIDTH_S * GPU_USE_WIDTH_S
    over = {"start": end - since_s + GPU_USE_WIDTH_S, "end": end, "step": GPU_USE_WIDTH_S}
    used = {_gpu(labels): _points(values) for labels, values in _results(prometheus, USED, over)}
    memory = {_gpu(labels): _points(values) for labels, values in _results(prometheus, MEMORY_USED, over)}
    whole = {_gpu(labels): (labels, mib) for labels, mib in _query(prometheus, MEMORY_OF.format(since=int(since_s)))}
    found = []
    for gpu, percents in sorted(used.items()):
        mib, (labels, of_mib) = memory.get(gpu, {}), whole.get(gpu, ({}, 0.0))
        points = (UsePoint(at, round(percent, 1), _whole(mib.get(at))) for at, percent in percents.items())
        model = labels.get("modelName", "")
        found.append(DeviceUse(node=gpu[0], device=gpu[1], model=model, memory_mib=int(of_mib), points=tuple(points)))
    return found


def _gpu(labels: dict[str, str]) -> tuple[str, int]:
    """Return a GPU's node and its number there."""
    number = labels.get("gpu", "")
    return labels.get("Hostname", ""), int(number) if number.isdecimal() and len(number) <= LONGEST_INDEX else 0


def _points(values: Any) -> dict[float, float]:
    """Return samples by the beginning of the interval that ends with them."""
    return {float(at) - GPU_USE_WIDTH_S: float(value) for at, value in values}


def _whole(mib: float | None) -> int | None:
    return None if mib is None else int(mib)


def _query(prometheus: str, expression: str) -> Iterator[tuple[dict[str, str], float]]:
    """Yield the labels and the value of each series now."""
    for labels, value in _results(prometheus, expression):
        yield labels, float(value[1])


def _results(
    prometheus: str, expression: str, over: Mapping[str, float] | None = None
) -> Iterator[tuple[dict[str, str], Any]]:
    """Yield the labels of each series with its sample now, or with those `over` a time: `start`, `end`, `step`."""
    parts = urllib.parse.urlsplit(prometheus)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise UsageError(f"--prometheus is {prometheus!r}, but must be a URL such as http://localhost:9090")
    path, key = ("query", "value") if over is None else ("query_range", "values")
    url = with_query(join(f"{prometheus.rstrip('/')}/api/v1", path), query=expression, **(over or {}))
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:  # noqa: S310 (checked above)
            answer: dict[str, Any] = json.loads(response.read())
        results = [(result["metric"], result[key]) for result in answer["data"]["result"]]
    except urllib.error.HTTPError as error:
        raise UsageError(f"{prometheus} responded with {error.code} {error.reason}; is it Prometheus?") from error
    except OSError as error:
        raise ClusterUnavailableError(
            f"{prometheus} does not respond ({error}); forward its port: kubectl -n monitoring port-forward "
            "service/prometheus 9090"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{prometheus} did not respond as Prometheus does; is the URL right?") from error
    yield from results
