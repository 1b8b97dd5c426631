"""Hugging Face's Trainer with the job's loop: what its arguments and callbacks ask for happens, or is refused."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from elastic_runtime.errors import SettingsError
from elastic_runtime.integrations.transformers import CAUSAL_MODELS, ElasticTrainer, counted_tokens
from elastic_runtime.integrations.transformers.losses import is_causal
from tests.elastic_runtime.training import Points

if TYPE_CHECKING:
    from pathlib import Path

POINTS = Points(50)
DATA = [{"x": x, "labels": y} for x, y in zip(POINTS.x, POINTS.y, strict=True)]


class Small(nn.Module):
    """Returns its loss, as transformers' models do, and records the precision of its computation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(12, 3)
        self.computed_in: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        self.computed_in.add(logits.dtype)
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


class RecordedEvents(TrainerCallback):
    """Which events there were, and at which step."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and name != "on_init_end":
            return partial(self.record, name)
        return super().__getattribute__(name)

    def record(self, event: str, _args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.events.append(f"{event} {state.global_step}")


def arguments(directory: Path, **more: Any) -> TrainingArguments:
    asked: dict[str, Any] = {"num_train_epochs": 2, "per_device_train_batch_size": 10, "report_to": "none"}
    asked |= {
        "use_cpu": True,
        "learning_rate": 0.05,
        "logging_steps": 3,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
    }
    return TrainingArguments(output_dir=str(directory), **{**asked, **more})


def trained(directory: Path, *callbacks: TrainerCallback, **more: Any) -> ElasticTrainer:
    trainer = ElasticTrainer(
        model=Small(),
        args=arguments(directory, **more),
        train_dataset=DATA,
        eval_dataset=DATA[:20],
        callbacks=list(callbacks),
        global_batch_size=20,
    )
    trainer.train()
    return trainer


def test_callbacks_hear_what_trainers_own_loop_tells_them(tmp_path: Path) -> None:
    """A step of 20 samples in two iterations; Trainer's own loop with as many steps emits the same events in order."""
    ours, plain = RecordedEvents(), RecordedEvents()
    asked = {"eval_strategy": "epoch", "logging_strategy": "epoch", "save_strategy": "epoch", "eval_on_start": True}
    trained(tmp_path, ours, **asked)
    given = arguments(tmp_path, gradient_accumulation_steps=2, **asked)
    Trainer(model=Small(), args=given, train_dataset=DATA, eval_dataset=DATA[:20], callbacks=[plain]).train()
    unlike = ("on_prediction_step", "on_substep_end")
    assert [e for e in ours.events if not e.startswith(unlike)] == [e for e in plain.events if not e.startswith(unlike)]
    assert "on_save 6" in ours.events


class Shrinking(TrainerCallback):
    """Halves the weights where an epoch begins; `stop`: a thread saves after that, as at SIGTERM."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.trainer = stop, None

    def on_epoch_begin(self, *_: object, model: Any = None, **__: object) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.stop:
            job = self.trainer.job  # type: ignore[attr-defined]
            session, member = job._session, job._member
            assert member._checkpoints.in_time(session._state, session._mode, member.stable_state, leader=True)
            raise KeyboardInterrupt


@pytest.mark.parametrize("stop", [None, 0, 2])
def test_weights_that_a_callback_changes_where_an_epoch_begins_are_those_of_trainer(
    tmp_path: Path, stop: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step of all samples is one epoch, so that their order changes nothing."""
    asked = {"num_train_epochs": 4, "gradient_accumulation_steps": 5}
    plain = Trainer(model=Small(), args=arguments(tmp_path, **asked), train_dataset=DATA, callbacks=[Shrinking()])
    plain.train()
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    callback = Shrinking(stop)
    trainer = ElasticTrainer(model=Small(), args=arguments(tmp_path, **asked), train_dataset=DATA, callbacks=[callback])
    callback.trainer = trainer  # type: ignore[assignment]
    if stop is None:
        trainer.train()
    else:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        given = arguments(tmp_path, **asked)
        trainer = ElasticTrainer(model=Small(), args=given, train_dataset=DATA, callbacks=[Shrinking()])
        trainer.train()
    ours, theirs = trainer.model.layer.weight, plain.model.layer.weight  # type: ignore[union-attr]
    torch.testing.assert_close(ours, theirs)


def test_it_evaluates_and_stops_early_where_it_is_asked_to(tmp_path: Path) -> None:
    trainer = trained(
        tmp_path,
        EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=10.0),
        num_train_epochs=20,
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="loss",
        greater_is_better=False,
    )
    evaluations = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert len(evaluations) == 3
    assert trainer.state.global_step == 6 == trainer.job.step


def test_a_log_tells_the_mean_loss_since_the_last_one(tmp_path: Path) -> None:
    trainer = trained(tmp_path, save_strategy="no")
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in rows] == [3, 6]
    assert rows[1]["loss"] < rows[0]["loss"]
    assert all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize(("asked", "dtype"), [({}, torch.float32), ({"bf16": True}, torch.bfloat16)])
