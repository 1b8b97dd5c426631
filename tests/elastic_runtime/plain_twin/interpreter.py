"""An interpreter that has imported torch already, and forks itself for each script: a request and an answer a line.

A script begins in `__main__`, and ends as the interpreter ends it: hooks, `atexit`, threads and exit codes are real.
The worker of a job has a coordinator that gives it the only generation there is, and otherwise the real parts.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch._dynamo

from elastic_runtime.loop import job, member
from tests.elastic_runtime.plain_twin.left import run_script
from tests.elastic_runtime.zoo.generated.scripted import ScriptedCoordinator

assert job


def begin(request: dict[str, Any]) -> None:
    """Turn this forked process into that of the script."""
    os.chdir(request["directory"])
    os.environ.update(request["environment"])
    for number in (1, 2):
        file = os.open(("stdout", "stderr")[number - 1], os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.argv = ["script.py"]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)  # a fork seeds it by itself
    np.random.seed(0)
    if "ELASTIC_COORDINATOR" in request["environment"]:
        ScriptedCoordinator.directory, ScriptedCoordinator.first, ScriptedCoordinator.changes = Path.cwd(), ("w0",), ()
        setattr(member, "Coordinator", ScriptedCoordinator)  # noqa: B010
        setattr(member, "CoordinatorStore", ScriptedCoordinator.store)  # noqa: B010


def next_script() -> str:
    """Return the source of a script in the process that is to run it; the first process answers with exit codes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            answers.close()
            begin(request)
            source: str = request["source"]
            return source
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
    os._exit(0)


if __name__ == "__main__":
    gc.collect()
    gc.freeze()  # the end of a process would go through all of torch
    script = compile(next_script(), "script.py", "exec")
    for name in [name for name in globals() if not name.startswith("__") and name not in {"script", "run_script"}]:
        del globals()[name]
    run_script(script, globals())
