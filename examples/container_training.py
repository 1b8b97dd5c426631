"""A container component that runs any training program: here examples/train_digits.py, which is elastic.

    gpuquota project create team-a --guaranteed 1
    gpuquota pipeline run examples/container_training.py --project team-a --arg epochs=3

The program does not depend on pipelines, nor the component on PyTorch: command, image and arguments are all that
KFP sees. In the step's log the training holds both GPUs of a machine with two, and gives one back as soon as another
team asks for it. The model is the step's output, written by the first worker.
"""

from pathlib import Path

from kfp import dsl

import kfp_gpuquota as gpuquota

# On a cluster: an image with torch, scikit-learn, kfp-gpuquota and the program. kfp.local uses this machine's instead.
IMAGE = "python:3.11"
PROGRAM = str(Path(__file__).absolute().with_name("train_digits.py"))


@gpuquota.component(gpus=1, min_gpus=1, max_gpus=2)
@dsl.container_component
def train(epochs: int, model: dsl.Output[dsl.Model]):
    """The whole step is its command."""
    return dsl.ContainerSpec(image=IMAGE, command=["python3", PROGRAM], args=["--epochs", epochs, "--save", model.path])


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def count_parameters(model: dsl.Input[dsl.Model]) -> int:
    """What the training left is a model that loads."""
    import torch  # noqa: PLC0415  # KFP runs a component's source by itself

    return sum(parameter.numel() for parameter in torch.load(model.path, weights_only=False).parameters())


@gpuquota.pipeline
@dsl.pipeline(name="container-training")
def container_training(epochs: int = 20) -> int:
    """Train by command, then look at the model; returns the number of its parameters."""
    return count_parameters(model=train(epochs=epochs).outputs["model"]).output
