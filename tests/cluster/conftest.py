"""What tests of the embedded cluster share: a clock that they set, and the seeds of random histories."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests import script_server
from tests.cluster import real_trainings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", [int(seed) for seed in metafunc.config.getoption("--seeds").split(",")])


@pytest.fixture(scope="session")
def clock_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that shifts a process's wall clock by the seconds in the file that CLOCK_OFFSET_FILE names."""
    folder = tmp_path_factory.mktemp("clock")
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture
def jumping_clock(tmp_path: Path, clock_library: Path) -> Iterator[Path]:
    """The file with the seconds by which the wall clock of the processes that are started meanwhile is shifted."""
    library, offset = clock_library, tmp_path / "offset"
    offset.write_text("0")
    before = {name: os.environ.get(name) for name in ("LD_PRELOAD", "CLOCK_OFFSET_FILE")}
    os.environ.update(LD_PRELOAD=str(library), CLOCK_OFFSET_FILE=str(offset))
    yield offset
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(scope="session")
def python_with_clock(tmp_path_factory: pytest.TempPathFactory, clock_library: Path) -> Iterator[tuple[str, ...]]:
    """`forked_python` with a clock that a test shifts."""
    environment = {**os.environ, "LD_PRELOAD": str(clock_library)}
    with script_server.running_with(tmp_path_factory.mktemp("scripts") / "socket", environment) as python:
        yield python


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The checksum that real trainings end with."""
    return real_trainings.undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def trainings(python_with_clock: tuple[str, ...], undisturbed: str, tmp_path: Path) -> real_trainings.Trainings:
    """Real trainings for one history."""
    (tmp_path / "results").mkdir()
    return real_trainings.Trainings(python_with_clock, tmp_path / "results", undisturbed)


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, t);
    const char *path = getenv("CLOCK_OFFSET_FILE");
    FILE *file = id == CLOCK_REALTIME && path ? fopen(path, "r") : NULL;
    if (file) { long offset = 0; if (fscanf(file, "%ld", &offset) == 1) t->tv_sec += offset; fclose(file); }
    return result;
}
"""
