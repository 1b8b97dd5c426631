"""Wrapping a model by the script's `shard` function, taking the wrapping off again, and wrapping it again.

`fully_shard` has no way back and no way to another mesh, but it works in place: it gives modules another class, hooks
and a state object, and replaces their parameters by DTensors. What it added is taken away here, parameters go to the
meta device, where they need no memory, and `fully_shard` is applied again with the new mesh; then each parameter gets
its new shard, as `load_state_dict(assign=True)` would do it. Model and optimizer stay the script's own objects.

Building the model a second time was rejected: the script's loop holds the first one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from elastic_runtime.errors import UsageError
from elastic_runtime.torch_internals import forget_composable_state, fsdp
from elastic_runtime.torch_internals.modules import own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from elastic_runtime.sharded.layout import Sharded

    ShardFunction = Callable[[Any, DeviceMesh], object]


@dataclass
class _Bare:
    """The state of a module before it was wrapped."""

    module: torch.nn.Module
    kind: type
    added: frozenset[str] = frozenset()
    """Attributes that wrapping gave it."""


class Wrapping:
    """One training's models under `shard`, and the optimizers that hold their parameters.

    `modules`: those that `shard` wrapped. `dims`: along which dimension each parameter is sharded, once it was wrapped
    for the first time. `aliases`: each name that a parameter has in a state_dict, and the one that it has here, the
    first of them; they differ where weights are tied. `on_gradient`: called with a parameter when FSDP has set the
    gradient of its shard.
    """

    on_gradient: Callable[[torch.nn.Parameter], None] | None = None

    def __init__(
        self,
        whole: torch.nn.Module,
        models: Sequence[torch.nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        shard: ShardFunction,
    ) -> None:
        if any(isinstance(module, FSDPModule) for module in whole.modules()):
            raise UsageError(
                "the model is wrapped by fully_shard already; give prepare the plain model, and the function that "
                "wraps it as shard=: it is called again at each change of size"
            )
        self.dims: dict[str, int] = {}
        self._models, self._shard = models, shard
        self.modules: list[FSDPModule] = []
        self._bare = [_Bare(module, type(module)) for module in whole.modules()]
        self._whole = whole
        self._standing: dict[str, Any] = {}
        self._names = _names(whole)
        every = whole.state_dict(keep_vars=True).items()
        self.aliases = {alias: self._names[id(tensor)] for alias, tensor in every if id(tensor) in self._names}
        self._places: dict[str, list[tuple[torch.nn.Module, str]]] = {name: [] for name in self._names.values()}
        for module in whole.modules():
            for attribute, parameter in own_parameters(module).items():
                if parameter is not None:
                    self._places[self._names[id(parameter)]].append((module, attribute))
        self._groups = {
            part: [[self._names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
            for part, optimizer in optimizers.items()
        }
        self._optimizers = optimizers

    @property
    def order(self) -> dict[str, list[str]]:
        """Return the parameters of each optimizer in the order of its state_dict."""
        return {part: [name for names in groups for name in names] for part, groups in self._groups.items()}

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """By name; sharded between two steps."""
        return {name: getattr(*places[0]) for name, places in self._places.items()}

    def rewrap(self, mesh: DeviceMesh) -> None:
        """Wrap for `mesh`, without memory: the parameters have no values until `assign`. Optimizers forget theirs."""
        self._standing = {}
        self._unwrap()
        for optimizer in self._optimizers.values():
            optimizer.state.clear()
        self._wrap(mesh)
        self._point_optimizers()  # they let go of the old shards
        self.dims = {name: _dim_of(name, parameter, mesh) for name, parameter in self.parameters().items()}
        for module in self.modules:
            module.set_gradient_divide_factor(1.0)  # the losses are scaled to their part of the global batch
            module.set_force_sum_reduction_for_comms(enable=True)

    def assign(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set each parameter's values, a DTensor, by name. Optimizers then hold the new parameters."""
        for name, meta in self.parameters().items():
            self._put(name, self._parameter(values[name], requires_grad=meta.requires_grad))
        self._point_optimizers()
        self._standing = self._whole.state_dict(keep_vars=True)

    def _parameter(self, value: torch.Tensor, *, requires_grad: bool) -> torch.nn.Parameter:
        hooked = self.on_gradient is not None and value.is_floating_point()
        made = torch.nn.Parameter(value, requires_grad=hooked or requires_grad)
        if hooked:
            made.register_post_accumulate_grad_hook(self.on_gradient)  # type: ignore[no-untyped-call]
        made.requires_grad_(requires_grad)
        return made

    def standing(self) -> dict[str, Any]:
        """The models' state_dict as it is between two steps, also in the middle of one, when modules show gathered
        parameters.
        """
        return {name: value.detach() if torch.is_tensor(value) else value for name, value in self._standing.items()}

    def _point_optimizers(self) -> None:
        parameters = self.parameters()
        for part, groups in self._groups.items():
            for group, names in zip(self._optimizers[part].param_groups, groups, strict=True):
                group["params"][:] = [parameters[name] for name in names]

    def _wrap(self, mesh: DeviceMesh) -> None:
        before = [frozenset(vars(bare.module)) for bare in self._bare]
        for model in self._models:
            self._shard(model, mesh)
        for bare, keys in zip(self._bare, before, strict=True):
            bare.added = frozenset(vars(bare.module)) - keys
        self.modules = [bare.module for bare in self._bare if isinstance(bare.module, FSDPModule)]

    def _unwrap(self) -> None:
        for module in self.modules:
            module.reshard()
        parameters = self.parameters()
        for bare in self._bare:
            _take_off(bare)
        for name, parameter in parameters.items():
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            self._put(name, torch.nn.Parameter(empty, requires_grad=parameter.requires_grad))

    def _put(self, name: str, parameter: torch.nn.Parameter) -> None:
        for module, attribute in self._places[name]:
            own_parameters(module)[attribute] = parameter


