"""Pipelines composed of what real ones have, drawn by a seed, with their steps plain or routed."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, valid-type, type-arg, attr-defined, no-untyped-call, no-any-return, union-attr"
# ruff: noqa: E501, FBT002, PLC0415, PTH101, PTH103, PTH109, PTH110, PTH114, PTH115, PTH116, PTH118, PTH123, PTH208, PTH211, PYI024, UP006, UP045 - as users write

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

    Values = namedtuple("Values", ["text", "total", "names", "options", "on", "x"])
    return Values(
        f'"{number}" ü\n$x {{}}', number, ["a", "{{ $ }}", str(number)], {"k": [1, {"é": "ü"}]}, number > 2, 1 / 3
    )


@lightweight
def consume(
    text: str,
    names: List[str] = ["default"],  # noqa: B006
    options: Optional[Dict[str, Any]] = None,
    on: bool = True,
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
    os.makedirs(os.path.join(model.path, "deep"))
    with open(os.path.join(model.path, "deep", "weights"), "wb") as binary:
        binary.write(bytes(range(256)))
    model.framework = "none"
    with open(count, "w") as file:
        file.write(str(len(text)))


@lightweight
def read(data: dsl.Input[dsl.Dataset], model: Optional[dsl.Input[dsl.Model]] = None) -> dict:
    import os

    with open(data.path) as file:
        text = file.read()
    inside = sorted(os.listdir(model.path)) if model else []
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

    return _doubled(number) + len(os.listdir(folder.path))


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


@lightweight
def old_style(
    text: dsl.InputPath(str),
    data: dsl.InputPath("Dataset"),
    out: dsl.OutputPath("Model"),
    options: dsl.OutputPath(dict),
    note: dsl.OutputPath(str),
):
    import json

    with open(text) as given, open(data, "rb") as binary, open(out, "wb") as file:
        file.write(given.read().encode() + binary.read())
    with open(options, "w") as file:
        json.dump({"e": "é", "big": 1 << 53, "x": 1e-300, "none": None}, file)
    with open(note, "w") as file:
        file.write(" ends with spaces and lines \n\n")


@lightweight
def around(data: dsl.Output[dsl.Artifact]) -> dict:
    """Returns what a process has around it."""
    import os
    import resource
    import signal
    import stat
    import sys

    def state(number: int) -> str:
        return str(signal.getsignal(number))

    with open(data.path, "w") as file:
        file.write("x")
    os.chmod(data.path, 0o750)
    names = ("HOME", "PATH", "LANG", "PWD", "GREETING", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "OF_THE_AUTHOR")
    return {
        "variables": {name: os.environ.get(name) for name in names},
        "folder": os.getcwd(),
        "umask": os.umask(0o022),
        "input": sys.stdin.read(),
        "signals": {str(number): state(number) for number in (1, 2, 3, 10, 13, 15, 17)},
        "blocked": sorted(map(str, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
        "mode": oct(stat.S_IMODE(os.stat(data.path).st_mode)),
        "argv": len(sys.argv),
    }


@lightweight
def folders(out: dsl.Output[dsl.Artifact], empty: dsl.Output[dsl.Dataset]):
    """An artifact that is a folder with what folders may have, and one that is an empty folder."""
    import os

    os.makedirs(os.path.join(out.path, "a", "empty"))
    os.makedirs(empty.path)
    for name in ("a/program", ".hidden", "a/with space", "a/ünï"):
        with open(os.path.join(out.path, name), "w") as file:
            file.write(name)
    os.chmod(os.path.join(out.path, "a/program"), 0o755)
    os.symlink("program", os.path.join(out.path, "a/link"))
    os.symlink(os.path.join(out.path, "a/program"), os.path.join(out.path, "a/absolute"))
    os.symlink("a", os.path.join(out.path, "folder"))
    os.link(os.path.join(out.path, ".hidden"), os.path.join(out.path, "hard"))
    empty.metadata["path"] = empty.path
    empty.metadata["uri"] = empty.uri


@lightweight
def walked(out: dsl.Input[dsl.Artifact]) -> list:
    import os

    found = []
    for folder, names, files in os.walk(out.path):
        for name in [*names, *files]:
            path = os.path.join(folder, name)
            mode = oct(os.lstat(path).st_mode)
            leads = os.readlink(path).replace(out.path, "OUT") if os.path.islink(path) else ""
            found.append([os.path.relpath(path, out.path), mode, leads, os.path.exists(path)])
    return sorted(found)


@lightweight
def several(text: str) -> NamedTuple("Several", [("data", dsl.Dataset), ("scores", dsl.Metrics), ("text", str)]):
    from collections import namedtuple

    data = dsl.Dataset(uri=dsl.get_uri("data"), metadata={"none": None, "deep": [{"a": 1}]})
    with open(data.path, "w") as file:
        file.write(text)
    scores = dsl.Metrics(uri=dsl.get_uri("scores"), metadata={"loss": 0.5})
    Several = namedtuple("Several", ["data", "scores", "text"])
    return Several(data, scores, text * 2)


@lightweight
def slices(sliced: dsl.Output[dsl.SlicedClassificationMetrics], page: dsl.Output[dsl.HTML]):
    sliced.load_confusion_matrix("one", ["a", "b"], [[1, 2], [3, 4]])
    page.uri = page.uri + ".html"
    page.metadata["title"] = 'a "page" <b>'
    with open(page.path, "w") as file:
        file.write("<html></html>")


@lightweight
def noisy(text: str) -> str:
    """Writes what a terminal may get."""
    import os
    import sys

    os.write(1, b"\xc3\xbc \x1b[31mred\x1b[0m\r50%\r100%\n" + b"x" * 70000 + b"\n")
    sys.stderr.write("an error, and no newline at the end")
    print("ünï", end="")
    return text + "\u2028\x07\t\u200b\U0001f600"


@lightweight
def large(count: int, out: dsl.OutputPath(str)) -> str:
    with open(out, "w") as file:
        file.write("0123456789ü" * 20_000)
    return "a'\"\\" * (count + 4_000)


@lightweight
def size_of(text: str, again: str = "") -> int:
    return len(text) + len(again)


@lightweight
def kept(folder: str, text: str) -> list:
    """Adds a file to the run's workspace, and returns what is there."""
    import os

    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, f"{len(os.listdir(folder))}"), "w") as file:
        file.write(text)
    return [open(os.path.join(folder, name)).read() for name in sorted(os.listdir(folder))]


