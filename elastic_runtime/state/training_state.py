"""Everything that makes the training's state: model, optimizers, schedulers, scaler and position."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from elastic_runtime.errors import StateError
from elastic_runtime.plan.order import mix_seed
from elastic_runtime.plan.position import Position
from elastic_runtime.state.optimizer_state import add_missing_groups, load_optimizer, loading_in_place
from elastic_runtime.state.sparse_parameters import sparse_parameters, zero_gradient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_runtime.state.epoch_start import LoopEnd
    from elastic_runtime.state.kept_gradients import KeptGradients


class Stateful(Protocol):
    """Anything with the usual two methods."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on."""

    def load_state_dict(self, state: dict[str, Any]) -> object:
        """Continue from this state."""


class Transient(Protocol):
    """Buffers of a model that its `state_dict` leaves out."""

    def transient(self) -> dict[str, torch.Tensor]:
        """Their values by name."""

    def load_transient(self, values: dict[str, torch.Tensor]) -> None:
        """Load these values."""


@dataclass(frozen=True)
class Totals:
    """The length of the training as the script requested it; -1: not by this number."""

    epochs: int = -1
    steps: int = -1
    steps_per_epoch: int = -1

    def __str__(self) -> str:
        length = "" if self.steps_per_epoch < 0 else f", of {self.steps_per_epoch} steps each"
        return f"job.steps({self.steps})" if self.steps >= 0 else f"job.epochs({self.epochs}){length}"


