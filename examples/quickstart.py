"""The quickstart: one pipeline, two teams, two GPUs. Run by `make quickstart`; nothing to prepare, no network.

Team A's digits pipeline trains on both GPUs, for team B's is idle. Team B opens an interactive session: the training
releases the GPU within a step and continues with one. Team B closes the session: the training uses the GPU again.
Without GPUs in this machine two CPU slots stand for them. What happens when is decided by the training's own progress.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from own_cluster import end_with_its_steps, own_cluster
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from timeline import draw

from kfp_gpuquota.api import Job, JobSpec, Kind, Resize
from kfp_gpuquota.cluster.local.devices import CPU_SLOT
from kfp_gpuquota.errors import GpuQuotaError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from kfp_gpuquota.server.client import Client

OUT = Path("out/quickstart").absolute()
PICTURE = OUT / "timeline.png"
LOG = OUT / "pipeline.log"
GPUS = 2
TEAM_A, TEAM_B = "team-a", "team-b"
SESSION = "notebook"
# Long enough for the training to run when the second worker has started again; a GPU is faster.
EPOCHS_ON_CPU, EPOCHS_ON_GPU = 80, 1500
OPEN_AFTER_STEPS, CLOSE_AFTER_STEPS = 60, 100
ENOUGH_ACCURACY = 0.95
EXPECTED_CHANGES = [(2, 1), (1, 2)]


@dataclass
class Story:
    """The demonstration with its messages to the user."""

    client: Client
    console: Console
    training: Job | None = None
    opened_at: float | None = None
    closed_at_step: int | None = None
    _shrunk_at_step: int | None = None
    _unfinished_line: str = ""

    def follow(self, pipeline: subprocess.Popen[bytes]) -> None:
        """Watch the jobs until the pipeline has ended, and play team B's part."""
        after: int | None = None
        with _progress(self.console) as progress, LOG.open() as log:
            bar = progress.add_task("loading", total=None, loss="")
            while pipeline.poll() is None:
                listed = self.client.list_jobs(after=after, timeout_s=0.0 if after is None else 0.5)
                after = listed.revision
                self.training = next((job for job in listed.jobs if job.spec.project == TEAM_A), None)
                if self.training:
                    self._play_team_b(self.training)
                    _show(progress, bar, self.training)
                self._tell(log.read())
            self._tell(log.read())

    def _play_team_b(self, training: Job) -> None:
        step = training.status.progress.step if training.status.progress else 0
        if self.opened_at is None and training.status.gpus == GPUS and step >= OPEN_AFTER_STEPS:
            self.client.submit(
                JobSpec(name=SESSION, project=TEAM_B, command=("sleep", "infinity"), kind=Kind.BUILD, grace_period_s=1)
            )
            self.opened_at = time.time()
            self._print(f"[bold]{TEAM_B}[/] opens an interactive session, and has its GPU guaranteed")
        elif self.opened_at and self._shrunk_at_step is None and training.status.gpus < GPUS:
            self._shrunk_at_step = step
        elif (
            self._shrunk_at_step is not None
            and self.closed_at_step is None
            and step >= self._shrunk_at_step + CLOSE_AFTER_STEPS
        ):
            self.client.delete_job(TEAM_B, SESSION)
            self.closed_at_step = step
            self._print(f"[bold]{TEAM_B}[/] closes its session, and its GPU is idle again")

    def _tell(self, text: str) -> None:
        """Show the messages about the job in the training step's log; the rest is in the log file."""
        *lines, self._unfinished_line = (self._unfinished_line + text).split("\n")
        for output in filter(None, (re.search(r"gpuquota: (?!step )(.*)", line) for line in lines)):
            self._print(f"[bold]{TEAM_A}[/] {output[1]}")

    def _print(self, text: str) -> None:
        self.console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, soft_wrap=True)


