"""The service of a shared cluster: its unit, its start by systemd, and what root refuses to run."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.cluster.connect import connect
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.shared.files import close_to_users, open_to_users
from kfp_gpuquota.cluster.local.shared.service import check_installation, unit
from kfp_gpuquota.cluster.local.start import await_stop
from kfp_gpuquota.cluster.local.workers import cgroups
from kfp_gpuquota.errors import StateFileError, UsageError
from tests.polling import TIMEOUT_S
from tests.shared.people import MARKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.shared.conftest import Users

pytestmark = MARKS

GPUQUOTA = Path(sys.executable).with_name("gpuquota")


def test_the_unit_is_one_that_systemd_accepts(tmp_path: Path) -> None:
    printed = subprocess.run(
        [GPUQUOTA, "cluster", "start", "--shared", "--gpus", "0,1", "--group", "g%u", "--print-unit"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    (command,) = (line for line in printed.splitlines() if line.startswith("ExecStart="))
    assert command == f'ExecStart={GPUQUOTA} cluster start --shared --gpus 0,1 --group "g%%u" --foreground'
    for line in ("KillMode=process", "OOMPolicy=continue", "Type=notify", "StateDirectory=gpuquota"):
        assert line in printed.splitlines()
    file = tmp_path / "gpuquota.service"
    file.write_text(printed)
    if analyze := shutil.which("systemd-analyze"):
        checked = subprocess.run([analyze, "verify", file], capture_output=True, text=True, check=False)
        found = [line for line in checked.stderr.splitlines() if file.name in line]
        assert not [line for line in found if "'DelegateSubgroup'" not in line], "that is unknown before version 254"


def test_the_unit_has_the_places_that_its_administrator_chose(tmp_path: Path) -> None:
    home, path = tmp_path / "the state %", tmp_path / "socket"
    places = {"GPUQUOTA_HOME": str(home), "GPUQUOTA_SHARED_SOCKET": str(path)}
    printed = subprocess.run(
        [GPUQUOTA, "cluster", "start", "--shared", "--print-unit"],
        env={**os.environ, **places}, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    found = [line for line in printed if line.startswith(("Environment", "StateDirectory", "RuntimeDirectory"))]
    assert found == [
        f'Environment="GPUQUOTA_HOME={tmp_path}/the state %%"',
        f"Environment=GPUQUOTA_SHARED_SOCKET={path}",
    ]


@pytest.mark.parametrize(
    ("word", "written"), [("a b", '"a b"'), ('"', '"\\""'), ("\\", '"\\\\"'), ("$HOME", '"$$HOME"')]
)
def test_words_are_quoted_for_systemd(word: str, written: str) -> None:
    assert f" {written}\n" in unit(["start", word])


@contextmanager
def ended_at_last(process: subprocess.Popen[str]) -> Iterator[None]:
    """End the process after the block, also if it has failed; `Popen` alone would wait for its end."""
    try:
        yield
    finally:
        process.terminate()


def test_the_service_reports_to_systemd_when_it_serves_and_runs_in_the_foreground(tmp_path: Path, users: Users) -> None:
    notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notified.bind(str(tmp_path / "notify"))
    notified.settimeout(TIMEOUT_S)
    path = tmp_path / "run" / "socket"
    environment = {
        **os.environ, "GPUQUOTA_HOME": str(tmp_path / "home"), "GPUQUOTA_SHARED_SOCKET": str(path),
        "NOTIFY_SOCKET": str(tmp_path / "notify"), "INVOCATION_ID": "1",
    }  # fmt: skip
    words = ["cluster", "start", "--shared", "--gpus", "2", "--cpu-slots", "--foreground"]
    with (
        subprocess.Popen([GPUQUOTA, *words], env=environment, stderr=subprocess.PIPE, text=True) as service,
        ended_at_last(service),
    ):
        assert notified.recv(100).decode() == f"READY=1\nMAINPID={service.pid}"
        assert connect({"GPUQUOTA_SHARED_SOCKET": str(path), "XDG_STATE_HOME": str(tmp_path)}).health().shared
        ((status, _),) = users.eve.ask(path, [("GET", "/v1/nodes", None)])
        assert status == 200, "without --group every user may look"
        service.terminate()
        assert service.wait(TIMEOUT_S) == 0
    await_stop(Home(tmp_path / "home"))
    notified.close()


def test_only_root_starts_a_shared_cluster(users: Users, tmp_path: Path) -> None:
    variables = {"GPUQUOTA_SHARED_SOCKET": str(tmp_path / "none")}
    refused = users.anna.gpuquota("cluster", "start", "--shared", variables=variables)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "only root can start jobs as their users: sudo gpuquota cluster start --shared" in refused.stderr
    lonely = users.anna.gpuquota("cluster", "start", "--group", "lab", variables=variables)
    assert "--group is for a cluster that several users share; add --shared" in lonely.stderr


def test_root_runs_no_program_that_a_user_can_change(tmp_path: Path, users: Users) -> None:
    program = tmp_path / "bin" / "gpuquota"
    program.parent.mkdir(mode=0o755)
    program.write_text("")
    program.chmod(0o755)
    check_installation([program])
    program.chmod(0o777)
    with pytest.raises(UsageError, match="can be changed by others; install kfp-gpuquota as root"):
        check_installation([program])
    program.chmod(0o755)
    os.chown(program.parent, users.anna.uid, -1)
    with pytest.raises(UsageError, match=f"root would run {program}, and {program.parent} can be changed by others"):
        check_installation([program])


def test_a_directory_that_users_cannot_reach_is_not_shared(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    home = Home(hidden / "home")
    home.create()
    with pytest.raises(StateFileError, match=f"users may not pass through {hidden}"):
        open_to_users(home, tmp_path / "run" / "socket")


@pytest.mark.parametrize("way", ["directory", "link"])
def test_roots_cluster_is_in_no_place_that_a_user_can_change(tmp_path: Path, users: Users, way: str) -> None:
    hers, real = tmp_path / "hers", tmp_path / "real"
    real.mkdir(mode=0o755)
    if way == "directory":
        hers.mkdir(mode=0o755)
    else:
        hers.symlink_to(real)
    os.chown(hers, users.anna.uid, -1, follow_symlinks=False)
    for place in (real, hers):
        Home(place / "home").create()
    with pytest.raises(StateFileError, match=f"others than root can change {hers}; .* with GPUQUOTA_HOME"):
        open_to_users(Home(hers / "home"), tmp_path / "run" / "socket")
    with pytest.raises(StateFileError, match=f"others than root can change {hers}; .* with GPUQUOTA_SHARED_SOCKET"):
        open_to_users(Home(real / "home"), hers / "socket")


def test_a_directory_that_is_shared_no_more_is_private_again(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    open_to_users(home, tmp_path / "run" / "socket")
    home.create()  # a client's look leaves it open
    assert [path.stat().st_mode & 0o777 for path in (home.root, home.jobs)] == [0o711, 0o711]
    close_to_users(home)
    assert [path.stat().st_mode & 0o777 for path in (home.root, home.jobs)] == [0o700, 0o700]
    assert not home.socket_file.is_symlink()


def test_limits_need_a_cgroup_for_the_daemon_alone_where_systemd_starts_it_again() -> None:
    service = Path("/sys/fs/cgroup/system.slice/gpuquota.service")
    assert cgroups.divisible(service / cgroups.DAEMON, service=True) == service
    assert cgroups.divisible(service, service=True) is None
    assert cgroups.divisible(service, service=False) == service
