"""Handwritten digits as a Kubeflow pipeline: load, train, evaluate. The training is elastic and under the team's quota.

    python examples/digits_pipeline.py --project team-a

runs it on this machine with kfp.local. `python examples/quickstart.py` runs it too, beside a second team that takes its
GPU back for a while.
"""

# ruff: noqa: PLC0415  # KFP runs a component's source by itself, so it imports what it uses

import argparse
import os

from kfp import dsl, local

import kfp_gpuquota as gpuquota

# On a cluster: an image with torch, scikit-learn and kfp-gpuquota. kfp.local uses this Python's own packages instead.
IMAGE = "python:3.11"


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def load(train_set: dsl.Output[dsl.Dataset], test_set: dsl.Output[dsl.Dataset]) -> None:
    """1797 pictures of 8 x 8 pixels that come with scikit-learn; a quarter is kept for the test."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train_index, test_index = train_test_split(range(len(labels)), test_size=0.25, random_state=0, stratify=labels)
    torch.save((images[train_index], labels[train_index]), train_set.path)
    torch.save((images[test_index], labels[test_index]), test_set.path)


@gpuquota.component(gpus=1, min_gpus=1, max_gpus=2)
@dsl.component(base_image=IMAGE, install_kfp_package=False)
def train(train_set: dsl.Input[dsl.Dataset], model: dsl.Output[dsl.Model], epochs: int) -> None:
    """A plain training loop; what makes it elastic are the lines with `elastic` and `job`."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import elastic_runtime as elastic

    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(*torch.load(train_set.path)), batch_size=128, shuffle=True)

    job = elastic.init(global_batch_size=128, max_batch_per_gpu=64)
    network, optimizer, loader = job.prepare(network, optimizer, loader)
    for _ in job.epochs(epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(network(images), labels)
            job.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            job.report(loss=loss.item())
    torch.save(network.to("cpu"), model.path)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def evaluate(test_set: dsl.Input[dsl.Dataset], model: dsl.Input[dsl.Model], metrics: dsl.Output[dsl.Metrics]) -> float:
    """The share of test pictures that the model reads right."""
    import torch

    network = torch.load(model.path, weights_only=False).eval()
    images, labels = torch.load(test_set.path)
    with torch.no_grad():
        accuracy = (network(images).argmax(dim=1) == labels).float().mean().item()
    metrics.log_metric("accuracy", accuracy)
    return accuracy


@gpuquota.pipeline
@dsl.pipeline(name="digits")
def digits_pipeline(epochs: int = 20) -> float:
    """Load, train, evaluate; returns the test accuracy."""
    data = load()
    trained = train(train_set=data.outputs["train_set"], epochs=epochs)
    tested = evaluate(test_set=data.outputs["test_set"], model=trained.outputs["model"])
    return tested.outputs["Output"]


def main() -> None:
    """Run it under kfp.local."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits through the GPU quota.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--project", help="the team with the quota; default: $GPUQUOTA_PROJECT or the configured one")
    parser.add_argument("--root", default="out/pipelines", help="where the pipeline's artifacts go")
    given = parser.parse_args()
    if given.project:
        os.environ["GPUQUOTA_PROJECT"] = given.project
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=given.root)
    print(f"accuracy: {digits_pipeline(epochs=given.epochs).outputs['Output']:.4f}")


if __name__ == "__main__":
    main()
