"""A step's files while its job runs: the step file for the workers, and the staged outputs of each worker."""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.dsl.worker.start import STAGING, local_path, output_locations
from kfp_gpuquota.errors import JobFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Json = dict[str, Any]
STEP_FILE: Final = "step.json"
_LOGS: Final = "executor-logs"
_BEGINNING: Final = 8192
PRIVATE_DIRECTORY: Final = 0o700
PRIVATE_FILE: Final = 0o600


class Staging:
    """The staging directories of one job of one step; `job` is the job's name.

    The root, beside `outputs.outputFile`, holds the step file. It exists from before the job is submitted until the
    outputs have been published, so where it is missing, no outputs are left to publish.
    """

    def __init__(self, executor_input: Json, job: str) -> None:
        self._executor_input = executor_input
        self.tag = f"{STAGING}/{job}"
        self.root = Path(executor_input["outputs"]["outputFile"]).parent / self.tag
        self.step_file = self.root / STEP_FILE

    def create(self, argv: list[str], environment: Mapping[str, str]) -> None:
        """Write the step file for the workers. Its environment may contain secrets, so only this user can read it."""
        self.root.mkdir(parents=True, exist_ok=True, mode=PRIVATE_DIRECTORY)
        content = {
            "tag": self.tag,
            "argv": argv,
            "environment": dict(environment),
            "executor_input": self._executor_input,
        }
        temporary = self.step_file.with_suffix(f".{os.getpid()}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file)
        temporary.replace(self.step_file)

    def exists(self) -> bool:
        """Return whether there may be outputs to publish."""
        return self.root.exists()

    def declared(self) -> list[str]:
        """Return the names of the outputs that the step's command writes. KFP writes the log's own."""
        outputs = self._executor_input["outputs"]
        return sorted({*outputs.get("parameters", {}), *outputs.get("artifacts", {})} - {_LOGS})

    def publish_outputs(self, worker: str) -> None:
        """Move this worker's outputs to their final paths, and remove the files of all workers. Idempotent.

        Raises JobFailedError for an artifact at a path of its command's own (KFP's `custom_path`) that is not here: KFP
        would end the step as succeeded, without the artifact.
        """
        elsewhere = ""
        with self._alone() as mine:
            if mine:
                self._translate(worker)
                for final in self._final_directories():
                    _move_into(final / self.tag / worker, final)
                self._name_artifacts()
                elsewhere = self._elsewhere()
                self.discard()
        if elsewhere:
            raise JobFailedError(
                f"the step names a path of its own for its output {elsewhere}, and its worker has left nothing there; "
                "write the output before the step ends"
            )

    def discard(self) -> None:
        """Remove every worker's files; the root last, because it marks unpublished outputs."""
        for root in sorted(self.directories(), key=lambda root: root == self.root):
            shutil.rmtree(root, ignore_errors=True)
            with contextlib.suppress(OSError):  # another job's staging lies beside it
                root.parent.rmdir()

    def directories(self) -> list[Path]:
        """Return the staging directories, one beside each output; each worker writes to a subdirectory."""
        return [final / self.tag for final in self._final_directories()]

    def _final_directories(self) -> list[Path]:
        """Return the final directories of the outputs, without duplicates."""
        locations = output_locations(self._executor_input)
        return list(dict.fromkeys(Path(local_path(owner[key])).parent for owner, key in locations))

    def _translate(self, worker: str) -> None:
        """Replace staged paths by final ones in all text files; the staging directory's name is unique.

        They are in the files that KFP reads, and in artifacts: a list of a data set's files, a checkpoint's index.
        """
        staged = re.compile(rf"/{re.escape(self.tag)}/{re.escape(worker)}(?![\w.-])".encode())
        for final in self._final_directories():
            for folder, _, names in os.walk(final / self.tag / worker):
                for path in (Path(folder, name) for name in names):
                    if path.is_file() and not path.is_symlink():
                        _remove_from_text(path, staged, final / self.tag / "rewritten")

    def _elsewhere(self) -> str:
        """Return "NAME at PATH" of an artifact that the command has at a path of its own that does not exist here."""
        declared = {owner[key] for owner, key in output_locations(self._executor_input)}
        try:
            written = json.loads(Path(self._executor_input["outputs"]["outputFile"]).read_bytes())
            listed = [(name, each) for name, kind in written["artifacts"].items() for each in kind["artifacts"]]
            paths = [(name, each.get("custom_path") or each.get("customPath")) for name, each in listed]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return ""  # KFP reads the file, and says what is wrong with it
        lost = (each for each in paths if each[1] and each[1] not in declared and not os.path.lexists(each[1]))
        return next((f"{name!r} at {path}" for name, path in lost), "")

    def _name_artifacts(self) -> None:
        """Write the executor's output file where the command wrote none, as with container components.

        KFP's backend generates it in that case; kfp.local would treat the step as one without artifacts.
        """
        outputs = self._executor_input["outputs"]
        artifacts = outputs.get("artifacts", {})
        path = Path(outputs["outputFile"])
        if artifacts and not path.exists():
            fields = ("name", "uri", "metadata")
            named = {
                name: {
                    "artifacts": [
                        {field: each[field] for field in fields if field in each} for each in kind["artifacts"]
                    ]
                }
                for name, kind in artifacts.items()
            }
            path.write_text(json.dumps({"artifacts": named}))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Hold the root's lock; yield False where another attempt of the step has published the outputs already."""
        try:
            descriptor = os.open(self.root, os.O_RDONLY)
        except FileNotFoundError:
            yield False
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield self.root.exists()
        finally:
            os.close(descriptor)


def _remove_from_text(path: Path, pattern: re.Pattern[bytes], temporary: Path) -> None:
    """Remove what matches from a file without zero bytes in its beginning. Of any size: it is not read into memory."""
    with path.open("rb") as file:
        if bytes(1) in (file.read(_BEGINNING) or bytes(1)):
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            spans = [found.span() for found in pattern.finditer(content)]
            if not spans:
                return
            with temporary.open("wb") as target:
                end = 0
                for begin, after in (*spans, (len(content), len(content))):
                    target.write(memoryview(content)[end:begin])
                    end = after
    shutil.copystat(path, temporary)
    temporary.replace(path)


def _move_into(source: Path, target: Path) -> None:
    """Move all entries of a directory into another one on the same file system, replacing existing entries.

    Absolute links from one to another of them lead to where that was moved.
    """
    for folder, folders, files in os.walk(source):
        for link in (path for name in (*folders, *files) if (path := Path(folder, name)).is_symlink()):
            if (leads_to := link.readlink()).is_relative_to(source):
                link.unlink()
                link.symlink_to(target / leads_to.relative_to(source))
    for entry in sorted(source.iterdir()) if source.is_dir() else ():
        destination = target / entry.name
        if destination.is_dir() and not destination.is_symlink():
            shutil.rmtree(destination)
        entry.replace(destination)