def _names(whole: torch.nn.Module) -> dict[int, str]:
    """By its id, what each parameter is called in a state_dict: wrappers of modules may hide themselves there."""
    names: dict[int, str] = {}
    for name, tensor in whole.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), name)
    for name, parameter in whole.named_parameters():
        if id(parameter) not in names:
            raise UsageError(
                f"parameter {name!r} is not in the model's state_dict(), so it could not be moved or saved"
            )
    return {id(parameter): names[id(parameter)] for parameter in whole.parameters()}


def as_dtensor(tensor: Sharded, local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A DTensor over `mesh`, made of this rank's part of it."""
    return DTensor.from_local(
        local,
        mesh,
        [*[Replicate()] * (mesh.ndim - 1), Shard(tensor.dim)],
        run_check=False,
        shape=torch.Size(tensor.shape),
        stride=torch.empty(tensor.shape, device="meta").stride(),
    )


def shard_dim(name: Callable[[], str], tensor: torch.Tensor) -> int | None:
    """Along which dimension a tensor is sharded; None: every rank has all of it. UsageError for another layout, which
    calls the tensor `name()`.
    """
    if not isinstance(tensor, DTensor):
        return None
    *outer, placement = tensor.placements
    if type(placement) is not Shard or not all(isinstance(each, Replicate) for each in outer):
        raise UsageError(
            f"{name()} is laid out as {tensor.placements}; shard= must use the mesh that it is given, as it is: over "
            "its last dimension everything is sharded"
        )
    return placement.dim


def _dim_of(name: str, parameter: torch.Tensor, mesh: DeviceMesh) -> int:
    if mesh.ndim > 1 and isinstance(parameter, DTensor) and parameter.device_mesh != mesh:
        raise UsageError(
            f"{name} is sharded over another mesh, so its gradients would not be summed over the replica groups; "
            "shard= must use the mesh that it is given, as it is: fully_shard(module, mesh=mesh)"
        )
    dim = shard_dim(lambda: name, parameter)
    if dim is None:
        raise UsageError(
            f"shard= left parameter {name!r} unsharded; end it with fully_shard(model, mesh=mesh), and without "
            "ignored_params"
        )
    return dim


def _take_off(bare: _Bare) -> None:
    """Leave nothing of FSDP's on the module. Its state objects are emptied: they refer to themselves in circles."""
    module, own = bare.module, vars(bare.module)
    forget_composable_state(module)
    module.__class__ = bare.kind
    hooks = [value for key, value in own.items() if "hooks" in key and isinstance(value, dict)]
    ids = {number for registry in hooks for number, hook in registry.items() if _is_fsdps(hook)}
    for registry in hooks:
        for number in ids & registry.keys():
            del registry[number]
    for key in bare.added & own.keys():
        _empty(own.pop(key))
    bare.added = frozenset()


def _is_fsdps(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)  # as torch.nn.Module wraps those for load_state_dict
    return str(getattr(function, "__module__", "")).startswith(fsdp.PACKAGE)


def _empty(value: object) -> None:
    """Free all shards, also if a script holds its last loss, whose graph references the state of its modules."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            _empty(each)
    elif type(value).__name__ in fsdp.HOLDERS and type(value).__module__.startswith(fsdp.PACKAGE):
        held = list(vars(value).values())
        value.__dict__.clear()
        _empty(held)
