"""The embedded cluster's figures in Prometheus's text format. Pure.

Names are those of the controller and the node agent on Kubernetes where they mean the same.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kfp_gpuquota.api import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kfp_gpuquota.api.wire import NodeView, ProjectView, ShareView
    from kfp_gpuquota.scheduler.forecast import Accuracy

Labels = dict[str, str]
Sample = tuple[Labels, float]
_MEMORY = {
    "used": "GPU memory in use",
    "request": "GPU memory guaranteed",
    "limit": "The most it may ever use",
    "granted": "What it may use now",
}


def metrics_text(
    projects: Sequence[ProjectView], nodes: Sequence[NodeView], phases: Iterable[Phase], accuracy: Accuracy
) -> str:
    """Return the text of GET /metrics."""
    shares = [(view.node.name, share) for view in nodes for share in view.shares]
    families: list[tuple[str, str, list[Sample]]] = [
        ("guaranteed_gpus", "Guaranteed quota", _of(projects, "guaranteed")),
        ("limit_gpus", "The most that may be held, where there is a limit", _of(projects, "limit")),
        ("held_gpus", "GPUs held", [(_project(view), view.allocated) for view in projects]),
        ("borrowed_gpus", "GPUs held beyond the guarantee", [(_project(view), view.over_quota) for view in projects]),
        ("lent_gpus", "GPUs of the guarantee that others hold", [(_project(view), view.lent) for view in projects]),
        ("surplus_gpus", "GPUs held beyond what jobs request", [(_project(view), view.surplus) for view in projects]),
        ("requested_gpus", "GPUs that jobs request", [(_project(view), view.requested) for view in projects]),
        ("jobs", "Jobs by status", _by_phase(phases)),
        ("expected_starts_compared", "Latest estimates of starts that are compared", [({}, accuracy.compared)]),
        ("expected_starts_held_ratio", "The part of these whose range held the start", [({}, accuracy.held)]),
        ("nodes", "Nodes known", [({}, len(nodes))]),
        ("gpus", "GPUs of the node", [({"node": view.node.name}, len(view.node.devices)) for view in nodes]),
        ("used_gpus", "GPUs in use", [({"node": view.node.name}, sum(view.used.values())) for view in nodes]),
    ]
    for of, text in _MEMORY.items():
        samples: list[Sample] = [(_share(node, share), getattr(share, f"{of}_mib")) for node, share in shares]
        families.append((f"gpu_memory_{of}_mib", text, samples))
    return "".join(line for family in families for line in _family(*family))


def _of(projects: Sequence[ProjectView], field: str) -> list[Sample]:
    found = ((_project(view), getattr(view.project, field)) for view in projects)
    return [(labels, value) for labels, value in found if value is not None]


def _project(view: ProjectView) -> Labels:
    return {"project": view.project.name}


def _share(node: str, share: ShareView) -> Labels:
    return {"project": share.project, "job": share.job, "worker": share.worker, "node": node, "gpu": str(share.device)}


def _by_phase(phases: Iterable[Phase]) -> list[Sample]:
    counts = Counter(phases)
    return [({"status": phase.value}, counts[phase]) for phase in Phase]


def _family(name: str, text: str, samples: Iterable[Sample]) -> Iterator[str]:
    name = f"gpuquota_{name}"
    yield f"# HELP {name} {text}\n# TYPE {name} gauge\n"
    for labels, value in samples:
        inside = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        yield f"{name}{{{inside}}} {value:g}\n" if inside else f"{name} {value:g}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
