# mypy: disable-error-code="untyped-decorator"
"""What a decorated step costs more than the plain one: kfp.local, warm embedded cluster, the two interleaved.

    python benchmarks/step_overhead.py [PAIRS]

The last line is JSON: overhead_s is the difference of the medians (bar: 0.4 s), compile_ratio what compiling a pipeline
of 500 such steps takes, as a multiple of plain KFP (bar: 1.2).
"""

import contextlib
import io
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from common import print_conditions, print_result
from kfp import compiler, dsl, local

import kfp_gpuquota as gpuquota
from kfp_gpuquota.api import Project
from kfp_gpuquota.cluster.connect import connect
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.start import await_stop

DEFAULT_PAIRS = 15
STEPS_TO_COMPILE = 500
COMPILATIONS = 3


def _step(x: int, model: dsl.Output[dsl.Model]) -> int:
    with open(model.path, "w") as file:  # noqa: PTH123
        file.write(str(x))
    return x


def _pipelines() -> tuple[Callable[..., object], Callable[..., object]]:
    plain = dsl.component(_step, base_image="python:3.11", install_kfp_package=False)
    decorated = gpuquota.component(gpus=1)(plain)
    return _pipeline("plain", plain), gpuquota.pipeline(project="team-a")(_pipeline("decorated", decorated))


def _pipeline(name: str, step: Callable[..., object]) -> Callable[..., object]:
    @dsl.pipeline(name=name)
    def pipeline(x: int) -> None:
        step(x=x)

    return cast("Callable[..., object]", pipeline)


def _seconds(pipeline: Callable[..., object], x: int) -> float:
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        pipeline(x=x)
    return time.perf_counter() - began


def _measure(pairs: int) -> tuple[list[float], list[float]]:
    plain, decorated = _pipelines()
    _seconds(plain, 0), _seconds(decorated, 0)  # files in the page cache, daemon warm
    times: tuple[list[float], list[float]] = [], []
    for pair in range(1, pairs + 1):
        times[0].append(_seconds(plain, pair))
        times[1].append(_seconds(decorated, pair))
    return times


def _compile_ratio(directory: Path) -> float:
    """Median of interleaved compilations, from tracing the pipeline to its file."""
    plain = dsl.component(_step, base_image="python:3.11", install_kfp_package=False)
    times: tuple[list[float], list[float]] = [], []
    for _ in range(COMPILATIONS):
        times[0].append(_compile_seconds(lambda: _large(plain), directory))
        times[1].append(
            _compile_seconds(
                lambda: gpuquota.pipeline(project="a")(_large(gpuquota.component(gpus=1)(plain))), directory
            )
        )
    return statistics.median(times[1]) / statistics.median(times[0])


def _compile_seconds(build: Callable[[], object], directory: Path) -> float:
    began = time.perf_counter()
    compiler.Compiler().compile(build(), str(directory / "compiled.yaml"))
    return time.perf_counter() - began


def _large(step: Callable[..., object]) -> Any:
    @dsl.pipeline(name="large")
    def large() -> None:
        for x in range(STEPS_TO_COMPILE):
            step(x=x)

    return large


def main(pairs: int = DEFAULT_PAIRS) -> None:
    """Measure and print."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["GPUQUOTA_HOME"] = directory
        local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(Path(directory) / "root"))
        client = connect()
        client.create_project(Project(name="team-a", guaranteed=1))
        try:
            plain, decorated = (statistics.median(times) for times in _measure(pairs))
        finally:
            client.stop_cluster()
            await_stop(Home(Path(directory)))
        ratio = _compile_ratio(Path(directory))
    print_conditions("What a decorated step costs under kfp.local", pairs_of_one_step=pairs, cluster="warm, idle")
    figures = {"overhead_s": decorated - plain, "plain_s": plain, "decorated_s": decorated, "compile_ratio": ratio}
    print_result(**{name: round(value, 3) for name, value in figures.items()})


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
