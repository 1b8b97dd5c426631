"""Everything that makes the training's state: model, optimizers, schedulers, scaler and position."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from elastic_runtime.errors import StateError
from elastic_runtime.order import mix_seed
from elastic_runtime.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class Stateful(Protocol):
    """Anything with the usual two methods."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on."""

    def load_state_dict(self, state: dict[str, Any]) -> object:
        """Go on from there."""


@dataclass
class TrainingState:
    """What `prepare` was given, and the position. All workers hold the same values between two steps."""

    model: torch.nn.Module
    parts: list[tuple[str, Stateful]] = field(default_factory=list)
    position: Position = field(default_factory=Position)

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Names and parameters, in order of definition, shared ones once."""
        yield from self.model.named_parameters()

    def capture(self) -> dict[str, Any]:
        """The whole state; its tensors are the live ones, not copies."""
        return {
            "fingerprint": self.fingerprint(),
            "position": (self.position.epoch, self.position.index, self.position.step),
            "model": dict(self.model.state_dict()),
            "parts": {name: part.state_dict() for name, part in self.parts},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take a captured state over. StateError where it is another model's."""
        if state["fingerprint"] != self.fingerprint():
            raise StateError(
                "the saved state belongs to another model: its parameters have other names, shapes or types; "
                "build the same model, or remove the checkpoints to begin anew"
            )
        self.model.load_state_dict(state["model"])
        for name, part in self.parts:
            part.load_state_dict(state["parts"][name])
        self.position = Position(*state["position"])

    def fingerprint(self) -> int:
        """A number that differs between models whose parameters differ in name, shape or type."""
        text = [f"{name}:{tuple(p.shape)}:{p.dtype}:{p.requires_grad}" for name, p in self.parameters()]
        text += [name for name, _ in self.parts]
        digest = hashlib.sha256("\n".join(text).encode()).digest()
        return mix_seed(int.from_bytes(digest[:8], "big"))
