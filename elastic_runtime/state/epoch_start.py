"""The state with which an epoch began, for workers that enter the epoch in its middle.

A worker that resumes, or joins, runs the code between `for epoch in job.epochs(...)` and the loader's loop once more.
Invariant: that code has no effect on what is trained. It begins with the state of the epoch's beginning, and where the
loader's loop is entered the state of the middle of the epoch is put back. So `scheduler.step()`, `tau.mul_(0.7)`,
`optimizer.state.clear()` or `optimizer.add_param_group(...)` stand there as in a plain loop, and a variable that the
code computes from the rate, or draws at random, has the value that it has on the other workers.

Only what is small is kept from the epoch's beginning: hyperparameters, schedulers, tracked objects, buffers, random
streams, results of `job.repeat` and of collectives. Parameters, moments and averaged models are those of the middle of
the epoch while the code runs again; a copy is made to put them back, if the code has changed them when it ran first.

Rejected: a copy of the whole state in each epoch (twice the memory, and checkpoints twice as large); schedulers and
optimizers that do not act there (a rate, a buffer or a weight that is set by hand would still change twice); refusing
such code (half of all scripts have some).

The code after the loader's loop runs again, too, if the state of the loop's end is saved while it runs. So a copy of
what is small is kept at the loop's end, and saved in place of what that code has changed since. If it has changed
parameters or moments (weights that are exchanged for an evaluation), nothing is saved: see LoopEnd.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from elastic_runtime.errors import LoopError, StateError
from elastic_runtime.state.layouts import flat
from elastic_runtime.state.optimizer_state import (
    add_missing_groups,
    hyperparameters,
    load_optimizer,
    loading_in_place,
    set_hyperparameters,
)
from elastic_runtime.state.packing import pack, unpack
from elastic_runtime.torch_internals.modules import writes_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elastic_runtime.plan.position import Position
    from elastic_runtime.state.random_streams import RandomStreams
    from elastic_runtime.state.training_state import TrainingState

NOTHING: Final = object()
"""Returned where no result of `job.repeat` is kept."""
MOST_ELEMENTS = 1 << 20
"""Of the tensors of one object: one with more is left as it is in the middle of the epoch."""
_SAMPLED = 1000
_STREAM = "loader"


class Buffers(Protocol):
    """The buffers of the models."""

    def values(self) -> dict[str, torch.Tensor]:
        """Return copies of their values by name."""

    def load_transient(self, values: dict[str, torch.Tensor]) -> None:
        """Set these values."""


class EpochStart:
    """Keeps the state of the current epoch's beginning in `state.epoch_start`, and uses a received one."""

    def __init__(self, state: TrainingState, buffers: Buffers, streams: RandomStreams) -> None:
        self._state, self._buffers, self._streams = state, buffers, streams
        self._running = False  # the code before the loader's loop
        self._marks: list[int] = []
        self._replayed: list[Any] | None = None  # the results that are left, while the code runs again
        self._kept: dict[str, Any] | None = None  # the state of the middle of the epoch, meanwhile

    def capture(self) -> None:
        """Keep the state of now as that of the epoch's beginning."""
        self._state.epoch_start = {
            "epoch": self._state.position.epoch,
            "entered": False,
            "changes": False,
            "results": [],
            "collectives": True,
            "small": self._small(),
            "streams": self._streams.capture(),
        }

    def begin(self) -> None:
        """The code before the loader's loop comes next, for the first time or again."""
        state, start = self._state, self._state.epoch_start
        resumed, state.resumed, self._running = state.resumed, False, True
        self._kept = self._replayed = None
        if resumed and start is None:  # a checkpoint of an older version
            self._kept = self._middle(whole=True)
        elif resumed and start is not None and start["epoch"] == state.position.epoch:
            self._replayed = list(start["results"])
            if start["entered"]:
                self._kept = self._middle(whole=start["changes"])
                self._streams.load(start["streams"])  # those of this worker are put back
            self._apply(start["small"])
        else:
            self.capture()
        self._marks = self._checksums()

    def enter(self) -> bool:
        """The loader's loop begins; return whether in the middle of the epoch, by a worker that joined or resumed.

        LoopError where code that ran again changed what it did not change before.
        """
        if not self._running:
            return False
        self._running, self._replayed = False, None
        kept, self._kept = self._kept, None
        changes = self._marks != self._checksums()
        if kept is None:
            if self._state.epoch_start is not None:
                self._state.epoch_start |= {"entered": True, "changes": changes}
            return False
        if changes and kept["whole"] is None:
            raise LoopError(
                "the code before the loader's loop changed parameters or optimizer state of this worker, which joined "
                "or resumed in the middle of the epoch, and did not when the epoch began; it must do the same whenever "
                "an epoch is entered: decide on the epoch, or on an object that job.track carries"
            )
        self._put_back(kept)
        return True

    def leave(self) -> None:
        """The state is that of an earlier epoch, after a loss: what the code does up to its loop is of no account."""
        self._running, self._replayed, self._kept = False, None, None

    def begin_rerun(self, *, whole: bool) -> None:
        """An iteration without effect comes next. `whole`: the script may change parameters and moments in it."""
        self._kept, self._marks = self._middle(whole=whole), self._checksums()

    def end_rerun(self) -> None:
        """Undo what the script did in that iteration. LoopError for what cannot be undone."""
        kept, self._kept = self._kept, None
        assert kept is not None
        if kept["whole"] is None and self._marks != self._checksums():
            raise LoopError(
                "the loop changed sharded parameters or optimizer state beside optimizer.step(), in an iteration that "
                "is run again without effect, because the training resumes at the end of an epoch; let the optimizer "
                "do it: optimizer.register_step_post_hook"
            )
        self._put_back(kept)

    def end(self) -> None:
        """The loader's loop ends: what is saved until the next epoch begins is the state of now."""
        kept = self._middle(whole=False)
        self._state.loop_end = LoopEnd(self._state.position, kept, self._checksums(), self._checksums)

    # Results of job.repeat

    @property
    def has_collectives(self) -> bool:
        """Whether results of collectives outside of `job.repeat` are kept; False for one of an older version."""
        return self._state.epoch_start is not None and self._state.epoch_start.get("collectives", False)

    def next_result(self) -> Any:
        """Return the result that the other workers had here, while the code runs again; else NOTHING."""
        if not self._replayed:
            if self._replayed is not None and self._kept is not None:
                raise LoopError(
                    "the code before the loader's loop calls job.repeat, job.mean or job.all_reduce more often than it "
                    "did when the epoch began; it must do the same whenever an epoch is entered, for the other workers "
                    "are in their steps"
                )
            return NOTHING
        found = self._replayed.pop(0)
        if isinstance(found, str) and found == _UNSENDABLE:
            raise LoopError(
                "job.repeat before the loader's loop returned an object that cannot be carried to a worker that enters "
                "the epoch later; return numbers, tensors, or containers of them"
            )
        return found

    def note(self, result: Any) -> None:
        """Keep a result of `job.repeat`, or of a collective, for workers that enter the epoch later."""
        start = self._state.epoch_start
        if not self._running or start is None:
            return
        try:
            start["results"].append(_copied(result))
        except StateError:
            start["results"].append(_UNSENDABLE)

    # Inside

    def _middle(self, *, whole: bool) -> dict[str, Any]:
        """Return a copy of what the script can change; `whole`: with parameters and moments."""
        return {
            "small": self._small(),
            "streams": self._streams.capture(),
            "whole": _copied(self._large()) if whole else None,
        }

    def _put_back(self, kept: dict[str, Any]) -> None:
        """Set what `_middle` returned."""
        self._apply(kept["small"])
        if kept["whole"] is not None:
            self._load_large(kept["whole"])
        self._streams.load(kept["streams"])
        if self._state.kept_gradients:
            self._state.kept_gradients.put_back(self._state.model)

    def _optimizers(self) -> Iterator[tuple[str, torch.optim.Optimizer]]:
        for name, part in self._state.parts:
            if isinstance(part, torch.optim.Optimizer):
                yield name, part

    def _others(self) -> Iterator[tuple[str, Any]]:
        """All other parts; a stream's position is that of the middle of the epoch."""
        for name, part in self._state.parts:
            if not isinstance(part, torch.optim.Optimizer) and name != _STREAM:
                yield name, part

    def _small(self) -> dict[str, Any]:
        state = self._state
        others = {name: part.state_dict() for name, part in self._others() if not isinstance(part, torch.nn.Module)}
        return {
            "frozen": [name for name, parameter in state.parameters() if not parameter.requires_grad],
            "names": state.groups(),
            "groups": {name: [hyperparameters(g) for g in part.param_groups] for name, part in self._optimizers()},
            "parts": {name: _cloned(found) for name, found in others.items() if _is_small(found)},
            "buffers": self._buffers.values(),
        }

    def _apply(self, small: dict[str, Any]) -> None:
        state = self._state
        state.freeze(small)
        named = dict(state.parameters())
        for name, optimizer in self._optimizers():
            groups = small["groups"][name]
            del optimizer.param_groups[len(groups) :]
            add_missing_groups(optimizer, small["names"].get(name, []), named)
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                set_hyperparameters(group, values)
        for name, part in self._others():
            if name in small["parts"]:
                part.load_state_dict(_cloned(small["parts"][name]))
        self._buffers.load_transient(small["buffers"])

    def _large_parts(self) -> dict[str, dict[str, Any]]:
        states = ((name, part, part.state_dict()) for name, part in self._others())
        return {n: state for n, part, state in states if isinstance(part, torch.nn.Module) or not _is_small(state)}

    def _large(self) -> dict[str, Any]:
        return {
            "parameters": [parameter.detach() for _, parameter in self._state.parameters()],
            "optimizers": {name: part.state_dict() for name, part in self._optimizers()},
            "modules": self._large_parts(),
        }

    @torch.no_grad()
    def _load_large(self, large: dict[str, Any]) -> None:
        for (_, parameter), value in zip(self._state.parameters(), large["parameters"], strict=True):
            parameter.copy_(value)
        with loading_in_place([optimizer for _, optimizer in self._optimizers()]):
            for name, optimizer in self._optimizers():
                load_optimizer(optimizer, large["optimizers"][name])
        for name, part in self._others():
            if name in large["modules"]:
                part.load_state_dict(large["modules"][name])

    @torch.no_grad()
    def _checksums(self) -> list[int]:
        """Return a number of each large tensor, which most likely differs if the script has changed it.

        Of a model above MOST_ELEMENTS it is that of about a thousand elements, and torch's counter of changes in place:
        a joiner computes it while the others wait for its first step.
        """
        kept = [list(part.state.values()) for _, part in self._optimizers()]
        tensors = pack([[parameter for _, parameter in self._state.parameters()], kept, self._large_parts()])[1]
        parts = 1 if sum(tensor.numel() for tensor in tensors) <= MOST_ELEMENTS else _SAMPLED
        sums = [_checksum(tensor, parts) for tensor in tensors if tensor.numel()]
        changes = [writes_to(tensor) for tensor in tensors]
        return [*changes, *torch.stack([each.cpu() for each in sums]).tolist()] if sums else changes


