"""Files of checkpoints for other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

from elastic_runtime.errors import CheckpointError, StateError
from elastic_runtime.export import export_dcp, export_safetensors, main
from elastic_runtime.state import checkpoint
from elastic_runtime.state.training_state import TrainingState

if TYPE_CHECKING:
    from pathlib import Path


def model() -> nn.Module:
    conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
    return nn.Sequential(conv, nn.BatchNorm2d(4), nn.Linear(2, 3).to(torch.bfloat16))


def test_the_newest_model_is_read_by_the_package_of_the_format(tmp_path: Path) -> None:
    old, new = model(), model()
    checkpoint.save(str(tmp_path), 3, TrainingState(old).capture())
    checkpoint.save(str(tmp_path), 7, TrainingState(new).capture())
    assert export_safetensors(tmp_path, tmp_path / "model.safetensors") == 7
    found, expected = load_file(tmp_path / "model.safetensors"), new.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.filterwarnings("ignore:torch.distributed is")  # one process reads
def test_the_newest_model_is_read_by_torchs_distributed_checkpoint(tmp_path: Path) -> None:
    saved, other = model(), model()
    checkpoint.save(str(tmp_path / "of the job"), 7, TrainingState(saved).capture())
    assert main([str(tmp_path / "of the job"), str(tmp_path / "model"), "--format", "dcp"]) == 0
    read = other.state_dict()
    load({"model": read}, checkpoint_id=tmp_path / "model", no_dist=True)
    for name, value in saved.state_dict().items():
        assert torch.equal(read[name], value), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "of the job"]


def test_a_folder_of_torchs_distributed_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path / "of the job"), 7, TrainingState(model()).capture())
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match="exists; name a new folder"):
        export_dcp(tmp_path / "of the job", tmp_path / "model")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be written"):
        export_dcp(tmp_path / "of the job", tmp_path / "file" / "model")


def test_a_folder_without_a_checkpoint_is_named_with_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="ELASTIC_CHECKPOINT_DIR"):
        export_safetensors(tmp_path, tmp_path / "model.safetensors")
    assert main([str(tmp_path), str(tmp_path / "model.safetensors")]) == CheckpointError.exit_code
    assert str(tmp_path) in capsys.readouterr().err


def test_a_tensor_of_a_type_that_the_format_does_not_have_is_named_and_no_file_is_left(tmp_path: Path) -> None:
    phase = nn.Module()
    phase.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    checkpoint.save(str(tmp_path), 1, TrainingState(phase).capture())
    with pytest.raises(StateError, match="'weight' is of type torch"):
        export_safetensors(tmp_path, tmp_path / "model.safetensors")
    assert [path.suffix for path in tmp_path.iterdir()] == [".elastic"]
