"""Elastic training of a model in shards (FSDP2), for models that one GPU does not hold.

    python examples/train_sharded.py                                     # alone
    gpuquota submit sharded -g 2 --elastic -- python examples/train_sharded.py

Parameters, gradients and optimizer state lie in shards over the workers, and are resharded in memory when workers come
or go. The shards of a worker that is lost come from their copies in the memory of another worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import elastic_runtime as elastic

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Model(nn.Module):
    """Blocks, as a transformer has them."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, 8) to (batch, 1)."""
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        found: torch.Tensor = self.leave(x)
        return found


def shard(model: Model, mesh: DeviceMesh) -> None:
    """Which layers are gathered together. Called again at each change of size."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def main() -> None:
    """Train, print the accuracy, and save the whole model."""
    job = elastic.init(global_batch_size=64, max_batch_per_gpu=32)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(1_000, 8)
    loader = DataLoader(TensorDataset(x, torch.sin(x).sum(1, keepdim=True)), batch_size=64, shuffle=True)
    model, optimizer, loader = job.prepare(model, optimizer, loader, shard=shard)
    loss = torch.zeros(())
    for epoch in job.epochs(5):
        for samples, targets in loader:
            loss = nn.functional.mse_loss(model(samples), targets)
            job.backward(loss)
            job.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if job.is_leader:
            print(f"epoch {epoch}: step {job.step}, {job.world_size} workers, loss {loss.item():.4f}")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if job.is_leader:  # every worker takes part in gathering it
        torch.save(whole, "model.pt")


if __name__ == "__main__":
    main()
