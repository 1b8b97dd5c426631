"""What is compiled is exactly what stands in golden/, and KFP reads it back.

After a wanted change: `GPUQUOTA_UPDATE_GOLDEN=1 pytest tests/dsl/test_compile.py`, then read the difference.
"""

# mypy: disable-error-code="untyped-decorator"

import copy
import os
import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from kfp import compiler, components, dsl

import kfp_gpuquota as gpuquota
from kfp_gpuquota.dsl.pipelines.route import COMMAND
from kfp_gpuquota.errors import DefinitionError
from tests.dsl import pipelines

GOLDEN = Path(__file__).parent / "golden"


def compiled(component: pipelines.Component, directory: Path) -> str:
    """The YAML that KFP writes, less the versions of the KFP that wrote it."""
    path = directory / "compiled.yaml"
    compiler.Compiler().compile(component, str(path))
    return re.sub(r"kfp(-|==)\d+(\.\d+)+", r"kfp\g<1>VERSION", path.read_text())


@pytest.mark.parametrize("name", pipelines.ALL)
def test_a_compiled_pipeline_is_the_golden_one(name: str, tmp_path: Path) -> None:
    found = compiled(pipelines.ALL[name], tmp_path)
    golden = GOLDEN / f"{name}.yaml"
    if "GPUQUOTA_UPDATE_GOLDEN" in os.environ:
        golden.write_text(found)
    assert found == golden.read_text()


@pytest.mark.parametrize("name", pipelines.ALL)
def test_compiling_again_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    assert compiled(pipelines.ALL[name], tmp_path) == compiled(pipelines.ALL[name], tmp_path)


@pytest.mark.parametrize("name", pipelines.ALL)
def test_kfps_loader_reads_it_back_as_it_was(name: str, tmp_path: Path) -> None:
    written = compiled(pipelines.ALL[name], tmp_path)
    loaded = components.load_component_from_text(written)
    assert compiled(loaded, tmp_path) == written


@pytest.mark.parametrize("name", pipelines.ALL)
def test_routing_twice_changes_nothing(name: str, tmp_path: Path) -> None:
    spec = yaml.safe_load(compiled(pipelines.ALL[name], tmp_path))
    assert gpuquota.route_pipeline(spec) == spec


def test_a_pipeline_that_somebody_else_compiled_can_be_routed(tmp_path: Path) -> None:
    text = compiled(pipelines._somebody_elses, tmp_path)
    routed = compiled(gpuquota.pipeline(project="team-a")(pipelines.loaded_from_yaml(text)), tmp_path)
    assert yaml.safe_load(routed) == gpuquota.route_pipeline(yaml.safe_load(text), "team-a")
    container = yaml.safe_load(routed)["deploymentSpec"]["executors"]["exec-train"]["container"]
    assert tuple(container["command"]) == COMMAND
    assert "resources" not in container


def test_types_of_gpus_by_kfps_accelerator_type_are_those_of_the_decorator(tmp_path: Path) -> None:
    @dsl.pipeline(name="types")
    def types() -> None:
        pipelines.plain_train(epochs=1).set_accelerator_type("H100,A100").set_accelerator_limit(2)

    @dsl.pipeline(name="both")
    def both() -> None:
        step = gpuquota.component(gpu_type="H100")(pipelines.plain_train)
        step(epochs=1).set_accelerator_type("A100").set_accelerator_limit(1)

    spec = yaml.safe_load(compiled(gpuquota.pipeline(project="team-a")(types), tmp_path))
    (executor,) = spec["deploymentSpec"]["executors"].values()
    assert {"name": "GPUQUOTA_GPU_TYPE", "value": "H100,A100"} in executor["container"]["env"]
    assert "accelerator" not in executor["container"].get("resources", {})
    with pytest.raises(DefinitionError, match=r"gpu_type='H100', the task set_accelerator_type\('A100'\); set it once"):
        gpuquota.pipeline(project="team-a")(both)


