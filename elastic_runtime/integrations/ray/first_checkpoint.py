"""The checkpoint with which a training began, for workers that join later.

An unmodified loop counts its epochs from it, so that it must be the same for all workers of an attempt. Ray deletes old
checkpoints as CheckpointConfig(num_to_keep=n) says, so a copy is kept.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from pyarrow.fs import FileType, copy_files
from ray.train import Checkpoint

if TYPE_CHECKING:
    from ray.train.v2._internal.execution.storage import StorageContext

_NAME = "name"


class FirstCheckpoint:
    """The copy in the storage of a run. `key` names the attempt, or the job."""

    def __init__(self, storage: StorageContext, key: str) -> None:
        self._files = storage.storage_filesystem
        self._directory = f"{storage.experiment_fs_path}/.elastic_runtime/begun-{key}"

    def keep(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """Copy the checkpoint with which the attempt begins, and return the copy."""
        name = checkpoint.path.rstrip("/").rpartition("/")[2] if checkpoint else ""
        self._files.create_dir(f"{self._directory}/{name}", recursive=True)
        if checkpoint:
            copy_files(
                checkpoint.path,
                f"{self._directory}/{name}",
                source_filesystem=checkpoint.filesystem,
                destination_filesystem=self._files,
            )
        with self._files.open_output_stream(f"{self._directory}/{_NAME}") as file:
            file.write(name.encode())
        return self._copy(name)

    @property
    def kept(self) -> bool:
        """Whether a worker has kept it already."""
        return bool(self._files.get_file_info(f"{self._directory}/{_NAME}").type != FileType.NotFound)

    def read(self) -> Checkpoint | None:
        """Return the copy; None where the training began without a checkpoint."""
        with self._files.open_input_stream(f"{self._directory}/{_NAME}") as file:
            return self._copy(file.read().decode())

    def drop(self) -> None:
        """Remove it, once no worker can join any more."""
        with contextlib.suppress(OSError):  # there is none
            self._files.delete_dir(self._directory)

    def _copy(self, name: str) -> Checkpoint | None:
        return Checkpoint(f"{self._directory}/{name}", self._files) if name else None
