"""Loads an optimizer's state exactly as another worker has it.

torch's own `load_state_dict` is designed for files: it casts each tensor of the state to its parameter's type, and
rebuilds other objects, such as strings, by iterating over them. An optimizer with 8-bit moments, or with integer
counters, would continue differently on a joined worker than on the others.
"""

from __future__ import annotations

from typing import Any

import torch

from elastic_runtime.errors import StateError


def add_missing_groups(
    optimizer: torch.optim.Optimizer, groups: list[list[str]], parameters: dict[str, torch.nn.Parameter]
) -> None:
    """Add the groups that the saved optimizer got in training, by `add_param_group`, and this one has not got yet.

    `groups`: the names of each saved group's parameters. StateError where the model has no such parameter.
    """
    for number, names in enumerate(groups[len(optimizer.param_groups) :], len(optimizer.param_groups)):
        missing = [name for name in names if name not in parameters]
        if missing:
            raise StateError(
                f"{type(optimizer).__name__} got parameter group {number} in the training, with {missing}, which the "
                "model of this worker does not have; build all modules before prepare, and add them to it"
            )
        optimizer.add_param_group({"params": [parameters[name] for name in names]})


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any], *, laid_out: bool = True) -> None:
    """`optimizer.load_state_dict(saved)`; what that changed of the state is put right, unless it is the optimizer's own
    `load_state_dict`.

    `laid_out`: tensors have the memory layout that they were saved with. In checkpoints of older versions all are
    contiguous, and get their parameter's: fused kernels go through all memories side by side.
    """
    has_own = "differentiable" in optimizer.defaults
    optimizer.load_state_dict(saved)
    if not has_own:  # torch adds it, and groups that are added later would have it on this worker only
        optimizer.defaults.pop("differentiable", None)
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    numbers = (number for group in saved["param_groups"] for number in group["params"])
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in saved["state"] and parameter in optimizer.state:
            optimizer.state[parameter] = _as_saved(
                saved["state"][number], optimizer.state[parameter], None if laid_out else parameter
            )


def _as_saved(saved: Any, loaded: Any, parameter: torch.Tensor | None) -> Any:
    """`loaded`, where it means the same; a torch that is newer than a checkpoint may have made tensors of numbers."""
    if isinstance(loaded, torch.Tensor):
        return _tensor_as_saved(saved, loaded, parameter) if isinstance(saved, torch.Tensor) else loaded
    if isinstance(saved, dict) and isinstance(loaded, dict):
        common = {key: _as_saved(saved[key], value, parameter) for key, value in loaded.items() if key in saved}
        return {**loaded, **common}
    if type(saved) is type(loaded) and type(saved) in {list, tuple}:
        return type(saved)(_as_saved(*both, parameter) for both in zip(saved, loaded, strict=True))
    return saved


def _tensor_as_saved(saved: torch.Tensor, loaded: torch.Tensor, parameter: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor in its saved type and memory layout; the layout of `parameter`, if it is given."""
    found = loaded if loaded.dtype == saved.dtype and loaded.stride() == saved.stride() else saved.to(loaded.device)
    if parameter is None:
        return found
    if type(found) is not torch.Tensor or found.shape != parameter.shape or found.stride() == parameter.stride():
        return found
    return torch.empty_like(parameter, dtype=found.dtype).copy_(found)
