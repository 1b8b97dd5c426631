"""ELASTIC_REHEARSE=1 names what would go wrong on a cluster, and passes what would not."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torchmetrics

from elastic_runtime.rehearsal import loop_variables
from elastic_runtime.rehearsal.loop_variables import LoopVariables, variable_of
from elastic_runtime.rehearsal.observer import SwitchedOff
from elastic_runtime.rehearsal.orders import RehearsedOrders, lines, when_both_ask
from elastic_runtime.rehearsal.records import fingerprint_of, flattened
from elastic_runtime.rehearsal.timetable import FAILING, FIRST, JOINED, SECOND, first_order, order_after_failure
from elastic_runtime.rehearsal.verdict import findings_of
from elastic_runtime.state.random_streams import RandomStreams
from tests.effort import soaked
from tests.elastic_runtime.zoo.parts import SCRIPTS
from tests.elastic_runtime.zoo.rehearsing import rehearse
from tests.elastic_runtime.zoo.silent import Attending
from tests.polling import until

if TYPE_CHECKING:
    from collections.abc import Iterator

QUICK = [
    ("perceptron", "fast"),
    ("generator_and_critic", "fast"),
    ("lazy_layers", "fast"),
    ("loss_that_is_a_sum", "fast"),
    ("weights_of_classes_beside_dropout", "fast"),
    ("weights_of_classes_counted_beside_dropout", "fast"),
    ("log_that_only_the_first_leader_has", "exact"),
    ("scheduler_that_was_not_given", "fast"),
    ("running_mean_that_is_no_buffer", "fast"),
    ("split_without_a_seed", "exact"),
    ("weights_of_the_best_epoch_in_a_variable", "fast"),
    ("training_that_only_initialises", "fast"),
    ("sharded_layers", "fast"),
    ("sharded_beside_a_count_that_is_not_restored", "fast"),
]
EACH = [(s.name, mode) for s in SCRIPTS.values() for mode in s.modes if (s.name, mode) not in QUICK]
SAMPLED = EACH if os.environ.get("ELASTIC_REHEARSALS") == "all" else EACH[::9]
"""`make soak` judges every script in each of its modes, `make test-slow` a ninth of these pairs."""


def judge(name: str, mode: str, directory: Path) -> None:
    """AssertionError if the rehearsal's result for a script differs from the one in the zoo."""
    script = SCRIPTS[name]
    done = rehearse(name, mode, directory)
    report = " ".join(done.stdout.split())
    expected = script.refused or script.rehearsed
    assert (done.returncode == 0) == (not expected), done.stdout + done.stderr
    assert re.search(expected or "No error was found in what was tried", report), done.stdout + done.stderr
    assert not list(directory.glob("elastic-rehearsal-*"))


@pytest.mark.parametrize(("name", "mode"), QUICK)
def test_a_rehearsal_names_what_is_wrong_with_a_script_and_passes_another(name: str, mode: str, tmp_path: Path) -> None:
    judge(name, mode, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), SAMPLED, ids=[f"{name}-{mode}" for name, mode in SAMPLED])
def test_a_rehearsal_is_right_about_every_script_of_the_zoo(name: str, mode: str, tmp_path: Path) -> None:
    judge(name, mode, tmp_path)


SCRIPT = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from elastic_runtime.integrations.transformers import ElasticTrainer

def sample(length):
    tokens = torch.arange(16) * length % 50
    return {"input_ids": tokens, "labels": torch.where(torch.arange(16) < length, -100, tokens)}

small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
ElasticTrainer(
    model=LlamaForCausalLM(LlamaConfig(**small, attention_dropout=0.1)),
    args=TrainingArguments("out", num_train_epochs=20, logging_steps=5, report_to="none", use_cpu=True),
    train_dataset=[sample(1 + number % 12) for number in range(100)],
).train()
print("trained to its end")
"""


@pytest.mark.slow
@soaked
def test_a_language_model_with_dropout_and_masked_tokens_is_rehearsed_as_a_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "ELASTIC_REHEARSE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Note: the gradients of step 7 depend on the number of workers" in done.stdout
    assert "No error was found in what was tried" in done.stdout
    assert "trained to its end" not in done.stdout


WITH_PROCESSES = """
import sys, torch
from torch.utils.data import DataLoader, Dataset
import elastic_runtime

