"""What tests of the embedded cluster share: a clock that they set, and the seeds of random histories."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", [int(seed) for seed in metafunc.config.getoption("--seeds").split(",")])


@pytest.fixture
def jumping_clock(tmp_path: Path) -> Iterator[Path]:
    """A library that shifts a process's wall clock by the seconds in a file, and that file."""
    source = tmp_path / "clock.c"
    source.write_text(CLOCK)
    library, offset = tmp_path / "clock.so", tmp_path / "offset"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    offset.write_text("0")
    before = {name: os.environ.get(name) for name in ("LD_PRELOAD", "CLOCK_OFFSET_FILE")}
    os.environ.update(LD_PRELOAD=str(library), CLOCK_OFFSET_FILE=str(offset))
    yield offset
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


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
