"""Where in the queue a job is, and what comes before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cli.conftest import Cli


def test_a_job_that_waits_says_what_comes_before_it(cli: Cli) -> None:
    cli("project create team-a --guaranteed 2")
    cli("config project team-a")
    cli("submit", "hog", "-g", "2", "--interactive", "--", "sleep", "infinity")
    cli.await_gpus("team-a", hog=2)
    cli("submit", "first", "--", "true")
    assert "It is the only one that waits in its project." in cli("explain first")
    for name in ("second", "third", "fourth", "fifth"):
        cli("submit", name, "--", "true")
    cli("submit", "urgent", "--priority", "80", "--", "true")
    assert "It is number 2 of 6 that wait in its project, after urgent." in cli("explain first")
    output = "It is number 6 of 6 that wait in its project, after 2 others and second, third, fourth."
    assert output in cli("explain fifth")
    assert output in cli("describe fifth")
    assert "It is the first of 6 that wait in its project." in cli("explain urgent")
    assert "queue" not in cli("describe hog")