@lightweight
def nothing():
    pass


@lightweight
def forgets(way: str, text: dsl.OutputPath(str), data: dsl.Output[dsl.Dataset]):
    """Leaves without what it declares, or as steps should not."""
    import os
    import signal
    import sys

    data.metadata["way"] = way
    if way != "nothing":
        with open(data.path, "w") as file:
            file.write(way)
    if way == "text":
        return
    with open(text, "w") as file:
        file.write("text")
    if way == "exit 0":
        sys.exit(0)
    if way == "_exit 0":
        os._exit(0)
    if way == "_exit 3":
        os._exit(3)
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if way == "interrupted":
        raise KeyboardInterrupt


@dsl.container_component
def any_types(
    on: bool,
    x: float,
    names: list,
    options: dict,
    data: dsl.Output[dsl.Artifact],
    folder: dsl.Output[dsl.Dataset],
    result: dsl.OutputPath(list),
    maybe: Optional[float] = None,
    model: Optional[dsl.Input[dsl.Model]] = None,
):
    script = (
        'mkdir -p "${0%/*}" "$1" "${2%/*}"; out=$0; echo in > "$1/file"; echo "[1, \'a\', {}]" | tr "\'" \'"\' > "$2"; '
        'shift 2; shift; printf "%s\n" "$#" "$@" > "$out"'
    )
    return dsl.ContainerSpec(
        image=IMAGE,
        command=["sh", "-c", script, data.path, folder.path, result],
        args=[
            "--on", on, "--x", x, names, options, "", " ", "*", "a\nb", "{{x}}", "{{$", "$(VAR) $$(VAR)",
            dsl.IfPresentPlaceholder("maybe", then=["--maybe", dsl.ConcatPlaceholder(["<", maybe, ">"])]),
            dsl.IfPresentPlaceholder("model", then=["--model", model.path, model.uri], else_=["--no-model"]),
            dsl.ConcatPlaceholder([data.uri, "|", data.path, "|", folder.path]),
            dsl.PIPELINE_TASK_NAME_PLACEHOLDER, dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
        ],
    )  # fmt: skip


