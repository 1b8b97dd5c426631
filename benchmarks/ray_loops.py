"""Fifteen training loops for Ray Train's TorchTrainer, as its documentation teaches them; none uses elastic_runtime.

Written for `ray_examples.py` from the documentation of the functions that they call. Each reports a checkpoint in each
epoch. `watched` is the only line of the benchmark in them: it lets a step take a while, and writes down who trains.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from ray.train import Checkpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, SAMPLES, BATCH = 10, 192, 8
FAST_STEPS, SLOW_S = 12, 0.25


def watched(model: nn.Module, config: dict[str, Any]) -> nn.Module:
    """Let each training step before the file "go" is there take SLOW_S, and write the size down, by process."""
    directory = config.get("directory")
    if directory is None:
        return model
    torch.set_num_threads(1)
    seen = Path(directory, f"sizes-{os.getpid()}").open("a", buffering=1)  # noqa: SIM115
    steps = 0

    def before(module: nn.Module, _inputs: object) -> None:
        nonlocal steps
        if not module.training:
            return
        steps += 1
        seen.write(f"{ray.train.get_context().get_world_size()}\n")
        if steps > FAST_STEPS and not Path(directory, "go").exists():
            time.sleep(SLOW_S)

    model.register_forward_pre_hook(before)
    return model


def network(inputs: int, outputs: int) -> nn.Module:
    """The same small network each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, outputs))


def numbers() -> TensorDataset:
    """A function of eight numbers, to be learned."""
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :4].prod(1, keepdim=True))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Images of digits: to train with, and to evaluate with."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    return TensorDataset(x[:SAMPLES], y[:SAMPLES]), TensorDataset(x[SAMPLES : SAMPLES + 64], y[SAMPLES : SAMPLES + 64])


