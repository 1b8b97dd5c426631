"""What became of a script in a history, against the script alone: right, refused, found by a rehearsal, or wrong."""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.elastic_runtime.zoo.generated.lives import Ended, History, play
from tests.elastic_runtime.zoo.generated.recipes import PREFIX, recipes, script_named
from tests.elastic_runtime.zoo.rehearsing import rehearse
from tests.forked import context, preload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

preload("tests.elastic_runtime.zoo.generated.verdicts")

RTOL, ATOL = 2e-3, 2e-4
"""Of two "fast" results: gradients are added up in another order."""
HISTORIES = (
    "stop:1",
    "stop:5",
    "stop:6",
    "stop:8",
    "stop:7",
    "stop_before:1",
    "stop_before:2",
    "stop_after:0",
    "stop_after:2",
    "stop:2 stop:9",
    "stop:5 stop:5",
    "crash:6",
    "crash:8",
    "crash_after:1",
    "crash:3 crash_after:2",
    "join:1",
    "join:5",
    "join:6",
    "join:7",
    "join:8",
    "with:2",
    "with:2 leave:5",
    "with:2 kill:5:0",
    "with:2 kill:9:1",
    "with:3 kill:6:1",
    "join:5 kill:10:0",
    "join:1 leave:6 join:13",
    "with:2 stop:6",
    "join:2 stop:9",
    "stop:5 join:9",
    "crash:6 join:9",
)
"""Of scripts of four steps an epoch and five epochs."""


@dataclass(frozen=True)
class Verdict:
    """`result`: passed, refused, rehearsed or wrong; `why`, in one line."""

    result: str
    why: str


@dataclass(frozen=True)
class Case:
    """One script in one reduction, through several histories."""

    script: str
    reduction: str
    histories: tuple[str, ...]


def judge(case: Case) -> Verdict:
    """Play the case in processes of its own, and return its verdict."""
    with tempfile.TemporaryDirectory() as directory:
        process = context.Process(target=_judge, args=(case, directory))
        process.start()
        process.join(300)
        if process.exitcode is None:
            process.kill()
            process.join()
        answer = Path(directory) / "verdict.json"
        if not answer.exists():
            return Verdict("wrong", f"the case ended with {process.exitcode}")
        found = Verdict(**json.loads(answer.read_text()))
        if found.result != "silent":
            return found
        return _rehearsed(case, found.why, Path(directory))


def _judge(case: Case, directory: str) -> None:
    os.environ["TMPDIR"] = directory
    found = _played(case, Path(directory))
    Path(directory, "verdict.json").write_text(json.dumps(vars(found)))


def _played(case: Case, directory: Path) -> Verdict:
    script = script_named(case.script)
    (alone,) = play(case.script, case.reduction, History(()), directory / "alone")
    if alone.code:
        return _of_refusal("alone", [alone], script.refused)
    assert alone.model is not None
    named: list[str] = []
    for number, text in enumerate(case.histories):
        ended = play(case.script, case.reduction, History.parse(text), directory / f"history-{number}")
        verdict = _against(text, ended, alone.model, script.refused, exact=case.reduction == "exact")
        if verdict.result in {"wrong", "silent"}:
            return verdict
        if verdict.result == "refused":
            named.append(verdict.why)
    return Verdict("refused", named[0]) if named else Verdict("passed", " and ".join(case.histories))


def _against(
    text: str, ended: Sequence[Ended], expected: dict[str, torch.Tensor], refused: str, *, exact: bool
) -> Verdict:
    errors = [each for each in ended if each.code]
    finals = [each.model for each in ended if not each.code and each.model is not None]
    differences = [off for model in finals if (off := difference(model, expected, exact=exact))]
    if differences:
        said = f", a worker said {errors[0].message[:120]!r}" if errors else ""
        return Verdict("silent", f"{text}: {differences[0]}{said}")
    if errors:
        return _of_refusal(text, errors, refused)
    if not finals:
        return Verdict("wrong", f"{text}: no worker came to the end ({ended})")
    return Verdict("passed", text)


def _of_refusal(text: str, errors: Sequence[Ended], refused: str) -> Verdict:
    for each in errors:
        if not refused or not re.search(refused, each.message) or not each.kind.endswith("Error"):
            return Verdict("silent", f"{text}: ended with {each.code}, {each.kind}: {each.message}")
    return Verdict("refused", f"{text}: {errors[0].message}")


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, exact: bool) -> str:
    """Return the first value that differs, and by how much; "" for equal models."""
    if set(found) != set(expected):
        return f"values {sorted(set(found) ^ set(expected))} are of one model only"
    for name, value in expected.items():
        same = torch.equal(found[name], value) if exact else torch.allclose(found[name], value, rtol=RTOL, atol=ATOL)
        if not same and not (torch.isnan(value).any() and torch.equal(value.isnan(), found[name].isnan())):
            off = float((found[name].double() - value.double()).norm() / (value.double().norm() + 1e-12))
            return f"{name} is {off:.2%} off"
    return ""


def _rehearsed(case: Case, why: str, directory: Path) -> Verdict:
    """A script that ends wrong in silence, or by a message that is none of ours, has to be found by a rehearsal."""
    pattern = script_named(case.script).rehearsed
    report = rehearse(case.script, case.reduction, directory)
    found = report.returncode == 1 and "would go wrong on a cluster" in report.stdout
    text = report.stdout.partition("ELASTIC_REHEARSE:")[2].replace("\n   ", " ")
    if found and pattern and re.search(pattern, text.replace("\n", " ")):
        return Verdict("rehearsed", f"{why}; {text[:900]}")
    return Verdict(
        "wrong", f"{why}; the rehearsal ended with {report.returncode}: {text[-600:] or report.stderr[-300:]}"
    )


def drawn(count: int, number: int) -> list[Case]:
    """Draw so many different cases; `number` seeds them."""
    found: dict[tuple[str, str], Case] = {}

    @settings(
        max_examples=100,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def collect(case: Case) -> None:
        found.setdefault((case.script, case.reduction), case)

    for turn in itertools.count():
        if len(found) >= count:
            break
        seed(number * 1000 + turn)(collect)()
    return list(found.values())[:count]


@st.composite
def cases(draw: st.DrawFn, histories: int = 3) -> Case:
    """Draw a script, one of its reductions, and a few histories."""
    recipe = draw(recipes())
    chosen = draw(st.lists(st.sampled_from(HISTORIES), min_size=histories, max_size=histories, unique=True))
    return Case(f"{PREFIX}{recipe}", draw(st.sampled_from(recipe.modes)), tuple(chosen))


def judge_all(chosen: Sequence[Case], workers: int = 2) -> Iterator[tuple[Case, Verdict]]:
    """Judge cases in so many processes at a time, in the order in which they were drawn."""
    with ThreadPoolExecutor(workers) as pool:
        yield from zip(chosen, pool.map(judge, chosen), strict=True)
