"""The Pipelines page: runs by the name of their pipeline, with all steps, also those that use no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.api import Phase, pipeline_labels
from kfp_gpuquota.web.source import RunStep
from kfp_gpuquota.web.views.pipelines import MOST_OF_RUN, MOST_ON_PAGE, RUNS
from tests.web.listed import NOW, Cluster, job
from tests.web.visitor import Tags

if TYPE_CHECKING:
    from kfp_gpuquota.api import Job


def step(task: str, phase: str, submitted_at: float, project: str = "team-a", run: str = "0a1b") -> RunStep:
    begun = None if phase == "Pending" else submitted_at
    ended = submitted_at + 5 if phase == "Succeeded" else None
    return RunStep(run, project, "digits", task, f"{task}(0)", phase, submitted_at, 0, begun, ended)


def train(name: str = "train-1", project: str = "team-a", **labels: str) -> Job:
    all_labels = {pipeline_labels.RUN: "0a1b", pipeline_labels.TASK: "train", **labels}
    return job(name, project=project, labels=all_labels, phase=Phase.RUNNING, submitted_at=NOW - 50)


def rows(source: Cluster, address: str = "/pipelines") -> dict[str, list[str]]:
    """Return the words of each step by run."""
    runs = source.show(address).lists["runs"]
    return {name: [" ".join(Tags(row).text.split()) for row in html.split("<tr>")[2:]] for name, html in runs.items()}


def test_a_run_has_the_name_of_its_pipeline_and_all_its_steps_in_order() -> None:
    source = Cluster([train(**{pipeline_labels.NAME: "digits"})])
    source.steps = (
        step("load", "Succeeded", NOW - 60),
        step("train", "Running", NOW - 52),
        step("loop.report", "Running", NOW - 40),
        step("other", "Running", NOW, run="of-no-job"),
    )
    shown = source.show("/pipelines").lists["runs"]["run-0a1b"]
    assert 'id="name-0a1b">digits <small>run 0a1b' in shown
    ((first, second, third),) = rows(source).values()
    assert first.startswith("loadno GPUSucceeded0ran 5s")
    assert second.startswith("traintrain-1Running"), "the pod of a step with a job only waits for it"
    assert third.startswith("loop.reportno GPURunning0ran 40s")
    assert "no others" not in source.show("/pipelines").parts["counts"]


def test_without_a_name_a_run_has_that_of_its_pods_and_else_its_id() -> None:
    source = Cluster([train()])
    assert 'id="name-0a1b">0a1b <small>team-a' in source.show("/pipelines").lists["runs"]["run-0a1b"]
    assert "and no others" in source.show("/pipelines").parts["counts"]
    source.steps = (step("load", "Pending", NOW - 60),)
    assert 'id="name-0a1b">digits <small>run' in source.show("/pipelines").lists["runs"]["run-0a1b"]


def test_a_run_of_thousands_of_pods_shows_those_that_are_not_fine_and_the_newest() -> None:
    source = Cluster([train()])
    loads = [step(f"loop.{index}", "Succeeded", NOW - 9000 + index / 10) for index in range(10_000)]
    source.steps = (step("bad", "Failed", NOW - 9999), *loads, step("slow", "Running", NOW - 9990))
    ((*others,),) = rows(source).values()
    assert len(others) == MOST_OF_RUN + 1
    assert [row.partition("no GPU")[0] for row in others[:3]] == ["bad", "slow", "loop.9802"]
    shown = source.show("/pipelines").lists["runs"]["run-0a1b"]
    assert "9802 more steps without a GPU, older ones, are not shown." in shown
    assert len(shown) < 200_000


def test_a_run_of_thousands_of_jobs_shows_those_that_are_not_fine_and_the_newest() -> None:
    labels = {pipeline_labels.RUN: "0a1b", pipeline_labels.TASK: "train"}
    bad = job("bad", labels=labels, phase=Phase.FAILED, submitted_at=NOW - 9000)
    done = [
        job(f"t-{index}", labels=labels, phase=Phase.SUCCEEDED, submitted_at=NOW - 5000 + index)
        for index in range(3000)
    ]
    source = Cluster([bad, *done])
    shown = source.show("/pipelines").lists["runs"]["run-0a1b"]
    assert shown.count("<tr>") == MOST_OF_RUN + 1
    assert ">bad<" in shown
    assert ">t-2999<" in shown
    assert "2801 more jobs, older ones, are on the queue" in shown


def test_many_runs_of_many_steps_are_a_page_of_a_bounded_size() -> None:
    names = [f"run{index}" for index in range(120)]
    source = Cluster([train(f"t-{name}", **{pipeline_labels.RUN: name}) for name in names])
    source.steps = tuple(step(f"s.{i}", "Succeeded", NOW - 90 + i, run=name) for name in names for i in range(85))
    runs = source.show("/pipelines").lists["runs"]
    assert len(runs) == RUNS
    assert sum(html.count("<tr>") - 1 for html in runs.values()) == RUNS + MOST_ON_PAGE


def test_a_run_over_two_projects_is_one_entry() -> None:
    source = Cluster([train(), train("train-2", "team-b")])
    source.steps = (step("load", "Succeeded", NOW - 60, "team-b"),)
    for address in ("/pipelines", "/pipelines?project=team-b"):
        ((load, first, second),) = rows(source, address).values()
        assert "team-b" in load
        assert "team-a" in first
        assert "team-b" in second
    assert rows(source, "/pipelines?project=team-c") == {}
