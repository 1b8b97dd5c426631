"""Every kind of cluster does the same for the same calls; what one cannot do is refused with a sentence."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import msgspec
import pytest

from kfp_gpuquota.api import JobSpec, Project
from kfp_gpuquota.api.policy import PartRule, WorkloadPolicy
from kfp_gpuquota.api.wire import JobUpdate, Lease, StopAction
from kfp_gpuquota.cluster.connect import operations
from kfp_gpuquota.cluster.kubernetes.operations.installed import KubernetesOperations
from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient
from kfp_gpuquota.cluster.kubernetes.web.user_source import UserSource
from kfp_gpuquota.cluster.local.cluster import LocalCluster
from kfp_gpuquota.cluster.local.operations import LocalOperations
from kfp_gpuquota.cluster.local.page.source import LocalPages
from kfp_gpuquota.cluster.local.shared.guard import GuardedCluster
from kfp_gpuquota.cluster.operations import ClusterOperations
from kfp_gpuquota.errors import AlreadyExistsError, ConflictError, GpuQuotaError, NotFoundError, UsageError
from kfp_gpuquota.server.client import Client
from kfp_gpuquota.server.cluster_api import Backend, ClusterApi
from kfp_gpuquota.web.source import Source
from tests.kubernetes.users import connection_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tools.devcluster import DevCluster

KINDS = ("embedded", "kubernetes")


@pytest.fixture(params=KINDS)
def reached(request: pytest.FixtureRequest) -> ClusterApi:
    if request.param == "embedded":
        found: ClusterApi = request.getfixturevalue("embedded_cluster").client
        return found
    kubeconfig = request.getfixturevalue("crds_cluster").kubeconfig
    return KubernetesClient(connection_of(kubeconfig), image="trainer:1", retry_for_s=5)


@pytest.fixture
def team(reached: ClusterApi, namespace: str) -> str:
    reached.create_project(Project(name=namespace, guaranteed=1))
    return namespace


def spec(team: str, name: str = "train", **more: object) -> JobSpec:
    return msgspec.convert(
        {"name": name, "project": team, "command": ("sleep", "infinity"), "gpus": 1, **more}, JobSpec
    )


def of_protocol(protocol: type, *implementations: type) -> list[tuple[type, type, str]]:
    names = {name for part in protocol.__mro__ if part is not object for name in vars(part) if not name.startswith("_")}
    return [(protocol, kind, name) for kind in implementations for name in sorted(names)]


@pytest.mark.parametrize(
    ("protocol", "kind", "name"),
    [
        *of_protocol(ClusterApi, Client, KubernetesClient),
        *of_protocol(ClusterOperations, LocalOperations, KubernetesOperations),
        *of_protocol(Backend, LocalCluster, GuardedCluster),
        *of_protocol(Source, LocalPages, UserSource),
    ],
)
def test_an_implementation_has_each_method_with_the_protocols_parameters(protocol: type, kind: type, name: str) -> None:
    asked, found = inspect.getattr_static(protocol, name), inspect.getattr_static(kind, name)
    if isinstance(asked, property):
        assert isinstance(found, property)
        return
    parameters = inspect.signature(found).parameters
    for given in inspect.signature(asked).parameters.values():
        assert (parameters[given.name].kind, parameters[given.name].default) == (given.kind, given.default)


def test_projects_are_created_changed_and_deleted_alike(reached: ClusterApi, team: str) -> None:
    before = reached.get_project(team).project
    with pytest.raises(AlreadyExistsError, match=f"gpuquota project set {team}"):
        reached.create_project(Project(name=team))
    assert reached.set_project(Project(name=team, guaranteed=2), expected=before).project.guaranteed == 2
    with pytest.raises(ConflictError):
        reached.set_project(Project(name=team, guaranteed=1), expected=before)
    assert team in {view.project.name for view in reached.list_projects()}
    reached.submit(spec(team))
    with pytest.raises(ConflictError, match="delete"):
        reached.delete_project(team)
    reached.stop_jobs(team, ("train",), StopAction.DELETE)
    with pytest.raises(NotFoundError, match="gpuquota project create"):
        reached.get_project("nobody")


def test_a_job_that_is_over_is_not_changed_any_more(reached: ClusterApi, team: str) -> None:
    """Also while its workers exit: a change would have no effect."""
    reached.submit(spec(team))
    reached.cancel_job(team, "train")
    changes: tuple[Callable[[], object], ...] = (
        lambda: reached.update_job(team, "train", JobUpdate(priority=60)),
        lambda: reached.suspend_job(team, "train"),
        lambda: reached.resume_job(team, "train"),
    )
    for change in changes:
        with pytest.raises(
            ConflictError, match=r"job 'train' (is being stopped|has ended .*); submit it again instead"
        ):
            change()


def test_policies_are_created_and_deleted_alike(reached: ClusterApi, team: str) -> None:
    policy = WorkloadPolicy(name=team, project=team, gpu_fraction_limit=PartRule(default=1.0))
    assert reached.set_policy(policy) == policy
    assert policy in reached.list_policies()
    for rule in (PartRule(default=0.5, most=0.75), PartRule(most=0.5)):  # it is replaced, not merged
        policy = WorkloadPolicy(name=team, gpu_fraction_limit=rule)
        assert reached.set_policy(policy) == policy
    reached.delete_policy(team)
    with pytest.raises(NotFoundError, match="gpuquota policy list"):
        reached.delete_policy(team)


def test_a_job_is_submitted_once_updated_listed_and_stopped_alike(reached: ClusterApi, team: str) -> None:
    made = reached.submit(spec(team), request_id="r1")
    assert reached.submit(spec(team), request_id="r1").uid == made.uid
    with pytest.raises(AlreadyExistsError, match=f"gpuquota delete -p {team} train"):
        reached.submit(spec(team), request_id="r2")
    assert reached.submit(spec(team, "never"), dry_run=True).spec.name == "never"
    assert reached.update_job(team, "train", JobUpdate(priority=80)).spec.effective_priority == 80
    assert reached.get_job(team, "train").spec.effective_priority == 80
    assert [job.spec.name for job in reached.list_jobs(team).jobs] == ["train"]
    assert [job.spec.name for page in reached.job_pages(team, 10) for job in page.jobs] == ["train"]
    reached.suspend_job(team, "train")
    reached.resume_job(team, "train")
    with pytest.raises(ConflictError):
        reached.renew_lease(team, "train", Lease(holder="another", duration_s=60.0))
    reached.renew_lease(team, "train", Lease(holder="another", duration_s=60.0, take_over=True))
    reached.cancel_job(team, "train")
    reached.delete_job(team, "train")


def test_calls_about_a_job_that_does_not_exist_are_refused_alike(reached: ClusterApi, team: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: reached.get_job(team, "none"),
        lambda: reached.update_job(team, "none", JobUpdate(priority=80)),
        lambda: reached.suspend_job(team, "none"),
        lambda: reached.resume_job(team, "none"),
        lambda: reached.cancel_job(team, "none"),
        lambda: reached.delete_job(team, "none"),
        lambda: reached.stop_jobs(team, ("none",), StopAction.CANCEL),
        lambda: reached.read_log(team, "none"),
        lambda: reached.renew_lease(team, "none", Lease(holder="h", duration_s=60.0, take_over=True)),
    ]
    for call in calls:
        with pytest.raises(NotFoundError, match="has no job 'none'; see"):
            call()


def test_what_a_cluster_cannot_do_is_refused_with_a_sentence(reached: ClusterApi, team: str) -> None:
    reached.submit(spec(team))
    calls: dict[str, Callable[[], object]] = {
        "maxGpus cannot be changed; create another job": lambda: reached.update_job(
            team, "train", JobUpdate(max_gpus=4)
        ),
        "see: kubectl get events": reached.events,
        "name it with --prometheus URL": lambda: reached.gpu_hours(3600.0),
        "the history is in Prometheus; name it": lambda: reached.gpu_use(3600.0),
        "the web page is one of the embedded cluster": reached.open_page,
    }
    for sentence, call in calls.items():
        if reached.runs_here:
            call()
        else:
            with pytest.raises(GpuQuotaError, match=sentence):
                call()
    reached.delete_job(team, "train")


def test_the_commands_about_a_state_file_are_refused_where_there_is_none(
    crds_cluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if this user has an embedded cluster, which is not the one that was chosen."""
    monkeypatch.setenv("KUBECONFIG", str(crds_cluster.kubeconfig))
    monkeypatch.setenv("GPUQUOTA_CONTEXT", ".")
    copy = tmp_path / "copy.db"
    chosen = operations()
    calls: tuple[Callable[[], object], ...] = (
        lambda: chosen.back_up(copy),
        chosen.repair,
        chosen.set_aside,
        chosen.discard_set_aside,
    )
    for call in calls:
        with pytest.raises(UsageError, match="the state is in objects, not in a file"):
            call()
    assert not copy.exists()
    with pytest.raises(UsageError, match="cannot be read"):
        list(chosen.restore(copy))
