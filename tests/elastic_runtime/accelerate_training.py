"""The small training of `training`, written with Accelerate; it evaluates after each epoch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.tracking import GeneralTracker, on_main_process
from torch import nn
from torch.utils.data import DataLoader

from elastic_runtime.errors import LoopError
from elastic_runtime.integrations.accelerate import ElasticAccelerator
from tests.elastic_runtime.training import Gate, Plan, Points, Record, build
from tests.forked import preload

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_runtime.loop.job import Job

preload(__name__)

HELD_OUT = 37  # divided by no number of workers here


class Counter:
    """What scripts count by themselves, once a step."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Journal(GeneralTracker):  # type: ignore[misc]  # Accelerate has no types
    """A tracker that appends the logged values to a file of this worker, created when it is opened."""

    name = "journal"
    requires_logging_directory = False

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    @property
    def tracker(self) -> Path:
        return self._file

    @on_main_process  # type: ignore[untyped-decorator]
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._file.touch()

    @on_main_process  # type: ignore[untyped-decorator]
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        with self._file.open("a") as file:
            file.write(f"{step}\n")


def check_place(accelerator: ElasticAccelerator, job: Job) -> None:
    """Check that Accelerate, torch and the job agree."""
    assert accelerator.num_processes == PartialState().num_processes == job.world_size
    assert accelerator.process_index == PartialState().process_index == job.rank
    assert accelerator.is_main_process == accelerator.is_local_main_process == job.is_leader
    assert accelerator.use_distributed == (job.world_size > 1)
    if dist.is_initialized():
        assert (dist.get_rank(), dist.get_world_size()) == (job.rank, job.world_size)


def check_collectives(accelerator: ElasticAccelerator) -> None:
    """At a place that all workers reach."""
    rank, size = accelerator.process_index, accelerator.num_processes
    mine = torch.full((rank + 1, 2), rank)
    assert accelerator.gather(mine).tolist() == [[r, r] for r in range(size) for _ in range(r + 1)]
    assert accelerator.gather(mine.bool()[:, 0]).tolist() == [bool(r) for r in range(size) for _ in range(r + 1)]
    assert accelerator.gather({"rank": torch.tensor(rank)})["rank"].tolist() in (list(range(size)), rank)
    assert accelerator.reduce(torch.tensor(rank)).item() == sum(range(size))
    assert accelerator.reduce(torch.tensor(float(rank)), "mean").item() == (size - 1) / 2
    assert accelerator.reduce(torch.tensor([-rank, rank]), "max").tolist() == [0, size - 1]
    padded = accelerator.pad_across_processes(mine, pad_index=-1, pad_first=True)
    assert padded[:, 0].tolist() == [-1] * (size - rank - 1) + [rank] * (rank + 1)
    assert accelerator.gather_for_metrics([f"of rank {rank}"]) == [f"of rank {r}" for r in range(size)]
    with accelerator.main_process_first():
        accelerator.wait_for_everyone()


def train(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    torch.set_num_threads(plan.threads)
    options = dict(plan.options)
    precision, save_at, load = (options.pop(name, None) for name in ("mixed_precision", "save_at", "load"))
    accelerator = ElasticAccelerator(
        mixed_precision=precision,
        cpu=True,
        log_with=Journal(directory / f"journal-{index}"),
        global_batch_size=plan.global_batch,
        elastic={"max_batch_per_gpu": plan.max_batch, **options},
    )
    job, counter = accelerator.job, Counter()
    assert accelerator.is_main_process  # alone, as long as the loop has not begun
    raw, optimizer, scheduler = build(plan)
    loader = DataLoader(Points(plan.samples), batch_size=plan.loader_batch, shuffle=True)
    held_out = DataLoader(Points(HELD_OUT), batch_size=4)
    record = Record(job, index, directory, optimizer, dict)
    accelerator.register_for_checkpointing(counter)
    accelerator.init_trackers("points", {"lr": 0.01})
    accelerator.log({"before": 1.0}, step=0)
    if gate:
        with pytest.raises(LoopError, match="nobody is rank 0"):
            accelerator.get_tracker("journal")
    held_out_names: list[list[int]] = []
    scheduler, model, held_out = accelerator.prepare(scheduler, raw, held_out, training_loader=loader)
    optimizer, loader = accelerator.prepare(optimizer, loader)

    @accelerator.warm_up
    def _forward(batch: list[torch.Tensor]) -> torch.Tensor:
        (directory / f"warm-{index}").touch()
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    if load:
        accelerator.load_state(load)
    for _epoch in accelerator.epochs(plan.epochs):
        for x, y, indices in loader:
            if gate:
                gate.pass_through(index, job.step)
            check_place(accelerator, job)
            record.computes(indices)
            with accelerator.accumulate(model):
                output = model(x)
                assert output.dtype == torch.float32  # converted back, in mixed precision
                accelerator.backward(nn.functional.cross_entropy(output, y))
                accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            counter.steps += accelerator.sync_gradients
            assert counter.steps == job.position.step
            if not accelerator.sync_gradients:
                continue
            accelerator.log({"lr": scheduler.get_last_lr()[0]}, step=counter.steps)
            if counter.steps == save_at:
                accelerator.save_state(str(directory / "state"))
            if counter.steps % 10 == 0:
                held_out_names.append(evaluate(accelerator, model, held_out))
        check_collectives(accelerator)
        held_out_names.append(accelerator.repeat(partial(evaluate, accelerator, model, held_out)))
        assert len(held_out) == -(-HELD_OUT // 4)  # by itself
    assert all(names == list(range(HELD_OUT)) for names in held_out_names)
    accelerator.wait_for_everyone()
    final: dict[str, Any] = {"model": accelerator.unwrap_model(model).state_dict(), "lr": scheduler.get_last_lr()}
    torch.save({**final, "step": job.step, "rank": job.rank}, directory / f"final-{index}.pt")
    accelerator.end_training()


def evaluate(accelerator: ElasticAccelerator, model: nn.Module, held_out: Any) -> list[int]:
    """Returns what was evaluated, in order: by all workers together, or by this one."""
    found = []
    for x, _y, indices in held_out:
        with torch.no_grad():
            answers = model(x).argmax(-1)
        _, names = accelerator.gather_for_metrics((answers, indices))
        found += names.tolist()
    return found
