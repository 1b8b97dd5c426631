"""Lightning's Trainer and Fabric: as without elastic_runtime alone, and the same through every history."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.utils.data import DataLoader

from elastic_runtime.errors import LoopError, SettingsError, UsageError
from elastic_runtime.integrations.lightning import ElasticFabric, ElasticStrategy
from tests.elastic_runtime.zoo import trainers
from tests.elastic_runtime.zoo.generated.drawing import Case
from tests.elastic_runtime.zoo.generated.verdicts import HISTORIES, judge_several
from tests.elastic_runtime.zoo.parts import SCRIPTS, Samples, vector
from tests.polling import TIMEOUT_S

NAMES = [name for name, script in SCRIPTS.items() if script.body.__module__ == trainers.__name__]


@pytest.mark.parametrize("name", [name for name in NAMES if "fast" in SCRIPTS[name].modes])
def test_a_worker_alone_trains_what_lightning_trains(name: str) -> None:
    torch.manual_seed(1)
    plain = SCRIPTS[name].body().state_dict()
    torch.manual_seed(1)
    elastic = SCRIPTS[name].body(reduction="fast").state_dict()
    for key, value in plain.items():
        torch.testing.assert_close(elastic[key], value)


ENDS_EARLY = "trainer_that_stops_early"
IN_SAMPLE = (
    "stop:5",
    "stop:7",
    "stop_after:1",
    "join:6",
    "with:2 kill:5:0",
    "join:1 leave:6 join:13",
    "crash:6 join:9",
    "evict_after:1",
    "evict_left:2 with:2",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_script_trains_the_same_through_a_history(name: str) -> None:
    """ELASTIC_HISTORIES=all: through all 31."""
    modes = SCRIPTS[name].modes
    everything = os.environ.get("ELASTIC_HISTORIES") == "all"
    sample = [one for one in IN_SAMPLE * 3 if name != ENDS_EARLY or "join" not in one]  # who comes late waits long
    chosen = HISTORIES if everything else sample[2 * NAMES.index(name) :][:2]
    cases = [
        Case(name, mode, (history,))
        for number, history in enumerate(chosen)
        for mode in (modes if everything else modes[number % len(modes) :][:1])
    ]
    found = judge_several(cases, trainers.judge)
    wrong = [f"{case}: {each.why}" for case, each in zip(cases, found, strict=True) if each.result != "passed"]
    assert not wrong, "\n\n".join(wrong)


# What is refused


class Manual(trainers.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(trainers.Classifier):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()  # type: ignore[no-untyped-call]


class QuasiNewton(trainers.Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class CountsInTraining(trainers.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.loss = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.loss(loss.detach())
        self.log("mean", self.loss)
        return loss


REFUSED: list[tuple[type[trainers.Classifier], dict[str, Any], str]] = [
    (Manual, {}, "automatic_optimization=False"),
    (OwnBackward, {}, "OwnBackward.backward is not called"),
    (QuasiNewton, {}, "LBFGS computes the loss several times"),
    (CountsInTraining, {}, "got a torchmetrics object"),
    (trainers.Classifier, {"accumulate_grad_batches": 2}, "Trainer\\(accumulate_grad_batches=2\\)"),
    (trainers.Classifier, {"limit_train_batches": 2}, "Trainer\\(limit_train_batches=2\\)"),
    (trainers.Classifier, {"fast_dev_run": True}, "Trainer\\(limit_train_batches=1\\)"),
    (trainers.Classifier, {"overfit_batches": 1}, "Trainer\\(overfit_batches=1\\)"),
    (trainers.Classifier, {"max_epochs": -1}, "has no end"),
    (trainers.Classifier, {"max_time": {"hours": 1}}, "Timer does not go together"),
    (trainers.Classifier, {"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging does not"),
]


@pytest.mark.parametrize(("kind", "arguments", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_cannot_be_elastic_is_refused_by_name(
    kind: type[trainers.Classifier], arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises((SettingsError, UsageError), match=words):
        trainers.fitted(kind(), ElasticStrategy(), **arguments)


@pytest.mark.filterwarnings("ignore:.*val_dataloader")
def test_a_checkpoint_of_lightnings_is_refused() -> None:
    quiet: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(strategy=ElasticStrategy(), max_epochs=1, **quiet)
    with pytest.raises(SettingsError, match="ckpt_path"):
        trainer.fit(trainers.Classifier(), DataLoader(Samples(vector), batch_size=12), ckpt_path="last.ckpt")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"strategy": "ddp"}, "ElasticFabric\\(strategy='ddp'\\)"),
        ({"devices": 2}, "ElasticFabric\\(devices=2\\)"),
        ({"num_nodes": 2}, "ElasticFabric\\(num_nodes=2\\)"),
    ],
)
def test_fabric_is_refused_what_distributes_by_itself(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        ElasticFabric(accelerator="cpu", **arguments)


class FabricLoop:
    """A model, its optimizer and a loader, set up, and where the loop is."""

    def __init__(self, **arguments: Any) -> None:
        self.fabric = ElasticFabric(accelerator="cpu", **arguments)
        self.fabric.launch()
        model = torch.nn.Linear(8, 3)
        self.model, self.optimizer = self.fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.loader = self.fabric.setup_dataloaders(DataLoader(Samples(vector), batch_size=12))

    def backward(self, batch: Any) -> None:
        self.fabric.backward(torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1]))


def test_fabrics_loader_is_iterated_within_its_epochs() -> None:
    with pytest.raises(LoopError, match=r"for epoch in fabric\.epochs"):
        iter(FabricLoop().loader)


def test_what_joiners_would_lack_is_refused_in_fabrics_loop() -> None:
    loop = FabricLoop()
    for call, given in (
        (loop.fabric.setup, torch.nn.Linear(1, 1)),
        (loop.fabric.setup_module, torch.nn.Linear(1, 1)),
        (loop.fabric.setup_optimizers, loop.optimizer),
    ):
        next(iter(loop.fabric.epochs(1)))
        with pytest.raises(LoopError, match=r"comes before fabric\.epochs"):
            call(given)


def test_fabrics_collectives_within_a_step_are_refused_and_so_is_a_loop_without_fabrics_backward() -> None:
    loop = FabricLoop()
    with pytest.raises(LoopError, match=r"after optimizer\.step"):  # noqa: PT012
        for batch in loop.fabric.steps(2):
            loop.backward(batch)
            loop.fabric.all_reduce(torch.zeros(1))


def test_fabrics_callbacks_see_each_step_once_if_it_is_cut_into_micro_batches() -> None:
    seen: list[object] = []

    class Counting:
        def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
            seen.append(optimizer)

    loop = FabricLoop(elastic={"max_batch_per_gpu": 5}, callbacks=[Counting()])
    for batch in loop.fabric.steps(3):
        loop.optimizer.zero_grad()
        loop.backward(batch)
        loop.optimizer.step()
    assert seen == [loop.optimizer] * 3


# Micro-batches


def test_a_step_cut_into_micro_batches_counts_and_logs_as_one() -> None:
    torch.manual_seed(1)
    whole = trainers.fitted(trainers.Classifier(), ElasticStrategy()).state_dict()
    torch.manual_seed(1)
    cut = trainers.fitted(trainers.Classifier(), ElasticStrategy(max_batch_per_gpu=5)).state_dict()
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=1e-4, atol=1e-5)


# The guide


@pytest.mark.parametrize("part", ["# Lightning", "## Fabric"])
def test_the_guide_can_be_typed_as_it_stands(part: str, forked_python: tuple[str, ...], tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "guides" / "lightning.md").read_text()
    code = text.partition(part)[2].partition("\n\n")[2].partition("\nThree lines are new")[0]
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(code))
    command = [*forked_python, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "trained 30 steps" in done.stdout
