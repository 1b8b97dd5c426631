"""What people with the habits of kubectl and Run:ai type, and what follows: the same on every kind of cluster.

The commands need two jobs, `SUBMITTED`, in the configured project, and no worker that runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Answer(Protocol):
    """The exit code and the output of a command."""

    @property
    def code(self) -> int: ...
    @property
    def out(self) -> str: ...
    @property
    def err(self) -> str: ...


@dataclass(frozen=True)
class Habit:
    """A command, its whole output, or a part of what it prints if it is refused."""

    words: tuple[str, ...]
    out: str = ""
    error: str = ""
    holds: str = ""

    def check(self, run: Callable[[tuple[str, ...]], Answer]) -> None:
        """Raise AssertionError if the command has another outcome."""
        answer = run(self.words)
        assert answer.code == (2 if self.error else 0), (self, answer)
        if self.error:
            assert self.error in answer.err, (self, answer)
        elif self.holds:
            assert self.holds in answer.out, (self, answer)
        else:
            assert answer.out == self.out, (self, answer)


def _habit(line: str, **outcome: str) -> Habit:
    words, _, last = line.partition(" # ")
    return Habit((*words.split(), *([last] if last else [])), **outcome)


_SLEEP = ("--", "sleep", "infinity")
SUBMITTED = (
    ("submit", "habit1", "-g", "1", "-i", "busybox", "-l", "team=vision", *_SLEEP),
    ("workspace", "submit", "habit2", "-g", "1", "-i", "busybox", "-l", "team=speech", "-l", "old=", *_SLEEP),
)

HABITS = (
    # label selectors: the forms of Kubernetes; one word behind " # " is an argument with spaces
    _habit("get jobs -o name -l # team in (vision)", out="job/habit1\n"),
    _habit("get jobs -o name -l # team notin (vision),team", out="job/habit2\n"),
    _habit("get jobs -o name -l !old,team", out="job/habit1\n"),
    _habit("get jobs -o name -l old", out="job/habit2\n"),
    _habit("get jobs -o name -l team=vision", out="job/habit1\n"),
    _habit("get jobs -o name -l team==vision", out="job/habit1\n"),
    _habit("get jobs -o name -l team!=vision,team", out="job/habit2\n"),
    _habit("get jobs -l team~vision", error="--selector is 'team~vision'"),
    _habit("get jobs -l # team like (a)", error="'like' behind 'team'"),
    _habit("list -l team=vision -o jsonpath={.items[*].spec.labels.team}", out="vision\n"),
    # formats
    _habit("get job habit1 -o jsonpath={.spec.name}", out="habit1\n"),
    _habit("get job/habit1 -o jsonpath={.spec.labels['team']}", out="vision\n"),
    _habit("get job habit1 -o jsonpath={.metadata.name}", error="there is no field 'metadata' here; there are uid"),
    _habit("get jobs -o jsonpath={.spec", error="which is not understood"),
    _habit("get jobs -o jsonpath={.items[0]['uid','spec']}", error="'uid','spec', which is not understood"),
    # options that choose among jobs, where there is no choice
    _habit("get job habit1 -l team=speech", error="--selector chooses among all jobs; leave it out, or leave out the"),
    _habit("get nodes -l gpu=a100", error="--selector chooses among all jobs; leave it out, or list jobs instead of"),
    _habit("list projects --type build", error="--type chooses among all jobs; leave it out, or list jobs instead of"),
    _habit("get jobs -o table2", error="--output is 'table2', but it must be one of table"),
    _habit("get job habit1 -o name", out="job/habit1\n"),
    _habit("get job habit1 -o yaml", holds="name: habit1\n"),
    # names that are not there
    _habit("get job nosuch --ignore-not-found", out=""),
    _habit("get job nosuch habit1 --ignore-not-found -o name", out="job/habit1\n"),
    _habit("get job nosuch", error="there is no job 'nosuch'"),
    _habit("delete nosuch --ignore-not-found", out=""),
    # Run:ai's groups
    _habit("training list -o name -l team", out="job/habit1\n"),
    _habit("workspace list -o name -l team", out="job/habit2\n"),
    _habit("training describe habit1", holds="team=vision"),
    _habit("training submit x -g 1 -i busybox --dry-run -o name -- true", out="job/x\n"),
    # dry runs change nothing
    _habit("submit x -g 1 -i busybox --dry-run=client -o jsonpath={.spec.gpus} -- true", out="1\n"),
    _habit("submit x -g 1 -i busybox --dry-run=server -o jsonpath={.status.phase} -- true", out="Pending\n"),
    _habit("submit x -g 1 -i busybox --dry-run server -o jsonpath={.spec.command} -- true", out='["true"]\n'),
    _habit(
        "submit x -i busybox --dry-run -o jsonpath={.spec.command} --command echo --args --dry-run",
        out='["echo", "--dry-run"]\n',
    ),
    _habit("submit x -g 0 --elastic -i busybox -- true", error="--elastic is given, but the job asks for no GPU: -"),
    _habit("run -g 0 --elastic -i busybox -- true", error="--elastic is given, but the job asks for no GPU: --gpus is"),
    _habit("submit habit1 -g 1 -i busybox --dry-run server -- true", error="already has a job 'habit1'"),
    _habit("submit habit1 -g 1 -i busybox --dry-run=server -- true", error="already has a job 'habit1'"),
    _habit("delete jobs -l team=vision --dry-run", out="job habit1 would be deleted (dry run)\n"),
    _habit("get jobs -o name -l team", out="job/habit1\njob/habit2\n"),
    # mistakes, in the words that were typed
    _habit("submit -g 1 -- sleep 5", error="the job has no name: gpuquota submit NAME ... -- sleep 5"),
    _habit("submit x -g 0.3.1 -i busybox -- true", error="--gpus is 0.3.1, but it must be a whole number of GPUs"),
    _habit("submit x -g -2 -i busybox -- true", error="--gpus is -2, but it must be"),
    _habit("submit x --gpu-memory 40GX -i busybox -- true", error="--gpu-memory is 40GX, but it must be a number"),
    _habit("submit x --gpu-memory 40GB -i busybox --dry-run -o jsonpath={.spec.gpu_memory_mib} -- true", out="38147\n"),
    _habit("wait habit1 --timeout soon", error="--timeout is soon, but a time is written as 30, 30s, 5m or 1h30m"),
    _habit("project create nosuch --guaranteed -5", error="--guaranteed is -5, but it must be"),
    # a maximum run time
    _habit(
        "submit x -i busybox --max-runtime 2h --dry-run=server -o jsonpath={.spec.max_runtime_s} -- true",
        out="7200.0\n",
    ),
    _habit(
        "submit x -g 1 -i busybox --max-runtime 0 -- true",
        error="--max-runtime is 0, but it must be between 1 and 31536000 s",
    ),
    # at the end
    _habit("delete jobs -l team", out="job habit1 deleted\njob habit2 deleted\n"),
)
