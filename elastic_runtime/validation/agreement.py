"""Values that must be equal on all workers, compared in the sum that each step has anyway.

A worker whose hyperparameters, GradScaler's scale or parameters differ from the others' trains another model, and
nothing fails. Invariant: no step that such a worker took part in is applied without an error that ends the job.

- Hyperparameters, the numbers of schedulers and of optimizers: each worker adds a checksum, so that all of them notice
  a difference in the step in which it appears, before it is applied. They then gather the values, for the message.
- Parameters, in the `FRESH` steps after each change of the members: elements of all of them are gathered.
- In a joiner's first step such a difference is the joiner's own: it ends, and the others repeat the step without it.
  Afterwards, and where rank 0 begins as well, the job ends on all workers: what one computes from its own samples,
  rank 0 does too, so its state is not that of a run alone either.
- Parameters, later: rank 0 adds elements of 1/8 of them in every 8th step, so that each one is looked at once in
  `FULL_TURN` steps, and each worker compares. The steps of a worker that differs were applied by then, so it adds a
  mark to the next step's sum and all workers end; at the end of the training, elements of all parameters are gathered.

Values are compared within a tolerance. Equal bits were rejected: devices of two kinds may round an optimizer's
operations differently, while the gradients that they apply are the same to the bit, so such differences do not grow.
Workers whose parameters had equal bits in the fresh steps are compared more strictly from then on.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from elastic_runtime.errors import CollectiveError, ModelMismatchError
from elastic_runtime.state.transfer import gather_values
from elastic_runtime.torch_internals.modules import scale_of
from elastic_runtime.validation.compared_numbers import first_difference, named_numbers, numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_runtime.membership.process_group import Group

TURNS = 8
EVERY = 8
FULL_TURN = TURNS * EVERY
"""Steps within which a parameter that differs is found."""
FRESH = 4
"""Steps after a change of the members in which all parameters are compared."""
_TOLERANCE = 1e-3
_STRICT = 1e-5
_ELEMENTS = 4
_MOD = 251
MARKS = 5
"""Numbers that every worker adds: whether it has found a difference, two residues of a checksum and their squares."""


class Agreement:
    """Compares by a step's sum: `MARKS` numbers of each worker, and `size` of rank 0 (scale, sampled elements)."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]] = (),
        optimizers: Sequence[torch.optim.Optimizer] = (),
        scaler: torch.amp.GradScaler | None = None,
        schedulers: Sequence[object] = (),
    ) -> None:
        self._optimizers, self._scaler, self.schedulers = list(optimizers), scaler, list(schedulers)
        self._named = [(name, p) for name, p in parameters if p.numel() and p.is_floating_point()]
        self._turns = [self._named[turn::TURNS] for turn in range(TURNS)]
        self.size = 1 + max(map(len, self._turns), default=0) if optimizers else 0
        self._kept: list[object] = []  # the values of the last checksum
        self._checksum, self._residues = 0, (0, 0)
        self._differs = ""  # the error of this worker, of which the others are notified in the next step
        self._own: torch.Tensor | None = None  # of the elements that this step compares
        self._fresh = FRESH
        self._trained = self._veteran = False  # this worker has trained; before the members changed last
        self._tolerance = _TOLERANCE
        self._group: Group | None = None

    def marks(self) -> tuple[int, int, int, int, int]:
        """Return what this worker adds to the step's numbers: whether it differs, and its checksum."""
        first, second = self._residues = self._checksum_residues()
        return bool(self._differs), first, first * first, second, second * second

    def fill(self, section: torch.Tensor, step: int, *, leader: bool) -> None:
        """Write rank 0's values, or zeros, into `section`, of shape (size,)."""
        self._own = self._sample(step) if step % EVERY == 0 else None
        section.fill_(-0.0)  # which changes no number it is added to
        if leader and self._own is not None:
            section[: self._own.numel()].copy_(self._own)

    def train_alone(self) -> None:
        """Note that this worker has trained a step without others."""
        self._trained = True

    def check(
        self, marks: Sequence[float], section: torch.Tensor, step: int, workers: int, group: Group | None = None
    ) -> None:
        """ModelMismatchError where this worker's values are not rank 0's, or the job cannot continue as it is.

        CollectiveError where another worker's are not, so that the step is to be repeated without it. `marks`: the sums
        of all workers'. `group`: of all workers; without one, differences of numbers are not looked for.
        """
        differs, first, first_squares, second, second_squares = marks
        if differs:
            raise ModelMismatchError(self._differs or _OTHERS)
        if group is not None:
            own = self._residues
            same = _same(own[0], first, first_squares, workers) and _same(own[1], second, second_squares, workers)
            self._check_numbers(group, step, same=same)
        self._check_own(section, step)
        self._trained = True

    def _check_numbers(self, group: Group, step: int, *, same: bool) -> None:
        if group is not self._group:
            self._group, self._fresh, self._veteran = group, FRESH, self._trained
        if not same:
            self._compare_numbers(group, step)
        if self._fresh:
            self._compare_parameters(group, f"in step {step}", _STRICT)
            self._fresh -= 1

    def _check_own(self, section: torch.Tensor, step: int) -> None:
        if self._own is not None:
            self._check_sample(section[: self._own.numel()], self._own, step)

    def check_all(self, group: Group) -> None:
        """Compare elements of all parameters at the end of the training. ModelMismatchError on all workers."""
        if self._named:
            self._fresh = 0
            self._compare_parameters(group, "at the end of the training", self._tolerance, self._differs)

    # Numbers

    def _checksum_residues(self) -> tuple[int, int]:
        values = numbers(self._optimizers, self.schedulers)
        if values != self._kept:
            self._kept = values
            self._checksum = zlib.crc32(repr(values).encode())
        return self._checksum % _MOD, self._checksum // _MOD % _MOD

    def _compare_numbers(self, group: Group, step: int) -> None:
        """Gather all numbers, and compare them one by one: what was rounded differently is no difference."""
        own = dict(named_numbers(self._optimizers, self.schedulers))
        rows, veterans = zip(*gather_values(group, (own, self._veteran)), strict=True)
        other = [rank for rank, row in enumerate(rows) if first_difference(row, rows[0])]
        if other:
            rank = group.rank if group.rank in other else other[0]
            name = first_difference(rows[rank], rows[0])
            self._raise(_number_differs(name, step, rank, rows), group.rank in other, rank_0_trained=veterans[0])

    def _raise(self, message: str, mine: bool, *, rank_0_trained: bool) -> NoReturn:  # noqa: FBT001
        """Raise the error of a difference, `mine` or another worker's, which this one may go on without."""
        if rank_0_trained and self._fresh == FRESH and not mine:
            raise CollectiveError(message)
        raise ModelMismatchError(message)

    # Parameters

    def _compare_parameters(self, group: Group, when: str, tolerance: float, found: str = "") -> None:
        marks = torch.tensor([float(bool(found)), float(self._veteran)])
        gathered = group.all_gather(torch.cat([marks, self._elements()]))
        rows, found_by, veteran = gathered[:, 2:], gathered[:, 0] > 0, bool(gathered[0, 1])
        if self._fresh < FRESH and bool((rows == rows[:1]).all()):
            self._tolerance = _STRICT
        same = torch.isclose(rows, rows[:1], rtol=tolerance, atol=1e-6, equal_nan=True)
        other = (~same.all(1) | found_by).nonzero().flatten().tolist()
        if other:
            rank = group.rank if group.rank in other else other[0]
            message = found or self._first_parameter(~same[rank], rows, rank, when)
            self._raise(message, group.rank in other, rank_0_trained=veteran)

    def _first_parameter(self, differs: torch.Tensor, rows: torch.Tensor, rank: int, when: str) -> str:
        if not bool(differs.any()):
            return _OTHERS
        index = int(differs.nonzero()[0])
        what = f"parameter {self._named[index // _ELEMENTS][0]!r} of rank {rank}"
        return _parameter_differs(what, when, float(rows[rank, index]), float(rows[0, index]))

    def _elements(self) -> torch.Tensor:
        """Return some elements of each parameter. Shape: (parameters * _ELEMENTS,)."""
        found = []
        for _, parameter in self._named:
            flat = parameter.detach().reshape(-1)
            at = torch.arange(_ELEMENTS, device=flat.device) * (flat.numel() - 1) // (_ELEMENTS - 1)
            found.append(flat[at].to(torch.float32))
        device = found[0].device if found else torch.device("cpu")
        return torch.cat([each.to(device) for each in found]).cpu() if found else torch.empty(0)

    def _sample(self, step: int) -> torch.Tensor:
        """Rank-independent elements of this turn's parameters, and the scaler's scale. Shape: (1 + parameters,)."""
        scale = scale_of(self._scaler) if self._scaler is not None else None
        chosen = self._turns[step // EVERY % TURNS]
        values = [_element(parameter, step) for _, parameter in chosen]
        first = torch.zeros(1) if scale is None else scale.detach().reshape(1)
        device = values[0].device if values else first.device
        return torch.cat([value.to(device, torch.float32) for value in (first, *values)])

    def _check_sample(self, theirs: torch.Tensor, own: torch.Tensor, step: int) -> None:
        """Note a difference, of which all workers are notified in the next step: this one is applied by the others."""
        theirs = theirs.to(own.device, torch.float32)
        same = torch.isclose(own, theirs, rtol=self._tolerance, atol=1e-6, equal_nan=True)
        if bool(same.all()) or self._differs:
            return
        index = int((~same).nonzero()[0])
        chosen = self._turns[step // EVERY % TURNS]
        name = "the GradScaler's scale" if index == 0 else f"parameter {chosen[index - 1][0]!r}"
        what = f"{name} of this worker"
        self._differs = _parameter_differs(what, f"in step {step}", float(own[index]), float(theirs[index]))


_OTHERS = (
    "a parameter of another worker differs from rank 0's, as its own error says; the steps since then are those of no "
    "one model, so no worker continues: correct the script, and resume from a checkpoint of before"
)


def _parameter_differs(what: str, when: str, here: float, there: float) -> str:
    return (
        f"{what} differs from rank 0's {when}: it is {here:g}, rank 0's {there:g}. Something changes it by a worker's "
        "own samples, time or rank, or by a counter of its own: an initialisation from the first batch (compute it "
        "from a fixed batch before prepare), a decision on a local loss (use job.mean(loss)), a counter (use "
        "job.step, or job.track), an optimizer or scheduler that prepare was not given"
    )


def _number_differs(name: str, step: int, rank: int, rows: Sequence[dict[str, Any]]) -> str:
    return (
        f"{name} of rank {rank} differs from rank 0's in step {step}: it is {rows[rank].get(name)}, rank 0's "
        f"{rows[0].get(name)}; it must be a function of what all workers have: of job.step, of job.mean(loss) in "
        "place of a worker's loss (ReduceLROnPlateau), of a scheduler that prepare was given, or of an object that "
        "job.track carries"
    )


def _same(value: int, total: float, squares: float, workers: int) -> bool:
    """Return whether as many residues as workers, all equal to `value`, have these sums: no others have both."""
    return abs(total - workers * value) < 0.5 and abs(squares - workers * value**2) < 0.5


def _element(parameter: torch.nn.Parameter, step: int) -> torch.Tensor:
    """One element, another one in each turn. Shape: (1,)."""
    flat = parameter.detach().reshape(-1) if not parameter.is_contiguous() else parameter.detach().view(-1)
    at = step * 2654435761 % flat.numel()
    return flat[at : at + 1]