def test_a_step_with_an_accelerator_limit_of_0_is_one_without_gpus(tmp_path: Path) -> None:
    @dsl.pipeline(name="none")
    def none() -> None:
        pipelines.plain_train(epochs=1).set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(0)

    (tmp_path / "routed").mkdir()
    assert compiled(gpuquota.pipeline(project="team-a")(none), tmp_path / "routed") == compiled(none, tmp_path)


def test_a_component_loaded_from_yaml_can_be_decorated(tmp_path: Path) -> None:
    loaded = pipelines.loaded_from_yaml(compiled(pipelines.plain_train, tmp_path))
    decorated = gpuquota.component(gpus=1, min_gpus=1, max_gpus=2)(loaded)
    expected = compiled(pipelines.elastic_train, tmp_path)
    assert yaml.safe_load(compiled(decorated, tmp_path)) == yaml.safe_load(expected)


def test_the_given_component_is_not_changed(tmp_path: Path) -> None:
    before = compiled(pipelines.plain_train, tmp_path)
    gpuquota.component(gpus=3)(pipelines.plain_train)
    assert compiled(pipelines.plain_train, tmp_path) == before


def test_the_given_pipeline_and_spec_are_not_changed(tmp_path: Path) -> None:
    before = compiled(pipelines._somebody_elses, tmp_path)
    gpuquota.pipeline(project="team-a")(pipelines._somebody_elses)
    spec = yaml.safe_load(before)
    original = copy.deepcopy(spec)
    gpuquota.route_pipeline(spec, "team-a")
    assert spec == original
    assert compiled(pipelines._somebody_elses, tmp_path) == before


def test_a_step_keeps_the_project_that_an_inner_pipeline_gave_it(tmp_path: Path) -> None:
    team_a = gpuquota.pipeline(project="team-a")(pipelines.inner)

    @gpuquota.pipeline(project="team-b")
    @dsl.pipeline(name="outer")
    def outer() -> None:
        team_a(epochs=1)
        pipelines.elastic_train(epochs=2)

    executors = yaml.safe_load(compiled(outer, tmp_path))["deploymentSpec"]["executors"]
    projects = [
        entry["value"]
        for executor in executors.values()
        for entry in executor["container"]["env"]
        if entry["name"] == "GPUQUOTA_PROJECT"
    ]
    assert sorted(projects) == ["team-a", "team-b"]


def test_a_component_that_lists_what_reaches_it_gets_its_options_too(tmp_path: Path) -> None:
    listed = dsl.component(
        pipelines.say,
        base_image=pipelines.IMAGE,
        install_kfp_package=False,
        task_config_passthroughs=[dsl.TaskConfigField.RESOURCES],
    )

    @dsl.pipeline(name="listed")
    def listing() -> None:
        gpuquota.component(gpus=1)(listed)(text="x")

    executors = yaml.safe_load(compiled(listing, tmp_path))["deploymentSpec"]["executors"]
    assert {"name": "GPUQUOTA_GPUS", "value": "1"} in executors["exec-say"]["container"]["env"]


def test_a_launcher_image_takes_the_place_of_the_steps_own_which_its_workers_get(tmp_path: Path) -> None:
    spec = yaml.safe_load(compiled(pipelines._somebody_elses, tmp_path))
    before = {
        label: e["container"]["image"] for label, e in spec["deploymentSpec"]["executors"].items() if "container" in e
    }
    routed = gpuquota.route_pipeline(spec, project="team-a", launcher_image="launcher:1")
    for label, executor in routed["deploymentSpec"]["executors"].items():
        container = executor.get("container", {})
        if container.get("command", [])[: len(COMMAND)] == list(COMMAND):
            assert container["image"] == "launcher:1"
            assert container["args"][0] == f"--image={before[label]}"
        elif container:
            assert container["image"] == before[label]
    assert gpuquota.route_pipeline(routed, project="team-a", launcher_image="launcher:1") == routed
