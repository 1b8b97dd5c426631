"""One small pipeline for every shape that is routed. Each is compiled whole against golden/NAME.yaml."""

# mypy: disable-error-code="untyped-decorator"
# No `from __future__ import annotations` where components are defined: KFP reads annotations as they are.

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

from kfp import components, dsl
from kfp.dsl import base_component

import kfp_gpuquota as gpuquota

IMAGE = "python:3.11"
"""An image that both a registry and kfp.local take for one with Python."""

Component: TypeAlias = base_component.BaseComponent


def lightweight(function: Callable[..., Any]) -> Component:
    """`dsl.component` without what tests have no use for: installing kfp in each step."""
    component: Component = dsl.component(function, base_image=IMAGE, install_kfp_package=False)
    return component


def train(epochs: int, model: dsl.Output[dsl.Model]) -> float:
    """Pretends to train."""
    with open(model.path, "w") as file:  # noqa: PTH123
        file.write("weights")
    model.metadata["epochs"] = epochs
    return 1.0 / epochs


def say(text: str) -> str:
    """A step on the CPU."""
    print(text)
    return text


def shell(data: dsl.Input[dsl.Artifact], lines: int, out: dsl.Output[dsl.Artifact], count: dsl.OutputPath(int)):  # type: ignore[no-untyped-def, valid-type]
    """Any command, in any language."""
    return dsl.ContainerSpec(
        image="python:3.11-slim",
        command=["sh", "-c", 'head -n "$0" "$1" > "$2"; echo "$0" > "$3"'],
        args=[lines, data.path, out.path, count, dsl.ConcatPlaceholder(["--uri=", out.uri])],
    )


plain_train = lightweight(train)
plain_say = lightweight(say)
plain_shell = dsl.container_component(shell)
elastic_train = gpuquota.component(gpus=1, min_gpus=1, max_gpus=2)(plain_train)


@gpuquota.pipeline(project="team-a")
@dsl.pipeline(name="lightweight")
def one_step(epochs: int = 3) -> float:
    """A decorated Python component, and a CPU step that stays as it is."""
    trained = elastic_train(epochs=epochs)
    plain_say(text=f"loss {trained.outputs['Output']}")
    return trained.outputs["Output"]  # type: ignore[no-any-return]


with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # about dsl.component's default image; KFP's own business

    @gpuquota.component(gpus=2, priority=80, max_runtime="2h", name="tuned", packages_to_install=["numpy"])
    def bare(rate: float) -> float:
        """A bare function: other keywords went to dsl.component."""
        return rate


@gpuquota.pipeline
@dsl.pipeline(name="bare-function")
def bare_function() -> None:
    """A decorated function, which pip-installs packages; the project is the one of where it runs."""
    bare(rate=0.1)


@gpuquota.pipeline(project="team-a")
@dsl.pipeline(name="container")
def container(lines: int = 2) -> None:
    """A container component with every placeholder of outputs, decorated as an interactive session."""
    source = dsl.importer(artifact_uri="gs://bucket/data", artifact_class=dsl.Artifact)
    gpuquota.component(interactive=True, gpus=1)(plain_shell)(data=source.output, lines=lines)


@gpuquota.pipeline(project="team-a")
@dsl.pipeline(name="accelerators")
def accelerators(gpus: int = 2) -> None:
    """Undecorated steps, routed because they request GPUs; the run determines the number for one of them."""
    plain_train(epochs=1).set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(2).set_memory_limit("2G")
    plain_train(epochs=2).set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(gpus)
    plain_train(epochs=3).set_accelerator_type("cloud-tpus.google.com/v3").set_accelerator_limit(8)
    plain_train(epochs=4).set_cpu_limit("2").set_env_variable("GREETING", "good day")


@gpuquota.pipeline(project="team-a")
@dsl.pipeline(name="sizes")
def sizes() -> None:
    """One component, and tasks of it with other sizes."""
    elastic_train(epochs=1)
    gpuquota.set_gpus(elastic_train(epochs=2), 4, max=8)
    gpuquota.set_gpus(plain_train(epochs=3), 2)


@dsl.pipeline(name="inner")
def inner(epochs: int) -> float:
    """A pipeline used as a step."""
    return elastic_train(epochs=epochs).outputs["Output"]  # type: ignore[no-any-return]


@gpuquota.pipeline(project="team-a")
@dsl.pipeline(name="control-flow")
def control_flow(retrain: bool = True) -> None:  # noqa: FBT002  # a pipeline's parameter
    """Routed steps inside a nested pipeline, a condition, a loop and an exit handler."""
    with dsl.ExitHandler(plain_say(text="the end")):
        first = inner(epochs=1)
        with dsl.If(retrain == True):  # noqa: E712  # this is how KFP writes conditions
            elastic_train(epochs=2).after(first)
        with dsl.ParallelFor([3, 4], parallelism=1) as epochs:
            plain_train(epochs=epochs).set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(1)


@dsl.pipeline(name="somebody-elses")
def _somebody_elses() -> None:
    plain_train(epochs=1).set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(1)


def loaded_from_yaml(text: str) -> Component:
    """A component or pipeline as another team hands it over."""
    component: Component = components.load_component_from_text(text)
    return component


ALL = {
    "lightweight": one_step,
    "bare-function": bare_function,
    "container": container,
    "accelerators": accelerators,
    "sizes": sizes,
    "control-flow": control_flow,
}
