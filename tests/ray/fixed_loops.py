"""Training functions for TorchTrainer that cannot be elastic as they are. Each is refused before it has trained."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Any

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import prepare_data_loader, prepare_model
from ray.train.v2.api.exceptions import TrainingFailedError
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from elastic_runtime.integrations.ray import ElasticTorchTrainer
from tests.forked import preload

if TYPE_CHECKING:
    from collections.abc import Callable

preload("tests.ray.fixed_loops")


Batches = DataLoader[Any]


def loader(**options: Any) -> Batches:
    inputs = torch.arange(32.0).reshape(32, 1)
    return DataLoader(TensorDataset(inputs, 2 * inputs), batch_size=4, **options)


def fit(model: torch.nn.Module, batches: Batches) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _epoch in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        ray.train.report({})


def plain_loader() -> None:
    fit(prepare_model(torch.nn.Linear(1, 1)), loader())


def plain_model() -> None:
    fit(torch.nn.Linear(1, 1), prepare_data_loader(loader()))


def plain() -> None:
    fit(torch.nn.Linear(1, 1), loader())


def in_evaluation() -> None:
    fit(prepare_model(torch.nn.Linear(1, 1)).eval(), prepare_data_loader(loader()))


def group_by_hand() -> None:
    torch.distributed.init_process_group("gloo")


def accumulates() -> None:
    model = prepare_model(torch.nn.Linear(1, 1))
    with model.no_sync():
        fit(model, prepare_data_loader(loader()))


def sharded() -> None:
    prepare_model(torch.nn.Linear(1, 1), parallel_strategy="fsdp")


def own_sampler() -> None:
    weights = torch.utils.data.WeightedRandomSampler([1.0] * 32, 32)
    prepare_data_loader(loader(sampler=weights))


def everything_on_each_worker() -> None:
    prepare_data_loader(loader(), add_dist_sampler=False)


def no_optimizer() -> None:
    model = prepare_model(torch.nn.Linear(1, 1))
    for x, _ in prepare_data_loader(loader()):
        model(x)


def with_lightning() -> None:
    from ray.train.lightning import RayFSDPStrategy  # noqa: PLC0415  (takes seconds)

    RayFSDPStrategy()


def with_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: PLC0415

    small: Any = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    data: Any = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(directory, use_cpu=True, report_to="none")
        Trainer(LlamaForCausalLM(LlamaConfig(vocab_size=8, **small)), arguments, train_dataset=data).train()


LOOPS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (plain_loader, plain_model, plain, in_evaluation, group_by_hand, accumulates, sharded, own_sampler,
                 everything_on_each_worker, no_optimizer, with_lightning, with_transformers)
}  # fmt: skip


def main(arguments: list[str]) -> None:
    """Fit the loop of this name in an elastic worker, and print how it is refused."""
    name, storage = arguments
    os.environ["ELASTIC_COORDINATOR"] = "none"  # nothing gets so far as to ask it
    run_config = RunConfig(name=name, storage_path=storage)
    trainer = ElasticTorchTrainer(LOOPS[name], scaling_config=ScalingConfig(num_workers=1), run_config=run_config)
    try:
        trainer.fit()
    except TrainingFailedError as error:
        print(*error.worker_failures.values())
