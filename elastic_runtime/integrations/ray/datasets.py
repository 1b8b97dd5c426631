"""What `ray.train.get_dataset_shard` returns: a DataIterator of Ray's, whose batches are those of an elastic job.

In a training loop `iter_torch_batches` and `iter_batches` are the job's steps over the rows of an epoch, which
`dataset_server` numbers; elsewhere they are this worker's share of all rows. It is a map-style dataset as well, for the
loops of elastic_runtime, which give `DataLoader(shard)` to `job.prepare`.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import ray
import torch
import torch.distributed as dist
from ray.data import DataContext, DataIterator
from torch.utils.data import DataLoader, IterableDataset

from elastic_runtime.errors import UsageError
from elastic_runtime.integrations.ray.dataset_server import start_server
from elastic_runtime.integrations.ray.ray_internals import accessor_of, finalized, joined_blocks
from elastic_runtime.integrations.ray.unmodified.driver import SEE
from elastic_runtime.integrations.ray.unmodified.names import driver
from elastic_runtime.plan.order import mix_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import NoReturn

    from elastic_runtime.integrations.ray.dataset_server import Piece
    from elastic_runtime.loop.job import Job

KEPT_BLOCKS = 4
"""Blocks that a worker keeps mapped: those of a step, and of the one before."""
MANY_ROWS = 1 << 40


class Rows:
    """Rows by number, in pieces of blocks that are fetched as they are needed."""

    def __init__(self, pieces: Sequence[Piece] = ()) -> None:
        self._pieces: list[Piece] = []
        self._ends: list[int] = []
        self._fetched: OrderedDict[int, Any] = OrderedDict()
        self._dropped = 0
        self.extend(pieces)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def count(self) -> int:
        """The number of pieces."""
        return len(self._pieces)

    def extend(self, pieces: Iterable[Piece]) -> None:
        """Add further rows."""
        for piece in pieces:
            self._pieces.append(piece)
            self._ends.append(len(self) + piece.rows)

    def drop_before(self, row: int) -> None:
        """Let go of the blocks whose rows all come before this one."""
        while self._dropped < len(self._ends) and self._ends[self._dropped] <= row:
            self._fetched.pop(self._dropped, None)
            self._pieces[self._dropped] = self._pieces[self._dropped].dropped()
            self._dropped += 1

    def block(self, rows: Sequence[int]) -> Any:
        """Return one block with these rows, in this order."""
        parts = []
        for number, run in itertools.groupby(rows, lambda row: bisect.bisect_right(self._ends, row)):
            begin = self._pieces[number].first - (self._ends[number] - self._pieces[number].rows)
            within = [row + begin for row in run]
            accessor = accessor_of(self._fetch(number))
            if within == list(range(within[0], within[0] + len(within))):
                parts.append(accessor.slice(within[0], within[0] + len(within)))
            else:
                parts.append(accessor.take(within))
        return parts[0] if len(parts) == 1 else joined_blocks(parts)

    def _fetch(self, number: int) -> Any:
        if number not in self._fetched:
            block = self._pieces[number].block
            assert block is not None, "a row of a step that all workers have applied is not read again"
            self._fetched[number] = ray.get(block[0])
        self._fetched.move_to_end(number)
        while len(self._fetched) > KEPT_BLOCKS:
            self._fetched.popitem(last=False)
        return self._fetched[number]


class RowStream(IterableDataset[int]):
    """The numbers of an epoch's rows, in the order in which they are trained; read by every worker.

    Until the training has begun it ends nowhere, and asks nothing: a worker that joins must not begin an epoch again.
    `window`: rows that are shuffled among each other; 1: none.
    """

    def __init__(self, server: Any, name: str, window: int, seed: int) -> None:
        self._server, self._name, self._window, self._seed = server, name, window, seed
        self._epoch = self._offset = 0
        self.rows, self._of_epoch, self._ended = Rows(), -1, False
        self.begun = False

    def state_dict(self) -> dict[str, int]:
        """Return the place in the epoch."""
        return {"offset": self._offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at this place."""
        self._offset = state["offset"]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that is read next."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        while True:
            start = self._offset // self._window * self._window
            order = self._order(start, self._available(start + self._window) - start)
            if self._offset - start >= len(order):
                return
            for row in order[self._offset - start :]:
                self._offset += 1
                yield row

    def _order(self, start: int, rows: int) -> Sequence[int]:
        rows = min(rows, self._window)
        if rows <= 1 or not self.begun:
            return range(start, start + rows)
        generator = torch.Generator().manual_seed(mix_seed(self._seed, self._epoch, start) % (1 << 63))
        return [start + each for each in torch.randperm(rows, generator=generator).tolist()]

    def _available(self, wanted: int) -> int:
        """Return how many rows the epoch has, as far as is known once `wanted` have come, or it has ended."""
        if not self.begun:
            return MANY_ROWS
        if self._of_epoch != self._epoch:
            self.rows, self._of_epoch, self._ended = Rows(), self._epoch, False
        while len(self.rows) < wanted and not self._ended:
            applied = self._applied()
            self.rows.drop_before(applied)
            answer = self._server.pieces.remote(self._name, self._epoch, self.rows.count, applied)
            pieces, self._ended = ray.get(answer)
            self.rows.extend(pieces)
        return len(self.rows)

    def _applied(self) -> int:
        """Return the rows before the window of the step that is computed."""
        job = driver().job
        position = job.position if job is not None else None
        if position is None or position.epoch != self._epoch:
            return 0
        return position.samples // self._window * self._window