Wrap = Callable[[Component], Component]
"""Returns a component as it is, or decorated."""


class Pool:
    """What steps of a scope may use: parameters by their types, and artifacts."""

    def __init__(
        self,
        rng: Random,
        wrap: Wrap,
        *,
        numbers: list[Any],
        texts: list[Any],
        nested: Component | None = None,
        with_artifacts: Component | None = None,
    ) -> None:
        self.rng, self.wrap, self.nested, self.with_artifacts = rng, wrap, nested, with_artifacts
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


def _old_style(pool: Pool) -> None:
    if not pool.sets:
        _write(pool)
    made = pool.step(old_style, text=pool.one("texts"), data=pool.one("sets")).outputs
    pool.models.append(made["out"])
    pool.options.append(made["options"])
    pool.texts.append(made["note"])


def _around(pool: Pool) -> None:
    pool.step(around)


def _folders(pool: Pool) -> None:
    made = pool.step(folders).outputs
    pool.step(walked, out=made["out"])
    pool.step(walked, out=made["empty"])


def _several(pool: Pool) -> None:
    made = pool.step(several, text=pool.one("texts")).outputs
    pool.sets.append(made["data"])
    pool.texts.append(made["text"])


def _slices(pool: Pool) -> None:
    pool.step(slices)


def _noisy(pool: Pool) -> None:
    pool.texts.append(pool.step(noisy, text=pool.one("texts")).output)


def _large(pool: Pool) -> None:
    made = pool.step(large, count=pool.one("numbers")).outputs
    pool.numbers.append(pool.step(size_of, text=made["Output"], again=made["out"]).output)


def _nothing(pool: Pool) -> None:
    pool.step(nothing).after(pool.step(nothing))


def _workspace(pool: Pool) -> None:
    folder = f"{dsl.WORKSPACE_PATH_PLACEHOLDER}/a folder"
    first = pool.step(kept, folder=folder, text=pool.one("texts"))
    pool.names.append(pool.step(kept, folder=folder, text="second").after(first).output)


def _any_types(pool: Pool) -> None:
    maybe = {"maybe": 0.5} if pool.rng.random() < 0.5 else {}
    model = {"model": pool.one("models")} if pool.models and pool.rng.random() < 0.7 else {}
    made = pool.step(
        any_types, on=pool.one("flags"), x=pool.rng.choice([0.1, 1e300, 5.0, -0.0]), names=pool.one("names"),
        options=pool.one("options"), **maybe, **model,
    ).outputs  # fmt: skip
    pool.names.append(made["result"])
    pool.step(walked, out=made["data"])


def _forgets(pool: Pool) -> None:
    ways = ["nothing", "text", "exit 0", "_exit 0", "_exit 3", "killed", "term", "interrupted"]
    made = pool.step(forgets, way=pool.rng.choice(ways)).outputs
    pool.step(read, data=made["data"])
    pool.step(size_of, text=made["text"])


def _nested_loops(pool: Pool) -> None:
    items = [{"a": 1, "b": 5}, {"a": 3, "b": 6}]
    with dsl.ParallelFor(items, parallelism=pool.rng.choice([None, 1, 2])) as item:
        inside = pool.inner()
        inside.step(values, number=item.b)
        made = inside.step(values, number=item.a).outputs["total"]
        with dsl.If(made > 1):
            inside.step(consume, text="more")
        with dsl.ParallelFor(["p", "q"]) as text:
            inside.inner().step(consume, text=text, maybe="inner")
    pool.names.append(pool.step(joined, parts=dsl.Collected(made)).output)