class Points(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x * (1 - 2 * torch.randint(0, 2, (1,))) if "flipped" in sys.argv else x, x.sum(0, keepdim=True)

if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Points(), batch_size=8, num_workers=2, multiprocessing_context=sys.argv[1])
    job = elastic_runtime.init()
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    for epoch in job.epochs(3):
        for x, y in loader:
            weight = 1.0 + 3.0 * (y > 0) if "weighted" in sys.argv else torch.ones_like(y)
            job.backward((weight * (model(x) - y) ** 2).sum() / weight.sum())
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "found"),
    [
        (("fork", "weighted"), 1, "1. the gradients of step 3 depend on the number of workers"),
        (("spawn", "plain"), 0, "of their norm at most"),
        (("fork", "flipped"), 0, "random numbers are drawn"),
    ],
)
def test_sizes_are_compared_unless_a_loaders_processes_draw_random_numbers(
    words: tuple[str, ...], code: int, found: str, forked_python: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(WITH_PROCESSES)
    environment = {**os.environ, "ELASTIC_REHEARSE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*forked_python, "train.py", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert found in done.stdout


def test_nothing_stays_of_a_rehearsal_though_a_thread_still_writes_to_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    orders = RehearsedOrders("1", FIRST, lambda _order: None)
    ended = threading.Event()

    def write() -> None:
        for number in itertools.count():
            if ended.is_set():
                return
            with suppress(FileNotFoundError):
                (orders.directory / str(number)).touch()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        until((orders.directory / "2000").exists)
        orders.close()
    finally:
        ended.set()
        writer.join()
    assert not list(tmp_path.iterdir())


def test_layers_that_are_switched_off_are_so_in_each_forward_and_then_what_they_were_before() -> None:
    model, x = Attending(), torch.randn(12, 8)
    before = [vars(module).copy() for module in model.modules()]
    switched = SwitchedOff([model])
    switched.set(off=True)
    first = model(x)
    model.train()  # as loops do in each step
    assert torch.equal(model(x), first)
    assert torch.allclose(model(x[:4]), first[:4], atol=1e-6)
    switched.set(off=False)
    assert [
        {name: vars(module)[name] for name in old} for module, old in zip(model.modules(), before, strict=True)
    ] == before
    assert not torch.equal(model(x), model(x))


# The timetable


def test_both_workers_derive_the_same_generations() -> None:
    first, second = [first_order(FIRST)], [first_order(SECOND)]
    while first[-1].kind == "Recover":
        first.append(order_after_failure(FIRST, first[-1].generation))
    while second[-1].kind == "Recover":
        second.append(order_after_failure(SECOND, second[-1].generation))
    members = {order.generation: order.members for order in first[:-1]}
    assert list(members.values()) == [(FIRST,), (FIRST,), (FIRST, SECOND), (FIRST, SECOND), (FIRST, SECOND)]
    assert [order.generation for order in second[:-1]] == [3, 4, 5, 6]
    assert all(members.get(order.generation, order.members) == order.members for order in second[:-1])
    assert second[3].members == (SECOND,)
    assert (first[-1].kind, second[-1].kind) == ("Release", "Release")
    assert JOINED in FAILING


# The verdict


def gradients(worker: str, step: int, attempt: int, workers: int, scale: float = 1.0, **more: Any) -> dict[str, Any]:
    row = {
        "random": False,
        "normalised": False,
        "exact": False,
        "resolution": 0.0,
        "attributes": {},
        "switched_off": False,
    }
    prints = {"weight": [2.0 * scale, 1.0 * scale], "bias": [1.0 * scale, -0.5 * scale]}
    kind = {"what": "gradients", "worker": worker, "step": step, "attempt": attempt, "workers": workers}
    return {**kind, **row, "fingerprints": prints, **more}


def test_gradients_that_a_repeated_step_computes_again_are_no_finding() -> None:
    assert findings_of([gradients(FIRST, 1, 0, 1), gradients(FIRST, 1, 1, 1, scale=1 + 1e-6)]) == []


def test_exact_gradients_have_to_be_the_same_to_the_bit() -> None:
    rows = [gradients(FIRST, 1, 0, 1, exact=True), gradients(FIRST, 1, 1, 1, scale=1 + 1e-6, exact=True)]
    assert "step 1, repeated" in findings_of(rows)[0].what


def test_attributes_that_changed_between_two_attempts_are_named() -> None:
    before = gradients(FIRST, 1, 0, 1, attributes={"mean": [1.0, 0.0], "eps": [0.1, 0.0]})
    after = gradients(FIRST, 1, 1, 1, scale=1.1, attributes={"mean": [2.0, 0.0], "eps": [0.1, 0.0]})
    assert "attributes that have changed meanwhile: mean" in findings_of([before, after])[0].why


@pytest.mark.parametrize("cause", ["random", "normalised"])
def test_what_normalisation_and_dropout_change_with_the_size_is_a_note(cause: str) -> None:
    rows = [gradients(FIRST, 3, 0, 1, **{cause: True}), gradients(FIRST, 3, 1, 2, scale=1.2, **{cause: True})]
    (finding,) = findings_of(rows)
    assert not finding.fails
    assert list(lines([finding], rows))[-1] == "No error was found in what was tried."


@pytest.mark.parametrize("cause", ["random", "normalised"])
def test_a_sum_is_found_beside_dropout(cause: str) -> None:
    rows = [gradients(FIRST, 3, 0, 1, **{cause: True}), gradients(FIRST, 3, 1, 2, scale=0.5, **{cause: True})]
    (finding,) = findings_of(rows)
    assert finding.fails
    assert 'reduction="sum"' in finding.remedy


def test_state_that_a_joiner_has_with_other_values_is_named() -> None:
    row = {"what": "state", "step": JOINED + 1, "workers": 2, "objects": []}
    first = {**row, "worker": FIRST, "fingerprints": {"model.bias": [1.0, 1.0], "model.weight": [2.0, 1.0]}}
    second = {**row, "worker": SECOND, "fingerprints": {"model.bias": [1.1, 1.0], "model.weight": [2.0, 1.0]}}
    (finding,) = findings_of([first, second])
    assert finding.why == "model.bias"


@pytest.mark.parametrize("kept", [[], ["best"]])
def test_variables_of_the_loop_that_a_joiner_has_with_other_values_are_named(kept: list[str]) -> None:
    """A state of the model is no figure that is printed."""
    row = {"what": "state", "step": JOINED + 1, "workers": 2, "objects": [], "fingerprints": {}}
    first = {"best.weight": [1.0, 1.0], "seen[0]": [3.0, 3.0], "equal": [2.0, 2.0]}
    rows = [
        {**row, "worker": FIRST, "variables": first, "kept_states": kept},
        {**row, "worker": SECOND, "variables": {"equal": [2.0, 2.0]}, "kept_states": []},
    ]
    found = [(finding.what.rpartition(": ")[2], finding.fails) for finding in findings_of(rows)]
    assert found == ([("best", True), ("seen", False)] if kept else [("best, seen", False)])


def test_variables_that_a_loop_changes_are_found_and_its_targets_are_not() -> None:
    x, total, seen = torch.zeros(3), 0.0, [1.0]
    best: Any = None
    variables = LoopVariables([torch.nn.Linear(2, 1)])
    assert best is None
    assert not x.any()
    variables.start()
    for number, (x, _) in enumerate([(torch.ones(3), 1)]):  # noqa: B007
        total += float(x.sum())
        seen.append(total)
        best = {"0": torch.nn.Linear(2, 1).state_dict()}
    changed, kept = variables.changed()
    own = {re.split(r"[.\[]", path)[0] for path in changed} & {"x", "total", "seen", "best", "number"}
    assert (own, kept) == ({"total", "seen", "best"}, ["best"])
    assert number == 0


@pytest.mark.parametrize(
    ("body", "targets"),
    [
        ("for x in given: y = x", {"x"}),
        ("for x, y in given: z = x", {"x", "y"}),
        ("for i, (x, y) in given: z = i", {"i", "x", "y"}),
        ("y = [x for x in given]", set()),
        ("for x in given: y = [z for z in x]", {"x"}),
        ("for x in [y for y in given]: z = [[y for y in z] for z in x]", {"x"}),
        ("y = [x for x in given]\n    for x in y: z = [x for x in y]", {"x"}),
    ],
)
def test_only_what_a_for_statement_sets_is_a_target(body: str, targets: set[str]) -> None:
    names: dict[str, Any] = {}
    exec(f"def loop(given):\n    {body}", names)
    assert loop_variables._targets(names["loop"].__code__) == targets


class Meter:
    """As scripts have them."""

    def __init__(self) -> None:
        self.total, self.values, self.rank, self._hidden = 0.0, [0.0], random.random(), 0
        self.inner: Any = None

    def update(self, value: float) -> None:
        self.total, self.values, self._hidden = self.total + value, [*self.values, value], self._hidden + 1


def test_attributes_of_a_loops_objects_are_found_unless_they_are_carried() -> None:
    meter, tracked, by_name = Meter(), Meter(), {"loss": Meter()}
    meter.inner = Meter()
    mean = torchmetrics.MeanMetric()
    variables = LoopVariables([], lambda: {id(tracked)})
    variables.start()
    for each in (meter, meter.inner, tracked, by_name["loss"], mean):
        each.update(2.0)
    changed, kept = variables.changed()
    own = ("meter", "tracked", "by_name", "mean")
    names = sorted(name for name in {variable_of(path) for path in changed} if name.startswith(own))
    of_meters = ["meter.inner.total", "meter.inner.values", "meter.total", "meter.values"]
    assert names == ["by_name", "mean.mean_value", "mean.weight", *of_meters]
    assert kept == []


def test_counts_of_a_loops_iterations_are_found_where_they_do_more_than_show_something() -> None:
    variables = LoopVariables([])
    batches, logged = [1.0, 2.0], 0.0

    def counted() -> set[str]:
        variables.iterate()
        return {name.partition(" ")[0] for name in variables.counted()}

    def each() -> Iterator[float]:
        for batch in batches:
            names.append(counted())
            yield batch

    names: list[set[str]] = []
    for step, batch in enumerate(each()):
        if step % 2 == 0:
            logged = batch
            print(step, logged)
    for index, _ in enumerate(each()):
        if index == 1:
            break
    for batch in itertools.islice(each(), 2):
        logged += batch
    for part, batch in enumerate(each()):
        logged += part * batch
    assert names == [set(), set(), {"index"}, {"index"}, {"islice"}, {"islice"}, {"part"}, {"part"}]


def test_neither_worker_begins_to_build_the_group_of_both_before_both_ask_for_it(tmp_path: Path) -> None:
    given: list[str] = []
    when_both_ask(tmp_path, SECOND, lambda: given.append(SECOND), lambda: True)
    assert given == []
    when_both_ask(tmp_path, FIRST, lambda: given.append(FIRST), lambda: False)
    assert given == [FIRST]


def gathered(worker: str, step: int, workers: int, checksum: str) -> dict[str, Any]:
    return {"what": "gathered", "worker": worker, "step": step, "workers": workers, "sums": {"model.weight": checksum}}


def test_a_step_that_begins_with_other_shards_after_a_change_of_size_is_named() -> None:
    (finding,) = findings_of([gathered(FIRST, 3, 1, "a"), gathered(FIRST, 3, 2, "a"), gathered(SECOND, 3, 2, "b")])
    assert finding.fails
    assert finding.why == "model.weight"
    assert findings_of([gathered(FIRST, 3, 1, "a"), gathered(SECOND, 3, 2, "a"), gathered(SECOND, 4, 2, "b")]) == []


def test_a_tensor_that_a_checkpoint_in_parts_lacks_is_named() -> None:
    row = {
        "what": "reread",
        "worker": SECOND,
        "step": 9,
        "before": {"bias": "a", "weight": "b"},
        "after": {"bias": "a"},
    }
    (finding,) = findings_of([row])
    assert (finding.fails, finding.why) == (True, "weight")


def test_a_report_about_shards_names_what_was_not_tried() -> None:
    report = " ".join(lines([], [gradients(FIRST, 10, 0, 1), {"what": "sharded", "worker": FIRST}]))
    assert "Not tried with shard=: a worker that leaves and hands its shards over" in report


def test_figures_that_are_not_finite_are_equal_where_both_have_them() -> None:
    rows = [gradients(FIRST, 1, attempt, 1, scale=float("nan")) for attempt in (0, 1)]
    assert findings_of(rows) == []


# Prints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_tensors_of_every_type_have_a_print_that_differs_where_they_do(dtype: torch.dtype) -> None:
    one = torch.tensor([1, 0, 1, 1]).to(dtype)
    assert fingerprint_of(one) == fingerprint_of(one.clone())
    assert fingerprint_of(one) != fingerprint_of(torch.tensor([1, 1, 0, 1]).to(dtype))


def test_a_nested_state_is_flattened_to_tensors_and_numbers_by_path() -> None:
    found = dict(flattened({"state": {0: {"step": 3}}, "groups": [{"lr": 0.1, "name": "text"}]}))
    assert {name: float(value) for name, value in found.items()} == {"state.0.step": 3.0, "groups[0].lr": 0.1}


# Random streams, which "exact" seeds for each shard


def test_streams_are_seeded_as_torch_seeds_them() -> None:
    """torch.manual_seed formats a stack trace for each kind of device that is not in use: 2 ms for each shard."""
    streams, before = RandomStreams(), torch.get_rng_state()
    streams.reseed(5)
    own = (torch.rand(3), random.random())
    torch.manual_seed(5)
    random.seed(5)
    assert torch.equal(own[0], torch.rand(3))
    assert own[1] == random.random()
    torch.set_rng_state(before)
