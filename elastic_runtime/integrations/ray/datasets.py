"""Ray datasets in an elastic loop: each as a whole, with an index, so that the job's loader shares it out.

Ray splits a dataset among a fixed number of workers. Here the shares change with the size, and each sample is trained
once per epoch all the same: so a worker gets every row by its number, and reads the blocks that it needs from Ray's
object store, without copies on the node where they are.
"""

from __future__ import annotations

import bisect
import itertools
from typing import TYPE_CHECKING, Any

import ray
from torch.utils.data import Dataset

from elastic_runtime.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn


class RowDataset(Dataset[dict[str, Any]]):
    """A Ray dataset's rows by number; each is a dict of its columns, as numpy values."""

    def __init__(self, blocks: list[Any], counts: list[int]) -> None:
        self._blocks = [block for block, count in zip(blocks, counts, strict=True) if count]
        self._ends = list(itertools.accumulate(count for count in counts if count))
        self._fetched: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self._ends, index)
        if number not in self._fetched:
            self._fetched[number] = ray.get(self._blocks[number])
        row = index - (self._ends[number - 1] if number else 0)
        return {column: values[row] for column, values in self._fetched[number].items()}

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse the methods of Ray's own shard, which is one of a fixed number, with what to write."""
        if name.startswith(("iter_", "to_", "materialize", "streaming_split")):
            raise UsageError(
                f"get_dataset_shard(...).{name}: a shard is one of a fixed number of workers, which changes here; "
                "write: loader = torch.utils.data.DataLoader(get_dataset_shard(name), batch_size=N, shuffle=True), and "
                "give it to job.prepare (see docs/guides/ray_train.md)"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fetched": {}}


class Shards:
    """What `ray.train.get_dataset_shard(name)` returns."""

    def __init__(self, datasets: dict[str, RowDataset]) -> None:
        self._datasets = datasets

    def get_dataset_shard(self, info: Any) -> RowDataset:
        """Return the dataset, as Ray's own provider does. UsageError for a name that was not given."""
        if info.dataset_name not in self._datasets:
            raise UsageError(
                f"get_dataset_shard({info.dataset_name!r}): datasets={{...}} of the trainer has {list(self._datasets)}"
            )
        return self._datasets[info.dataset_name]


def shards_of(datasets: Mapping[str, Any]) -> Shards:
    """Compute the datasets, and return them for the workers. The blocks belong to the calling program."""
    return Shards({name: _rows(each() if callable(each) else each) for name, each in datasets.items()})


def _rows(dataset: Any) -> RowDataset:
    blocks = dataset.to_numpy_refs()
    return RowDataset(blocks, ray.get([_count.remote(block) for block in blocks]))


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def _count(block: dict[str, Any]) -> int:
    return len(next(iter(block.values()))) if block else 0
