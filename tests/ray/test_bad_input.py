"""What `gpuquota cluster start --ray` refuses, in one sentence each; none of these has a Ray cluster."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from tests import forked, programs

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("ray")


def refused(home: Path, *options: str, **environment: str) -> str:
    """Return the command's stderr; fail if the command succeeds."""
    given = {**os.environ, "GPUQUOTA_HOME": str(home), "COLUMNS": "200", **environment}
    done = forked.run(programs.gpuquota, "cluster", "start", *options, environment=given)
    assert done.returncode, done
    assert "Traceback" not in done.stderr, done.stderr
    return " ".join(done.stderr.split())


def test_an_address_at_which_nothing_answers(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    assert f"nothing answers at {address}" in refused(tmp_path / "home", "--ray", address)


def test_a_ray_that_is_too_old(tmp_path: Path) -> None:
    package = tmp_path / "old" / "ray"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "2.9.3"\n')
    output = refused(tmp_path / "home", "--ray", "127.0.0.1:1", PYTHONPATH=str(package.parent))
    assert "Ray 2.9.3 is too old" in output


def test_a_shape_beside_ray_and_options_of_ray_without_it(tmp_path: Path) -> None:
    assert "leave out --nodes" in refused(tmp_path / "home", "--ray", "auto", "--nodes", "2")
    assert "need --ray" in refused(tmp_path / "home", "--ray-silence", "9")
    assert "must be auto, or HOST:PORT" in refused(tmp_path / "home", "--ray", "ray://head:10001")