@lightweight
def joined(parts: List[int]) -> list:
    return sorted(str(part) for part in parts)


def _conditions(pool: Pool) -> None:
    made = pool.step(values, number=pool.one("numbers")).outputs
    with dsl.If(made["on"] == True):  # noqa: E712
        one = pool.inner().step(returned, text="on").output
    with dsl.Elif(made["text"] == "other"):
        two = pool.inner().step(returned, text="other").output
    with dsl.Else():
        three = pool.inner().step(several, text="else").outputs["data"]
    pool.step(read, data=dsl.OneOf(one, two, three))


def _artifacts_nested(pool: Pool) -> None:
    if pool.with_artifacts is None:
        return
    if not pool.sets:
        _write(pool)
    made = pool.with_artifacts(data=pool.one("sets"), text=pool.one("texts")).outputs
    pool.sets.append(made["data"])
    pool.numbers.append(made["count"])


def _with_artifacts(rng: Random, wrap: Wrap) -> Component:
    @dsl.pipeline(name="with-artifacts")
    def with_artifacts(
        data: dsl.Input[dsl.Dataset], text: str, maybe: Optional[int] = None, on: bool = False
    ) -> NamedTuple("Made", [("data", dsl.Dataset), ("count", int)]):
        from collections import namedtuple

        inside = Pool(rng, wrap, numbers=[1], texts=[text])
        inside.sets.append(data)
        inside.flags.append(on)
        _draw(inside, LEAVES, 1)
        made = inside.step(write, text=text)
        inside.step(read, data=data)
        Made = namedtuple("Made", ["data", "count"])
        return Made(made.outputs["data"], made.outputs["count"])

    return with_artifacts


def _loop(pool: Pool) -> None:
    items = pool.rng.choice([["p", "q"], [1], pool.one("names") or ["r"]])
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


LEAVES = [
    _values, _consume, _write, _read, _elsewhere, _report, _returned, _command, _embedded, _imported, _old_style,
    _around, _folders, _several, _slices, _noisy, _large, _nothing, _any_types,
]  # fmt: skip
PARTS = [*LEAVES, _workspace, _loop, _condition, _nested, _nested_loops, _conditions, _artifacts_nested]


WORKSPACE = dsl.PipelineConfig(workspace=dsl.WorkspaceConfig(size="1Gi"))


def _draw(pool: Pool, parts: Sequence[Callable[[Pool], None]], count: int) -> None:
    for part in pool.rng.sample(parts, count):
        part(pool)


def drawn(seed: int, wrap: Wrap) -> Component:
    """Return the pipeline of a seed, with its steps as `wrap` has them; both have the same parts and inputs."""
    rng = Random(seed)
    nested, with_artifacts = _inner(rng, wrap), _with_artifacts(rng, wrap)

    @dsl.pipeline(name=f"drawn-{seed}", pipeline_config=WORKSPACE)
    def pipeline(number: int = 3, text: str = "from outside") -> str:
        pool = Pool(
            rng,
            wrap,
            numbers=[number, 1],
            texts=[text, "", dsl.PIPELINE_TASK_NAME_PLACEHOLDER],
            nested=nested,
            with_artifacts=with_artifacts,
        )
        _draw(pool, PARTS, rng.randint(2, 3))
        if rng.random() < 0.3:
            _exit(pool)
        elif rng.random() < 0.1:
            pool.step(fails, code=rng.choice([1, 7]))
        elif rng.random() < 0.25:
            _forgets(pool)
        return pool.step(consume, text=pool.one("texts"), names=pool.one("names"), options=pool.one("options")).output

    return gpuquota.pipeline(project="team-a")(pipeline) if wrap is routed else pipeline