def report(metrics: dict[str, Any], model: nn.Module, **more: Any) -> None:
    """Report, rank 0 with the model."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            torch.save({"model": model.state_dict(), **more}, Path(directory, "model.pt"))
            checkpoint = Checkpoint.from_directory(directory)
        ray.train.report(metrics, checkpoint=checkpoint)


def linear(config: dict[str, Any]) -> None:
    """Learn a function, with a validation in each epoch."""
    train = ray.train.torch.prepare_data_loader(DataLoader(numbers(), batch_size=BATCH))
    valid = ray.train.torch.prepare_data_loader(DataLoader(numbers(), batch_size=BATCH))
    model = ray.train.torch.prepare_model(watched(network(8, 1), config))
    loss_fn, optimizer = nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        model.train()
        for x, y in train:
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        total = 0.0
        with torch.no_grad():
            for x, y in valid:
                total += loss_fn(model(x), y).item()
        report({"epoch": epoch, "loss": total / len(valid)}, model)


def images(config: dict[str, Any]) -> None:
    """Classify images; the batch of a worker from a global one, the samples shuffled by `set_epoch`."""
    context = ray.train.get_context()
    training, test = digits()
    batch = config["global_batch"] // context.get_world_size() if config["divide"] else BATCH
    train = ray.train.torch.prepare_data_loader(DataLoader(training, batch_size=batch, shuffle=True))
    valid = ray.train.torch.prepare_data_loader(DataLoader(test, batch_size=batch))
    model = ray.train.torch.prepare_model(watched(network(64, 10), config))
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9)
    for epoch in range(EPOCHS):
        if ray.train.get_context().get_world_size() > 1:
            train.sampler.set_epoch(epoch)
        model.train()
        for x, y in train:
            prediction = model(x)
            loss = loss_fn(prediction, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        right, count = 0, 0
        with torch.no_grad():
            for x, y in valid:
                prediction = model(x)
                right += (prediction.argmax(1) == y).sum().item()
                count += y.shape[0]
        report({"accuracy": right / count}, model)


def table(config: dict[str, Any]) -> None:
    """Regression on a Ray dataset."""
    shard = ray.train.get_dataset_shard("train")
    model = ray.train.torch.prepare_model(watched(network(8, 1), config))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        for batch in shard.iter_torch_batches(batch_size=2 * BATCH, dtypes=torch.float32):
            loss = F.mse_loss(model(batch["x"]), batch["y"].unsqueeze(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        report({"epoch": epoch, "loss": loss.item()}, model)


def by_hand(config: dict[str, Any]) -> None:
    """DistributedDataParallel and DistributedSampler without Ray's functions."""
    data = numbers()
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    model = DistributedDataParallel(watched(network(8, 1), config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        report({"epoch": epoch}, model)


def resumed(config: dict[str, Any]) -> None:
    """Fail once, and go on from the checkpoint, with the optimizer's state."""
    model = watched(network(8, 1), config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "model.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    wrapped = ray.train.torch.prepare_model(model)
    loader = ray.train.torch.prepare_data_loader(DataLoader(numbers(), batch_size=BATCH))
    for epoch in range(first, EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(wrapped(x), y).backward()
            optimizer.step()
        report({"epoch": epoch}, model, optimizer=optimizer.state_dict(), epoch=epoch)
        if first == 0 and epoch == 0:
            raise RuntimeError("the machine of this example fails once")


def lightning(config: dict[str, Any]) -> None:
    """Lightning's Trainer with Ray's strategy, environment and callback."""
    import lightning.pytorch as pl  # noqa: PLC0415  (takes seconds)
    from ray.train.lightning import (  # noqa: PLC0415
        RayDDPStrategy,
        RayLightningEnvironment,
        RayTrainReportCallback,
        prepare_trainer,
    )

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = watched(network(64, 10), config)

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, _index: int) -> None:
            self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    training, test = digits()
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        devices="auto",
        accelerator="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    batch = BATCH if config["divide"] else 2 * BATCH
    trainer.fit(Classifier(), DataLoader(training, batch_size=batch), DataLoader(test, batch_size=batch))


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sequences of tokens that count up."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) * (1 + index % 3) + index) % 16
        return {"input_ids": tokens, "labels": tokens}


def transformers(config: dict[str, Any]) -> None:
    """Transformers' Trainer with Ray's callback."""
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: PLC0415

    torch.manual_seed(0)
    small = LlamaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model = watched(LlamaForCausalLM(small), config)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        save_strategy="epoch",
        logging_strategy="epoch",
        report_to="none",
        use_cpu=True,
        train_sampling_strategy="sequential",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences())
    trainer.add_callback(RayTrainReportCallback())
    trainer = prepare_trainer(trainer)
    trainer.train()


def accelerate(config: dict[str, Any]) -> None:
    """Hugging Face's Accelerate in a worker of Ray."""
    from accelerate import Accelerator  # noqa: PLC0415

    accelerator = Accelerator(cpu=True)
    training, test = digits()
    model = watched(network(64, 10), config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train, valid = DataLoader(training, batch_size=BATCH), DataLoader(test, batch_size=BATCH)
    model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)
    for _epoch in range(EPOCHS):
        model.train()
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right, count = 0, 0
        for x, y in valid:
            with torch.no_grad():
                predicted = model(x).argmax(1)
            predicted, y = accelerator.gather_for_metrics((predicted, y))  # noqa: PLW2901
            right, count = right + int((predicted == y).sum()), count + len(y)
        report({"accuracy": right / count}, accelerator.unwrap_model(model))


def collectives(config: dict[str, Any]) -> None:
    """Metrics over all workers by torch.distributed."""
    training, test = digits()
    model = ray.train.torch.prepare_model(watched(network(64, 10), config))
    train = ray.train.torch.prepare_data_loader(DataLoader(training, batch_size=BATCH, shuffle=True))
    valid = ray.train.torch.prepare_data_loader(DataLoader(test, batch_size=BATCH))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dist.barrier()
    for epoch in range(EPOCHS):
        train.sampler.set_epoch(epoch)
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss.detach())
        model.eval()
        counts = torch.zeros(2)
        for x, y in valid:
            with torch.inference_mode():
                counts += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
        dist.all_reduce(counts)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, dist.get_rank())
        assert everyone == list(range(dist.get_world_size()))
        report({"accuracy": (counts[0] / counts[1]).item(), "evaluated": int(counts[1])}, model)


