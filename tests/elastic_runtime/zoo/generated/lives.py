"""Plays a script through a history in forked processes: lives, each ended by a stop, with a resume after it."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.loop import member
from elastic_runtime.loop.session import Session
from elastic_runtime.process import preemption
from tests.elastic_runtime.zoo import catalogue
from tests.elastic_runtime.zoo.generated.recipes import script_named
from tests.elastic_runtime.zoo.generated.scripted import Change, ScriptedCoordinator
from tests.elastic_runtime.zoo.parts import flat

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elastic_runtime.plan.batches import MicroBatch

__all__ = ["Ended", "History", "catalogue", "play"]

TIMEOUT_S = 180.0
ENDS = ("stop", "crash", "evict")
"""The events that end all workers."""
_GRACE_S = 2.0


@dataclass(frozen=True)
class History:
    """As text: words with numbers, like "with:2 kill:5:0 stop:9 join:13".

    with:N — N workers begin (default 1). join:S, leave:S — after step S, with what the workers agree on. kill:S:R —
    rank R dies in step S. stop:S, stop_before:E, stop_after:E — all are stopped in step S, between the code before
    epoch E's loader and its first step, or after the code that follows it; one worker resumes.
    crash:S, crash_after:E — the one worker dies there, and resumes from the checkpoint that is written after each step.
    evict_after:E — it gets SIGTERM as the code after epoch E's loader begins, and is killed once that state is saved.
    evict_left:E — likewise at the end of that code, where it may have changed what is saved.
    """

    words: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, text: str) -> History:
        return cls(tuple(tuple(word.split(":")) for word in text.split()))

    def __str__(self) -> str:
        return " ".join(":".join(word) for word in self.words)

    def lives(self) -> list[Life]:
        """Return what happens between the stops."""
        found = [Life(1)]
        for name, *numbers in self.words:
            values = [int(number) for number in numbers]
            life = found[-1]
            if name == "with":
                found[-1] = Life(values[0])
            elif name.startswith(ENDS):
                found[-1] = replace(life, stop=(name, values[0]))
                found.append(Life(1))
            else:
                found[-1] = life.changed(name, *values)
        return found


@dataclass(frozen=True)
class Life:
    """`size` workers begin; `changes` of their number; how they are stopped, if they are."""

    size: int
    changes: tuple[Change, ...] = ()
    stop: tuple[str, int] | None = None

    @property
    def workers(self) -> list[str]:
        """All that take part at some time."""
        sizes = [*self.first, *(worker for change in self.changes for worker in change.members)]
        return sorted(set(sizes))

    @property
    def first(self) -> tuple[str, ...]:
        """The members of the first generation."""
        return tuple(f"w{number}" for number in range(self.size))

    @property
    def crashes(self) -> bool:
        """Whether its end is not announced."""
        return self.stop is not None and self.stop[0].startswith("crash")

    @property
    def evicted(self) -> bool:
        """Whether its end comes before the loop can save."""
        return self.stop is not None and self.stop[0].startswith("evict")

    @property
    def alone(self) -> bool:
        """Whether it needs no coordinator."""
        return self.size == 1 and not self.changes

    def changed(self, name: str, step: int, rank: int = -1) -> Life:
        """Return the life with one more change of the members."""
        now = self.changes[-1].members if self.changes else self.first
        if name == "join":
            change = Change("agreed", step, (*now, f"w{len(self.workers)}"))
        elif name == "leave":
            change = Change("agreed", step, now[:-1])
        else:
            change = Change("killed", step, tuple(worker for at, worker in enumerate(now) if at != rank))
        return replace(self, changes=(*self.changes, change))


@dataclass(frozen=True)
class Ended:
    """How one worker of the last life ended. `model`: its values by name; None where it did not come so far."""

    code: int
    kind: str = ""
    message: str = ""
    model: dict[str, torch.Tensor] | None = None


def play(
    name: str, reduction: str, history: History, directory: Path, options: dict[str, Any] | None = None
) -> list[Ended]:
    """Return how the workers ended that were not killed, of the last life that was played."""
    ended: list[Ended] = []
    checkpoints = directory / "checkpoints"
    for number, life in enumerate(lives := history.lives()):
        place = directory / f"life-{number}"
        place.mkdir(parents=True)
        saved = str(checkpoints) if len(lives) > 1 else ""
        init = {"reduction": reduction, **(options or {})}
        if life.crashes:
            init["checkpoint_every_s"] = 1e-9
        ended = _played(name, init, life, place, saved)
        stopped = life.stop is not None and all(each.model is None and not each.kind for each in ended)
        if number < len(lives) - 1 and not stopped:
            return ended
    return ended


def _played(name: str, init: dict[str, Any], life: Life, place: Path, saved: str) -> list[Ended]:
    (place / "token").write_text("secret")
    pids = {worker: _fork(partial(_be, worker, name, init, life, place, saved)) for worker in life.workers}
    codes = _wait(pids, place)
    return [_result(worker, codes[worker], place) for worker in life.workers if codes[worker] != -signal.SIGKILL]


def _fork(work: Callable[[], int]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        code = work()
    finally:
        os._exit(code)


def _wait(pids: dict[str, int], place: Path) -> dict[str, int]:
    """Return the exit codes. What is left when all the others have ended, like a joiner of a generation that does not
    come, is killed after a while.
    """
    codes: dict[str, int] = {}
    late, last = time.monotonic() + TIMEOUT_S, time.monotonic()
    while len(codes) < len(pids):
        for worker, pid in pids.items():
            if worker in codes:
                continue
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                (place / f"ended-{worker}").touch()
                codes[worker], last = os.waitstatus_to_exitcode(status), time.monotonic()
        idle = bool(codes) and time.monotonic() - last > _GRACE_S and len(codes) >= 1
        if time.monotonic() > late or (idle and all((place / f"waits-{w}").exists() for w in pids if w not in codes)):
            for worker in (worker for worker in pids if worker not in codes):
                os.kill(pids[worker], signal.SIGKILL)
                (place / f"hung-{worker}").touch()
        time.sleep(0.005)
    return codes


def _result(worker: str, code: int, place: Path) -> Ended:
    error = place / f"error-{worker}.json"
    kind, message = json.loads(error.read_text()) if error.exists() else ("", "")
    final = place / f"final-{worker}.pt"
    return Ended(code, kind, message, torch.load(final) if final.exists() else None)


def _be(worker: str, name: str, init: dict[str, Any], life: Life, place: Path, saved: str) -> int:
    """Be one worker, in a forked process; returns its exit code."""
    atexit._clear()
    log = os.open(place / f"log-{worker}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.excepthook = sys.__excepthook__
    if hasattr(sys, "last_type"):
        del sys.last_type
    os.environ["ELASTIC_CHECKPOINT_DIR"] = saved
    if not life.alone:
        os.environ |= {
            "JOB_NAME": "generated",
            "ELASTIC_COORDINATOR": "http://127.0.0.1:9/",
            "ELASTIC_TOKEN_FILE": f"{place}/token",
            "ELASTIC_WORKER_ID": worker,
        }
        ScriptedCoordinator.directory, ScriptedCoordinator.first = place, life.first
        stop = (Change("stopped", -1, ()),) if life.stop else ()
        ScriptedCoordinator.changes = (*life.changes, *stop)
        setattr(member, "Coordinator", ScriptedCoordinator)  # noqa: B010
        setattr(member, "CoordinatorStore", ScriptedCoordinator.store)  # noqa: B010
    Events(worker, life).hook()
    code = 0
    try:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        modules = script_named(name).body(**init)
        values = {key: value for key, value in flat(modules).items() if isinstance(value, torch.Tensor)}
        torch.save(values, place / f"final-{worker}.pt")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:  # noqa: BLE001  (whatever ends a script)
        sys.last_type = type(error)  # as an interpreter does; a training that an exception ended is not finished
        traceback.print_exc()
        (place / f"error-{worker}.json").write_text(json.dumps([type(error).__name__, str(error)]))
        code = getattr(error, "exit_code", 1)
    finally:
        (place / f"waits-{worker}").touch()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    return code


class Events:
    """Lets the events of a life happen in this worker's process, from within the session's own methods."""

    def __init__(self, worker: str, life: Life) -> None:
        self._worker, self._life, self._stop = worker, life, life.stop

    def hook(self) -> None:
        """Replace the methods of Session in this process."""
        begin, enter, leave = Session.begin_iteration, Session.enter_epoch, Session.leave_epoch
        end = Session.end_iteration

        def begun(session: Session, micro: MicroBatch) -> int:
            if session._step.first:
                self._at_step(session, session.position.step)
            return begin(session, micro)

        def ended(session: Session, iteration: int) -> bool:
            goes_on = end(session, iteration)
            if not session.loader.has_more(session.position):
                self._at(session, "evict_after", session.position.epoch)
            return goes_on

        def entered(session: Session) -> int:
            self._at(session, "stop_before", session.position.epoch)
            return enter(session)

        def left(session: Session, epoch: int) -> None:
            self._at(session, "stop_after", epoch)
            self._at(session, "crash_after", epoch)
            self._at(session, "evict_left", epoch)
            leave(session, epoch)

        Session.begin_iteration, Session.enter_epoch, Session.leave_epoch = begun, entered, left  # type: ignore[method-assign, assignment]
        Session.end_iteration = ended  # type: ignore[method-assign, assignment]

    def _at_step(self, session: Session, step: int) -> None:
        if self._life.crashes:
            session._member._checkpoints.settle()  # a step that ends while the last one is written is not saved
        generation = session._member.generation
        # a life that resumes beyond the step of a change has it at once: a joiner would wait for it in vain
        if 1 <= generation <= len(self._life.changes) and self._life.changes[generation - 1].step <= step:
            self._change(session, generation)
        self._at(session, "stop", step)
        self._at(session, "crash", step)

    def _change(self, session: Session, generation: int) -> None:
        change = self._life.changes[generation - 1]
        if change.kind == "agreed":
            _coordinator_of(session).propose(generation + 1)
            _wait_for_vote(session)
        elif self._worker not in change.members:
            os.kill(os.getpid(), signal.SIGKILL)

    def _at(self, session: Session, name: str, at: int) -> None:
        if self._stop != (name, at):
            return
        self._stop = None
        if self._life.crashes:
            session._member._checkpoints.settle()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._life.evicted:
            _wait_for_save(session)
            os.kill(os.getpid(), signal.SIGKILL)
        if self._life.alone:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            _coordinator_of(session).propose_end(session._member.generation)
            _wait_for_vote(session)


def _wait_for_save(session: Session) -> None:
    """Get SIGTERM, and return when the thread that saves within the grace period has tried to."""
    handler = session._member._preemption
    assert handler is not None
    assert handler._save is not None
    save, tried = handler._save, threading.Event()

    def saved() -> bool:
        try:
            return save()
        finally:
            tried.set()

    handler.save_by(saved)
    setattr(preemption, "SAVE_AFTER_S", 0.0)  # noqa: B010
    os.kill(os.getpid(), signal.SIGTERM)
    tried.wait(TIMEOUT_S)
    session._member._checkpoints.settle()


def _coordinator_of(session: Session) -> ScriptedCoordinator:
    coordinator: Any = session._member._coordinator
    assert isinstance(coordinator, ScriptedCoordinator)
    return coordinator


def _wait_for_vote(session: Session) -> None:
    until = time.monotonic() + TIMEOUT_S
    while session._member.vote() is None and not session._member.must_recover:
        assert time.monotonic() < until, "the generation that was proposed could not be built"
        time.sleep(0.001)
