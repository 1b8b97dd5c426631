"""Loads an optimizer's state exactly as another worker has it.

torch's own `load_state_dict` is designed for files: it casts each tensor of the state to its parameter's type, and
rebuilds other objects, such as strings, by iterating over them. An optimizer with 8-bit moments, or with integer
counters, would continue differently on a joined worker than on the others. It also makes new lists and dictionaries,
while others hold the former ones: an optimizer that wraps this one (SAM, Lookahead) shares its groups and state, and a
script keeps a group whose rate it sets.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elastic_runtime.state.training_state import TrainingState


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


def with_inner(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return the optimizers, and those that they wrap, each once."""
    found: dict[int, torch.optim.Optimizer] = {}
    pending = list(optimizers)
    while pending:
        each = pending.pop(0)
        if id(each) not in found:
            found[id(each)] = each
            pending += [value for value in vars(each).values() if isinstance(value, torch.optim.Optimizer)]
    return list(found.values())


def with_kept_apart(named: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return optimizers by name, and those in them that have a state of their own, which no state_dict has.

    One with a state_dict of its own takes care of what it wraps.
    """
    found, every = list(named), {id(each) for _, each in named}
    for name, outer in found:
        if type(outer).state_dict is not torch.optim.Optimizer.state_dict:
            continue
        for attribute, each in vars(outer).items():
            if isinstance(each, torch.optim.Optimizer) and id(each) not in every and each.state is not outer.state:
                every.add(id(each))
                found.append((f"{name}.{attribute}", each))
    return found


@contextmanager
def loading_in_place(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Let optimizers that load a state in this context keep their lists and dictionaries, and so those in them."""
    every = [each for each in with_inner(optimizers) if {"param_groups", "state"} <= vars(each).keys()]
    held = [(each, each.param_groups, each.state) for each in every]
    yield
    for optimizer, groups, _ in held:
        loaded, optimizer.param_groups = optimizer.param_groups, groups
        if loaded is not groups:
            _replace_groups(groups, [dict(group) for group in loaded])
    for optimizer, _, state in held:
        found, optimizer.state = optimizer.state, state
        if found is not state:
            state.clear()
            state.update(found)


def _replace_groups(groups: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> None:
    for group, values in zip(groups, loaded, strict=False):
        for name in group.keys() - values.keys():
            del group[name]
        set_hyperparameters(group, values)
    groups[:] = groups[: len(loaded)] + loaded[len(groups) :]


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return copies of a group's values."""
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def set_hyperparameters(group: dict[str, Any], values: dict[str, Any]) -> None:
    """Set a group's values; a rate that is a tensor keeps its memory, which compiled optimizers hold."""
    for name, value in values.items():
        own = group.get(name)
        if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):
            own.copy_(value)
        else:
            group[name] = value if name == "params" else copy.deepcopy(value)


class GroupValues:
    """The values of all optimizers' groups at an iteration's first backward pass.

    What a script sets after it is meant for the next step, as by a schedule that is not torch's: it has no effect where
    the iteration does not complete a step, as `scheduler.step()` has none.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._noted: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def note(self, *, acts: bool) -> None:
        """A backward pass begins. `acts`: its iteration is certain to complete the step."""
        optimizers = () if acts else self._state.optimizers()
        self._noted = [(group, _values(group)) for each in optimizers for group in each.param_groups]

    def restore(self) -> None:
        """The iteration has not completed a step, or the step is repeated."""
        for group, values in self._noted:
            set_hyperparameters(group, {name: value for name, value in values.items() if group.get(name) is not value})
        self._noted = []


def _values(group: dict[str, Any]) -> dict[str, Any]:
    found = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in group.items()}
    del found["params"]
    return found


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
