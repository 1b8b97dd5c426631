"""What became of a script in a history, against the script alone: right, refused, found by a rehearsal, or wrong."""

from __future__ import annotations

import json
import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.elastic_runtime.zoo.generated.lives import Ended, History, play
from tests.elastic_runtime.zoo.generated.recipes import script_named
from tests.elastic_runtime.zoo.rehearsing import rehearse
from tests.forked import context, preload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.elastic_runtime.zoo.generated.drawing import Case

preload("tests.elastic_runtime.zoo.generated.verdicts")

RTOL, ATOL = 2e-3, 2e-4
"""Of two "fast" results: gradients are added up in another order."""
CHUNK, TIMEOUT_S = 10, 1500
"""Cases of one process, and the most that it may take."""
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
    "crash_after:4",
    "evict_after:1",
    "evict_after:1 with:2",
    "evict_after:0 evict_after:0",
    "evict_after:4",
    "evict_left:1",
    "evict_left:0 stop:6",
    "evict_left:4",
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


def judge(case: Case) -> Verdict:
    """Play the case in processes of its own, and return its verdict."""
    return judge_several([case])[0]


def judge_several(chosen: Sequence[Case], played_by: Callable[[Any, str], None] | None = None) -> list[Verdict]:
    """Judge cases one after another, in one process that forks theirs. A case that ends it is wrong.

    `played_by`: `play_all` of a module that enters scripts which are not in the catalogue.
    """
    with tempfile.TemporaryDirectory() as directory:
        process = context.Process(target=played_by or play_all, args=(list(chosen), directory))
        process.start()
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        files = [Path(directory) / f"verdict-{number}.json" for number in range(len(chosen))]
        read = [Verdict(**json.loads(file.read_text())) for file in files if file.exists()]
        found = [
            _rehearsed(case, verdict.why, Path(directory)) if verdict.result == "silent" else verdict
            for case, verdict in zip(chosen, read, strict=False)
        ]
    if len(found) == len(chosen):
        return found
    found.append(Verdict("wrong", f"the case ended with {process.exitcode}"))
    return found + (judge_several(chosen[len(found) :], played_by) if len(found) < len(chosen) else [])


def play_all(chosen: Sequence[Case], directory: str) -> None:
    """Play cases, and write their verdicts."""
    os.environ["TMPDIR"] = directory
    for number, case in enumerate(chosen):
        found = _played(case, Path(directory) / str(number))
        draft = Path(directory) / "draft.json"
        draft.write_text(json.dumps(vars(found)))
        draft.rename(Path(directory) / f"verdict-{number}.json")


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
    script = script_named(case.script)
    place = Path(tempfile.mkdtemp(dir=directory))
    report = rehearse(case.script, case.reduction, place)
    found = report.returncode == 1 and "would go wrong on a cluster" in report.stdout
    text = report.stdout.partition("ELASTIC_REHEARSE:")[2].replace("\n   ", " ")
    fails = found and script.rehearsed and re.search(script.rehearsed, text.replace("\n", " "))
    noted = script.noted and re.search(rf"variables of the loop .*: .*\b({script.noted})\b", text)
    if fails or noted:
        return Verdict("rehearsed", f"{why}; {text[:900]}")
    return Verdict(
        "wrong", f"{why}; the rehearsal ended with {report.returncode}: {text[-600:] or report.stderr[-300:]}"
    )


def judge_all(chosen: Sequence[Case], workers: int = 2) -> Iterator[tuple[Case, Verdict]]:
    """Judge cases in so many processes at a time, in the order in which they were drawn."""
    chunks = [chosen[at : at + CHUNK] for at in range(0, len(chosen), CHUNK)]
    with ThreadPoolExecutor(workers) as pool:
        for chunk, verdicts in zip(chunks, pool.map(judge_several, chunks), strict=True):
            yield from zip(chunk, verdicts, strict=True)