@contextlib.contextmanager
def pipeline_process(epochs: int) -> Iterator[subprocess.Popen[bytes]]:
    """The pipeline, exactly as a data scientist runs it; ended, with all its steps, when we leave early."""
    script = Path(__file__).with_name("digits_pipeline.py")
    command = [
        sys.executable,
        "-u",
        str(script),
        f"--project={TEAM_A}",
        f"--epochs={epochs}",
        f"--root={OUT / 'pipelines'}",
    ]
    with LOG.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        end_with_its_steps(process)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True)


def _show(progress: Progress, bar: object, job: Job) -> None:
    reported = job.status.progress
    loss = f"loss {reported.metrics['loss']:.3f}" if reported and "loss" in reported.metrics else ""
    progress.update(
        bar,  # type: ignore[arg-type]
        description=f"training on {job.status.gpus} GPU{'s' * (job.status.gpus != 1)}"
        if job.status.gpus
        else "waiting",
        completed=reported.step if reported else 0,
        total=reported.total_steps if reported else None,
        loss=loss,
    )


def report(story: Story, console: Console) -> list[str]:
    """Show what came out; returns what is wrong with it."""
    accuracy = re.search(r"^accuracy: (\d\.\d+)$", LOG.read_text(), re.MULTILINE)
    if not accuracy or story.training is None:
        console.print(LOG.read_text(), markup=False, highlight=False)
        return ["the pipeline did not reach its end"]
    resizes = story.training.status.resizes
    lost = sum(resize.lost_steps for resize in resizes)
    console.print(_table(resizes, story.training.status.started_at or 0.0))
    draw(PICTURE, story.client.events().events, (TEAM_A, TEAM_B), resizes, GPUS)
    console.print(f"accuracy: {accuracy[1]}\nsteps lost: {lost}\ntimeline: {PICTURE}", highlight=False, soft_wrap=True)
    return _problems(float(accuracy[1]), resizes, lost)


def _table(resizes: tuple[Resize, ...], start_at: float) -> Table:
    table = Table("when", "GPUs", "why", "at step", "pause", "steps lost", title="Every change of the training's size")
    for resize in resizes:
        pause = "" if resize.pause_ms is None else f"{resize.pause_ms:.1f} ms"
        table.add_row(
            f"{resize.at - start_at:.1f} s",
            f"{resize.from_gpus} → {resize.to_gpus}",
            str(resize.reason).partition("GPUs: ")[2] or str(resize.reason),
            str(resize.step),
            pause,
            str(resize.lost_steps),
        )
    return table


def _problems(accuracy: float, resizes: tuple[Resize, ...], lost: int) -> list[str]:
    changes = [(resize.from_gpus, resize.to_gpus) for resize in resizes]
    return [
        message
        for wrong, message in (
            (accuracy < ENOUGH_ACCURACY, f"the accuracy is {accuracy}, but it should be at least {ENOUGH_ACCURACY}"),
            (changes[-2:] != EXPECTED_CHANGES, f"the sizes went {changes}, but should end with {EXPECTED_CHANGES}"),
            (lost > 0, f"{lost} steps were lost"),
        )
        if wrong
    ]


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    """Run the story; returns 0 when everything came out as promised, 1 when not, 130 when interrupted."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # the same cleanup as for Ctrl-C
        signal.signal(number, _interrupt)
    console = Console()
    began = time.monotonic()
    try:
        with own_cluster(OUT, {TEAM_A: 1, TEAM_B: 1}, GPUS) as client:
            on_cpu = client.list_nodes()[0].node.devices[0].model == CPU_SLOT
            story = Story(client, console)
            with pipeline_process(EPOCHS_ON_CPU if on_cpu else EPOCHS_ON_GPU) as pipeline:
                story.follow(pipeline)
            problems = report(story, console)
    except KeyboardInterrupt:
        console.print("interrupted; everything is stopped")
        return 130
    except GpuQuotaError as error:
        console.print(f"[red]wrong:[/] {error.message}")
        return error.exit_code
    for problem in problems:
        console.print(f"[red]wrong:[/] {problem}; see {LOG}")
    console.print(f"finished in {time.monotonic() - began:.0f} s", highlight=False)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