def test_it_computes_in_the_precision_that_was_asked_for(
    tmp_path: Path, asked: dict[str, Any], dtype: torch.dtype
) -> None:
    model: Any = trained(tmp_path, save_strategy="no", **asked).model
    assert model.computed_in == {dtype}
    assert model.layer.weight.dtype == torch.float32


def test_the_last_epoch_may_be_a_part_as_trainer_counts_it(tmp_path: Path) -> None:
    asked = {"num_train_epochs": 1.5, "save_strategy": "no"}
    plain = Trainer(model=Small(), args=arguments(tmp_path, gradient_accumulation_steps=2, **asked), train_dataset=DATA)
    plain.train()
    assert trained(tmp_path, **asked).state.global_step == plain.state.global_step == 5


def test_saved_checkpoints_are_trainers_own(tmp_path: Path) -> None:
    trainer = trained(tmp_path, save_strategy="best", eval_strategy="epoch", metric_for_best_model="loss")
    (saved, *_) = sorted(tmp_path.glob("checkpoint-*"))
    state = TrainerState.load_from_json(str(saved / "trainer_state.json"))
    assert saved.name == f"checkpoint-{state.global_step}"
    assert trainer.state.best_model_checkpoint == str(
        max(tmp_path.glob("checkpoint-*"), key=lambda f: f.stat().st_mtime)
    )
    assert (saved / "optimizer.pt").exists()


def test_the_order_of_the_samples_is_that_of_the_datas_seed(tmp_path: Path) -> None:
    models: list[Any] = [
        trained(tmp_path, save_strategy="no", **asked).model
        for asked in ({"data_seed": 3}, {"data_seed": 3, "seed": 5}, {"data_seed": 4})
    ]
    first, same, other = (model.layer.weight for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_an_optimizer_without_a_schedule_is_told_that_it_trains(tmp_path: Path) -> None:
    class Averaging(torch.optim.SGD):
        training = True
        stepped: list[bool] = []  # noqa: RUF012

        def train(self) -> None:
            self.training = True

        def eval(self) -> None:
            self.training = False

        def step(self, closure: Any = None) -> Any:
            self.stepped.append(self.training)
            return super().step(closure)

    model = Small()
    trainer = ElasticTrainer(
        model=model,
        args=arguments(tmp_path, save_strategy="no", eval_strategy="steps", eval_steps=1),
        train_dataset=DATA,
        eval_dataset=DATA[:20],
        optimizers=(Averaging(model.parameters(), lr=0.1), None),
        global_batch_size=20,
    )
    trainer.train()
    assert Averaging.stepped == [True] * 6


def test_it_is_compiled_where_that_is_asked_for(tmp_path: Path) -> None:
    torch.compiler.reset()
    trainer = trained(tmp_path, save_strategy="no", torch_compile=True, torch_compile_backend="eager")
    assert trainer.state.global_step == 6
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_ending_an_epoch_early_is_refused(tmp_path: Path) -> None:
    class Ending(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop = True

    with pytest.raises(SettingsError, match="should_training_stop"):
        trained(tmp_path, Ending(), save_strategy="no")


def test_dropping_the_last_samples_makes_fewer_steps(tmp_path: Path) -> None:
    assert trained(tmp_path, save_strategy="no", dataloader_drop_last=True).state.global_step == 4


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 250}, "save the best in a callback"),
        ({"auto_find_batch_size": True}, "max_batch_per_gpu"),
        ({"include_num_input_tokens_seen": "all"}, "is lost with it"),
        ({"optim": "lomo"}, "within the backward pass"),
    ],
)
def test_what_cannot_be_had_is_refused(tmp_path: Path, asked: dict[str, Any], remedy: str) -> None:
    with pytest.raises(SettingsError, match=remedy):
        ElasticTrainer(model=Small(), args=arguments(tmp_path, **asked), train_dataset=DATA, eval_dataset=DATA)


def test_a_checkpoint_of_trainers_is_not_gone_on_with(tmp_path: Path) -> None:
    trainer = ElasticTrainer(model=Small(), args=arguments(tmp_path), train_dataset=DATA)
    with pytest.raises(SettingsError, match="resumes at the newest checkpoint"):
        trainer.train(resume_from_checkpoint=True)


