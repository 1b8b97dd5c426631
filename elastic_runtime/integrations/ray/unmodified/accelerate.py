"""Accelerate in a loop for TorchTrainer: ElasticAccelerator, whose epochs are counted by the loop's driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_runtime.integrations.accelerate import ElasticAccelerator
from elastic_runtime.integrations.accelerate.prepared import TrainingLoader
from elastic_runtime.integrations.ray.unmodified.names import driver

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch.utils.data import DataLoader

    from elastic_runtime.loop.job import Job


class RayAccelerator(ElasticAccelerator):
    """An Accelerator that needs no `accelerator.epochs`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        driver().before_job()
        super().__init__(*args, **kwargs)
        driver().follow(self.job)

    def batch_of(self, loader: DataLoader[Any]) -> tuple[int, int | None]:
        """Samples of a global step, those of the least number of workers, and the most of one iteration."""
        most, cut = super().batch_of(loader)
        return driver().options.kept(most), cut

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As ElasticAccelerator's; nothing where an epoch is run again."""
        if driver().replaying:
            driver().backward(loss)
        else:
            super().backward(loss, **kwargs)

    def _training_loader(self, loader: DataLoader[Any], place: bool) -> TrainingLoader | None:  # noqa: FBT001
        found = super()._training_loader(loader, place)
        if found is not None:
            found.__class__ = CountedLoader
        return found

    def begin(self) -> None:
        """Begin the training."""
        self._begin()

    def enter(self, epoch: int) -> None:
        """Begin an epoch, as `epochs` does."""
        self.follow()
        self.read_alone, self.epoch, self.epoch_over = False, epoch, False

    def alone(self) -> None:
        """Let no call reach the other workers."""
        self._show(self.process_index, 1)

    def models(self) -> list[torch.nn.Module]:
        """Return what is trained."""
        return list(self._trained)


class CountedLoader(TrainingLoader):
    """The training loader; each iteration over it is an epoch of the job. A `TrainingSource` as well."""

    def __iter__(self) -> Iterator[Any]:
        return driver().epoch(self)

    def make_job(self) -> tuple[Job, Any]:
        """Give the job all that was prepared; return it, and this loader's batches."""
        accelerator = self._accelerator
        assert isinstance(accelerator, RayAccelerator)
        accelerator.begin()
        driver().models.extend(accelerator.models())
        return accelerator.job, _Batches(self)

    def same_as(self, other: Any) -> bool:
        """Whether it is this one."""
        return self is other

    def begin(self) -> None:
        """Do nothing: the samples are read by number."""

    def sample(self) -> Any:
        """Return a batch, whichever."""
        assert self.elastic is not None
        assert isinstance(self._accelerator, RayAccelerator)
        self._accelerator.alone()
        return self.on_device(self.elastic.sample())


class _Batches:
    """The batches of an epoch."""

    def __init__(self, loader: CountedLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        loader, accelerator = self._loader, self._loader._accelerator  # noqa: SLF001
        assert isinstance(accelerator, RayAccelerator)
        assert loader.elastic is not None
        accelerator.enter(accelerator.job.position.epoch)
        return loader._epoch(loader.elastic)  # noqa: SLF001
