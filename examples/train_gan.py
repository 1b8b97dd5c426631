"""An elastic GAN: in each iteration the critic is trained, and then the generator, by an optimizer each.

    python examples/train_gan.py                                      # alone
    gpuquota submit gan -g 1 --elastic -- python examples/train_gan.py

The generator learns to draw points near a circle. `more=True` announces another backward pass in the iteration;
a worker that is lost between the two costs nothing, for all go back to the step's beginning.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_runtime as elastic

NOISE, RADIUS = 4, 2.0


def circle(count: int) -> torch.Tensor:
    """Points near the circle. Shape: (count, 2)."""
    generator = torch.Generator().manual_seed(0)
    angle = 2 * torch.pi * torch.rand(count, generator=generator)
    points = RADIUS * torch.stack([angle.cos(), angle.sin()], dim=1)
    return points + 0.05 * torch.randn(count, 2, generator=generator)


def layers(inputs: int, outputs: int) -> nn.Sequential:
    """A small network."""
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def main() -> None:
    """Train, and print the distance of the points from the circle."""
    torch.set_num_threads(1)  # networks this small are slower on more
    job = elastic.init(global_batch_size=128)
    torch.manual_seed(0)
    generator, critic = layers(NOISE, 2), layers(2, 1)
    makes = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    judges = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    data = DataLoader(TensorDataset(circle(4096)), batch_size=128, shuffle=True)
    (generator, critic), (makes, judges), loader = job.prepare([generator, critic], [makes, judges], data)
    for epoch in job.epochs(24):
        for (real,) in loader:
            made = generator(torch.randn(len(real), NOISE))
            judges.zero_grad()
            loss = nn.functional.softplus(-critic(real)).mean() + nn.functional.softplus(critic(made.detach())).mean()
            job.backward(loss, more=True)
            judges.step()
            makes.zero_grad()
            job.backward(nn.functional.softplus(-critic(made)).mean())
            makes.step()
        with torch.no_grad():
            off = (generator(torch.randn(1024, NOISE)).norm(dim=1) - RADIUS).abs().mean().item()
        job.report(off_circle=off)
        if job.is_leader and epoch % 6 == 5:
            print(f"epoch {epoch + 1}: {off:.3f} off a circle of radius {RADIUS:g}")


if __name__ == "__main__":
    main()
