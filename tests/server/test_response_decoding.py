"""A client of this version with the answers of a newer server, which have fields that it does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kfp_gpuquota.api import Job, JobSpec, Project, Toleration
from kfp_gpuquota.api.policy import PartRule, WorkloadPolicy
from kfp_gpuquota.api.wire import EventList, Health, JobList, NodeView, Outlook, ProjectView, Supposition
from kfp_gpuquota.cluster.kubernetes.objects import core_types, custom_types
from kfp_gpuquota.errors import RunError
from kfp_gpuquota.server.client import Client
from kfp_gpuquota.server.response_decoding import decoded

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster

NEWER = {"field_of_a_newer_version": {"a": [1]}, "another one": None}


def of_a_newer_server(answer: Any) -> Any:
    """The answer as JSON values, with two more fields in each of its objects."""
    if isinstance(answer, msgspec.Struct):
        named = ((field.encode_name, getattr(answer, field.name)) for field in msgspec.structs.fields(answer))
        return {**{name: of_a_newer_server(value) for name, value in named if value is not msgspec.UNSET}, **NEWER}
    if isinstance(answer, dict):
        return {key: of_a_newer_server(value) for key, value in answer.items()}
    return [of_a_newer_server(each) for each in answer] if isinstance(answer, (list, tuple)) else answer


def test_fields_that_a_client_does_not_know_are_left_out_of_each_answer(embedded_cluster: EmbeddedCluster) -> None:
    client = embedded_cluster.client
    assert isinstance(client, Client)
    client.create_project(Project(name="team", guaranteed=1))
    client.set_policy(WorkloadPolicy(name="whole", project="team", gpu_fraction_limit=PartRule(default=1.0)))
    spec = JobSpec(name="waits", project="team", command=("true",), gpus=2, tolerations=(Toleration(key="a"),))
    client.submit(spec)
    supposed = Supposition(submit=(msgspec.structs.replace(spec, name="another"),))
    answers: tuple[tuple[Any, Any], ...] = (
        (Health, client.health()),
        (tuple[ProjectView, ...], client.list_projects()),
        (tuple[WorkloadPolicy, ...], client.list_policies()),
        (tuple[NodeView, ...], client.list_nodes()),
        (JobList, client.list_jobs()),
        (Job, client.get_job("team", "waits")),
        (EventList, client.events()),
        (Outlook, client.what_if(supposed)),
    )
    for kind, answer in answers:
        newer = msgspec.json.encode(of_a_newer_server(answer))
        assert b"field_of_a_newer_version" in newer
        found: Any = decoded(newer, kind)
        assert found == answer, kind


OBJECTS = [custom_types.ElasticJob, custom_types.GpuQuota, custom_types.PolicyObject, core_types.Pod]


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_of_a_newer_controller_are_read_as_well(kind: Any) -> None:
    spec, status = {"template": {}, **NEWER}, {"phase": "Running", **NEWER}
    newer = {"metadata": {"name": "a", **NEWER}, "spec": spec, "status": status, **NEWER}
    assert msgspec.json.decode(msgspec.json.encode(newer), type=kind).metadata.name == "a"


@pytest.mark.parametrize("raw", [b"no json", b'{"version": 1}', b'{"version": "1", "pid": "none"}', b"[]"])
def test_an_answer_that_cannot_be_read_is_one_sentence(raw: bytes) -> None:
    with pytest.raises(RunError, match=r"the answer of the server cannot be read \(.*upgrade kfp-gpuquota"):
        decoded(raw, Health)
