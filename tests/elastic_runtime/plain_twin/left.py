"""The beginning of a script, and its end: its process's state, written to a file."""

from __future__ import annotations

import atexit
import builtins
import gc
import json
import logging
import os
import random
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module
from torch.optim import optimizer

from elastic_runtime.loop import member
from tests.elastic_runtime.zoo.generated.scripted import ScriptedCoordinator

SCRIPTED = "http://127.0.0.1:9/"
"""The address of a coordinator that gives its one worker the only generation there is; all else is real."""


def _name(thing: Any) -> str:
    """Return a name without an address."""
    if callable(thing) and hasattr(thing, "__qualname__"):
        return f"{getattr(thing, '__module__', '')}.{thing.__qualname__}"
    return str(thing) if isinstance(thing, int | str | None) else type(thing).__qualname__


def state() -> dict[str, Any]:
    """Return what a script may have changed, and what may have been changed for it."""
    main = sys.modules["__main__"].__dict__
    gc.collect()
    root = logging.getLogger()
    return {
        "signals": {n.name: _name(signal.getsignal(n)) for n in signal.Signals if n.name not in {"SIGKILL", "SIGSTOP"}},
        "hooks": [_name(each) for each in (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook)],
        "exit": [_name(sys.exit), _name(getattr(builtins, "exit", None))],
        "warnings": [str(each) for each in warnings.filters],
        "showwarning": _name(warnings.showwarning),
        "logging": [root.level, [type(each).__name__ for each in root.handlers], logging.root.manager.disable],
        "own logger": [logging.getLogger("elastic_runtime").level, len(logging.getLogger("elastic_runtime").handlers)],
        "threads": sorted(each.name for each in threading.enumerate()),
        "environment": {n: v for n, v in os.environ.items() if not n.startswith(("ELASTIC_", "JOB_"))},
        "directory": str(Path.cwd()),
        "umask": os.umask(os.umask(0)),
        "limits": {
            n: resource.getrlimit(getattr(resource, n)) for n in ("RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_NPROC")
        },
        "files": _files(),
        "gc": [gc.isenabled(), gc.get_threshold(), len(gc.garbage), len(gc.callbacks)],
        "interpreter": [
            sys.getrecursionlimit(),
            sys.getswitchinterval(),
            _name(sys.getprofile()),
            _name(sys.gettrace()),
        ],
        "streams": [type(sys.stdout).__name__, type(sys.stderr).__name__],
        "python random": hash(random.getstate()),
        "numpy random": hash(str(np.random.get_state())),
        "torch": _torch(),
        "torch random": hash(tuple(torch.get_rng_state().tolist())),
        "torch hooks": {
            name: len(value)
            for kept in (module, optimizer)
            for name, value in vars(kept).items()
            if name.startswith("_global") and isinstance(value, dict)
        },
        "loader": _name(torch.utils.data.dataloader._BaseDataLoaderIter.__next__),
        "group": torch.distributed.is_initialized(),
        "models alive": sum(each() is not None for each in main.get("models", ())),
    }


def _files() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
        except OSError:
            continue
        if "/proc/" not in target:
            found.append(target.partition(":")[0] if target[0] != "/" else target)
    return sorted(found)


def _torch() -> list[Any]:
    return [
        str(torch.get_default_dtype()),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.is_anomaly_enabled(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.mkldnn.enabled,
        torch.is_inference_mode_enabled(),
        str(torch.get_default_device()),
    ]


def begin() -> None:
    """Begin as all do: the same random numbers, one thread of torch; `ScriptedCoordinator` at its address."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    if os.environ.get("ELASTIC_COORDINATOR") == SCRIPTED:
        ScriptedCoordinator.directory, ScriptedCoordinator.first, ScriptedCoordinator.changes = Path.cwd(), ("w0",), ()
        setattr(member, "Coordinator", ScriptedCoordinator)  # noqa: B010
        setattr(member, "CoordinatorStore", ScriptedCoordinator.store)  # noqa: B010
    _leave_state()


def _leave_state() -> None:
    """Write the state as the last of the functions at this process's exit."""
    file, process = Path.cwd() / "state.json", os.getpid()

    def write() -> None:
        if os.getpid() == process:
            file.write_text(json.dumps(state(), indent=1))

    atexit.register(write)
