"""Reaches a port of a pod or Service as the kubeconfig's user: `kubectl port-forward`."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.errors import ClusterUnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_STARTS_WITHIN_S: Final = 30.0
_STOPS_WITHIN_S: Final = 5.0
_FORWARDING = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d+)")


@contextlib.contextmanager
def forwarded(context: str, namespace: str, target: str, port: int, *, needed_by: str) -> Iterator[str]:
    """Forward a local port to the `port` of `target` (svc/NAME, pod/NAME), and yield its URL on this machine.

    `context` is a context of the kubeconfig ("": the current one). Raises UsageError, with the start of the sentence
    `needed_by`, where kubectl is not installed, ClusterUnavailableError where it cannot forward the port.
    """
    program = shutil.which("kubectl")
    if not program:
        raise UsageError(f"{needed_by} needs kubectl to reach the cluster, and it is not installed here")
    command = [program, *([f"--context={context}"] if context else []), f"--namespace={namespace}", "port-forward"]
    process = subprocess.Popen(
        [*command, "--address=127.0.0.1", target, f":{port}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        yield f"http://127.0.0.1:{_local_port(process, target)}"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOPS_WITHIN_S)
        process.kill()
        process.wait()


def _local_port(process: subprocess.Popen[bytes], target: str) -> int:
    """Return the local port that kubectl reports in its output."""
    assert process.stdout is not None
    output, give_up_at = b"", time.monotonic() + _STARTS_WITHIN_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, give_up_at - time.monotonic())):
            piece = os.read(process.stdout.fileno(), 4096)
            output += piece
            if match := _FORWARDING.search(output):
                return int(match[1])
            if not piece:
                break
    why = output.decode(errors="replace").strip() or f"no answer within {_STARTS_WITHIN_S:g} s"
    raise ClusterUnavailableError(f"{target} cannot be reached through kubectl port-forward: {why}")
