# mypy: disable-error-code="untyped-decorator"
"""Whole pipelines under kfp.local, on a real cluster: the step stays what KFP takes it for."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kfp import dsl, local

import kfp_gpuquota as gpuquota
from kfp_gpuquota.api import Phase, pipeline_labels
from tests.conftest import EmbeddedCluster
from tests.dsl.pipelines import Component, lightweight, plain_shell


@pytest.fixture
def cluster(
    embedded_cluster: EmbeddedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EmbeddedCluster]:
    embedded_cluster.project("team-a", 2)
    monkeypatch.setenv("GPUQUOTA_HOME", str(embedded_cluster.home.root))
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path / "root"))
    yield embedded_cluster
    local.config.LocalExecutionConfig.instance = None


@lightweight
def load(count: int, data: dsl.Output[dsl.Dataset]):  # type: ignore[no-untyped-def]
    with open(data.path, "w") as file:  # noqa: PTH123
        file.write("\n".join(map(str, range(count))))
    data.metadata["count"] = count


@lightweight
def everything(  # type: ignore[no-untyped-def]
    data: dsl.Input[dsl.Dataset],
    names: list,  # type: ignore[type-arg]
    options: dict,  # type: ignore[type-arg]
    strict: bool,
    model: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    page: dsl.Output[dsl.HTML],
    where: dsl.OutputPath(str),  # type: ignore[valid-type]
    rate: float = 0.5,
):
    """Every kind of input and output that a Python component has."""
    import json  # noqa: PLC0415
    from pathlib import Path  # noqa: PLC0415

    total = sum(int(line) for line in Path(data.path).read_text().split())
    (Path(model.path) / "weights").mkdir(parents=True)
    (Path(model.path) / "weights" / "0.json").write_text(json.dumps([total, names, options, strict, rate]))
    model.metadata["best"] = f"{model.path}/weights/0.json"
    model.framework = "none"
    metrics.log_metric("total", total)
    Path(page.path).write_text(f"<b>{total}</b>")
    Path(where).write_text(model.path)


@lightweight
def count_files(model: dsl.Input[dsl.Model], where: str) -> int:
    from pathlib import Path  # noqa: PLC0415

    if where != model.path or model.metadata["best"] != f"{where}/weights/0.json":
        raise ValueError(f"{where} is not {model.path}, or {model.metadata} does not fit")
    return len([path for path in Path(model.path).rglob("*") if path.is_file()])


def _everything_pipeline(step: Component) -> Component:
    @dsl.pipeline(name="everything")
    def everything_pipeline(count: int = 5) -> int:
        loaded = load(count=count)
        trained = step(data=loaded.outputs["data"], names=["a", "b"], options={"x": {"y": [1]}}, strict=True)
        counted = count_files(model=trained.outputs["model"], where=trained.outputs["where"])
        return counted.output  # type: ignore[no-any-return]

    return everything_pipeline


def _tree(root: Path) -> dict[str, str]:
    """Every file that a run wrote, with the run's own directory made the same for every run."""
    (run,) = root.iterdir()
    return {
        str(path.relative_to(run)): path.read_text().replace(str(run), "RUN")
        for path in run.rglob("*")
        if path.is_file()
    }


def test_a_decorated_steps_outputs_are_those_of_the_plain_one(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    outputs, trees = [], []
    for name in ("plain", "decorated"):
        root = tmp_path / name
        local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(root))
        step = everything if name == "plain" else gpuquota.component(gpus=1)(everything)
        pipeline = gpuquota.pipeline(project="team-a")(_everything_pipeline(step))
        outputs.append(pipeline(count=7).outputs)
        trees.append(_tree(root))
    assert outputs == [{"Output": 1}] * 2
    assert trees[0] == trees[1]
    assert "everything/model/weights/0.json" in trees[0]
    (job,) = cluster.client.list_jobs("team-a").jobs
    assert job.status.phase is Phase.SUCCEEDED
    assert job.spec.labels[pipeline_labels.NAME] == _everything_pipeline(everything).name


