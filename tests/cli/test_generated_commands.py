"""Drawn command lines, right and wrong ones, against a real cluster: what every command keeps to.

No traceback; an exit code and a sentence for each failure; output that can be read as what it is said to be; a command
that is refused changes nothing; every view of a job agrees with the others, the page included; and what was answered is
still there when the daemon has been killed. `make soak` draws 100 people of 200 commands; COMMANDS_SEED draws others.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import sys
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest
import typer
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.cli.main import application, main
from tests.effort import effort
from tests.web.conftest import visitor_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import EmbeddedCluster
    from tests.web.visitor import Visitor

SEEDS = range(int(os.environ.get("COMMANDS_SEED", "0")), int(os.environ.get("COMMANDS_SEED", "0")) + effort(2, 100))
COMMANDS = effort(60, 200)

NOT_DRAWN: Final = {
    "simulate", "ui", "bash", "port-forward", "attach", "uninstall", "migrate", "doctor", "run", "exec",
    "cluster start", "cluster restore", "cluster repair", "cluster stop", "cluster backup",
    "cluster test-notifications",
    "pipeline run", "pipeline route", "pipeline check", "config context", "debug state", "policy check",
}  # fmt: skip
"""They wait for a person, end the cluster, or have files; their own tests run them."""
WAITING: Final = {"follow", "watch", "rehearse", "picture", "plot", "seconds", "no_browser", "install_completion"}
READ_ONLY: Final = {
    "list", "get", "events", "describe", "explain", "top", "logs", "wait", "twin", "what-if", "report",
    "cluster export", "cluster status", "project list", "policy list",
}  # fmt: skip
WRONG: Final = (
    "", " ", "x", "-1", "nan", "inf", "-inf", "1e400", "0", "1e-9", "9" * 40, "٣", "x" * 5000, "a\nb", "[bold]b[/]",
    "[/]", "\x1b[31mred", "é", "日本", "'; rm", "a,b", "=", "%s", "{}", "..", "../x", "NULL", "true", "1_0", "0x10",
    "a=b", "--", "*", "1,2", "\u202e", "😀", "1:2", "@", "~", "$HOME",
)  # fmt: skip
NAMES: Final = ("a", "b", "c", "sweep", "train-1", "notebook")
PROJECTS: Final = ("team-a", "team-b")
RIGHT: Final[dict[str, tuple[str, ...]]] = {
    "gpus": ("1", "2", "0", "0.5", "1.0", "3"), "min_gpus": ("1", "2"), "max_gpus": ("2", "3", "8"),
    "gpu_limit": ("0.8", "1"), "gpu_memory": ("4G", "1Gi", "500M"), "gpu_memory_limit": ("6G",),
    "memory": ("1G", "2Gi"), "cpu": ("1", "500m"), "cpu_limit": ("2",), "memory_limit": ("4G", "none"),
    "limit": ("2", "3", "none"), "guaranteed": ("1", "2", "0", "team-a=2"), "name": NAMES, "job": NAMES,
    "jobs": NAMES, "names": (*NAMES, *PROJECTS), "project": PROJECTS, "max_runtime": ("1h", "90m", "1d"),
    "begin": ("now+1h", "2030-01-01", "10m"), "after": NAMES, "array": ("0-3", "0-9%2", "1,5"),
    "label": ("app=x", "a/b=c"), "environment": ("A=1", "B=é", "C=a=b"),
    "selector": ("app", "app=x", "!app", "app in (x)"), "timeout": ("0", "0.1s"),
    "wait_for": ("running", "ended"),
    "output": ("json", "yaml", "name", "wide", "jsonpath={.status.phase}", "jsonpath={..name}", "table"),
    "priority": ("10", "60", "100"), "grace_period": ("1", "2"), "since": ("1h", "7d", "1m"),
    "toleration": ("x", "a=b:NoSchedule"), "node_selector": ("disk=fast",), "tail": ("1", "10"),
    "last": ("1", "100"), "idle_warn": ("1h", "none"), "parent": (*PROJECTS, "none"), "weight": ("1", "2.5"),
    "member": ("root", "@root"), "delete": NAMES, "with_node": ("8", "x=8"), "without_node": ("local",),
    "node": ("local",), "segment": ("1",), "worker": ("0",), "default_time": ("1h", "none"),
    "max_time": ("2h", "none"), "min_runtime": ("10m", "none"), "reserve_after": ("1h", "none"),
    "order": ("shortest", "submission", "fifo"), "kind": ("train", "build"),
    "what": ("jobs", "projects", "nodes", "gpus", *NAMES), "restart_window": ("6h",), "cool_down": ("1",),
    "min_run_time": ("1",), "gpu_type": ("A100", "A100,H100"), "max_restarts": ("0", "3"),
    "gpu_devices": ("2",), "gpu_compute": ("0.5",),
}  # fmt: skip


PROGRAMS: Final[tuple[list[str], ...]] = (
    ["sleep", "infinity"],
    ["true"],
    ["sh", "-c", "echo é; exit 3"],
    ["no-such-program"],
    [],
)
LIKELY: Final = {"output": 0.5, "help": 0.01}
CODES: Final = {0, 1, 2, 3, 124}
KILLS: Final = 0.01
READERS: Final = {"json": json.loads, "yaml": yaml.safe_load}
ESCAPE: Final = "\x1b"


def commands(of: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """All commands of the program by their words."""
    found = of or typer.main.get_command(application([]))
    if hasattr(found, "commands"):
        for name, each in found.commands.items():
            yield from commands(each, (*path, name))
    elif (words := " ".join(path)) not in NOT_DRAWN and path[0] not in {"training", "workspace"}:
        yield words, found


ALL: Final = dict(commands())
OFTEN: Final = (
    "submit",
    "submit",
    "submit",
    "list",
    "describe",
    "update",
    "delete",
    "suspend",
    "resume",
    "project set",
)


class Ran(msgspec.Struct):
    """What a command did."""

    words: list[str]
    code: int
    out: str
    err: str

    def output(self) -> str:
        """The format that it was asked for; "" where it is the usual one, or not clear."""
        own = self.words[: self.words.index("--")] if "--" in self.words else self.words
        given = [word.partition("=")[2] for word in own if word.startswith("--output=")]
        given += [value for flag, value in itertools.pairwise(own) if flag == "-o"]
        return given[-1] if len(given) == 1 else ""


def run(*words: str) -> Ran:
    """Run the program in this process; what it raises is what a person would see as a traceback."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    before, argv, code = dict(os.environ), sys.argv, 0
    sys.argv = ["gpuquota", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(before)
    return Ran(list(words), code, *(stream.buffer.getvalue().decode() for stream in (out, err)))


class Person:
    """Draws command lines; most values are right ones."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)

    def value(self, option: Any) -> str:
        """Return a value for an option or argument."""
        if hasattr(option.type, "choices") and self.rng.random() < 0.9:
            return str(self.rng.choice(list(option.type.choices)))
        number = option.type.name in {"float", "integer", "float range", "integer range"}
        right = RIGHT.get(option.name, ("1",) if number else ("x",))
        return self.rng.choice(right if self.rng.random() < 0.85 else WRONG)

    def line(self) -> tuple[str, list[str]]:
        """Return a command's name, and its whole line."""
        name = self.rng.choice(OFTEN) if self.rng.random() < 0.5 else self.rng.choice(list(ALL))
        words, arguments = name.split(), []
        for option in ALL[name].params:
            if option.name in WAITING or (name == "submit" and option.name == "command"):
                continue
            if option.param_type_name == "argument":
                count = 1 if option.nargs == 1 else self.rng.choice([1, 1, 2])
                if option.required or self.rng.random() < 0.7:
                    arguments += [self.value(option) for _ in range(count)]
            elif option.name == "project" or self.rng.random() < LIKELY.get(option.name, 2 / len(ALL[name].params)):
                words += self.flag(option)
        if name == "wait":
            words.append("--timeout=0.05s")
        if name == "submit":
            arguments += ["--", *self.rng.choice(PROGRAMS)]
        return name, words + arguments

    def flag(self, option: Any) -> list[str]:
        """Return the option by one of its names, with a value if it takes one."""
        flag = self.rng.choice([*option.opts, *option.secondary_opts])
        if option.is_flag:
            return [flag]
        return [f"{flag}={self.value(option)}"] if flag.startswith("--") else [flag, self.value(option)]


def state(cluster: EmbeddedCluster) -> dict[str, dict[object, object]]:
    """What commands change, without what time changes."""
    jobs: dict[object, object] = {job.uid: job.spec for job in cluster.client.list_jobs().jobs}
    return {"jobs": jobs, "projects": {view.project.name: view.project for view in cluster.client.list_projects()}}


def changes(before: dict[str, dict[object, object]], after: dict[str, dict[object, object]]) -> list[object]:
    """The uids of jobs and the names of projects that differ."""
    keys = {(kind, key) for each in (before, after) for kind, found in each.items() for key in found}
    return [key for kind, key in keys if before[kind].get(key) != after[kind].get(key)]


def problems(ran: Ran, name: str) -> Iterator[str]:
    """What no command may do."""
    named = [word for word in ran.words if not word.startswith("-")]
    if ran.code not in CODES:
        yield f"ends with {ran.code}"
    if ran.code and not ran.err.strip():
        yield "fails without a word"
    if ran.code == 2 and ran.out and len(named) <= len(name.split()) + 1:
        yield "refuses, and has output"
    if ran.code == 0 and (kind := ran.output()) in READERS:
        try:
            READERS[kind](ran.out)
        except (ValueError, yaml.YAMLError) as error:
            yield f"{kind} cannot be read: {error}"
    if ESCAPE in ran.out + ran.err:
        yield "control characters in the output"


def agree(cluster: EmbeddedCluster, visitor: Visitor) -> Iterator[str]:
    """What differs between views of the same jobs; what changes while they are read is read again."""
    revision = None
    while revision != (revision := cluster.client.list_jobs().revision):
        listed = {job["uid"]: job for job in json.loads(run("list", "-A", "-o", "json").out)}
        jobs = {job.uid: job for job in cluster.client.list_jobs().jobs}
        page = visitor.get("/queue?state=all&size=1000").text
        described = {
            job.uid: run("describe", job.spec.name, "-p", job.spec.project, "-o", "json").out
            for job in [*jobs.values()][:3]
        }
        revision = revision if revision == cluster.client.list_jobs().revision else None
    for uid, job in jobs.items():
        shown = json.loads(msgspec.json.encode(job))
        if listed.get(uid) != shown:
            yield f"listed as {listed.get(uid)}, is {shown}"
        if uid in described and json.loads(described[uid]) != shown:
            yield f"described as {described[uid]}, is {shown}"
        row = re.search(f'<tr id="job-{uid}">.*', page)
        if row is None and job.spec.array is None:
            yield f"not on the page: {shown}"
        if row is not None:
            phase, gpus = (
                re.findall('class="badge.*?>(.*?)<', row[0])[0],
                re.findall('class="gpus">([^ <]*)', row[0])[0],
            )
            held = job.spec.asks if job.status.phase.final else f"{job.status.gpus - job.status.leaving_gpus:g}"
            if (phase, gpus) != (job.status.phase.value, str(held)):
                yield f"on the page {phase} {gpus}, is {shown}"


@pytest.fixture
def visitor(embedded_cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Visitor:
    """A person's page of the cluster; commands run in this process."""
    monkeypatch.setenv("GPUQUOTA_HOME", str(embedded_cluster.home.root))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    for project in PROJECTS:
        embedded_cluster.project(project, 1)
    return entered(embedded_cluster)


def entered(cluster: EmbeddedCluster) -> Visitor:
    made = visitor_of(cluster)
    assert made.enter().status == 200
    return made


@pytest.mark.parametrize("seed", SEEDS)
def test_no_command_breaks_contradicts_another_view_or_changes_something_where_it_is_refused(
    embedded_cluster: EmbeddedCluster, visitor: Visitor, seed: int
) -> None:
    person, before, found = Person(seed), state(embedded_cluster), []
    for number in range(COMMANDS):
        name, words = person.line()
        ran = run(*words)
        after = state(embedded_cluster)
        found += [f"{ran}: {wrong}" for wrong in problems(ran, name)]
        one = len([word for word in words if word in {*NAMES, *PROJECTS, *WRONG}]) <= 1
        if (name in READ_ONLY or (ran.code and one)) and (changed := changes(before, after)):
            found.append(f"{ran}: changes {changed}")
        if number % 20 == 10:
            found += agree(embedded_cluster, visitor)
        if person.rng.random() < KILLS:
            embedded_cluster.kill_daemon()
            found += [f"lost when the daemon was killed: {each}" for each in changes(after, state(embedded_cluster))]
            visitor = entered(embedded_cluster)
        before = after
    assert not found, "\n".join(found)
