"""Training functions for TorchTrainer, as its users write them. Each needs a group of a fixed size."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Any

import ray.train
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import prepare_data_loader, prepare_model
from ray.train.v2.api.exceptions import TrainingFailedError
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from elastic_runtime.integrations.ray import ElasticTorchTrainer
from elastic_runtime.integrations.ray.datasets import RowDataset
from tests.forked import preload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

preload("tests.ray.fixed_loops")


def loader() -> DataLoader[Any]:
    inputs = torch.arange(32.0).reshape(32, 1)
    return DataLoader(TensorDataset(inputs, 2 * inputs), batch_size=4)


def fit(model: torch.nn.Module, batches: Iterable[Any]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _epoch in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        ray.train.report({})


def prepared_model() -> None:
    fit(prepare_model(torch.nn.Linear(1, 1)), loader())


def prepared_loader() -> None:
    batches = prepare_data_loader(loader())
    fit(torch.nn.Linear(1, 1), batches)


def named_in_full() -> None:
    fit(torch.nn.Linear(1, 1), ray.train.torch.prepare_data_loader(loader()))


def parallel_by_hand() -> None:
    fit(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)), loader())


def group_by_hand() -> None:
    torch.distributed.init_process_group("gloo")


def plain() -> None:
    fit(torch.nn.Linear(1, 1), loader())


def batches_of_a_dataset() -> None:
    shard: Any = RowDataset([], [])  # what get_dataset_shard returns
    fit(torch.nn.Linear(1, 1), shard.iter_torch_batches(batch_size=4))


def with_accelerate() -> None:
    from accelerate import Accelerator  # noqa: PLC0415  (takes seconds)

    model = torch.nn.Linear(1, 1)
    accelerator, optimizer = Accelerator(cpu=True), torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    for x, y in batches:
        accelerator.backward(mse_loss(model(x), y))
        optimizer.step()


def with_transformers() -> None:
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: PLC0415

    small: Any = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    data: Any = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(directory, use_cpu=True, report_to="none")
        trainer = Trainer(LlamaForCausalLM(LlamaConfig(vocab_size=8, **small)), arguments, train_dataset=data)
        trainer.add_callback(RayTrainReportCallback())
        prepare_trainer(trainer).train()


def with_lightning() -> None:
    import lightning  # noqa: PLC0415
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer  # noqa: PLC0415

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            return mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()], **quiet
    )
    prepare_trainer(trainer).fit(Module(), loader())


LOOPS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (prepared_model, prepared_loader, named_in_full, parallel_by_hand, group_by_hand, plain,
                 batches_of_a_dataset, with_accelerate, with_transformers, with_lightning)
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
