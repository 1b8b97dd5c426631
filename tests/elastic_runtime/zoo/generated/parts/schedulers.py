"""Schedulers, and where they step."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim import lr_scheduler

from tests.elastic_runtime.zoo.generated.drafts import evaluated
from tests.elastic_runtime.zoo.generated.parts.registry import part
from tests.elastic_runtime.zoo.parts import EPOCHS, SAMPLES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.elastic_runtime.zoo.generated.drafts import Draft


@part("scheduler")
def constant(s: Draft) -> None:
    pass


def _gamma(optimizer: Any) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.8)


@part("scheduler")
def stepped_at_the_epochs_begin(s: Draft) -> None:
    s.make_scheduler = _gamma
    s.prologue.append(lambda epoch: s.scheduler.step() if epoch else None)


@part("scheduler")
def stepped_at_the_epochs_end(s: Draft) -> None:
    s.make_scheduler = _gamma
    s.epilogue.append(lambda _epoch: s.scheduler.step())


@part("scheduler")
def one_cycle(s: Draft) -> None:
    s.make_scheduler = lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=SAMPLES * EPOCHS + 1)
    s.after_step.append(lambda _: s.scheduler.step())


@part("scheduler")
def rate_of_the_epoch_by_hand(s: Draft) -> None:
    def set_rate(epoch: int) -> None:
        for group in s.optimizer.param_groups:
            group["lr"] = 0.05 * 0.7**epoch

    s.prologue.append(set_rate)


@part("scheduler")
def rate_lowered_at_the_epochs_begin(s: Draft) -> None:
    def lower(_: int) -> None:
        for group in s.optimizer.param_groups:
            group["lr"] *= 0.8

    s.prologue.append(lower)


@part("scheduler")
def rate_lowered_at_the_epochs_end(s: Draft) -> None:
    def lower(_: int) -> None:
        for group in s.optimizer.param_groups:
            group["lr"] *= 0.8

    s.epilogue.append(lower)


@part("scheduler")
def plateau_of_the_mean(s: Draft) -> None:
    s.make_scheduler = lambda optimizer: lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=0.3
    )
    s.epilogue.append(lambda _: s.scheduler.step(evaluated(s)))


@part("scheduler", refused="differs from rank 0's", rehearsed="differs from rank 0's", refused_in="with:2")
def plateau_of_a_local_loss(s: Draft) -> None:
    """The metric is each worker's own: its last micro-batch's loss."""
    s.make_scheduler = lambda optimizer: lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=0.3
    )
    s.after_step.append(lambda loss: s.scheduler.step(loss))  # noqa: PLW0108  (bound once it is made)


@part(
    "scheduler", refused="differs from rank 0's", rehearsed="differs from rank 0's|another state", refused_in="join:6"
)
def momentum_by_a_counter_of_steps(s: Draft) -> None:
    steps = [0]

    def count(_: Any) -> None:
        if s.job.applied:
            steps[0] += 1
        for group in s.optimizer.param_groups:
            group["weight_decay"] = 0.1 * min(steps[0] / 10, 1.0)

    s.after_step.append(count)


@part(
    "scheduler", refused="differs from rank 0's", rehearsed="differs from rank 0's|another state", refused_in="join:6"
)
def rate_by_a_counter_of_epochs(s: Draft) -> None:
    epochs = [0]

    def count(_: int) -> None:
        epochs[0] += 1
        for group in s.optimizer.param_groups:
            group["lr"] = 0.05 * 0.7 ** epochs[0]

    s.prologue.append(count)


@part("scheduler")
def rate_of_a_kept_group_lowered(s: Draft) -> None:
    """The script keeps the group itself, and not the optimizer."""
    kept: list[Any] = []
    s.prepared.append(lambda: kept.extend(s.optimizer.param_groups))

    def lower(_: int) -> None:
        for group in kept:
            group["lr"] *= 0.8

    s.epilogue.append(lower)


@part("scheduler")
def rate_of_the_next_step(s: Draft) -> None:
    """As a schedule that is not torch's sets it, after each iteration: the step's own rate where it is not complete."""

    def set_rate(_: Any) -> None:
        for group in s.optimizer.param_groups:
            group["lr"] = 0.1 * 0.8 ** (s.job.step + 1)

    s.after_step.append(set_rate)


class Warmup:
    """As pytorch_warmup has it: a factor of the rate, around the step of another schedule."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.count = optimizer, 0
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self._dampen()

    def _dampen(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= min(1.0, self.count / 9)

    @contextmanager
    def dampening(self) -> Iterator[None]:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate
        yield
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self._dampen()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "rates": self.rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.rates = state["count"], list(state["rates"])


@part("scheduler")
def warmup_around_each_step(s: Draft) -> None:
    s.make_scheduler = Warmup

    def warm(_: Any) -> None:
        with s.scheduler.dampening():
            pass

    s.after_step.append(warm)


class Forgetful(Warmup):
    state_dict = None  # type: ignore[assignment]


@part("scheduler", refused="lacks state_dict and load_state_dict")
def schedule_without_a_state(s: Draft) -> None:
    s.make_scheduler = Forgetful
