"""Losses, and how a step is cut."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

from tests.elastic_runtime.zoo.generated.parts.registry import part
from tests.elastic_runtime.zoo.parts import GLOBAL_BATCH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.elastic_runtime.zoo.generated.drafts import Draft


@part("loss")
def mean(s: Draft) -> None:
    pass


@part("loss", rehearsed="depend on the number of workers", modes=("fast",))
def class_weights(s: Draft) -> None:
    weights = torch.tensor([1.0, 1.15, 1.0])
    s.loss = lambda output, y: cross_entropy(output, y, weight=weights)


@part("loss")
def class_weights_with_their_sum(s: Draft) -> None:
    weights = torch.tensor([1.0, 2.0, 1.0])
    s.loss = lambda output, y: (cross_entropy(output, y, weight=weights), {"weight": float(weights[y].sum())})


@part("loss")
def sum_over_samples(s: Draft) -> None:
    s.loss = lambda output, y: (cross_entropy(output, y, reduction="sum") / GLOBAL_BATCH, {"reduction": "sum"})


@part("loss", rehearsed="sum", modes=("fast",))
def sum_over_a_constant(s: Draft) -> None:
    s.loss = lambda output, y: cross_entropy(output, y, reduction="sum") / GLOBAL_BATCH


def _masked(output: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = (y > 0).float()
    return (cross_entropy(output, y, reduction="none") * mask).sum() / mask.sum().clamp(min=1.0), mask.sum()


@part("loss", rehearsed="weight=", modes=("fast",))
def mean_over_a_mask(s: Draft) -> None:
    s.loss = lambda output, y: _masked(output, y)[0]


@part("loss")
def mean_over_a_mask_with_its_sum(s: Draft) -> None:
    def loss(output: torch.Tensor, y: torch.Tensor) -> Any:
        found, weight = _masked(output, y)
        return found, {"weight": float(weight)}

    s.loss = loss


@part("loss", refused="create_graph=True, but gradients that are summed")
def mean_with_a_graph_of_its_gradients(s: Draft) -> None:
    s.loss = lambda output, y: (cross_entropy(output, y), {"create_graph": True})


@part("loss")
def decayed_weights(s: Draft) -> None:
    s.more_loss.append(lambda: 0.01 * sum(p.square().sum() for p in s.model.parameters()))


# How a step is cut


@part("cut")
def whole(s: Draft) -> None:
    pass


@part("cut", modes=("fast",))
def in_pieces(s: Draft) -> None:
    s.init["max_batch_per_gpu"] = 5


@part("cut")
def by_global_steps(s: Draft) -> None:
    s.by_global_steps = True


@part("cut")
def epochs_of_three_steps(s: Draft) -> None:
    """Left as an iteration begins: a training that resumes there has none, so nothing is counted."""
    s.leaves, s.leaves_first = lambda: s.job.position.index == 3, True


def _cut_short(s: Draft) -> Iterator[Any]:
    for batch in islice(s.loader, 3):  # noqa: UP028  (a worker that resumes counts from 0 again)
        yield batch


def _counted(s: Draft) -> Iterator[Any]:
    for number, batch in enumerate(s.loader):
        s.number = number
        yield batch


@part("cut", rehearsed="not at the same step|at different places", noted="islice", modes=("fast",))
def epochs_of_three_iterations(s: Draft) -> None:
    s.batches = lambda: _cut_short(s)


@part("cut", rehearsed="not at the same step|at different places", noted="number", modes=("fast",))
def left_after_three_iterations(s: Draft) -> None:
    s.batches, s.leaves = lambda: _counted(s), lambda: s.number == 3


@part("cut", rehearsed="depend on the number|other gradients", noted="number")
def every_third_iteration_weighs_more(s: Draft) -> None:
    s.batches = lambda: _counted(s)
    s.scale_loss.append(lambda loss: loss * (3.0 if s.number % 3 == 2 else 1.0))


@part("cut", modes=("exact",))
def in_three_shards(s: Draft) -> None:
    s.init["shards"] = 3