@dataclass(frozen=True)
class LoopEnd:
    """The state at the end of the loader's loop: `kept`, and checksums of the rest, which `checksums()` returns."""

    position: Position
    kept: dict[str, Any]
    marks: list[int]
    checksums: Callable[[], list[int]]

    def is_intact(self) -> bool:
        """Return whether what is not kept is unchanged: parameters, moments, averaged models."""
        return self.marks == self.checksums()

    def rewound(self, captured: dict[str, Any]) -> dict[str, Any]:
        """Return a state that was captured since then as it was at the end of the loop."""
        small = self.kept["small"]
        parts = captured["parts"] | small["parts"]
        for name, groups in small["groups"].items():
            now = parts[name]["param_groups"]
            parts[name] = parts[name] | {"param_groups": [g | then for g, then in zip(now, groups, strict=False)]}
        changed = {"frozen": small["frozen"], "groups": small["names"], "parts": parts, "streams": self.kept["streams"]}
        for tensors in ("model", "transient"):
            values = captured[tensors]
            changed[tensors] = values | {name: each for name, each in small["buffers"].items() if name in values}
        return captured | changed


_UNSENDABLE = "\0unsendable"
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _checksum(tensor: torch.Tensor, parts: int) -> torch.Tensor:
    """Return a checksum of all elements, or of `parts` of them. Shape: ()."""
    own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    own = torch.view_as_real(own.resolve_conj()) if own.is_complex() else own
    bits = flat(own.detach()).view(_BITS[own.element_size()])
    return bits[:: 1 if parts == 1 else max(1, bits.numel() // parts)].sum(dtype=torch.int64)


def _copied(tree: Any) -> Any:
    """Return a copy whose tensors are on the CPU, in the memory layout of the originals."""
    skeleton, tensors = pack(tree)
    return unpack(
        skeleton, [tensor.to("cpu", copy=True) if _on_device(tensor) else tensor.clone() for tensor in tensors]
    )


def _on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu" and not hasattr(tensor, "to_local")


def _cloned(tree: Any) -> Any:
    """Return a copy; its tensors have no graph, with which they could not be copied."""
    skeleton, tensors = pack(tree)
    return unpack(skeleton, copy.deepcopy(tensors))


def _is_small(tree: Any) -> bool:
    return sum(tensor.numel() for tensor in pack(tree)[1]) <= MOST_ELEMENTS
