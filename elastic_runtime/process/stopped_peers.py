"""Finds a worker on this machine whose process is stopped by a signal while this worker waits for it, and kills it.

The coordinator finds it as well, by its silence, after ten seconds. That a process is stopped (SIGSTOP, or a terminal's
Ctrl-Z) is known at once: it is its state in /proc. Invariant: only a worker that is in this state for the whole bound,
while this process itself runs and waits for peers, is killed. It is in this state at each look, and has not run between
two looks: a limiter of CPU time (cpulimit) stops and continues a process many times a second. One that computes,
compiles, saves, swaps or lacks a core is in another state, and so is one that a debugger holds ("t"), or a frozen
control group, or a suspended machine: those are left to the coordinator. Where a whole job is stopped and continued,
this process is stopped, too, and begins to count when it runs again.

By default the bound is learned from the durations of steps: two of them, for a stop that is shorter delays little.

Each worker leaves its identity in the generation's store, where the others read it when they have waited for a while.
Processes in another PID namespace, as that of another pod, cannot be seen: the coordinator finds them.

A killed worker cannot wake up in a generation that goes on without it. Rejected: a report to the coordinator, which
would kill it through its cluster. It would be one more message of the protocol, unknown to coordinators of an earlier
release, for what the kernel does at once. The process is the same user's; it is addressed by a descriptor, so that no
other process with its number can be hit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_runtime.process.stall_watch import Waits

LEAST_S: Final = 0.5
BOUND_S: Final = 2.0
STEPS: Final = 2
"""By default the bound is the time of so many steps, between these two; the longer one before a step was measured."""
WAITED_S: Final = 0.25
"""What a step may wait for its slowest worker before anything is looked for."""
PAUSE_S: Final = 0.1
LATE_S: Final = LEAST_S - PAUSE_S
"""A look that comes later than that follows a time in which this process did not run: what it has seen is outdated.
Below every bound, so that a stop of the whole job is never counted as one of a peer's.
"""
STOPPED: Final = "T"

_log = logging.getLogger("elastic_runtime")


class Process(NamedTuple):
    """A process for all times: `space` is the machine's start and its PID namespace, `started` in clock ticks."""

    space: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> Process | None:
        """Return this process; None on a system without /proc, or with that of another PID namespace (a host's that is
        mounted in a container), where this process's number is that of another one.
        """
        try:
            if Path("/proc/self").readlink().name != str(os.getpid()):
                return None
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            space = f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
            return cls(space, os.getpid(), state_and_start(os.getpid())[1])
        except OSError:
            return None

    @classmethod
    def parse(cls, text: str) -> Process:
        """Return the process that `str` has written. ValueError for other texts."""
        space, pid, started = text.split()
        return cls(space, int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.space} {self.pid} {self.started}"

    @property
    def stopped(self) -> bool:
        """Whether it is stopped by a signal now; False where it has ended."""
        return self.stop() is not None

    def stop(self) -> str | None:
        """Return a text that is another one for each stop, while it is stopped by a signal; None otherwise, and where
        nothing says how often it has run.
        """
        try:
            if state_and_start(self.pid) != (STOPPED, self.started):
                return None
        except OSError:
            return None
        with contextlib.suppress(OSError):  # it has ended
            return _switches(Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8", errors="replace"))
        return None

    def kill(self) -> None:
        """Kill it by SIGKILL if it is still stopped. OSError where that is not allowed."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.stopped:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def state_and_start(pid: int) -> tuple[str, int]:
    """Return the letter of the process's state, and when it started. OSError where it has ended."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _switches(status: str) -> str | None:
    """Return how often the process has given up its core; None where the kernel does not count it.

    Its schedstat would be zeros on a kernel without delay accounting, so that all stops would look like one.
    """
    return "".join(line for line in status.splitlines() if line.split(":")[0].endswith("_ctxt_switches")) or None


class Peers(Protocol):
    """The members of the generation in force."""

    def leave_process(self, text: str) -> None:
        """Leave for the others what this process is; from any thread."""

    def processes(self) -> Mapping[int, str]:
        """Return what the other members have left, by rank; none before all of them have. From any thread."""


class StoppedPeers:
    """Watches the peers of this worker. `bound_s`: seconds for which one may be stopped; None: as `step_s` says, the
    duration of a recent step, or None; 0: nothing is watched.
    """

    def __init__(
        self,
        bound_s: float | None,
        waits: Waits,
        step_s: Callable[[], float | None],
        kill: Callable[[Process], None] = Process.kill,
    ) -> None:
        self._given_s, self._step_s = bound_s, step_s
        self._waits, self._kill, self._own = waits, kill, Process.own()
        self._peers: Peers | None = None
        self._left_to: Peers | None = None
        self._seen: tuple[Peers, dict[int, Process]] | None = None  # those on this machine, by rank
        self._stopped_since: dict[Process, tuple[str, float]] = {}  # in this stop
        self._looked_at = 0.0
        self._changed = threading.Event()  # there are new peers
        self._thread: threading.Thread | None = None

    @property
    def bound_s(self) -> float:
        """Seconds for which a peer may be stopped."""
        if self._given_s is not None:
            return self._given_s
        step_s = self._step_s()
        return BOUND_S if step_s is None else min(BOUND_S, max(LEAST_S, STEPS * step_s))

    def watch(self, peers: Peers | None) -> None:
        """Watch these from now on; None: there are none."""
        self._peers = peers if self.bound_s and self._own is not None else None
        self._changed.set()
        if self._peers is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="elastic-stopped-peers", daemon=True)
            self._thread.start()

    def leave_process(self) -> None:
        """Leave for new peers what this process is."""
        peers = self._peers
        if peers is not None and self._left_to is not peers:
            peers.leave_process(str(self._own))
            self._left_to = peers

    def look(self, now: float) -> None:
        """Look at the peers' processes, if this worker has waited for them for long."""
        late, self._looked_at = now - self._looked_at > LATE_S, now
        peers, since = self._peers, self._waits.waiting_since
        if peers is None or since is None or now - since < WAITED_S or late:
            self._stopped_since.clear()
            return
        for rank, process in self._on_this_machine(peers).items():
            found = process.stop()
            if found is None:
                self._stopped_since.pop(process, None)
                continue
            stop, since = self._stopped_since.get(process, (None, now))
            if stop != found:
                self._stopped_since[process] = found, now
            elif now - since >= self.bound_s:
                self._kill(process)
                _log.warning(
                    "rank %d (process %d) had been stopped by a signal for %.1f s while this worker waited for it: it "
                    "is killed (ELASTIC_STOPPED_S sets the time)",
                    rank,
                    process.pid,
                    now - self._stopped_since.pop(process)[1],
                )

    def _on_this_machine(self, peers: Peers) -> dict[int, Process]:
        if self._seen is not None and self._seen[0] is peers:
            return self._seen[1]
        left = {rank: Process.parse(text) for rank, text in peers.processes().items()}
        assert self._own is not None
        here = {rank: one for rank, one in left.items() if one.space == self._own.space}
        if left:
            self._seen = peers, here
        return here

    def _run(self) -> None:
        while True:
            self._changed.wait(PAUSE_S)
            self._changed.clear()
            try:
                self.leave_process()
                self.look(time.monotonic())
            except Exception as error:  # noqa: BLE001  (the coordinator is away, or the process is another user's)
                _log.debug("stopped peers could not be looked for: %s", error)