def test_a_container_component_runs_though_kfp_local_takes_only_python(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    @gpuquota.pipeline(project="team-a")
    @dsl.pipeline(name="containers")
    def containers() -> int:
        loaded = load(count=9)
        first = gpuquota.component(gpus=1)(plain_shell)(data=loaded.outputs["data"], lines=3)
        second = gpuquota.component(gpus=2)(plain_shell)(data=first.outputs["out"], lines=2)
        return second.outputs["count"]  # type: ignore[no-any-return]

    assert containers().outputs == {"Output": 2}
    assert sorted(path.read_text() for path in (tmp_path / "root").rglob("out")) == ["0\n1\n", "0\n1\n2\n"]


def test_a_step_that_nobody_decorated_runs_through_the_quota_when_it_asks_for_gpus(cluster: EmbeddedCluster) -> None:
    @lightweight
    def held() -> str:
        import os  # noqa: PLC0415

        return os.environ["RUNAI_NUM_OF_GPUS"]

    @gpuquota.pipeline(project="team-a")
    @dsl.pipeline(name="asking")
    def asking(gpus: int) -> str:
        task = held().set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(gpus)
        return task.output  # type: ignore[no-any-return]

    assert asking(gpus=2).outputs == {"Output": "2"}


def test_routed_steps_in_loops_conditions_and_exit_handlers(
    cluster: EmbeddedCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    @gpuquota.component(gpus=1)
    @lightweight
    def square(x: int) -> int:
        return x * x

    @gpuquota.component(gpus=1)
    @lightweight
    def last(status: dsl.PipelineTaskFinalStatus):  # type: ignore[no-untyped-def]
        print("the pipeline ended:", status.state)

    @dsl.pipeline(name="inner")
    def inner(x: int) -> int:
        return square(x=x).output  # type: ignore[no-any-return]

    @gpuquota.pipeline(project="team-a")
    @dsl.pipeline(name="flow")
    def flow(go: str = "yes") -> None:
        with dsl.ExitHandler(last()):
            first = inner(x=3)
            with dsl.If(go == "yes"):
                square(x=first.output)
            with dsl.If(go == "no"):
                square(x=100)
            with dsl.ParallelFor([5, 6]) as x:
                square(x=x)

    flow()
    jobs = cluster.client.list_jobs("team-a").jobs
    assert sorted(job.spec.name.split("-")[0] for job in jobs) == ["last"] + ["square"] * 4
    assert {job.status.phase for job in jobs} == {Phase.SUCCEEDED}
    assert "[0] the pipeline ended: SUCCEEDED" in capfd.readouterr().out


def test_a_failing_step_fails_its_pipeline_and_shows_the_traceback(
    cluster: EmbeddedCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    @gpuquota.component(gpus=1)
    @lightweight
    def fail() -> None:
        raise ValueError("the data is bad")

    @gpuquota.pipeline(project="team-a")
    @dsl.pipeline(name="failing")
    def failing() -> None:
        fail()

    with pytest.raises(RuntimeError, match="Inner task failed"):
        failing()
    log = capfd.readouterr().out
    assert "[0] ValueError: the data is bad" in log
    assert "gpuquota: failed with exit code 1: worker 0 ended with exit code 1" in log


def test_kfps_own_retry_runs_a_failed_step_again(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    @gpuquota.component(gpus=1)
    @lightweight
    def flaky(marker: str) -> str:
        from pathlib import Path  # noqa: PLC0415

        if not Path(marker).exists():
            Path(marker).touch()
            raise ValueError("the first attempt fails")
        return "done"

    @gpuquota.pipeline(project="team-a")
    @dsl.pipeline(name="retrying")
    def retrying(marker: str) -> str:
        return flaky(marker=marker).set_retry(2, backoff_duration="0s").output  # type: ignore[no-any-return]

    assert retrying(marker=str(tmp_path / "marker")).outputs == {"Output": "done"}
    phases = sorted(job.status.phase.value for job in cluster.client.list_jobs("team-a").jobs)
    assert phases == ["Failed", "Succeeded"]


def test_set_gpus_gives_one_task_another_size(cluster: EmbeddedCluster) -> None:
    @gpuquota.component(gpus=1)
    @lightweight
    def held() -> str:
        import os  # noqa: PLC0415

        return os.environ["RUNAI_NUM_OF_GPUS"]

    @gpuquota.pipeline(project="team-a")
    @dsl.pipeline(name="sized")
    def sized() -> str:
        return gpuquota.set_gpus(held(), 2).output  # type: ignore[no-any-return]

    assert sized().outputs == {"Output": "2"}


def test_a_decorated_component_runs_without_a_pipeline(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUQUOTA_PROJECT", "team-a")
    step = gpuquota.component(lightweight(_double), gpus=1)
    assert step(x=21).outputs == {"Output": 42}


def _double(x: int) -> int:
    return 2 * x


def test_a_local_cache_hit_starts_no_job(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    local.init(
        local.SubprocessRunner(use_venv=False),
        pipeline_root=str(tmp_path / "cached"),
        enable_caching=True,
        cache_root=str(tmp_path / "cache"),
    )

    @gpuquota.pipeline(project="team-a")
    @dsl.pipeline(name="cached")
    def cached() -> int:
        return gpuquota.component(gpus=1)(lightweight(_double))(x=4).output  # type: ignore[no-any-return]

    assert [cached().outputs, cached().outputs] == [{"Output": 8}] * 2
    assert len(cluster.client.list_jobs("team-a").jobs) == 1
