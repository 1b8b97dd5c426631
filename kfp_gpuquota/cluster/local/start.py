"""Starting the embedded cluster's daemon on demand, and stopping it."""

from __future__ import annotations

import importlib.util
import os
import select
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.local.home import private
from kfp_gpuquota.errors import ClusterStartError, ConflictError

if TYPE_CHECKING:
    from pathlib import Path

    from kfp_gpuquota.cluster.local.devices import ClusterConfig
    from kfp_gpuquota.cluster.local.home import Home

START_TIMEOUT_S: Final = 30.0
RAY_START_TIMEOUT_S: Final = 120.0
"""The first connection to Ray starts an actor, and a raylet may be about to register."""
STOP_TIMEOUT_S: Final = 15.0
READY: Final = "ready"
NEEDED: Final = ("aiohttp", "numpy")


def ensure_running(home: Home) -> None:
    """Start the daemon unless it runs. Safe for many callers at once. Raises ClusterStartError."""
    home.create()
    if not home.is_locked():
        start(home)
    _await_files(home)


def start_with(home: Home, config: ClusterConfig) -> None:
    """Start the daemon with a new shape. Raises ClusterStartError."""
    home.create()
    timeout_s = START_TIMEOUT_S if config.ray is None else RAY_START_TIMEOUT_S
    start(home, (msgspec.json.encode(config).decode(),), timeout_s)


def start(home: Home, arguments: tuple[str, ...] = (), timeout_s: float = START_TIMEOUT_S) -> None:
    """Start a daemon and return when it serves; one that finds another already there is no failure."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ClusterStartError(
            f"the embedded cluster needs {', '.join(missing)}; run: pip install 'kfp-gpuquota[cluster]'"
        )
    message = _spawn(home, arguments, timeout_s)
    if message == READY or home.is_locked():
        return
    why = message or "its daemon ended without a message"
    raise ClusterStartError(f"the embedded cluster did not start: {why}; its log is {home.log_file}", why)


def _spawn(home: Home, arguments: tuple[str, ...], timeout_s: float) -> str:
    """Start the process; returns its first line, which is READY or what went wrong."""
    read, write = os.pipe()
    try:
        with open(home.log_file, "ab", opener=private) as log:
            subprocess.Popen(
                [sys.executable, "-m", "kfp_gpuquota.cluster.local.daemon", str(home.root), str(write), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(write,),
                start_new_session=True,
                cwd="/",
            ).returncode = 0  # a daemon: its parent does not wait for it
    finally:
        os.close(write)
    with os.fdopen(read) as pipe:
        ready, _, _ = select.select([pipe], [], [], timeout_s)
        return pipe.readline().strip() if ready else f"no answer within {timeout_s:g} s"


def _await_files(home: Home) -> None:
    """Another caller's daemon may hold the lock and not serve yet."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (home.socket_file.exists() and home.token_file.exists()):
        if time.monotonic() > deadline:
            raise ClusterStartError(f"the embedded cluster does not serve; its log is {home.log_file}")
        time.sleep(0.02)


def await_socket_closed(path: Path) -> None:
    """Return when no server accepts at the socket any more. Raises ConflictError."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while _accepts(path):
        if time.monotonic() > deadline:
            raise ConflictError(f"the daemon still serves {path} after {STOP_TIMEOUT_S:g} s")
        time.sleep(0.02)


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(str(path))
        except OSError:
            return False
    return True


def await_stop(home: Home) -> None:
    """Return when no daemon runs any more. Raises ConflictError."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while home.is_locked():
        if time.monotonic() > deadline:
            raise ConflictError(f"the daemon still runs after {STOP_TIMEOUT_S:g} s; its log is {home.log_file}")
        time.sleep(0.02)
