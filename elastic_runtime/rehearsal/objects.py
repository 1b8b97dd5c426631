"""State that a script keeps beside what `prepare` and `job.track` were given."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.rehearsal.records import Prints, flattened, print_of, prints_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elastic_runtime.state.training_state import TrainingState

KINDS: tuple[type, ...] = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_INTERNAL = ("torch._", "torch.fx", "elastic_runtime")


def objects_beside(state: TrainingState, models: Sequence[torch.nn.Module]) -> list[dict[str, Any]]:
    """Modules, optimizers and schedulers of the process that are no part of the job's state, with their prints.

    [{"kind": class name, "shape": what it is made of, "prints": by name}], of those that hold any tensor or number.
    """
    covered = {id(part) for root in [state.model, *models, *_values(state)] for part in _with_parts(root)}
    found = [each for each in gc.get_objects() if _is_kind(each) and id(each) not in covered]
    inner = {id(part) for each in found for part in _with_parts(each) if part is not each}
    rows = []
    for each in found:
        if id(each) in inner or type(each).__module__.startswith(_INTERNAL):
            continue
        prints = prints_of(flattened(each.state_dict()))
        if prints:
            rows.append({"kind": type(each).__name__, "shape": sorted(prints), "prints": prints})
    return rows


def attributes_of(model: torch.nn.Module) -> Prints:
    """Tensors and numbers that modules hold as plain attributes: no parameters, no buffers."""
    found: Prints = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or name == "training" or isinstance(value, bool):
                continue
            if isinstance(value, torch.Tensor):
                found[f"{path}.{name}".lstrip(".")] = print_of(value)
            elif isinstance(value, int | float):
                found[f"{path}.{name}".lstrip(".")] = [float(value), 0.0]
    return found


def _is_kind(value: object) -> bool:
    """By type and not by isinstance, which asks proxies for their class."""
    return issubclass(type(value), KINDS)


def _values(state: TrainingState) -> Iterable[Any]:
    return (part for _, part in state.parts)


def _with_parts(value: Any) -> list[Any]:
    """An object, and the modules, optimizers or schedulers that it is made of."""
    if isinstance(value, torch.nn.Module):
        return list(value.modules())
    parts = [*getattr(value, "_schedulers", ()), getattr(value, "optimizer", None)]
    return [value, *(part for part in parts if part is not None)]
