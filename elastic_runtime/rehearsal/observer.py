"""The comparisons of a rehearsal within the loop, and the points at which it makes a step fail.

Every worker of a rehearsal has one observer: the global step calls `summed`, the session `between_steps`.

Dropout and the statistics of batches are switched off while two sizes are compared. Both make a gradient depend on the
number of workers in any script, right or wrong. Without them, what still depends on it is the script's: a mean over
tokens, weights of classes, a balance of experts.

`model.eval()` is not used for this: models return other things then, as detectors and Hugging Face's do.

It also finds state that a script keeps beside what `prepare` and `job.track` were given, and buffers that are filled
from samples: those of rank 0's samples count for all workers.
"""

from __future__ import annotations

import gc
import math
import random
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.swa_utils import AveragedModel

from elastic_runtime.errors import CollectiveError, ElasticError
from elastic_runtime.reduction.buffers import MAX_NUMEL
from elastic_runtime.rehearsal.loop_variables import LoopVariables
from elastic_runtime.rehearsal.records import Fingerprints, fingerprint_of, fingerprints_of, flattened, widened
from elastic_runtime.rehearsal.timetable import FAILING, JOINED, LAST, SAVED, SECOND
from elastic_runtime.state import checkpoint
from elastic_runtime.torch_internals.modules import BatchStatistics, Dropout, inner_schedulers, own_buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from elastic_runtime.rehearsal.orders import RehearsedOrders
    from elastic_runtime.rehearsal.records import Fingerprints
    from elastic_runtime.state.training_state import TrainingState


KINDS: tuple[type, ...] = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_INTERNAL = ("torch._", "torch.fx", "elastic_runtime")


def objects_beside(state: TrainingState, models: Sequence[torch.nn.Module]) -> list[dict[str, Any]]:
    """Modules, optimizers and schedulers of the process that are no part of the job's state, with their fingerprints.

    [{"kind": class name, "shape": what it is made of, "fingerprints": by name, "averages": whether it is an
    AveragedModel}], of those that hold a tensor or number.
    """
    covered = carried_by(state, models)
    found = [each for each in gc.get_objects() if _is_kind(each) and id(each) not in covered]
    inner = {id(part) for each in found for part in _with_parts(each) if part is not each}
    rows = []
    for each in found:
        if id(each) in inner or type(each).__module__.startswith(_INTERNAL):
            continue
        fingerprints = fingerprints_of(flattened(each.state_dict()))
        if fingerprints:
            row = {"kind": type(each).__name__, "shape": sorted(fingerprints), "fingerprints": fingerprints}
            rows.append({**row, "averages": isinstance(each, AveragedModel)})
    return rows


def carried_by(state: TrainingState, models: Sequence[torch.nn.Module]) -> set[int]:
    """Return the ids of what is prepared or tracked, and of its parts."""
    return {id(part) for root in [state.model, *models, *_values(state)] for part in _with_parts(root)}


def attributes_of(model: torch.nn.Module) -> Fingerprints:
    """Tensors and numbers that modules hold as plain attributes: no parameters, no buffers."""
    found: Fingerprints = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or name == "training" or isinstance(value, bool):
                continue
            if isinstance(value, torch.Tensor):
                found[f"{path}.{name}".lstrip(".")] = fingerprint_of(value)
            elif isinstance(value, int | float):
                found[f"{path}.{name}".lstrip(".")] = [float(value), 0.0]
    return found


def filled_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return buffers by name: of modules that are not torch's, whose statistics are those of rank 0 by intention."""
    return {
        f"{path}.{name}".lstrip("."): tensor.detach()
        for path, module in model.named_modules()
        if not type(module).__module__.startswith("torch.") and not isinstance(module, BatchStatistics)
        for name, tensor in own_buffers(module).items()
        if tensor is not None and tensor.numel() <= MAX_NUMEL
    }


def _is_kind(value: object) -> bool:
    """By type and not by isinstance, which asks proxies for their class."""
    return issubclass(type(value), KINDS)


def _values(state: TrainingState) -> Iterable[Any]:
    return (part for _, part in state.parts)


