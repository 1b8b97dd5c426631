"""A step's claims are mounted by its workers alone, whatever gives a claim its name."""

# mypy: disable-error-code="untyped-decorator"
# No `from __future__ import annotations` where pipelines are defined: KFP reads annotations as they are.

import json
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from kfp import dsl, kubernetes

import kfp_gpuquota as gpuquota
from kfp_gpuquota.dsl.pipelines.pipeline_file import parse
from kfp_gpuquota.dsl.spec.pod_volumes import ARGUMENT, parsed
from kfp_gpuquota.errors import InvalidFieldError
from tests.dsl import pipelines
from tests.dsl.test_compile import compiled

Json = dict[str, Any]


@dsl.pipeline(name="claims")
def claims(name: str = "given") -> None:
    """Names by a constant, by a parameter, and by a task's output, there and in a loop."""
    made = kubernetes.CreatePVC(
        pvc_name_suffix="-data", access_modes=["ReadWriteOnce"], size="1Gi", storage_class_name="standard"
    )
    task = pipelines.elastic_train(epochs=1)
    kubernetes.mount_pvc(task, "constant", "/constant", sub_path="part")
    kubernetes.mount_pvc(task, name, "/parameter")
    kubernetes.mount_pvc(task, made.outputs["name"], "/output")
    kubernetes.mount_pvc(task, made.outputs["name"], "/output2")
    kubernetes.use_secret_as_volume(task, "secret", "/secret")
    with dsl.ParallelFor([1, 2]) as epochs:
        kubernetes.mount_pvc(pipelines.elastic_train(epochs=epochs), made.outputs["name"], "/data")
    kubernetes.mount_pvc(pipelines.plain_say(text="on the CPU"), "constant", "/data")


def volumes_of(executor: Json) -> Json:
    """As routing passes them to the launcher."""
    argument = next(argument for argument in executor["container"]["args"] if argument.startswith(ARGUMENT))
    volumes: Json = json.loads(argument.removeprefix(ARGUMENT))
    return volumes


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> list[Json]:
    text = compiled(gpuquota.pipeline(project="team-a")(claims), tmp_path_factory.mktemp("routed"))
    return list(yaml.safe_load_all(text))


def test_workers_mount_what_the_launcher_does_not(routed: list[Json]) -> None:
    spec, platform = routed
    first, second = "{{$.inputs.parameters['gpuquota-volume-0']}}", "{{$.inputs.parameters['gpuquota-volume-1']}}"
    assert volumes_of(spec["deploymentSpec"]["executors"]["exec-train"]) == {
        "mounts": [
            {"name": "constant", "mountPath": "/constant", "subPath": "part"},
            {"name": first, "mountPath": "/parameter"},
            {"name": second, "mountPath": "/output"},
            {"name": second, "mountPath": "/output2"},
        ],
        "volumes": [
            {"name": name, "persistentVolumeClaim": {"claimName": name}} for name in ("constant", first, second)
        ],
    }
    left = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert {label: sorted(config) for label, config in left.items()} == {
        "exec-train": ["secretAsVolume"],
        "exec-train-2": [],
        "exec-say": ["pvcMount"],
    }


def test_a_name_that_only_the_run_knows_is_an_input_of_the_task(routed: list[Json]) -> None:
    spec = routed[0]
    inputs = spec["root"]["dag"]["tasks"]["train"]["inputs"]["parameters"]
    assert inputs["gpuquota-volume-0"] == {"componentInputParameter": "name"}
    made = {"taskOutputParameter": {"outputParameterKey": "name", "producerTask": "createpvc"}}
    assert inputs["gpuquota-volume-1"] == made
    (loop,) = [each for name, each in spec["components"].items() if name.startswith("comp-for-loop")]
    inputs = loop["dag"]["tasks"]["train-2"]["inputs"]["parameters"]
    assert inputs["gpuquota-volume-0"] == {"componentInputParameter": "pipelinechannel--createpvc-name"}


def test_a_file_is_routed_as_the_decorator_routes_it_and_routing_twice_changes_nothing(
    routed: list[Json], tmp_path: Path
) -> None:
    again = parse(compiled(claims, tmp_path), "claims.yaml").routed("team-a")
    assert [again.spec, *again.more] == routed
    assert again.routed("team-a") == again


def test_a_component_that_gets_its_volumes_as_an_input_keeps_them(tmp_path: Path) -> None:
    passing = dsl.component(
        pipelines.say,
        base_image=pipelines.IMAGE,
        install_kfp_package=False,
        task_config_passthroughs=[dsl.TaskConfigField.KUBERNETES_VOLUMES],
    )

    @gpuquota.pipeline(project="team-a")
    @dsl.pipeline(name="passing")
    def one_step() -> None:
        kubernetes.mount_pvc(gpuquota.component(gpus=1)(passing)(text="x"), "data", "/data")

    spec, platform = yaml.safe_load_all(compiled(one_step, tmp_path))
    assert "pvcMount" in platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]["exec-say"]
    assert not any(
        arg.startswith(ARGUMENT) for arg in spec["deploymentSpec"]["executors"]["exec-say"]["container"]["args"]
    )


def test_one_claim_under_two_names_of_the_pipeline_is_one_volume() -> None:
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
    assert parsed(json.dumps({"volumes": [volume, volume], "mounts": []}))["volumes"] == [volume]


@pytest.mark.parametrize("text", ["data", "[]", '{"volumes": ["data"], "mounts": []}', '{"mounts": []}'])
def test_volumes_that_are_not_kubernetes_are_refused(text: str) -> None:
    with pytest.raises(InvalidFieldError, match="--volumes"):
        parsed(text)
