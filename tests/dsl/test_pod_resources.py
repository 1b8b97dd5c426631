"""A step's CPU and memory are requested once: by its workers. Its launcher requests next to nothing."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from kfp_gpuquota.api.environment import WORKER_VARIABLES
from kfp_gpuquota.dsl.launcher.step import Step, step_from
from kfp_gpuquota.dsl.pipelines.route import route_pipeline
from kfp_gpuquota.dsl.spec.options import StepOptions, from_environment, to_environment
from kfp_gpuquota.dsl.spec.pod_resources import VARIABLE, parsed, with_extended
from kfp_gpuquota.dsl.worker import start
from kfp_gpuquota.errors import DefinitionError, InvalidFieldError

Json = dict[str, Any]

GPU = {"resourceType": "nvidia.com/gpu", "resourceCount": "2"}


def routed(image: str = "trainer:7", env: list[Json] | None = None, **resources: Any) -> Json:
    container: Json = {
        "image": image,
        "command": ["python", "train.py"],
        "resources": {"accelerator": GPU, **resources},
    }
    if env is not None:
        container["env"] = env
    spec = route_pipeline({"deploymentSpec": {"executors": {"exec-train": {"container": container}}}}, "team-a")
    assert route_pipeline(spec, "team-a") == spec
    found: Json = spec["deploymentSpec"]["executors"]["exec-train"]["container"]
    return found


def step(container: Json, filled: dict[str, str] | None = None) -> Step:
    """What the launcher of this container reads, with placeholders filled in as KFP does."""
    arguments = [str(argument) for argument in container["args"][: container["args"].index("--")]]
    for placeholder, value in (filled or {}).items():
        arguments = [argument.replace(placeholder, value) for argument in arguments]
    given = next((text.partition("=")[2] for text in arguments if text.startswith("--pod-resources=")), None)
    namespace = argparse.Namespace(
        gpus=None,
        pod_resources=given,
        volumes=None,
        executor_input='{"outputs": {"outputFile": "/x"}}',
        task="r/t",
        argv=["a"],
        image="",
    )
    return step_from(namespace, {entry["name"]: entry["value"] for entry in container["env"]})


def test_the_launcher_requests_its_own_and_the_workers_the_steps() -> None:
    container = routed(cpuLimit=4.0, resourceCpuLimit="4", memoryRequest=8.0, resourceMemoryRequest="8G")
    assert container["resources"] == {
        "cpuRequest": 0.05,
        "resourceCpuRequest": "50m",
        "memoryRequest": 0.067108864,
        "resourceMemoryRequest": "64Mi",
        "cpuLimit": 1.0,
        "resourceCpuLimit": "1",
    }
    assert step(container).worker_resources == {"limits": {"cpu": "4"}, "requests": {"memory": "8G"}}


def test_numbers_alone_are_cpus_and_billions_of_bytes() -> None:
    container = routed(cpuRequest=0.25, memoryLimit=1.073741824)
    assert step(container).worker_resources == {"requests": {"cpu": "250m"}, "limits": {"memory": "1073741824"}}


def test_an_amount_that_only_the_run_knows_travels_as_an_argument() -> None:
    placeholder = "{{$.inputs.parameters['pipelinechannel--memory']}}"
    container = routed(resourceMemoryLimit=placeholder, resourceCpuLimit="2")
    assert VARIABLE not in {entry["name"] for entry in container["env"]}
    found = step(container, {placeholder: "24Gi"})
    assert found.worker_resources == {"limits": {"cpu": "2", "memory": "24Gi"}}


def test_a_step_that_asks_for_nothing_gives_its_workers_nothing_of_the_launchers() -> None:
    container = routed()
    assert "resources" not in container
    assert step(container).worker_resources == {}
    spec = route_pipeline(
        {"deploymentSpec": {"executors": {"exec-train": {"container": container}}}}, None, "launcher:1"
    )
    backends = spec["deploymentSpec"]["executors"]["exec-train"]["container"]
    assert backends["resources"]["resourceMemoryRequest"] == "64Mi"
    assert step(backends).worker_resources == {}


def test_a_step_compiled_without_routing_leaves_its_workers_what_its_pod_has() -> None:
    container = routed()
    container["env"] = [entry for entry in container["env"] if entry["name"] != VARIABLE]
    assert step(container).worker_resources is None


@pytest.mark.parametrize("text", ["", "8Gi", '{"limits": "8Gi"}'])
def test_resources_that_are_not_kubernetes_are_refused(text: str) -> None:
    with pytest.raises(InvalidFieldError, match=VARIABLE):
        parsed(text)


def test_extended_resources_are_requests_and_limits_of_each_worker() -> None:
    options = StepOptions(extended_resources={"rdma/hca": 1, "vpc.amazonaws.com/efa": 4})
    assert from_environment(to_environment(options)) == options
    found = with_extended({"limits": {"memory": "8Gi"}}, options.extended_resources)
    amounts = {"rdma/hca": "1", "vpc.amazonaws.com/efa": "4"}
    assert found == {"limits": {"memory": "8Gi", **amounts}, "requests": amounts}


@pytest.mark.parametrize("given", [{"memory": 1}, {"nvidia.com/gpu": 1}, {"rdma/hca": 0}, {"rdma/hca": True}])
def test_what_is_no_extended_resource_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(InvalidFieldError, match="extended_resources"):
        StepOptions(extended_resources=given)


@pytest.mark.parametrize("name", [*WORKER_VARIABLES, "KFP_POD_NAME", "GPUQUOTA_COLOUR"])
def test_a_variable_that_would_not_reach_the_workers_is_refused(name: str) -> None:
    with pytest.raises(DefinitionError, match=f"step 'train' sets the environment variable {name}"):
        routed(env=[{"name": name, "value": "1"}])


@pytest.mark.parametrize("name", ["ELASTIC_PASSWORD", "ELASTICSEARCH_URL", "KFP_API_TOKEN", "ARGO_SERVER"])
def test_names_that_merely_look_like_the_launchers_are_the_authors(name: str) -> None:
    assert step(routed(env=[{"name": name, "value": "1"}])).environment[name] == "1"


def test_an_image_needs_no_shell() -> None:
    assert routed("gcr.io/distroless/static")["image"] == "gcr.io/distroless/static"


@pytest.mark.parametrize(
    ("artifact", "path"),
    [
        ({"uri": "s3://bucket/run/data"}, "/s3/bucket/run/data"),
        ({"uri": "oci://registry.lab/models/llama:3"}, "/oci/registry.lab_models_llama:3/models"),
        (
            {"uri": "minio://bucket/data", "metadata": {"_kfp_workspace": True}},
            "/kfp-workspace/.artifacts/minio/bucket/data",
        ),
    ],
)
def test_inputs_lie_where_kfp_puts_them(artifact: Json, path: str) -> None:
    assert start.input_path(artifact) == path
