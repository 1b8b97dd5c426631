"""Every mistake in a definition is one clear error, where it is made, that names the component and the argument."""

# mypy: disable-error-code="untyped-decorator"

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from kfp import dsl

import kfp_gpuquota as gpuquota
from kfp_gpuquota.errors import DefinitionError
from tests.dsl import pipelines


def _message(act: Callable[[], Any]) -> str:
    with pytest.raises(DefinitionError) as caught:
        act()
    return caught.value.message


def test_the_decorator_twice() -> None:
    assert _message(lambda: gpuquota.component(gpus=2)(pipelines.elastic_train)) == (
        "component 'train' is decorated with @gpuquota.component twice; for another size of one task use "
        "gpuquota.set_gpus(task, ...)"
    )


def test_the_decorator_below_kfps() -> None:
    below = "component 'train': put @gpuquota.component(...) above @dsl.component, not below it"
    assert _message(lambda: dsl.component(pipelines.elastic_train, base_image=pipelines.IMAGE)) == below
    assert _message(lambda: dsl.container_component(pipelines.elastic_train)) == below
    assert _message(lambda: inspect.signature(pipelines.elastic_train)) == below


def test_the_components_decorator_on_a_pipeline() -> None:
    assert _message(lambda: gpuquota.component(gpus=1)(pipelines.one_step)) == (
        "'lightweight' is a pipeline: decorate its steps with @gpuquota.component(...), and the pipeline with "
        "@gpuquota.pipeline(project=...)"
    )


def test_the_pipelines_decorator_on_a_function_or_a_component() -> None:
    assert _message(lambda: gpuquota.pipeline(project="a")(pipelines.say)).startswith(
        "'say' is not a pipeline yet: put @gpuquota.pipeline(...) above @dsl.pipeline, not below it"
    )
    assert "'train' is not a pipeline" in _message(lambda: gpuquota.pipeline(project="a")(pipelines.plain_train))


def test_a_project_that_cannot_be_a_namespace() -> None:
    assert _message(lambda: gpuquota.pipeline(project="Team A")(pipelines.one_step)).startswith("project is 'Team A'")


def test_neither_component_nor_function() -> None:
    assert _message(lambda: gpuquota.component(gpus=1)(3)) == (
        "@gpuquota.component is for components and functions, not for 3"
    )


def test_an_argument_that_nobody_knows() -> None:
    assert _message(lambda: gpuquota.component(gpu=1)(pipelines.plain_train)) == (
        "component 'train': unknown argument 'gpu'; pass KFP's own arguments to @dsl.component below"
    )


def test_a_share_that_cannot_be_is_told_in_the_authors_words() -> None:
    assert _message(lambda: gpuquota.component(fraction=1.5)(pipelines.plain_train)) == (
        "component 'train': fraction is 1.5, but it must be more than 0 and less than 1; ask for whole GPUs with gpus"
    )


def test_an_image_that_starts_something_by_itself() -> None:
    @dsl.container_component
    def server(port: int):  # type: ignore[no-untyped-def]
        return dsl.ContainerSpec(image="python:3.11", args=["--port", port])

    assert _message(lambda: gpuquota.component(gpus=1)(server)) == (
        "component 'server' has no command: the entry point of its image is not visible here; "
        "write it as in dsl.ContainerSpec(command=[...])"
    )


def _in_a_pipeline(body: Callable[[Any], Any], **decorator: Any) -> Callable[[], Any]:
    def compile_it() -> Any:
        @dsl.pipeline(name="p")
        def p(gpus: int = 1) -> None:
            body(gpus)

        return gpuquota.pipeline(**decorator)(p)

    return compile_it


def test_a_pipeline_parameter_where_a_constant_is_needed() -> None:
    message = _message(_in_a_pipeline(lambda gpus: gpuquota.set_gpus(pipelines.plain_train(epochs=1), gpus)))
    assert message.startswith(
        "component 'train': gpus is parameter 'gpus', which has no value before the pipeline runs"
    )
    assert "set_accelerator_limit(...)" in message


def test_the_decorator_and_the_task_disagree() -> None:
    def body(_gpus: object) -> None:
        pipelines.elastic_train(epochs=1).set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(4)

    assert _message(_in_a_pipeline(body)) == (
        "step 'train': the decorator sets gpus=1, the task set_accelerator_limit(4); set it once, or use "
        "gpuquota.set_gpus(task, 4)"
    )


def test_the_decorator_and_the_task_agree() -> None:
    def body(_gpus: object) -> None:
        pipelines.elastic_train(epochs=1).set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(1)

    executors = _in_a_pipeline(body)().pipeline_spec.deployment_spec["executors"]
    assert "resources" not in executors["exec-train"]["container"]


def test_sizes_of_a_task_that_contradict_each_other() -> None:
    assert _message(_in_a_pipeline(lambda _: gpuquota.set_gpus(pipelines.elastic_train(epochs=1), 4, max=2))) == (
        "component 'train': max_gpus is 2, but it cannot be below the requested 4 GPUs"
    )


def test_set_gpus_on_a_pipeline_or_an_importer() -> None:
    message = "task 'inner' is not one container: set_gpus needs a step, not a pipeline or importer"
    assert _message(_in_a_pipeline(lambda _: gpuquota.set_gpus(pipelines.inner(epochs=1), 2))) == message


def test_a_type_of_gpu_is_not_taken_silently() -> None:
    def body(_gpus: object) -> None:
        pipelines.plain_train(epochs=1).set_accelerator_type("NVIDIA_TESLA_K80").set_accelerator_limit(1)

    assert _message(_in_a_pipeline(body)).startswith("step 'train' asks for the accelerator 'NVIDIA_TESLA_K80', but")
