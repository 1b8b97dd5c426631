"""Threads that are in torch's native part when the process ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.polling import TIMEOUT_S

MANY_GROUPS = """
import datetime
import torch.distributed as dist
from elastic_runtime.membership import background

store = dist.HashStore()
for number in range(60):
    own = dist.PrefixStore(str(number), store)
    group = [dist.ProcessGroupGloo(own, 0, 1, datetime.timedelta(seconds=5))]
    background.start(group.clear, "drop")
"""

WAITING = """
import datetime, threading
import torch.distributed as dist
from elastic_runtime.membership import background

store, begun = dist.HashStore(), threading.Barrier(21)

def wait(after_s):
    background.interrupted_by(lambda: store.set("x", "y"))
    begun.wait()
    store.wait(["x"], datetime.timedelta(seconds=600))

for number in range(20):
    background.start(lambda: wait(number), "wait")
begun.wait()
"""

LATER = """
import threading
from elastic_runtime.membership import background

done = threading.Event()
background.start(lambda: print("too late", flush=True), "later", after_s=600)
background.start(lambda: (print("at once", flush=True), done.set()), "now")
done.wait()
"""


@pytest.mark.parametrize(
    ("program", "output"), [(MANY_GROUPS, ""), (WAITING, ""), (LATER, "at once\n")], ids=["drop", "wait", "later"]
)
def test_a_process_ends_well_while_threads_are_in_native_code(program: str, output: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, output, "")
