"""What `gpuquota cluster start --ray` refuses, in one sentence each; none of these has a Ray cluster."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.cluster.ray.bridge_output import copy_without_native_stacks, ended_by
from tests import forked, programs
from tools.devcluster.layout import free_port

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
    address = f"127.0.0.1:{free_port()}"
    assert f"nothing answers at {address}" in refused(tmp_path / "home", "--ray", address)


def test_a_recorded_head_that_has_ended_is_one_sentence_without_a_stack(tmp_path: Path) -> None:
    port = free_port()
    output = refused(tmp_path / "home", "--ray", "auto", RAY_ADDRESS=f"127.0.0.1:{port}")
    assert re.search(rf"nothing answers at [0-9.]+:{port} ", output)
    assert "StackTrace" not in output


def test_a_stack_of_rays_native_part_is_not_copied() -> None:
    target = io.BytesIO()

    async def copy() -> None:
        source = asyncio.StreamReader()
        source.feed_data(b"a warning\nx.cc:1: Check failed: no head\n*** StackTrace Information ***\nray::frame()\n")
        source.feed_eof()
        await copy_without_native_stacks(source, target)

    asyncio.run(copy())
    assert target.getvalue() == b"a warning\nx.cc:1: Check failed: no head\n"


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (-signal.SIGABRT, "its head did not answer, or was restarted"),
        (-signal.SIGKILL, "its process ended by SIGKILL"),
        (1, "its process ended with exit code 1"),
    ],
)
def test_the_end_of_the_bridge_is_a_sentence(code: int, sentence: str) -> None:
    assert sentence in ended_by(code)


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
