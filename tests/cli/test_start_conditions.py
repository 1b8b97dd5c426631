"""Jobs that begin later, after others, or in their turn of an array."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import pytest

from kfp_gpuquota.api import JobSpec, Project
from kfp_gpuquota.cli.arguments.start_conditions import array_of, begin_time, dependencies
from kfp_gpuquota.cli.jobs import listing
from kfp_gpuquota.cli.jobs.arrays import specs_of, submit_all
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from kfp_gpuquota.api import Job
    from tests.cli.conftest import Cli
    from tests.conftest import EmbeddedCluster

NOW = datetime(2027, 1, 31, 21, 30, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("+2h", "2027-01-31T23:30:00+00:00"),
        ("now", "2027-01-31T21:30:00+00:00"),
        ("now+2h", "2027-01-31T23:30:00+00:00"),
        ("+90", "2027-01-31T21:31:30+00:00"),
        ("22:00:30", "2027-01-31T22:00:30+00:00"),
        ("22:00", "2027-01-31T22:00:00+00:00"),
        ("21:30", "2027-02-01T21:30:00+00:00"),
        ("2027-03-01T08:00", "2027-03-01T08:00:00+00:00"),
        ("2027-03-01 08:00", "2027-03-01T08:00:00+00:00"),
        ("2027-03-01T08:00+02:00", "2027-03-01T06:00:00+00:00"),
    ],
)
def test_a_begin_is_written_as_a_wait_a_time_of_day_or_a_date(text: str, expected: str) -> None:
    assert datetime.fromtimestamp(begin_time(text, NOW, UTC), UTC).isoformat() == expected


def test_a_time_of_day_is_that_of_the_users_time_zone() -> None:
    found = datetime.fromtimestamp(begin_time("22:00", NOW, ZoneInfo("Europe/Berlin")), UTC)
    assert found.isoformat() == "2027-02-01T21:00:00+00:00"


@pytest.mark.parametrize("text", ["2027-03-28T02:30", "02:30"])
def test_a_time_that_clocks_skip_is_after_the_gap_also_in_the_machines_time_zone(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, berlin = datetime(2027, 3, 27, 12, tzinfo=UTC).timestamp(), ZoneInfo("Europe/Berlin")
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        found = [begin_time(text, now, zone) for zone in (None, berlin)]
    finally:
        monkeypatch.undo()
        time.tzset()
    assert found == [datetime(2027, 3, 28, 3, 30, tzinfo=berlin).timestamp()] * 2


@pytest.mark.parametrize("text", ["2200-01-01", "1960-01-01"])
def test_a_begin_is_between_two_years(text: str) -> None:
    with pytest.raises(InvalidFieldError, match="between the years 1970 and 2100"):
        begin_time(text, NOW, UTC)


@pytest.mark.parametrize("text", ["afterok:prep", "prep:clean", "any:any:prep", "prep,", ""])
def test_another_after_is_refused_with_examples(text: str) -> None:
    with pytest.raises(InvalidFieldError, match="written as prep, or any:prep"):
        dependencies([text], {})


@pytest.mark.parametrize("text", ["", "tomorrow", "25:00", "22:60", "+", "-2h", "0000-00-00", "9" * 40])
def test_another_begin_is_refused_with_examples(text: str) -> None:
    with pytest.raises(InvalidFieldError, match=r"\+2h, 22:00"):
        begin_time(text, NOW, UTC)


@pytest.mark.parametrize(
    ("text", "indices", "limit"),
    [("0-3%2", (0, 1, 2, 3), 2), ("1,5,7", (1, 5, 7), None), ("0-30:10,3%1", (0, 10, 20, 30, 3), 1), ("4", (4,), None)],
)
def test_an_array_is_written_as_in_slurm(text: str, indices: tuple[int, ...], limit: int | None) -> None:
    assert array_of(text) == (indices, limit)


@pytest.mark.parametrize("text", ["", "3-1", "0-3%", "0-3%0", "0-3%x", "1,1", "a", "0-1000", "-1", "0--3", "0-9999999"])
def test_another_array_is_refused(text: str) -> None:
    with pytest.raises(InvalidFieldError):
        array_of(text)


def test_an_array_in_after_means_all_of_its_jobs() -> None:
    arrays = {"sweep": ["sweep-0", "sweep-1"]}
    found = dependencies(["prep, any:sweep", "job/prep"], arrays)
    assert found == ("prep", "any:sweep-0", "any:sweep-1")


def test_an_array_is_submitted_listed_awaited_and_deleted_by_its_name(cli: Cli) -> None:
    cli("project create team-a --guaranteed 2")
    cli("config project team-a")
    submitted = cli(
        "submit", "sweep", "-g", "1", "--array", "0-3%1", "--", "sh", "-c", "echo I am $GPUQUOTA_ARRAY_INDEX"
    )
    assert "4 jobs submitted to project team-a as array sweep" in submitted
    for dry_run in ("client", "server"):
        checked = json.loads(cli(f"submit other -g 1 --array 0-1 --dry-run={dry_run} -o json -- true"))
        assert [job["spec"]["name"] for job in checked] == ["other-0", "other-1"]
    refused = cli.run("submit", "sweep", "--array", "4,0", "--", "true")
    assert "already has a job 'sweep-0'" in refused.err
    assert "sweep-4" not in cli("list -o name"), "those that were submitted before are deleted"
    cli("submit", "summary", "-g", "0", "--after", "any:sweep", "--", "true")
    cli("wait sweep summary --timeout 60s")
    assert cli("logs sweep-2") == "I am 2\n"
    for command in ("logs", "explain", "describe"):
        assert "sweep is an array of 4 jobs; name one of them, as sweep-0" in cli.run(command, "sweep").err
    (line,) = (line for line in cli("list").splitlines() if "sweep" in line)
    assert line.split()[:7] == ["sweep-[0-3]", "team-a", "train", "Succeeded", "0", "4", "x"]
    jobs = {job["spec"]["name"]: job["status"] for job in json.loads(cli("list -o json"))}
    ends = [jobs[f"sweep-{index}"] for index in range(4)]
    for before, after in pairwise(ends):
        assert after["started_at"] >= before["finished_at"], "one at a time, in the order of their indices"
    assert jobs["summary"]["started_at"] >= ends[-1]["finished_at"]
    assert "held (begin, after, array, project)" in cli("describe sweep-3").partition("TIME SPENT")[2]
    (row,) = json.loads(cli("report --since 1h --time-spent -o json"))
    assert (row["project"], row["jobs"], row["held_s"] > 0) == ("team-a", 5, True)
    cli("delete sweep")
    assert "sweep" not in cli("list -o name")


def test_a_job_says_what_it_waits_for_and_why_it_cannot_start(cli: Cli) -> None:
    cli("project create team-a --guaranteed 2")
    cli("config project team-a")
    refused = cli.run("submit", "early", "--after", "prep", "--", "true")
    assert "project 'team-a' has no job 'prep'" in refused.err
    cli("submit", "prep", "-g", "1", "--", "sleep", "infinity")
    cli("submit", "train", "-g", "1", "--after", "prep", "--", "true")
    cli("submit", "report", "-g", "1", "--after", "any:train", "--begin", "+1d", "--", "true")
    assert cli("explain train") == "train is pending with 0 GPUs: waits for the success of job prep (after)\n"
    assert "report is pending with 0 GPUs: waits until " in cli("explain report")
    cli("delete prep")
    cli.run("wait train")
    failed = "train has failed: job prep was deleted, and this one starts only after its success (after)\n"
    assert cli("explain train") == failed
    assert cli.run("submit", "x", "--after", "x", "--", "true").err.startswith("Error: ")


def test_an_array_is_one_line_also_if_it_is_on_several_pages(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAGE", 3)
    cli("project create team-a --guaranteed 2")
    cli("config project team-a")
    cli("submit before -g 1 --begin +1h -- true")
    cli("submit sweep -g 1 --begin +1h --array 0-7 -- true")
    cli("submit after -g 1 --begin +1h -- true")
    assert [line.split()[0] for line in cli("list").splitlines()] == ["JOB", "before", "sweep-[0-7]", "after"]
    assert len(cli("list -o name").splitlines()) == 10
    cli("delete before")
    header, array, _ = cli("list").splitlines()
    assert header.index("PROJECT") == array.index("team-a"), "the first page has no line of its own"


def test_an_interrupted_submission_of_an_array_leaves_none_of_it(
    embedded_cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = embedded_cluster.client
    reached.create_project(Project(name="team-a", guaranteed=2))
    submit = reached.submit

    def interrupted(spec: JobSpec) -> Job:
        if spec.name == "sweep-2":
            raise KeyboardInterrupt
        return submit(spec)

    monkeypatch.setattr(reached, "submit", interrupted)
    spec = JobSpec(name="sweep", project="team-a", command=("true",), gpus=1, begin_at=NOW)
    with pytest.raises(KeyboardInterrupt):
        submit_all(reached, specs_of(spec, array_of("0-3")))
    assert not reached.list_jobs("team-a").jobs