def _with_parts(value: Any) -> list[Any]:
    """An object, and the modules, optimizers or schedulers that it is made of."""
    if isinstance(value, torch.nn.Module):
        return list(value.modules())
    parts = [*inner_schedulers(value), getattr(value, "optimizer", None)]
    return [value, *(part for part in parts if part is not None)]


def uses_batch_statistics(module: torch.nn.Module) -> bool:
    """Whether it normalizes with the mean and variance of the samples that one worker has."""
    return isinstance(module, BatchStatistics) and (module.training or module.running_mean is None)


class SwitchedOff:
    """The layers of `models`. A loop may call `model.train()` in each step: they are switched at each forward, too."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
        self._before: list[tuple[torch.nn.Module, str, Any]] | None = None
        for model in models:
            model.register_forward_pre_hook(self._before_forward)

    @property
    def off(self) -> bool:
        """Whether they are."""
        return self._before is not None

    def set(self, *, off: bool) -> None:
        """Switch them off, or back to what they were."""
        for module, name, value in reversed(self._before or ()):
            setattr(module, name, value)
        self._before = [] if off else None
        for model in self._models:
            self._before_forward(model)

    def _before_forward(self, model: torch.nn.Module, *_inputs: Any) -> None:
        if self._before is None:
            return
        for module in model.modules():
            for name, value in _to_change(module):
                self._before.append((module, name, getattr(module, name)))
                setattr(module, name, value)


def _to_change(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(attribute, value) of a layer that is not off. Own modules have probabilities of dropout as attributes, too."""
    if isinstance(module, torch.jit.ScriptModule):
        return
    if uses_batch_statistics(module) and module.training:
        yield "training", False
    for name, value in vars(module).items():
        drops = "drop" in name or (name == "p" and isinstance(module, Dropout))
        if drops and isinstance(value, float) and value:
            yield name, 0.0


_SMALLEST_HALF = 2.0**-24
_COARSE = {torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}


