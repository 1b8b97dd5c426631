"""A job's `runtime_env`, as Ray's: its actors are created with it, and its workers run in what Ray has set up.

Ray uploads local directories of a program that connects, and not those of an actor's options. This module does it with
the same two functions of Ray, which are private.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    RuntimeEnv = Mapping[str, Any]

SURVIVE: Final = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""The shim is the actor's child, and must outlive it."""
SETUP_S: Final = 600.0
"""How long Ray itself lets the setup take, unless `config.setup_timeout_seconds` says otherwise."""
WORKING_DIR: Final = "working_dir"
_MISTAKES: Final = (ValueError, TypeError, FileNotFoundError, NotADirectoryError, PermissionError)

log = logging.getLogger(__name__)


class NotSetUpError(Exception):
    """Ray refuses the runtime environment, or could not set it up."""


def digest(runtime_env: RuntimeEnv) -> str:
    """Return what identifies it. If its directories are uploaded, another content has another digest."""
    return hashlib.sha256(msgspec.json.encode(runtime_env, order="deterministic")).hexdigest()[:12]


def setup_s(runtime_env: RuntimeEnv) -> float:
    """Return how many seconds its setup may take; -1 in Ray's configuration is as long as it takes."""
    if not runtime_env:
        return 0.0
    config = runtime_env.get("config")
    limit = config.get("setup_timeout_seconds", SETUP_S) if isinstance(config, dict) else SETUP_S
    return float(limit) if isinstance(limit, int | float) and limit > 0 else SETUP_S


def uploaded(runtime_env: RuntimeEnv) -> dict[str, Any]:
    """Return it for an actor's options, with its local directories uploaded.

    Raises NotSetUpError where another attempt would not help, and otherwise what Ray raises.
    """
    from ray._private.runtime_env.py_modules import upload_py_modules_if_needed  # noqa: PLC0415
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed  # noqa: PLC0415
    from ray.runtime_env import RuntimeEnv as Checked  # noqa: PLC0415

    try:
        with tempfile.TemporaryDirectory(prefix="gpuquota-upload-") as scratch:
            given = Checked(**runtime_env).to_dict()
            for upload in (upload_working_dir_if_needed, upload_py_modules_if_needed):
                given = upload(given, include_gitignore=True, scratch_dir=scratch, logger=log)
    except Exception as error:
        if mistake := _mistake_in(error):
            raise NotSetUpError(mistake) from error
        raise
    return {**given, "env_vars": {**given.get("env_vars", {}), **SURVIVE}}


def _mistake_in(error: BaseException | None) -> str:
    """Return the first line of the error, or of one that caused it, that is the user's; "" if none is."""
    while error is not None:
        if isinstance(error, _MISTAKES):
            return (str(error).strip().splitlines() or [type(error).__name__])[0]
        error = error.__cause__
    return ""


def inside(runtime_env: RuntimeEnv, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker that this actor starts: what Ray set up comes first."""
    if not runtime_env:
        return dict(environment)
    set_up = {name: os.environ[name] for name in runtime_env.get("env_vars", {}) if name in os.environ}
    first = {"PATH": os.path.dirname(sys.executable), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # noqa: PTH120
    joined = {name: os.pathsep.join(filter(None, (path, environment.get(name, "")))) for name, path in first.items()}
    return {**environment, **joined, **set_up}


def directory(runtime_env: RuntimeEnv, otherwise: str) -> str:
    """Return where a worker that this actor starts runs: in `working_dir`, if that is given."""
    return os.getcwd() if WORKING_DIR in runtime_env else otherwise  # noqa: PTH109