@dataclass
class TrainingState:
    """The arguments of `prepare`, and the position. All workers hold the same values between two steps."""

    model: torch.nn.Module
    parts: list[tuple[str, Stateful]] = field(default_factory=list)
    position: Position = field(default_factory=Position)
    reduction: str = "reduction='fast'"
    numerics: str = ""  # what all workers must have in common for results that are the same to the bit
    data: str = ""  # what the order of the samples depends on
    split: str = ""  # how a step is split
    totals: Totals = field(default_factory=Totals)
    sample_checksum: int = 0  # of a few samples; 0: unknown, or different each time they are read
    transient: Transient | None = None  # of the buffers that a state_dict leaves out
    kept_gradients: KeptGradients | None = None
    noise: Stateful | None = None  # of the gradients; None: it is not measured
    rounds: int = 0  # of work done together beside the training, since the workers started
    in_round: bool = False  # this worker is in one
    in_iteration: bool = False  # whose step counts already: the rest of it would be left out by a resume
    round_is_shared: bool = True  # and all others come to it, since the last loss of a sharded training
    awaited: bool = False  # others, the sender of the state among them, are in a round that this worker has not begun
    epoch_start: dict[str, Any] | None = None  # see EpochStart; None: nothing is kept
    loop_end: LoopEnd | None = None  # of the newest loop over the loader that has come to its end
    resumed: bool = False  # the state was received or read, and no epoch was begun with it yet
    _rehearsed: list[torch.optim.Optimizer] = field(default_factory=list)

    @property
    def between_loops(self) -> LoopEnd | None:
        """The end of the loader's loop, while the code after it runs."""
        end = self.loop_end
        return end if end is not None and end.position == self.position else None

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Names and parameters, in order of definition, shared ones once."""
        yield from self.model.named_parameters()

    def capture(self, model: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the whole state; its tensors are the live ones. `model`: its state_dict, if the caller has it."""
        whole = dict(self.model.state_dict()) if model is None else model  # first: FSDP then shows its shards again
        return {
            "fingerprint": self.fingerprint(),
            "reduction": self.reduction,
            "data": self.data,
            "optimizers": self._kinds(),
            "frozen": [name for name, parameter in self.parameters() if not parameter.requires_grad],
            "position": dataclasses.astuple(self.position),
            "model": whole,
            "parts": {name: part.state_dict() for name, part in self.parts},
            "groups": self.groups(),
            "transient": self.transient.transient() if self.transient else {},
            "zero_gradients": self.kept_gradients.names() if self.kept_gradients else [],
            "gradients_cleared": self.kept_gradients is not None and self.kept_gradients.cleared,
            "noise": self.noise.state_dict() if self.noise else None,
            "epoch_start": self.epoch_start,
            "laid_out": True,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load a captured state. Raises StateError for the state of another model."""
        self.check(state)
        self.freeze(state)
        own = self.model.state_dict()
        if not all(_same_memory(value, own.get(name)) for name, value in state["model"].items()):
            self.model.load_state_dict(state["model"])
        self.load_parts(state)

    def freeze(self, state: dict[str, Any]) -> None:
        """Freeze the layers that are frozen in the state."""
        frozen = set(state.get("frozen", ()))
        for name, parameter in self.parameters() if "frozen" in state else ():
            parameter.requires_grad_(name not in frozen)

    def load_parts(self, state: dict[str, Any]) -> None:
        """Load everything but the model."""
        if self.transient:
            self.transient.load_transient(state.get("transient", {}))
        named = dict(self.parameters())
        with loading_in_place(self.optimizers()):
            for name, part in self.parts:
                if isinstance(part, torch.optim.Optimizer):
                    add_missing_groups(part, state.get("groups", {}).get(name, []), named)
                    load_optimizer(part, state["parts"][name], laid_out=state.get("laid_out", False))
                else:
                    part.load_state_dict(state["parts"][name])
        if self.kept_gradients:
            self.kept_gradients.load(state.get("zero_gradients", ()), self.model)
        self.position = Position(*state["position"])
        if self.noise:  # a training that did not measure it has steps of a gain of 1
            self.noise.load_state_dict(state.get("noise") or {"scaled_steps": float(self.position.step)})
        self.epoch_start, self.resumed = state.get("epoch_start"), True

    def check(self, state: dict[str, Any]) -> None:
        """StateError where a captured state is another model's, or was trained in another way."""
        if state.get("reduction", self.reduction) != self.reduction:
            raise StateError(
                f"the saved state was trained with {state['reduction']}, this script asks for {self.reduction}; what "
                "follows would be neither: ask for the same, or remove the checkpoints to start from the beginning"
            )
        for what, own in (("data", self.data), ("optimizers", self._kinds())):
            if state.get(what, own) != own:
                raise StateError(
                    f"the saved state was trained with {state[what]}, this script has {own}; samples or optimizer "
                    "state would be mixed up: give it the same, or remove the checkpoints to start from the beginning"
                )
        if state["fingerprint"] != self.fingerprint():
            raise StateError(
                "the saved state belongs to another model: its parameters have other names, shapes or types; "
                "build the same model, or remove the checkpoints to start from the beginning"
            )

    def rehearse(self) -> None:
        """Make the optimizer allocate what a step allocates, so that a joiner receives into memory that is there.

        One step without gradients, its effect on the parameters undone. Only for torch's own optimizers, whose state is
        completely in `state`; others allocate when they receive.
        """
        for optimizer in self.optimizers():
            if type(optimizer).__module__.startswith("torch.optim") and not optimizer.state:
                self._rehearse(optimizer)

    def groups(self) -> dict[str, list[list[str]]]:
        """Return the names of the parameters in each optimizer's groups."""
        names = {id(parameter): name for name, parameter in self.parameters()}
        return {
            part_name: [[names.get(id(p), "") for p in group["params"]] for group in part.param_groups]
            for part_name, part in self.parts
            if isinstance(part, torch.optim.Optimizer)
        }

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return those among the parts."""
        return [part for _, part in self.parts if isinstance(part, torch.optim.Optimizer)]

    def _rehearse(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        saved, sparse = [p.detach().clone() for p in parameters], sparse_parameters(self.model)
        for parameter in parameters:
            parameter.grad = zero_gradient(parameter, sparse)
        step = getattr(type(optimizer).step, "__wrapped__", None)  # without the script's own hooks
        if step is not None and not isinstance(optimizer, torch.optim.LBFGS):
            step(optimizer)
        for parameter, value in zip(parameters, saved, strict=True):
            parameter.detach().copy_(value)
            parameter.grad = None
        self._rehearsed.append(optimizer)

    def forget_rehearsal(self) -> None:
        """Begin without a state, since no worker sends one."""
        for optimizer in self._rehearsed:
            optimizer.state.clear()
        self._rehearsed.clear()

    def leave_memory(self) -> None:
        """Move to new memory: a transfer into the old memory failed, and data in flight may still arrive there."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.data = tensor.detach().clone()
        self.forget_rehearsal()

    def fingerprint(self) -> int:
        """Return a number that differs between models whose parameters differ in name, shape or type."""
        text = [f"{name}:{tuple(p.shape)}:{p.dtype}" for name, p in self.parameters()]
        text += [name for name, _ in self.parts]
        return _hash("\n".join(text))

    def agreement(self) -> str:
        """Return the values beside the model that must be equal on all workers."""
        return ", ".join(part for part in (self.reduction, self.numerics, self.data, self.split, self._kinds()) if part)

    def agreement_fingerprint(self) -> int:
        """A number that differs between workers that could not train together."""
        return _hash(self.agreement())

    def _kinds(self) -> str:
        return " and ".join(type(optimizer).__name__ for optimizer in self.optimizers())


def _hash(text: str) -> int:
    return mix_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))


def _same_memory(received: object, own: object) -> bool:
    return (
        isinstance(received, torch.Tensor)
        and isinstance(own, torch.Tensor)
        and received.data_ptr() == own.data_ptr()
        and received.numel() > 0
    )
