"""Draws scripts, runs each plain and with elastic_runtime, and compares what both leave behind."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.elastic_runtime.plain_twin import parts
from tests.elastic_runtime.plain_twin.left import SCRIPTED
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SURROUNDINGS = ("alone", "checkpoint", "report", "worker", "exact")
OUTPUTS = ("stdout", "stderr", "state.json")
Action = tuple[str, str]  # place, name


@dataclass(frozen=True)
class Draft:
    """One script: what it does where, how a training of it ends, and how often it trains."""

    habits: tuple[Action, ...]
    end: Action
    main: str
    surroundings: str

    def source(self, *, elastic: bool) -> str:
        """Return the script."""
        actions: dict[str, list[Action]] = {}
        for place, name in self.habits:
            actions.setdefault(place, []).append((name, parts.HABITS[name]))
        place, name = self.end
        failing = {place: [(name, parts.ENDS[name])]}
        options = {"exact": "reduction='exact', shards=1", "checkpoint": "checkpoint_every_s=1e-9"}
        return parts.TEMPLATE.format(
            actions=actions,
            failing=failing,
            elastic=elastic,
            options=options.get(self.surroundings, ""),
            main=parts.MAINS[self.main],
        )


def draw(seed: int) -> Draft:
    """Return the draft of this seed."""
    draws = random.Random(seed)
    habits = [(draws.choice(parts.PLACES), draws.choice(list(parts.HABITS))) for _ in range(draws.randint(0, 3))]
    end = draws.choice(parts.PLACES), draws.choice(list(parts.ENDS))
    surroundings = draws.choice(SURROUNDINGS)
    mains = parts.WITH_ONE if surroundings in {"worker", "checkpoint"} else tuple(parts.MAINS)
    if surroundings == "worker":  # refused
        mains = tuple(main for main in mains if main != "in a thread")
    if end[1].startswith("SIGINT"):  # an interpreter whose wait for a thread is interrupted may not wait for its end
        mains = tuple(main for main in mains if main != "in a thread")
    return Draft(tuple(habits), end, draws.choice(mains), surroundings)


@dataclass
class Left:
    """What a process has left: exit code, outputs, state, other files."""

    code: int
    stdout: str
    stderr: list[str]
    state: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)


def start(python: Sequence[str], source: str, directory: Path, more: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a script in a new folder."""
    directory.mkdir(parents=True)
    (directory / "script.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1", **more}
    with (directory / "stdout").open("wb") as out, (directory / "stderr").open("wb") as err:
        return subprocess.Popen([*python, "script.py"], cwd=directory, env=environment, stdout=out, stderr=err)


def run(python: Sequence[str], source: str, directory: Path, more: dict[str, str]) -> Left:
    """Run a script in a new folder, and return what it leaves."""
    code = start(python, source, directory, more).wait(TIMEOUT_S)
    if code >= 0 and "os._exit" not in source:
        assert (directory / "state.json").exists(), (directory / "stderr").read_text()
    return left_in(directory, code)


def left_in(directory: Path, code: int) -> Left:
    """Return what a script has left in its folder."""
    found = {name: (directory / name).read_text() for name in OUTPUTS if (directory / name).exists()}
    files = {
        each.name: each.read_text()
        for each in directory.iterdir()
        if each.is_file() and each.name not in OUTPUTS and each.name not in OWN_FILES
    }
    text = json.dumps(json.loads(found.get("state.json", "{}"))).replace(str(directory), "FOLDER")
    return Left(code, "\n".join(lines_of(found["stdout"])), lines_of(found["stderr"]), json.loads(text), files)


OWN_FILES = {"report.jsonl", "store", "token", "error", "script.py"}
OWN_LINES = (
    "the training runs in a thread",
    "ELASTIC_CHECKPOINT_DIR is not set",
    "generation ",
    "nanobind:",
    " - ",
    "See https://nanobind",
)  # a library of torch.compile
OF_A_PLACE = r"(\[rank0\]: )*  |.*multi-threaded, use of fork\(\) may lead"
"""Lines of a traceback, and Python's warning since 3.12: a worker of a job has threads of the library's."""


