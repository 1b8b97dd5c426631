"""`gpuquota debug state` of a running cluster, and `gpuquota simulate --state` with the file, which says the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli


def test_a_dumped_state_is_replayed_with_the_cluster_s_own_explanations(cli: Cli, tmp_path: Path) -> None:
    cli("project create team-a --guaranteed 1")
    cli("project create team-b --guaranteed 1")
    cli("submit", "train", "-p", "team-a", "-g", "1", "-e", "PASSWORD=hunter2", "--", "sleep", "infinity")
    cli("submit", "wide", "-p", "team-b", "-g", "2", "--interactive", "--", "sleep", "infinity")
    cli.await_gpus("team-a", train=1)
    written = cli("debug state")
    assert "hunter2" not in written
    file = tmp_path / "state.json"
    file.write_text(written)
    why = cli.job("wide", "team-b")["status"]["reason"]
    replayed = json.loads(cli("simulate", "--state", str(file), "-o", "json"))
    assert replayed["same"] is True
    (waits,) = replayed["decisions"]
    assert (waits["decision"], waits["project"], waits["job"]) == ("wait", "team-b", "wide")
    assert (waits["reason"], waits["code"]) == (why["message"], why["code"])
    shown = cli("simulate", "--state", str(file))
    assert "2 projects, 1 nodes with 2 GPUs, 2 jobs, 1 workers" in shown
    assert why["message"] in shown
    assert "The cluster makes the same plan of this state." in shown
    supposed = cli("what-if", "--state", str(file), "--guaranteed", "team-b=2", "--guaranteed", "team-a=0")
    assert "wide of team-b would start" in supposed


def test_another_plan_is_reported_and_other_files_are_refused(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    dump = json.loads(cli("debug state"))
    file.write_text(json.dumps({**dump, "version": "0.1.9", "plan": {"again_at": 1.0}}))
    assert "version 0.1.9, makes another plan of this state" in cli("simulate", "--state", str(file))
    for words, message in (
        (("--state", str(tmp_path / "none")), "cannot read --state"),
        (("--state", str(file), "--nodes", "nodes.csv"), "leave out --nodes and --jobs"),
        (("--nodes", "nodes.csv"), "give --nodes CSV and --jobs CSV, or --state JSON"),
    ):
        answer = cli.run("simulate", *words)
        assert (answer.code, message in answer.err) == (2, True), answer
    file.write_text("{}")
    assert "not what `gpuquota debug state` writes" in cli.run("simulate", "--state", str(file)).err