class Observer:
    """One worker. `workers`: how many train now. `models`: as given to `prepare`. `draws`: whether its
    loader's processes may draw random numbers.
    """

    def __init__(
        self,
        orders: RehearsedOrders,
        state: TrainingState,
        workers: Callable[[], int],
        models: Sequence[torch.nn.Module],
        draws: Callable[[], bool],
    ) -> None:
        self._orders, self._state, self._workers, self._models = orders, state, workers, list(models)
        self._records, self._draws = orders.records, draws
        joins = orders.worker == SECOND
        self._joined = JOINED if joins else 0  # the step that this worker begins with, counted from the first one
        self._attempts = {JOINED: 1} if joins else {}  # by step: how often it was computed, by anyone
        self._offset: int | None = None
        self._processes_draw: bool | None = None
        self._between = -1  # the step before which the state was recorded last
        self._streams: list[Any] = []
        self._buffers: dict[str, torch.Tensor] = {}  # as the attempt begins
        self._variables = LoopVariables(self._models, lambda: carried_by(state, self._models))
        self._coarse = any(p.dtype in _COARSE for _, p in state.parameters())
        self._exact = state.reduction != "reduction='fast'"
        self._switched = SwitchedOff(self._models)
        register_module_forward_hook(self._look_at_precision)

    @property
    def _step(self) -> int:
        """The current step, counted from the one that the training begins with."""
        if self._offset is None:
            self._offset = self._state.position.step - self._joined
        return self._state.position.step - self._offset

    def started(self) -> None:
        """The training starts."""
        self._variables.start()
        if self._processes_draw is None:
            self._processes_draw = self._draws()

    def entered(self) -> None:
        """The loader's loop begins."""
        self._variables.enter()

    def between_steps(self) -> None:
        """A step is about to begin, possibly for the second time."""
        step = self._step
        self._variables.iterate()
        if step > self._between:
            self._between = step
            self._record_state(step)
            if step == SAVED:
                self._save_and_load(step)
            if step > LAST:
                self._orders.release()
        self._begin_attempt(step)

    def _begin_attempt(self, step: int) -> None:
        """Switch off what makes gradients depend on the size, where sizes are compared for the first time."""
        fails = self._attempts.get(step, 0) < FAILING.count(step)
        self._switched.set(off=step == JOINED and fails and not self._exact)
        self._streams = streams()
        self._buffers = {name: value.clone() for name, value in filled_buffers(self._state.model).items()}

    def summed(self) -> None:
        """The gradients of the step, those of its last backward pass, are summed over all workers.

        CollectiveError where the timetable lets the step fail.
        """
        step, workers = self._step, self._workers()
        attempt = self._attempts.get(step, 0)
        self._records.write(
            "gradients",
            step=step,
            attempt=attempt,
            workers=workers,
            fingerprints=self._gradients(),
            random=bool(self._processes_draw) or streams() != self._streams,
            normalised=self._normalised(),
            switched_off=self._switched.off,
            resolution=self._resolution(),
            precision=self._precision(),
            exact=self._exact,
            attributes=attributes_of(self._state.model),
            buffers=self._changes_of_buffers(),
        )
        self._attempts[step] = attempt + 1
        if attempt < FAILING.count(step):
            raise CollectiveError(f"the rehearsal lets step {step} fail")

    def _look_at_precision(self, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        """Note that modules compute in a coarse type, as autocast lets them."""
        if isinstance(output, torch.Tensor) and output.dtype in _COARSE:
            self._coarse = True

    def _precision(self) -> str:
        """What rounding depends on: the types that are computed in, and the device."""
        device = next((p.device.type for _, p in self._state.parameters()), "cpu")
        return "coarse" if self._coarse else "full" if device == "cpu" else "device"

    def _gradients(self) -> Fingerprints:
        return fingerprints_of((name, p.grad) for name, p in self._state.parameters())

    def _changes_of_buffers(self) -> Fingerprints:
        """Return by how much each buffer has changed in this attempt, and as a last number its norm."""
        found: Fingerprints = {}
        for name, value in filled_buffers(self._state.model).items():
            before = self._buffers.get(name)
            if before is not None and before.shape == value.shape:
                change = widened(value) - widened(before)
                found[name] = [*fingerprint_of(change), fingerprint_of(value)[0]]
        return found

    def _record_state(self, step: int) -> None:
        workers = self._workers()
        objects = objects_beside(self._state, self._models) if workers > 1 else []
        fingerprints = fingerprints_of(flattened(self._captured()))
        variables, kept = self._variables.changed() if workers > 1 else ({}, [])
        variables |= self._variables.counted() if workers > 1 else {}
        self._records.write(
            "state",
            step=step,
            workers=workers,
            fingerprints=fingerprints,
            objects=objects,
            variables=variables,
            kept_states=kept,
        )

    def _captured(self) -> dict[str, Any]:
        """Return the state that all workers share; the position in a stream is each worker's own."""
        captured = self._state.capture()
        for name, part in self._state.parts:
            for own in getattr(part, "values_of_each_worker", ()):
                captured["parts"][name]["state"].pop(own, None)
        return self._shared(captured)

    @staticmethod
    def _shared(captured: dict[str, Any]) -> dict[str, Any]:
        return {"model": captured["model"], "parts": {k: v for k, v in captured["parts"].items() if k != "loader"}}

    def _save_and_load(self, step: int) -> None:
        before = fingerprints_of(flattened(self._captured()))
        try:
            path = checkpoint.save(str(self._orders.directory / "checkpoints"), step, self._state.capture())
            self._state.load(checkpoint.load(path)[1])
        except ElasticError as error:
            self._records.write("unsaved", step=step, message=str(error))
            return
        self._records.write("loaded", step=step, before=before, after=fingerprints_of(flattened(self._captured())))

    def _resolution(self) -> float:
        """The norm of gradients that are as small as float16 can hold, of the parameters that are float16."""
        halves = sum(p.numel() for _, p in self._state.parameters() if p.dtype == torch.float16)
        return math.sqrt(halves) * _SMALLEST_HALF

    def _normalised(self) -> bool:
        """Whether a layer computes with the statistics of the batch."""
        return any(uses_batch_statistics(part) for model in self._models for part in model.modules())


def streams() -> list[Any]:
    """Return the state of the random streams."""
    numpy = sys.modules.get("numpy")
    found: list[Any] = [torch.get_rng_state().tolist(), random.getstate()]
    if numpy is not None:
        found.append(str(numpy.random.get_state()))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found.append(torch.cuda.get_rng_state().tolist())
    return found