def accumulated(config: dict[str, Any]) -> None:
    """Gradients of two batches for a step."""
    model = ray.train.torch.prepare_model(watched(network(8, 1), config))
    loader = ray.train.torch.prepare_data_loader(DataLoader(numbers(), batch_size=BATCH // 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        for number, (x, y) in enumerate(loader):
            (F.mse_loss(model(x), y) / 2).backward()
            if (number + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        report({"epoch": epoch}, model)


def mixed_precision(config: dict[str, Any]) -> None:
    """Autocast and a GradScaler, with clipped gradients."""
    training, _ = digits()
    model = ray.train.torch.prepare_model(watched(network(64, 10), config))
    loader = ray.train.torch.prepare_data_loader(DataLoader(training, batch_size=BATCH))
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        report({"epoch": epoch}, model)


def schedules(config: dict[str, Any]) -> None:
    """A schedule of the steps, and one of the epochs that reads a metric."""
    model = ray.train.torch.prepare_model(watched(network(8, 1), config))
    loader = ray.train.torch.prepare_data_loader(DataLoader(numbers(), batch_size=BATCH))
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    steps = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * SAMPLES // (2 * BATCH))
    for epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            steps.step()
        report({"epoch": epoch, "rate": steps.get_last_lr()[0]}, model)


def arrays(config: dict[str, Any]) -> None:
    """A Ray dataset with a transformation, as arrays."""
    shard = ray.train.get_dataset_shard("train")
    model = ray.train.torch.prepare_model(watched(network(8, 1), config))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _epoch in range(EPOCHS):
        losses = []
        for batch in shard.iter_batches(batch_size=2 * BATCH, batch_format="numpy"):
            x, y = torch.as_tensor(np.stack(batch["x"]).astype("float32")), torch.as_tensor(batch["y"])
            loss = F.mse_loss(model(x), y.float().unsqueeze(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        report({"loss": sum(losses) / len(losses)}, model)


def padded(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad lists of tokens to one length."""
    tokens = [torch.as_tensor(np.array(each), dtype=torch.long) for each in batch["tokens"]]
    return nn.utils.rnn.pad_sequence(tokens, batch_first=True), torch.as_tensor(np.array(batch["label"]))


class Bag(nn.Module):
    """Classifies a list of tokens, where 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(16, 16, padding_idx=0), nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        found: torch.Tensor = self.head(self.embedding(tokens).sum(1))
        return found


def ragged(config: dict[str, Any]) -> None:
    """Texts of different lengths, with a collate function; the last batch is not full."""
    shard = ray.train.get_dataset_shard("train")
    model = ray.train.torch.prepare_model(watched(Bag(), config))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        for tokens, labels in shard.iter_torch_batches(batch_size=2 * BATCH, collate_fn=padded):
            loss = F.cross_entropy(model(tokens), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        report({"epoch": epoch}, model)


def metrics(config: dict[str, Any]) -> None:
    """Torchmetrics over all workers, clipped gradients, a last batch that is dropped, the best checkpoints kept."""
    from torchmetrics.classification import MulticlassAccuracy  # noqa: PLC0415

    training, test = digits()
    device = ray.train.torch.get_device()
    model = ray.train.torch.prepare_model(watched(network(64, 10), config))
    train = DataLoader(training, batch_size=BATCH, shuffle=True, drop_last=True)
    train = ray.train.torch.prepare_data_loader(train, move_to_device=False)
    valid = ray.train.torch.prepare_data_loader(DataLoader(test, batch_size=BATCH))
    accuracy = MulticlassAccuracy(10).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        train.sampler.set_epoch(epoch)
        model.train()
        for x, y in train:
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for x, y in valid:
                accuracy(model(x), y)
        report({"accuracy": accuracy.compute().item()}, model)
        accuracy.reset()


def tables() -> dict[str, Any]:
    """Return the datasets of the loops that read one, by the loop's name."""
    ray.data.DataContext.get_current().execution_options.preserve_order = True  # else blocks come as they are ready
    x, y = numbers().tensors
    rows = [{"x": x[n].numpy(), "y": float(y[n])} for n in range(SAMPLES)]
    texts = [{"tokens": [1 + (n + k) % 15 for k in range(1 + n % 7)], "label": n % 3} for n in range(SAMPLES - 5)]
    return {
        "table": lambda: ray.data.from_items(rows, override_num_blocks=4),
        "arrays": lambda: ray.data.from_items(rows, override_num_blocks=3).map_batches(_doubled),
        "ragged": lambda: ray.data.from_items(texts, override_num_blocks=5),
    }


def _doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "y": 2 * batch["y"]}


LOOPS = {
    each.__name__: each
    for each in (linear, images, table, by_hand, resumed, lightning, transformers, accelerate, collectives, accumulated,
                 mixed_precision, schedules, arrays, ragged, metrics)
}  # fmt: skip
