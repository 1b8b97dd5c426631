"""Pipelines composed of what real ones have, drawn by a seed, with their steps plain or routed."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, valid-type, type-arg, attr-defined, no-untyped-call, no-any-return"
# ruff: noqa: E501, PLC0415, PTH123, UP006, UP045 - components as users write them

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Dict, List, NamedTuple, Optional  # noqa: UP035

from kfp import dsl, kubernetes

import kfp_gpuquota as gpuquota
from tests.dsl.pipelines import IMAGE, Component, lightweight


@lightweight
def values(
    number: int,
) -> NamedTuple(
    "Values", [("text", str), ("total", int), ("names", list), ("options", dict), ("on", bool), ("x", float)]
):
    from collections import namedtuple

    Values = namedtuple("Values", ["text", "total", "names", "options", "on", "x"])  # noqa: PYI024
    return Values(
        f'"{number}" ü\n$x {{}}', number, ["a", "{{ $ }}", str(number)], {"k": [1, {"é": "ü"}]}, number > 2, 1 / 3
    )


@lightweight
def consume(
    text: str,
    names: List[str] = ["default"],  # noqa: B006
    options: Optional[Dict[str, Any]] = None,
    on: bool = True,  # noqa: FBT002
    maybe: Optional[str] = None,
    x: float = 0.25,
) -> str:
    import json
    import os

    return json.dumps([text, names, options, on, maybe, x, os.environ.get("GREETING")], sort_keys=True)


@lightweight
def write(text: str, data: dsl.Output[dsl.Dataset], model: dsl.Output[dsl.Model], count: dsl.OutputPath(int)):
    import os

    with open(data.path, "w") as file:
        file.write(text)
    data.metadata.update({"n": 3, "x": 0.5, "yes": True, "text": text, "list": [1, "b"], "deep": {"a": {"b": []}}})
    os.makedirs(os.path.join(model.path, "deep"))  # noqa: PTH103, PTH118
    with open(os.path.join(model.path, "deep", "weights"), "wb") as binary:  # noqa: PTH118
        binary.write(bytes(range(256)))
    model.framework = "none"
    with open(count, "w") as file:
        file.write(str(len(text)))


@lightweight
def read(data: dsl.Input[dsl.Dataset], model: Optional[dsl.Input[dsl.Model]] = None) -> dict:
    import os

    with open(data.path) as file:
        text = file.read()
    inside = sorted(os.listdir(model.path)) if model else []  # noqa: PTH208
    return {"text": text, "metadata": data.metadata, "name": data.name, "inside": inside}


@lightweight
def elsewhere(text: str, data: dsl.Output[dsl.Dataset]):
    data.metadata["kept"] = "elsewhere"
    data.custom_path = data.path + "-of-its-own"
    with open(data.path, "w") as file:
        file.write(text)


@lightweight
def report(
    number: int,
    metrics: dsl.Output[dsl.Metrics],
    classes: dsl.Output[dsl.ClassificationMetrics],
    page: dsl.Output[dsl.HTML],
    notes: dsl.Output[dsl.Markdown],
):
    metrics.log_metric("accuracy", number / 7)
    classes.log_confusion_matrix(["a", "b"], [[1, 2], [3, number]])
    classes.log_roc_curve([0.0, 0.5, 1.0], [0.0, 0.8, 1.0], [1.0, 0.5, 0.0])
    for one, text in ((page, "<b>ü</b>"), (notes, "# title")):
        with open(one.path, "w") as file:
            file.write(text)


@lightweight
def returned(text: str) -> dsl.Dataset:
    made = dsl.Dataset(uri=dsl.get_uri(), metadata={"of": "its own"})
    with open(made.path, "w") as file:
        file.write(text)
    return made


@lightweight
def together(parts: List[str], sets: dsl.Input[List[dsl.Dataset]]) -> list:
    return [*sorted(parts), *sorted(one.metadata.get("kept", one.name) for one in sets)]


def _doubled(number: int) -> int:
    return 2 * number


def helped(number: int, folder: dsl.EmbeddedInput[dsl.Dataset]) -> int:
    import os

    return _doubled(number) + len(os.listdir(folder.path))  # noqa: PTH208


embedding = dsl.component(
    helped,
    base_image=IMAGE,
    install_kfp_package=False,
    embedded_artifact_path=str(Path(__file__).parent / "release_0_2"),
    additional_funcs=[_doubled],
)


@lightweight
def fails(code: int):
    import sys

    if code == 1:
        raise ValueError("as it was told")
    sys.exit(code)


@lightweight
def farewell(status: dsl.PipelineTaskFinalStatus, text: str = "bye") -> str:
    return f"{text}: {status.state}, {status.error_code}"


@dsl.container_component
def command(
    text: str,
    data: dsl.Input[dsl.Dataset],
    out: dsl.Output[dsl.Dataset],
    number: dsl.OutputPath(int),
    maybe: Optional[str] = None,
):
    script = 'mkdir -p "${1%/*}"; out=$1 number=$2; shift 2; printf "%s|" "${out##*/}" "$@" > $out; printf 7 > $number'
    return dsl.ContainerSpec(
        image=IMAGE,
        command=["sh", "-c", script, "sh"],
        args=[
            out.path,
            number,
            data.path,
            dsl.ConcatPlaceholder(["--text=", text, ";", dsl.ConcatPlaceholder(["<", data.uri, ">"])]),
            dsl.IfPresentPlaceholder("maybe", then=["--maybe", maybe], else_=["--none", "$HOME `x` \\ '\""]),
        ],
    )


Wrap = Callable[[Component], Component]
"""Returns a component as it is, or decorated."""


class Pool:
    """What steps of a scope may use: parameters by their types, and artifacts."""

    def __init__(
        self, rng: Random, wrap: Wrap, *, numbers: list[Any], texts: list[Any], nested: Component | None = None
    ) -> None:
        self.rng, self.wrap, self.nested = rng, wrap, nested
        self.numbers, self.texts = numbers, texts
        self.names: list[Any] = [["x", "y"], []]
        self.options: list[Any] = [{"a": {"b": [1]}}, {}]
        self.flags: list[Any] = [True, False]
        self.sets: list[Any] = []
        self.models: list[Any] = []

    def inner(self) -> "Pool":
        """A scope within this one: what is made there does not leave it. kfp.local passes no artifacts into one."""
        made = Pool(self.rng, self.wrap, numbers=[*self.numbers], texts=[*self.texts])
        made.names, made.options, made.flags = [*self.names], [*self.options], [*self.flags]
        return made

    def one(self, kind: str) -> Any:
        return self.rng.choice(getattr(self, kind))

    def step(self, component: Component, **inputs: Any) -> Any:
        """Add a task of the component, routed in one of the ways, with settings that tasks have."""
        way = self.rng.randrange(4)
        decorated = gpuquota.component(gpus=1) if way == 0 else gpuquota.component(fraction=0.5)
        task = self.wrap(decorated(component) if way < 2 and self.wrap is routed else component)(**inputs)
        if way == 2 and self.wrap is routed:
            task.set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(1)
        for setting in self.rng.sample(SETTINGS, self.rng.randrange(3)):
            setting(task)
        return task


def plain(component: Component) -> Component:
    return component


def routed(component: Component) -> Component:
    return component


SETTINGS: list[Callable[[Any], Any]] = [
    lambda task: task.set_env_variable("GREETING", "héllo $HOME"),
    lambda task: task.set_caching_options(False),
    lambda task: task.set_retry(1),
    lambda task: task.set_cpu_limit("1").set_memory_request("100M"),
    lambda task: task.set_display_name("A step: with a title"),
    lambda task: kubernetes.set_timeout(task, 600),
    lambda task: kubernetes.use_secret_as_env(task, "secret", {"key": "SECRET"}),
    lambda task: kubernetes.mount_pvc(task, "claim", "/claim"),
    lambda task: kubernetes.add_toleration(task, key="team", operator="Exists"),
    lambda task: kubernetes.add_node_selector(task, "disk", "fast"),
]


def _values(pool: Pool) -> None:
    made = pool.step(values, number=pool.one("numbers")).outputs
    for kind, name in (
        ("texts", "text"),
        ("numbers", "total"),
        ("names", "names"),
        ("options", "options"),
        ("flags", "on"),
    ):
        getattr(pool, kind).append(made[name])


def _consume(pool: Pool) -> None:
    kinds = {"names": "names", "options": "options", "on": "flags", "maybe": "texts"}
    given = {name: pool.one(kind) for name, kind in kinds.items() if pool.rng.random() < 0.5}
    pool.texts.append(pool.step(consume, text=pool.one("texts"), **given).output)


def _write(pool: Pool) -> None:
    made = pool.step(write, text=pool.one("texts")).outputs
    pool.sets.append(made["data"])
    pool.models.append(made["model"])
    pool.numbers.append(made["count"])


def _read(pool: Pool) -> None:
    if not pool.sets:
        _write(pool)
    model = {"model": pool.one("models")} if pool.models and pool.rng.random() < 0.7 else {}
    pool.options.append(pool.step(read, data=pool.one("sets"), **model).output)


def _elsewhere(pool: Pool) -> None:
    pool.sets.append(pool.step(elsewhere, text=pool.one("texts")).outputs["data"])


def _report(pool: Pool) -> None:
    pool.step(report, number=pool.one("numbers"))


def _returned(pool: Pool) -> None:
    pool.sets.append(pool.step(returned, text=pool.one("texts")).output)


def _command(pool: Pool) -> None:
    if not pool.sets:
        _write(pool)
    maybe = {"maybe": pool.one("texts")} if pool.rng.random() < 0.5 else {}
    made = pool.step(command, text=pool.one("texts"), data=pool.one("sets"), **maybe).outputs
    pool.sets.append(made["out"])
    pool.numbers.append(made["number"])


def _embedded(pool: Pool) -> None:
    pool.numbers.append(pool.step(embedding, number=pool.one("numbers")).output)


def _imported(pool: Pool) -> None:
    made = dsl.importer(artifact_uri=__file__, artifact_class=dsl.Dataset, metadata={"text": pool.one("texts")})
    pool.sets.append(made.output)


def _loop(pool: Pool) -> None:
    items = pool.rng.choice([["p", "q"], [1], pool.one("names")])
    with dsl.ParallelFor(items) as item:
        inside = pool.inner()
        made = inside.step(consume, text=item if pool.rng.random() < 0.5 else "in a loop").output
        sets = inside.step(returned, text="in a loop").output
    pool.step(together, parts=dsl.Collected(made), sets=dsl.Collected(sets))


def _condition(pool: Pool) -> None:
    number = pool.step(values, number=pool.one("numbers")).outputs["total"]
    with dsl.If(number > 2):
        one = pool.inner().step(consume, text="more").output
    with dsl.Else():
        other = pool.inner().step(consume, text="less").output
    pool.texts.append(dsl.OneOf(one, other))


def _nested(pool: Pool) -> None:
    if pool.nested is not None:
        pool.texts.append(pool.nested(number=pool.one("numbers")).output)


def _inner(rng: Random, wrap: Wrap) -> Component:
    @dsl.pipeline(name="inner")
    def inner(number: int, text: str = "of the inner one") -> str:
        inside = Pool(rng, wrap, numbers=[number], texts=[text])
        _draw(inside, LEAVES, rng.randint(1, 2))
        return inside.step(consume, text=text).output

    return inner


def _exit(pool: Pool) -> None:
    last = pool.step(farewell, text="done")
    with dsl.ExitHandler(last):
        inside = pool.inner()
        _draw(inside, LEAVES, 1)
        if pool.rng.random() < 0.4:
            inside.step(fails, code=pool.rng.choice([1, 7]))


LEAVES = [_values, _consume, _write, _read, _elsewhere, _report, _returned, _command, _embedded, _imported]
PARTS = [*LEAVES, _loop, _condition, _nested]


def _draw(pool: Pool, parts: Sequence[Callable[[Pool], None]], count: int) -> None:
    for part in pool.rng.sample(parts, count):
        part(pool)


def drawn(seed: int, wrap: Wrap) -> Component:
    """Return the pipeline of a seed, with its steps as `wrap` has them; both have the same parts and inputs."""
    rng = Random(seed)
    nested = _inner(rng, wrap)

    @dsl.pipeline(name=f"drawn-{seed}")
    def pipeline(number: int = 3, text: str = "from outside") -> str:
        pool = Pool(rng, wrap, numbers=[number, 1], texts=[text, "", dsl.PIPELINE_TASK_NAME_PLACEHOLDER], nested=nested)
        _draw(pool, PARTS, rng.randint(2, 3))
        if rng.random() < 0.3:
            _exit(pool)
        elif rng.random() < 0.1:
            pool.step(fails, code=rng.choice([1, 7]))
        return pool.step(consume, text=pool.one("texts"), names=pool.one("names"), options=pool.one("options")).output

    return gpuquota.pipeline(project="team-a")(pipeline) if wrap is routed else pipeline
