"""What Ray's `runtime_env` of a job becomes; no Ray cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kfp_gpuquota.cluster.ray import runtime_environments
from kfp_gpuquota.cluster.submission import with_absolute_paths


def test_only_the_same_environment_has_the_same_digest() -> None:
    digest = runtime_environments.digest
    assert digest({"pip": ["a"], "env_vars": {"B": "c"}}) == digest({"env_vars": {"B": "c"}, "pip": ["a"]})
    assert digest({"pip": ["a"]}) != digest({"pip": ["b"]})


@pytest.mark.parametrize(
    ("runtime_env", "seconds"),
    [
        ({}, 0.0),
        ({"pip": ["a"]}, 600.0),
        ({"config": {"setup_timeout_seconds": 30}}, 30.0),
        ({"config": {"setup_timeout_seconds": -1}}, 600.0),
        ({"config": "wrong"}, 600.0),
    ],
)
def test_a_setup_takes_as_long_as_ray_lets_it(runtime_env: dict[str, Any], seconds: float) -> None:
    assert runtime_environments.setup_s(runtime_env) == seconds


def test_programs_and_modules_that_ray_has_set_up_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/env/bin/python")
    monkeypatch.setenv("PYTHONPATH", "/modules")
    monkeypatch.setenv("COLOR", "blue of the actor")
    given = {"PATH": "/usr/bin", "COLOR": "red", "OTHER": "kept"}
    assert runtime_environments.inside({}, given) == given
    assert runtime_environments.inside({"env_vars": {"COLOR": "blue"}}, given) == {
        "PATH": f"/env/bin{os.pathsep}/usr/bin",
        "PYTHONPATH": "/modules",
        "COLOR": "blue of the actor",
        "OTHER": "kept",
    }


def test_it_runs_in_the_working_directory_that_ray_has_unpacked() -> None:
    assert runtime_environments.directory({"working_dir": "gcs://a.zip"}, "/otherwise") == str(Path.cwd())
    assert runtime_environments.directory({"pip": []}, "/otherwise") == "/otherwise"


def test_local_directories_are_those_of_who_submits() -> None:
    files = {"uv": "needs.txt", "conda": "environment.yaml"}
    given = {**files, "working_dir": ".", "py_modules": ["mine", "s3://bucket/theirs.zip", Path("there")], "pip": ["a"]}
    assert with_absolute_paths(given) == {
        **{name: str(Path(file).absolute()) for name, file in files.items()},
        "working_dir": str(Path.cwd()),
        "py_modules": [str(Path("mine").absolute()), "s3://bucket/theirs.zip", str(Path("there").absolute())],
        "pip": ["a"],
    }
    assert with_absolute_paths({"conda": "name-of-one"}) == {"conda": "name-of-one"}
    assert with_absolute_paths({"working_dir": "https://host/code.zip"}) == {"working_dir": "https://host/code.zip"}
