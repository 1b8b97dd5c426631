"""State as one skeleton of bytes and a list of tensors, so that tensors travel and are stored as they are.

The skeleton is the same nested structure of dictionaries, lists and tuples with a `Hole` in each tensor's place; a
tensor made of others (an 8-bit optimizer's moments: codes and scales) is a `Composite` of theirs. See `codec`.
"""

from __future__ import annotations

from typing import Any

import torch

from elastic_runtime.errors import StateError
from elastic_runtime.state.codec import UNPICKLABLE, Composite, Hole, Skeleton, decode, encode


def pack(state: object) -> tuple[Skeleton, list[torch.Tensor]]:
    """(skeleton, tensors), which are the state's own, not copies. StateError where something cannot be saved."""
    tensors: list[torch.Tensor] = []
    skeleton = _map(state, lambda tensor: _dig(tensor, tensors))
    try:
        return encode(skeleton), tensors
    except UNPICKLABLE as error:
        raise StateError(
            f"the training state cannot be saved: {_culprit(skeleton)}{error}; keep open files, locks and lambdas out "
            "of state_dict()"
        ) from error


def unpack(skeleton: bytes, tensors: list[torch.Tensor], *, trusted: bool = True) -> Any:
    """The state again, made of these tensors. StateError where the skeleton needs pickle and is not `trusted`."""
    return _fill(decode(skeleton, trusted=trusted), tensors)


def holes(skeleton: bytes, *, trusted: bool = True) -> list[str]:
    """Return the path of each tensor, in order: equal for two states of the same structure."""
    found: dict[int, str] = {}
    _locate(decode(skeleton, trusted=trusted), "", found)
    return [found[index] for index in sorted(found)]


def _locate(value: object, path: str, found: dict[int, str]) -> None:
    if isinstance(value, Hole):
        found[value.index] = path
    elif isinstance(value, Composite):
        _locate(value.parts, path, found)
    elif isinstance(value, dict):
        for key, item in value.items():
            _locate(item, f"{path}/{key!r}", found)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _locate(item, f"{path}/{index}", found)


def _culprit(value: object, path: str = "") -> str:
    """Return the path of the first value that cannot be saved, like "['parts']['lock']: "; empty for `value` itself."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        try:
            encode(item)
        except UNPICKLABLE:
            return _culprit(item, f"{path}[{key!r}]")
    return f"{path}: " if path else ""


def _dig(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> Hole:
    tensors.append(tensor.detach() if tensor.requires_grad else tensor)
    return Hole(len(tensors) - 1)


def _map(value: object, dig: Any) -> object:
    if isinstance(value, torch.Tensor):
        return _taken_apart(value, dig) if _is_composite(value) else dig(value)
    if isinstance(value, dict):
        return {key: _map(item, dig) for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in {list, tuple}:
        return type(value)(_map(item, dig) for item in value)
    return value


def _is_composite(tensor: torch.Tensor) -> bool:
    """DTensors are not: they are the matter of `sharded`."""
    return hasattr(tensor, "__tensor_flatten__") and not type(tensor).__module__.startswith("torch.distributed")


def _taken_apart(tensor: Any, dig: Any) -> Composite:
    names, context = tensor.__tensor_flatten__()
    parts = {name: _map(getattr(tensor, name), dig) for name in names}
    return Composite(type(tensor), parts, context, tuple(tensor.shape), tensor.stride())


def _fill(value: object, tensors: list[torch.Tensor]) -> object:
    if isinstance(value, Hole):
        return tensors[value.index]
    if isinstance(value, Composite):
        kind: Any = value.kind
        return kind.__tensor_unflatten__(_fill(value.parts, tensors), value.context, value.shape, value.stride)
    if isinstance(value, dict):
        return {key: _fill(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in {list, tuple}:
        return type(value)(_fill(item, tensors) for item in value)
    return value