def lines_of(output: str) -> list[str]:
    """Return the script's lines of an output: without places in the code, and without ours."""
    text = re.sub("0x[0-9a-f]+|Thread-[0-9]+", "...", output)
    lines = [re.sub("^(WARNING:|)elastic_runtime[: ]", "", line) for line in text.splitlines()]
    return [line for line in lines if not re.match(OF_A_PLACE, line) and not line.startswith(OWN_LINES)]


def environment_of(surroundings: str, directory: Path) -> dict[str, str]:
    """Return the variables that a script with elastic_runtime gets."""
    if surroundings == "checkpoint":
        return {"ELASTIC_CHECKPOINT_DIR": f"{directory}/checkpoints"}
    if surroundings == "report":
        return {"ELASTIC_REPORT_FILE": f"{directory}/report.jsonl"}
    if surroundings == "worker":
        return {
            "JOB_NAME": "twin", "ELASTIC_WORKER_ID": "w0", "ELASTIC_COORDINATOR": SCRIPTED,
            "ELASTIC_ERROR_FILE": f"{directory}/error", "ELASTIC_STALL_S": "off", "ELASTIC_STOPPED_S": "off",
        }  # fmt: skip
    return {}


IN_LOOP = (parts.LOOP, parts.EVALUATION, parts.LATER)
STATE_OF_A_TRAINING = frozenset({"files", "hooks", "loader", "torch hooks", "models alive"})


def documented(draft: Draft, plain: Left, elastic: Left) -> frozenset[str]:
    """Return what differs by design."""
    named = {"torch random"}  # an elastic loader's order is a function of its seed, and draws no random numbers
    place, end = draft.end
    awaited = draft.surroundings in {"checkpoint", "report", "worker"}
    if draft.surroundings == "exact":
        named |= {"python random", "numpy random"}  # functions of seed and step
    if awaited:
        named.add("exit")  # what the script passes to it is noted
    if awaited and end not in parts.GOES_ON:
        named.add("files")  # the report file of a training that has not ended
    in_a_loop = place in IN_LOOP or (draft.main == "within another" and place not in {parts.START, parts.END})
    if end == "breaks" or (in_a_loop and end not in parts.GOES_ON):
        named |= STATE_OF_A_TRAINING if awaited else {"hooks"}  # it may be entered again; an error may get a note
    if awaited and "end the training by job.close()" in "".join(elastic.stderr):
        named |= {"code", "stdout", "stderr"}  # it may be entered again, and a plain loop over its model is refused
    if draft.surroundings == "worker":
        named |= {"signals", "hooks", "files", "group", "models alive", "threads"}  # it is a worker to its end
        if end == "SIGTERM":
            named |= {"code", "stdout", "stderr", "state"}  # it asks the coordinator
        if "weights" not in plain.stdout and elastic.code == 2 and (plain.code == 0 or end.startswith("SystemExit")):
            named |= {"code", "stderr"}  # no step was trained
    if draft.surroundings == "checkpoint" and end == "SIGTERM" and place in IN_LOOP and elastic.code == 143:
        named |= {"code", "stdout", "stderr", "state"}
    return frozenset(named)


def differences(plain: Left, elastic: Left) -> Iterator[tuple[str, Any, Any]]:
    """Yield (what, plain, elastic) of all that differs."""
    for name in ("code", "stdout", "stderr", "files"):
        one, other = getattr(plain, name), getattr(elastic, name)
        if one != other:
            yield name, one, other
    if bool(plain.state) != bool(elastic.state):
        yield "state", bool(plain.state), bool(elastic.state)
        return
    for name, value in plain.state.items():
        other = elastic.state[name]
        if value != other:
            if isinstance(value, dict):
                keys = {key for key in {*value, *other} if value.get(key) != other.get(key)}
                yield name, {k: value.get(k) for k in keys}, {k: other.get(k) for k in keys}
            else:
                yield name, value, other


def compare(python: Sequence[str], draft: Draft, directory: Path) -> list[tuple[str, Any, Any]]:
    """Run both, and return the differences."""
    plain = run(python, draft.source(elastic=False), directory / "plain", {})
    environment = environment_of(draft.surroundings, directory / "elastic")
    elastic = run(python, draft.source(elastic=True), directory / "elastic", environment)
    named = documented(draft, plain, elastic)
    return [row for row in differences(plain, elastic) if row[0] not in named]
