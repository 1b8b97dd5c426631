"""GPU-hours of each project over a time, from the Prometheus that scrapes the controller.

The controller adds up GPU-seconds while it leads and keeps none of them, so that only Prometheus has a history. A gap
in which no controller led counts nothing. What GPUs did is measured by NVIDIA's exporter (dcgm-exporter), if the same
Prometheus scrapes it; it names the pod that holds the GPU, and not those that share one.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.api.history import GpuHours
from kfp_gpuquota.api.request_paths import with_query
from kfp_gpuquota.errors import ClusterUnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLED_EVERY_S: Final = 60
HELD: Final = "sum by (project, kind) (increase(gpuquota_gpu_seconds_total[{since}s]))"
IDLE: Final = "sum(increase(gpuquota_idle_gpu_seconds_total[{since}s]))"
UNUSED: Final = (
    f"{SAMPLED_EVERY_S} * sum by (namespace, exported_namespace) "
    f"(sum_over_time((DCGM_FI_DEV_GPU_UTIL == bool 0)[{{since}}s:{SAMPLED_EVERY_S}s]))"
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


def _query(prometheus: str, expression: str) -> Iterator[tuple[dict[str, str], float]]:
    parts = urllib.parse.urlsplit(prometheus)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise UsageError(f"--prometheus is {prometheus!r}, but must be a URL such as http://localhost:9090")
    url = with_query(f"{prometheus.rstrip('/')}/api/v1/query", query=expression)
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:  # noqa: S310 (checked above)
            answer: dict[str, Any] = json.loads(response.read())
        results = answer["data"]["result"]
    except urllib.error.HTTPError as error:
        raise UsageError(f"{prometheus} responded with {error.code} {error.reason}; is it Prometheus?") from error
    except OSError as error:
        raise ClusterUnavailableError(
            f"{prometheus} does not respond ({error}); forward its port: kubectl -n monitoring port-forward "
            "service/prometheus 9090"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{prometheus} did not respond as Prometheus does; is the URL right?") from error
    for result in results:
        yield result["metric"], float(result["value"][1])
