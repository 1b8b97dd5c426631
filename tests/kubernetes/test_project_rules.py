"""A team's quota holds and drains it, and has the run times of its ElasticJobs, through the real API server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api import JobSpec, Project, StopPolicy
from kfp_gpuquota.cluster.kubernetes.quota.quotas import project_of_plugin, quota_spec
from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient
from kfp_gpuquota.errors import InvalidFieldError
from tests.kubernetes.installation import QUOTAS
from tests.kubernetes.users import connection_of

if TYPE_CHECKING:
    from tests.kubernetes.controlled import Controlled

OWNER = {"apiVersion": "batch/v1", "kind": "Job", "name": "none", "uid": "none", "controller": True}


def test_a_team_is_held_and_drained_also_by_the_next_controller_and_resumed(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=8)
    team = controlled.team(guaranteed=8)
    controlled.start()
    session = controlled.pod(team, "session", labels_={"gpuquota.dev/preemptible": "false"})
    controlled.until_bound(session)
    running = controlled.job(team, "running", gpus=2, minGpus=1, maxGpus=2, gracePeriodSeconds=1)
    controlled.until_phase(running, "Running")
    controlled.cluster.api.patch(f"{QUOTAS}/{team}", {"spec": {"stopPolicy": "Hold"}})
    controlled.until(f"{QUOTAS}/{team}", lambda quota: "Stopped" in str(quota.get("status", {}).get("conditions")))
    waiting = controlled.job(team, "waiting", gpus=1)
    held = controlled.until(waiting, lambda job: job.get("status", {}).get("reason") == "project-held")
    assert held["status"]["message"] == (
        f"project {team} is held by an administrator, so that none of its jobs starts (stop policy Hold)"
    )
    controlled.pod(team, "pod")
    controlled.kill()
    controlled.start()
    controlled.cluster.api.patch(f"{QUOTAS}/{team}", {"spec": {"stopPolicy": "HoldAndDrain"}})
    controlled.until_phase(running, "Pending")
    assert controlled.waiting(team) == {"pod"}
    drained = controlled.cluster.api.get(running)["status"]
    assert "is drained (stop policy HoldAndDrain)" in drained["lastEviction"]["message"]
    controlled.wait(lambda: controlled.bound(team) == {"session"})
    controlled.cluster.api.patch(f"{QUOTAS}/{team}", {"spec": {"stopPolicy": None}})
    for job in (running, waiting):
        controlled.until_phase(job, "Running")
    controlled.until_bound(f"/api/v1/namespaces/{team}/pods/pod")


def test_an_elastic_job_keeps_the_run_time_of_its_team_when_it_was_created(controlled: Controlled) -> None:
    team = controlled.team(guaranteed=1, defaultRuntimeSeconds=3600, maxRuntimeSeconds=5400)
    controlled.start()
    usual = controlled.job(team, "usual", gpus=1)
    controlled.until(usual, lambda job: job.get("status", {}).get("defaultRuntimeSeconds") == 3600)
    long = controlled.job(team, "long", gpus=1, maxRuntimeSeconds=5401)
    refused = controlled.until(long, lambda job: job.get("status", {}).get("message"))
    words = f"maxRuntimeSeconds is 5401, but project {team!r} allows at most 1h30m"
    assert refused["status"]["message"] == words
    user = KubernetesClient(connection_of(controlled.cluster.kubeconfig), image="none", retry_for_s=5)
    with pytest.raises(InvalidFieldError, match="max_runtime_s is 5401, but project"):
        user.submit(JobSpec(name="refused", project=team, command=("x",), max_runtime_s=5401))
    assert user.get_job(team, "usual").spec.max_runtime_s == 3600
    longest = controlled.job(team, "longest", gpus=1, maxRuntimeSeconds=5400)
    controlled.until(longest, lambda job: "Accepted" in str(job.get("status", {}).get("conditions")))
    controlled.kill()
    spec = {"defaultRuntimeSeconds": 60, "maxRuntimeSeconds": 60}
    controlled.cluster.api.patch(f"{QUOTAS}/{team}", {"spec": spec})
    controlled.start()
    later = controlled.job(team, "later", gpus=1)
    controlled.until(later, lambda job: job.get("status", {}).get("defaultRuntimeSeconds") == 60)
    for path, default in ((usual, 3600), (longest, 3600)):
        status = controlled.cluster.api.get(path)["status"]
        assert status["defaultRuntimeSeconds"] == default
        assert {c["type"]: c["status"] for c in status["conditions"]}["Accepted"] == "True"


def test_a_profiles_plugin_has_the_rules_of_a_project_and_no_policy_is_written_as_none() -> None:
    plugin = b'{"guaranteed": 2, "defaultRuntimeSeconds": 60, "maxRuntimeSeconds": 90, "stopPolicy": "HoldAndDrain"}'
    project = project_of_plugin("team", plugin)
    expected = {"default_runtime_s": 60, "max_runtime_s": 90, "stop_policy": StopPolicy.HOLD_AND_DRAIN}
    assert project == Project(name="team", guaranteed=2, **expected)  # type: ignore[arg-type]
    written = quota_spec(project)
    assert (written["stopPolicy"], written["defaultRuntimeSeconds"]) == ("HoldAndDrain", 60)
    assert "stopPolicy" not in quota_spec(Project(name="team"))
