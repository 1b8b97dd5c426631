"""The model of the newest checkpoint in a format that other programs read.

    python -m elastic_runtime.export CHECKPOINT_DIRECTORY model.safetensors
    python -m elastic_runtime.export CHECKPOINT_DIRECTORY model --format dcp

A safetensors file is written by the format's own rules: the length of a header, the header in JSON, the tensors. So it
needs no package. Of tensors that share memory (tied weights) the file has a copy for each name, as `save_model` of the
package would refuse, or leave out. A folder of torch.distributed.checkpoint is written by torch; a sharded model reads
it with any number of workers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import CheckpointError, ElasticError, StateError
from elastic_runtime.sharded.files import load_newest
from elastic_runtime.state.checkpoint import bytes_of, write_whole
from elastic_runtime.state.packing import pack

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


def export_safetensors(directory: str | Path, target: str | Path) -> int:
    """Write the model's tensors, by their names in its state_dict, and return the step of the checkpoint.

    CheckpointError where there is no complete checkpoint, or the file cannot be written; StateError for tensors of
    types that the format does not have.
    """
    step, tensors = _newest_model(directory)
    for name, tensor in tensors.items():
        _check_type(name, tensor)
    place = Path(target)
    partial = place.with_name(f"{place.name}.partial-{os.getpid()}")
    write_whole(place, partial, step, _blocks(tensors, {"format": "pt", "step": str(step)}))
    return step


def export_dcp(directory: str | Path, target: str | Path) -> int:
    """Write the model as a folder of torch.distributed.checkpoint, and return the step of the checkpoint.

    Read it with `torch.distributed.checkpoint.load({"model": state_dict}, checkpoint_id=target)`. CheckpointError where
    there is no complete checkpoint, or the folder exists or cannot be written.
    """
    # A quarter of a second, and many modules:
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415

    step, tensors = _newest_model(directory)
    place = Path(target)
    if place.exists():
        raise CheckpointError(f"{place} exists; name a new folder")
    partial = place.with_name(f"{place.name}.partial-{os.getpid()}")
    try:
        with warnings.catch_warnings(action="ignore"):  # that it is one process
            save({"model": tensors}, checkpoint_id=partial, no_dist=True)
        partial.rename(place)
    except (OSError, CheckpointException) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{place} could not be written: {error}") from error
    return step


_FORMATS = {"safetensors": export_safetensors, "dcp": export_dcp}


def _newest_model(directory: str | Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Return (step, tensors by name); CheckpointError where there is no complete checkpoint."""
    found = load_newest(str(directory))
    if found is None:
        raise CheckpointError(f"{directory} has no complete checkpoint; name the folder of ELASTIC_CHECKPOINT_DIR")
    step, state = found
    return step, {name: value for name, value in state["model"].items() if isinstance(value, torch.Tensor)}


def _blocks(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        dense = tensor.cpu().contiguous()
        yield bytes_of(dense)


def _check_type(name: str, tensor: torch.Tensor) -> None:
    """StateError for what the format does not have: complex numbers, and tensors made of others."""
    if tensor.dtype not in _DTYPES or len(pack(tensor)[1]) != 1:
        raise StateError(f"tensor {name!r} is of type {tensor.dtype}, which safetensors does not have")


def main(arguments: list[str] | None = None) -> int:
    """Export as the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m elastic_runtime.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", help="of the checkpoints: ELASTIC_CHECKPOINT_DIR of the job")
    parser.add_argument("target", help="the file to write; with --format dcp the folder")
    parser.add_argument("--format", choices=_FORMATS, default="safetensors", help="safetensors unless given")
    options = parser.parse_args(arguments)
    try:
        step = _FORMATS[options.format](options.directory, options.target)
    except ElasticError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{options.target}: the model after step {step}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
