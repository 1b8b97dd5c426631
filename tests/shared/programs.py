"""Programs that run as another user, forked with all their modules: those may lie where only root may read."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys

import kfp_gpuquota
from kfp_gpuquota.cluster.local.workers import shim
from tests import programs

for _package in ("cli", "cluster.local", "server", "fractions", "engine"):
    _found = importlib.import_module(f"kfp_gpuquota.{_package}")
    for _module in pkgutil.walk_packages(_found.__path__, f"{_found.__name__}."):
        importlib.import_module(_module.name)


def as_user(arguments: list[str]) -> None:
    """Become the user of the first argument, then the program that the second one names."""
    ids, name, *words = arguments
    uid, gid, groups = json.loads(ids)
    os.setgroups(groups)
    os.setgid(gid)
    os.setuid(uid)
    {"command_line": programs.gpuquota, "python_api": python_api, "shim": a_shim}[name](words)


def a_shim(words: list[str]) -> None:
    """Be the shim of a directory."""
    sys.exit(shim.main(words[0]))


def python_api(words: list[str]) -> None:
    """Submit a job, and wait for it."""
    handle = kfp_gpuquota.submit(words, project="vision", name="hers")
    print(handle.wait(timeout_s=60).phase, handle.job().owner, handle.logs())