class RowsSource:
    """A `TrainingSource`: one way to iterate over a shard."""

    def __init__(self, shard: ElasticShard, batch_size: int, drop_last: bool, window: int, seed: int) -> None:  # noqa: FBT001
        self._shard, self.batch_size, self._drop_last = shard, batch_size, drop_last
        self.stream = RowStream(shard.server, shard.name, window, seed)

    def __str__(self) -> str:
        return f"get_dataset_shard({self._shard.name!r})"

    def same_as(self, other: Any) -> bool:
        """Whether it reads the same dataset; the batches keep their size."""
        return str(self) == str(other)

    def make_job(self) -> tuple[Job, Any]:
        """Make the job of the epochs' rows; its batches are blocks."""
        drop_last = self._drop_last

        def loader_of(size: int) -> DataLoader[Any]:
            return DataLoader(self.stream, batch_size=size, drop_last=drop_last, collate_fn=self.block)

        return driver().make_job(self.batch_size, loader_of)

    def block(self, rows: Sequence[int]) -> Any:
        """Return a batch's rows as a block."""
        return self.stream.rows.block(rows)

    def begin(self) -> None:
        """The training begins: the stream has its rows from now on."""
        self.stream.begun = True

    def sample(self) -> Any:
        """Return a block of rows, whichever."""
        piece = ray.get(self._shard.server.some.remote(self._shard.name))
        return Rows([piece]).block(range(min(self.batch_size, piece.rows)))


class ElasticShard(DataIterator):  # type: ignore[misc]  # Ray has no types
    """One dataset of the trainer."""

    def __init__(self, server: Any, name: str) -> None:
        self.server, self.name = server, name
        self._whole: Rows | None = None

    # As Ray's DataIterator

    def _iter_batches(
        self,
        *,
        batch_size: int | None = 256,
        batch_format: str | None = "default",
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        _collate_fn: Callable[[Any], Any] | None = None,
        _finalize_fn: Callable[[Any], Any] | None = None,
        **_: Any,
    ) -> Iterable[Any]:
        """Return what can be iterated over once in each epoch. Ray's own methods call it."""
        window = max(1, local_shuffle_buffer_size or 1)
        source = RowsSource(self, batch_size or 1, drop_last, window, local_shuffle_seed or 0)
        source_size = batch_size

        def blocks() -> Iterator[Any]:
            if not driver().trains:
                return self._share(source_size, drop_last=drop_last)
            if source_size is None:
                raise UsageError(
                    f"get_dataset_shard({self.name!r}) is iterated without a batch_size; write: "
                    f"iter_torch_batches(batch_size=N) ({SEE})"
                )
            return driver().epoch(source)

        return _Iterable(lambda: (_as_batch(each, batch_format, _collate_fn, _finalize_fn) for each in blocks()))

    def _share(self, batch_size: int | None, *, drop_last: bool) -> Iterator[Any]:
        """Yield this worker's part of all rows, in blocks; one where an epoch is run again."""
        rank, size, rows = dist.get_rank(), dist.get_world_size(), self._rows()
        start, stop = len(rows) * rank // size, len(rows) * (rank + 1) // size
        step = batch_size or max(1, stop - start)
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            if drop_last and batch_size and end - begin < batch_size:
                return
            yield rows.block(range(begin, end))
            if driver().replaying:
                return

    def _to_ref_bundle_iterator(self) -> NoReturn:
        raise UsageError(
            f"get_dataset_shard({self.name!r}) is read by iter_torch_batches, iter_batches, iter_rows, or as a dataset "
            f"of rows by DataLoader; use one of them ({SEE})"
        )

    def stats(self) -> str:
        """Return nothing: the execution's statistics are the server's."""
        return ""

    def schema(self) -> Any:
        """Return the dataset's schema."""
        return ray.get(self.server.schema.remote(self.name))

    def get_context(self) -> Any:
        """Return Ray Data's context in this process."""
        return DataContext.get_current()

    # As a map-style dataset

    def __len__(self) -> int:
        return len(self._rows())

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return these rows; each is a dict of its columns, as numpy values."""
        columns = accessor_of(self._rows().block(indices)).to_batch_format("numpy")
        return [{name: values[row] for name, values in columns.items()} for row in range(len(indices))]

    def _rows(self) -> Rows:
        if self._whole is None:
            self._whole = Rows(ray.get(self.server.whole.remote(self.name)))
        return self._whole

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_whole": None}


class _Iterable:
    """Can be iterated over again and again, each time an epoch."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


def _as_batch(block: Any, batch_format: str | None, collate: Any, finalize: Any) -> Any:
    batch = accessor_of(block).to_batch_format(batch_format)
    batch = batch if collate is None else collate(batch)
    return batch if finalize is None else finalized(finalize, batch)


class Shards:
    """What answers `ray.train.get_dataset_shard(name)` in a worker."""

    def __init__(self, server: Any, names: Sequence[str]) -> None:
        self._server, self._names = server, list(names)
        self._shards: dict[str, ElasticShard] = {}

    def get_dataset_shard(self, info: Any) -> ElasticShard:
        """Return the dataset, as Ray's own provider does. UsageError for a name that was not given."""
        name = info.dataset_name
        if name not in self._names:
            raise UsageError(f"get_dataset_shard({name!r}): datasets={{...}} of the trainer has {self._names}")
        return self._shards.setdefault(name, ElasticShard(self._server, name))

    def end(self) -> None:
        """End the server: an execution of Ray Data may outlive its last handle."""
        if self._server is not None:
            ray.kill(self._server)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": {}}


def shards_of(datasets: Mapping[str, Any]) -> Shards:
    """Start the server of the datasets, if there are some, and return what a worker is given."""
    return Shards(start_server(datasets) if datasets else None, list(datasets or {}))
