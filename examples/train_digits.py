"""A plain training script made elastic: it runs alone, in a debugger, or as a job that changes its size.

    python examples/train_digits.py --epochs 3
    gpuquota submit elastic1 -g 1 --elastic -- python examples/train_digits.py --epochs 200

The lines with `elastic` and `job` are all that differs from the loop for one GPU.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_runtime as elastic


def main() -> None:
    """Train on scikit-learn's handwritten digits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--save", help="write the trained model to this file")
    given = parser.parse_args()

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=128, shuffle=True)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    job = elastic.init(global_batch_size=128, max_batch_per_gpu=64)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    for epoch in job.epochs(given.epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            job.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            job.report(loss=loss.item())
        if job.is_leader:
            print(f"epoch {epoch}: loss {loss.item():.4f}, {job.world_size} workers, step {job.step}", flush=True)
    if given.save:
        torch.save(model.to("cpu"), given.save)


if __name__ == "__main__":
    main()