class Theirs(Trainer):
    """As others' trainers are: with a step, a loss, an optimizer, data, a log and an evaluation of their own."""

    stepping = False

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.stepping = True
        found = super().training_step(*args, **kwargs)
        self.stepping = False
        return found

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.stepping == model.training
        return super().compute_loss(model, {**inputs, "x": inputs["x"] * 2}, *args, **kwargs)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        trained: Any = model or self.model
        self.optimizer = torch.optim.SGD(trained.parameters(), lr=0.2, momentum=0.9)
        return self.optimizer

    def get_train_dataloader(self) -> Any:
        data: Any = DATA[10:]
        loader: DataLoader[Any] = DataLoader(data, batch_size=10, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        found: Any = super().evaluation_loop(*args, **kwargs)
        return found._replace(metrics={**found.metrics, "eval_twice": 2 * found.metrics["eval_loss"]})

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log({**logs, "logged": 1.0}, start_time)


class ElasticFirst(ElasticTrainer, Theirs):
    pass


class TheirsFirst(Theirs, ElasticTrainer):
    pass


FIGURES = ("loss", "learning_rate", "grad_norm", "eval_loss", "eval_twice", "logged", "epoch", "step", "train_loss")


@pytest.mark.parametrize("kind", [ElasticFirst, TheirsFirst])
def test_a_trainer_of_others_is_made_elastic_by_inheriting_from_both(
    tmp_path: Path, kind: type[ElasticTrainer]
) -> None:
    asked = {"gradient_accumulation_steps": 2, "logging_steps": 1, "lr_scheduler_type": "linear", "warmup_steps": 1}
    asked |= {"eval_strategy": "epoch", "max_grad_norm": 0.0, "save_strategy": "no"}
    trainers: list[Trainer] = [
        each(model=Small(), args=arguments(tmp_path, **asked), train_dataset=DATA, eval_dataset=DATA[:20])
        for each in (Theirs, kind)
    ]
    for trainer in trainers:
        trainer.train()
    theirs, ours = ([{k: row[k] for k in FIGURES if k in row} for row in t.state.log_history] for t in trainers)
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    for mine, plain in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(plain, rel=1e-5)
    states = [t.model.state_dict() for t in trainers if t.model is not None]
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value)


def test_a_mean_over_tokens_is_logged_as_such(tmp_path: Path) -> None:
    """Each iteration of a step is weighted by its tokens: Trainer has the same result for the whole step."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=20, num_key_value_heads=1, **sizes)
    rows = [{"input_ids": torch.arange(3 + i % 7)} for i in range(24)]

    def collate(batch: list[Any]) -> dict[str, torch.Tensor]:
        ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in batch], batch_first=True, padding_value=-100)
        return {"input_ids": ids.clamp(min=0), "labels": ids}

    asked: dict[str, Any] = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "logging_steps": 1}
    asked |= {"train_sampling_strategy": "sequential", "save_strategy": "no"}
    logged = []
    for kind in (Trainer, ElasticTrainer):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
        trainer = kind(model=model, args=arguments(tmp_path, **asked), train_dataset=rows, data_collator=collate)
        trainer.train()
        logged.append([(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row])
    for mine, plain in zip(*logged, strict=True):
        assert mine == pytest.approx(plain, rel=1e-4)


def test_a_trainer_with_a_loop_of_its_own_is_refused(tmp_path: Path) -> None:
    class Own(ElasticTrainer):
        def _maybe_log_save_evaluate(self, *_: Any, **__: Any) -> None:
            raise AssertionError

    with pytest.raises(SettingsError, match=r"Own overrides _maybe_log_save_evaluate.*; override compute_loss"):
        Own(model=Small(), args=arguments(tmp_path), train_dataset=DATA)


def test_a_trainer_that_generates_its_samples_is_refused(tmp_path: Path) -> None:
    class Generating(ElasticTrainer):
        num_generations = 4

    with pytest.raises(SettingsError, match="groups that have to stay together"):
        Generating(model=Small(), args=arguments(tmp_path), train_dataset=DATA)


def test_the_jobs_own_options_come_before_trainers(tmp_path: Path) -> None:
    elastic = {"max_batch_per_gpu": "auto", "global_batch_size": 25, "seed": 7}
    given = arguments(tmp_path, save_strategy="no")
    trainer = ElasticTrainer(model=Small(), args=given, train_dataset=DATA, elastic=elastic)
    trainer.train()
    assert trainer.state.global_step == 4


def test_a_schedule_that_follows_a_figure_is_stepped_with_it(tmp_path: Path) -> None:
    more: dict[str, Any] = {"lr_scheduler_kwargs": {"patience": 0, "mode": "min"}, "metric_for_best_model": "loss"}
    trainer = trained(tmp_path, lr_scheduler_type="greedy", eval_strategy="epoch", save_strategy="no", **more)
    assert trainer.state.global_step == 6


def test_tokens_are_counted_as_the_models_loss_counts_them() -> None:
    labels = torch.tensor([[5, 6, -100], [-100, 7, 8]])
    assert counted_tokens({"labels": labels}, shifted=False) == 4
    assert counted_tokens({"labels": labels}, shifted=True) == 3
    assert counted_tokens({"labels": torch.tensor([1, 2])}, shifted=False) is None
    assert counted_tokens({}, shifted=True) is None
    assert counted_tokens({"labels": labels, "shift_labels": labels[:, :2]}, shifted=True) == 3
    assert {"GPT2LMHeadModel", "LlamaForCausalLM"} <= CAUSAL_MODELS
    assert not {"T5ForConditionalGeneration", "BertForTokenClassification"} & CAUSAL_MODELS


def test_adapters_do_not_hide_that_a_model_is_causal() -> None:
    class Adapted(nn.Module):
        """As PEFT wraps models."""

        def get_base_model(self) -> nn.Module:
            return LlamaForCausalLM.__new__(LlamaForCausalLM)

    assert is_causal(Adapted())
    assert not is_causal(Small())
