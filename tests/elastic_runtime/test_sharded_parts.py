"""Where shards lie, what moves between two layouts, and what a sharded checkpoint is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import elastic_runtime
from elastic_runtime.errors import CheckpointError, SettingsError, UsageError
from elastic_runtime.plan.batches import lockstep_batches
from elastic_runtime.sharded import files
from elastic_runtime.sharded.files import Saved, prune, read_parts, whole_ones, write_part
from elastic_runtime.sharded.layout import Sharded, batches, part_of, providers
from elastic_runtime.sharded.state import Parts, own_parts, places, take_apart
from elastic_runtime.state import checkpoint
from tests.elastic_runtime.training import Points

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("size", [1, 2, 5, 8, 9, 17])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_parts_are_those_that_fsdp_makes(size: int, ranks: int) -> None:
    chunks = list(torch.arange(size).chunk(ranks))
    for rank in range(ranks):
        start, stop = part_of(size, rank, ranks)
        assert list(range(start, stop)) == (chunks[rank].tolist() if rank < len(chunks) else [])


def test_batches_hold_everything_once_and_stay_below_the_limit() -> None:
    tensors = [Sharded(torch.float32, (7, 5), 0), Sharded(torch.float32, (3, 40), 1), Sharded(torch.bfloat16, (9,), 0)]
    seen = []
    for batch in batches(tensors, limit=64):
        assert sum((cut.stop - cut.start) * tensors[cut.index].row_bytes for cut in batch) <= 64
        seen += [(cut.index, at) for cut in batch for at in range(cut.start, cut.stop)]
    assert seen == [(index, at) for index, tensor in enumerate(tensors) for at in range(tensor.size)]


def test_the_parts_of_those_who_leave_come_through_those_who_stay_in_turns() -> None:
    assert providers(5, [1, 4, -1]) == [[1, 0, 3], [4, 2], []]


@pytest.mark.parametrize("samples", [1, 4, 16, 17])
def test_all_ranks_iterate_equally_often_over_each_sample_once(samples: int) -> None:
    plans = [lockstep_batches(samples, rank, 3, 2) for rank in range(3)]
    assert len({len(plan) for plan in plans}) == 1
    assert [micro.last for plan in plans for micro in plan] == 3 * [*[False] * (len(plans[0]) - 1), True]
    assert all(micro.size <= 2 for plan in plans for micro in plan)
    assert [i for plan in plans for micro in plan for i in range(micro.start, micro.stop)] == list(range(samples))


def whole() -> Parts:
    torch.manual_seed(3)
    model = nn.Linear(4, 7)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    tree = {"model": dict(model.state_dict()), "parts": {"optimizer": optimizer.state_dict()}, "extra": torch.arange(3)}
    names = {"weight": "weight", "bias": "bias"}
    return take_apart(tree, places(tree, names, {"weight": 0, "bias": 0}, {"optimizer": ["weight", "bias"]}))


def save(directory: Path, saved: Saved, *, leave_out: int = -1) -> None:
    for rank in range(saved.ranks):
        if rank != leave_out:
            write_part(str(directory), saved, rank, own_parts(whole(), rank, saved.ranks))


def test_what_an_optimizer_keeps_in_a_parameters_shape_is_sharded_as_it_is() -> None:
    parts = whole()
    assert len(parts.shards) == 2 + 2 * 2
    assert [tensor.dim() for tensor in parts.replicated] == [0, 0, 1]


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_a_checkpoint_is_read_back_at_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    saved = Saved(7, 1, 3)
    save(tmp_path, saved)
    for rank in range(ranks):
        got, expected = read_parts(str(tmp_path), saved, rank, ranks), own_parts(whole(), rank, ranks)
        assert got.kinds == expected.kinds
        for tensor, other in zip(got.shards + got.replicated, expected.shards + expected.replicated, strict=True):
            assert torch.equal(tensor, other)


def test_a_job_that_is_not_sharded_reads_it_as_its_own(tmp_path: Path) -> None:
    save(tmp_path, Saved(7, 1, 3))
    step, tree = files.load_newest(str(tmp_path)) or (0, {})
    expected = whole().tree(None)
    assert step == 7
    assert torch.equal(tree["model"]["weight"], expected["model"]["weight"])
    moment, other = (t["parts"]["optimizer"]["state"][0]["exp_avg"] for t in (tree, expected))
    assert torch.equal(moment, other)


def test_a_checkpoint_without_all_parts_of_one_attempt_is_none(tmp_path: Path) -> None:
    save(tmp_path, Saved(5, 1, 2))
    save(tmp_path, Saved(7, 2, 2), leave_out=0)
    save(tmp_path, Saved(7, 3, 2), leave_out=1)
    assert whole_ones(str(tmp_path)) == [Saved(5, 1, 2)]


def test_the_newest_of_either_kind_comes_first(tmp_path: Path) -> None:
    save(tmp_path, Saved(5, 1, 2))
    checkpoint.save(str(tmp_path), 6, {"step": 6})
    assert whole_ones(str(tmp_path)) == [Saved(6, 0, 0), Saved(5, 1, 2)]
    assert files.load_newest(str(tmp_path)) == (6, {"step": 6})


def test_a_damaged_part_falls_back_to_the_checkpoint_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, Saved(5, 1, 2))
    save(tmp_path, Saved(7, 2, 2))
    path = Saved(7, 2, 2).path(str(tmp_path), 1)
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="a checksum does not match"):
        read_parts(str(tmp_path), Saved(7, 2, 2), 0, 1)
    assert (files.load_newest(str(tmp_path)) or (0,))[0] == 5
    assert "falling back to the one before" in caplog.text


def test_old_ones_go_and_what_is_in_the_making_stays(tmp_path: Path) -> None:
    save(tmp_path, Saved(3, 9, 2), leave_out=1)
    for step in (4, 5, 6):
        save(tmp_path, Saved(step, step, 2))
    save(tmp_path, Saved(7, 7, 2), leave_out=1)
    (tmp_path / "checkpoint-000000000004-00000004.part-0-of-2.partial").write_bytes(b"half")
    prune(str(tmp_path), 2, step=7)
    assert whole_ones(str(tmp_path)) == [Saved(6, 6, 2), Saved(5, 5, 2)]
    assert sorted({int(path.name.split("-")[1]) for path in tmp_path.iterdir()}) == [5, 6, 7]


def test_a_damaged_one_of_later_steps_does_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    for step in (9, 5, 6):
        save(tmp_path, Saved(step, step, 2))
    prune(str(tmp_path), 1, step=6)
    assert whole_ones(str(tmp_path)) == [Saved(9, 9, 2), Saved(6, 6, 2)]


@pytest.mark.parametrize(
    ("options", "scaled", "what"),
    [
        ({"max_batch_per_gpu": "auto"}, False, "max_batch_per_gpu='auto'"),
        ({}, True, "GradScaler"),
    ],
)
def test_what_does_not_go_with_shards_is_refused(options: dict[str, Any], scaled: bool, what: str) -> None:
    job = elastic_runtime.init(global_batch_size=4, **options)
    model = nn.Linear(12, 3)
    loader = DataLoader(Points(8), batch_size=4)
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    with pytest.raises(SettingsError, match=what):
        job.prepare(model, torch.optim.SGD(model.parameters()), loader, scaler=scaler, shard=lambda *_: None)


def test_an_optimizer_of_another_model_is_refused() -> None:
    job = elastic_runtime.init(global_batch_size=4)
    loader = DataLoader(Points(8), batch_size=4)
    with pytest.raises(UsageError, match="none of the model's"):
        job.prepare(nn.Linear(12, 3), torch.optim.SGD(nn.Linear(12, 3).parameters()), loader, shard=lambda *_: None)
