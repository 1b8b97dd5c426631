"""What a script changes in a dataset after the loop is refused when the next one begins; what it may change passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from elastic_runtime.data.changed_datasets import ChangedDatasets
from elastic_runtime.errors import LoopError

if TYPE_CHECKING:
    from collections.abc import Callable


class Labelled(Dataset[Any]):
    def __init__(self) -> None:
        self.labels, self.scores, self.size = torch.zeros(3), np.zeros((3000, 200)), 1.0
        self.order, self.pairs = list(range(3)), [(torch.ones(1), 1)] * 40
        self.cache: list[Any] = [None, None, None]
        self.texts: dict[str, int] = {}
        self._reads = 0
        self.parent = self

    def __len__(self) -> int:
        return 3


def played(change: Callable[[Labelled], object], before_the_loop: Callable[[Labelled], object] | None = None) -> None:
    """One end of an epoch, and the beginning of the next."""
    data = Labelled()
    watch = ChangedDatasets([ConcatDataset([TensorDataset(torch.ones(3)), data]), Subset(data, [0, 1])])
    watch.ended()
    change(data)
    watch.left([])
    if before_the_loop:
        before_the_loop(data)
    watch.entered(1)


CHANGES: list[tuple[str, Callable[[Labelled], object]]] = [
    ("labels", lambda data: setattr(data, "labels", torch.ones(3))),
    ("labels", lambda data: data.labels.add_(1)),
    ("scores", lambda data: data.scores.fill(1.0)),
    ("size", lambda data: setattr(data, "size", 2.0)),
    ("order", lambda data: data.order.reverse()),
    ("pairs", lambda data: data.pairs.append((torch.ones(1), 2))),
    ("more", lambda data: setattr(data, "more", 1)),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_a_change_after_the_loop_is_refused_by_the_attributes_name(
    name: str, change: Callable[[Labelled], object]
) -> None:
    with pytest.raises(LoopError, match=f"changed '[a-z.0-9\\[\\]]*{name}' .* between the loops of epochs 0 and 1"):
        played(change)


def test_equal_values_caches_counters_and_what_is_set_before_the_loop_pass() -> None:
    played(lambda data: setattr(data, "labels", torch.zeros(3)))
    played(lambda data: data.cache.__setitem__(0, 1))
    played(lambda data: data.texts.update(a=1))
    played(lambda data: setattr(data, "_reads", 7))
    played(lambda data: setattr(data, "size", 2.0), lambda data: setattr(data, "size", 1.0))
