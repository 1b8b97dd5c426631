"""The planner's process: it reads events and requests from a socket, and writes plans.

It is forked from the controller, so that its state is the controller's at that moment; from then on events change both.
It ends when the controller closes the socket, or has ended. Messages are pickled with their length in front: both ends
are one program, and no other process can open the socket.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import signal
import struct
import time
import traceback
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api.defragmentation import Defragmentation
from kfp_gpuquota.cluster.kubernetes.planner.bounded import BoundedPlanner, Planned
from kfp_gpuquota.errors import GpuQuotaError

if TYPE_CHECKING:
    import socket
    from typing import BinaryIO

LENGTH: Final = struct.Struct(">Q")
_FIRST_DESCRIPTOR: Final = 3
_LAST_DESCRIPTOR: Final = 1 << 30

log = logging.getLogger(__name__)


class Request(msgspec.Struct, frozen=True):
    """Apply the events, then plan at `now`.

    `reclaim_shelter_s`: the rules' limit of minimum run times. Without `moves` no job is moved to make room.
    `reserve_after_s`: how long an entitled job waits until what it needs is kept for it. `half_life_s`: that of
    over-quota usage; None: it does not count. `defragmentation`: when jobs are moved to gather free GPUs.
    """

    events: list[scheduler.Event]
    now: float
    reclaim_shelter_s: float
    moves: bool
    reserve_after_s: float
    half_life_s: float | None
    defragmentation: Defragmentation | None


class Failed(msgspec.Struct, frozen=True):
    """The plan raised: its traceback."""

    traceback: str


def forked(state: scheduler.State, own: socket.socket, other: socket.socket) -> int:
    """Fork the planner, which serves `own`; return its process id. `other` is the controller's end."""
    pid = os.fork()
    if pid == 0:
        _run(state, own, other)
    return pid


def packed(message: object) -> bytes:
    """Return a message as it is sent."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(content)) + content


def _run(state: scheduler.State, own: socket.socket, other: socket.socket) -> NoReturn:
    """Serve until the other end is closed; it must never return into the controller's event loop."""
    try:
        signal.set_wakeup_fd(-1)  # signals of this process are not the controller's
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        other.detach()
        os.closerange(_FIRST_DESCRIPTOR, own.fileno())
        os.closerange(own.fileno() + 1, _LAST_DESCRIPTOR)
        gc.freeze()  # a collection of what was inherited would copy all of its memory
        gc.enable()
        own.setblocking(True)  # noqa: FBT003 - the standard library's parameter
        with own.makefile("rb") as stream:
            serve(state, stream, own)
    except (ConnectionError, KeyboardInterrupt):
        pass  # the controller has ended
    except BaseException:
        log.exception("the planner's process failed")
    finally:
        os._exit(0)


def serve(state: scheduler.State, stream: BinaryIO, answers: socket.socket) -> None:
    """Answer requests until the stream ends."""
    planner = BoundedPlanner(state, time.monotonic)
    while (head := stream.read(LENGTH.size)) and len(head) == LENGTH.size:
        request: Request = pickle.loads(stream.read(LENGTH.unpack(head)[0]))  # noqa: S301 - of this program itself
        answers.sendall(packed(_answer(state, planner, request)))


def _answer(state: scheduler.State, planner: BoundedPlanner, request: Request) -> Planned | Failed:
    began = time.process_time()
    try:
        state.ledger.reclaim_shelter_s, state.ledger.moves = request.reclaim_shelter_s, request.moves
        state.ledger.reserve_after_s, state.ledger.half_life_s = request.reserve_after_s, request.half_life_s
        state.ledger.defragmentation = request.defragmentation
        for event in request.events:
            _apply(state, event)
            planner.applied(event)
        planned = planner.plan(request.now)
        return msgspec.structs.replace(planned, seconds=time.process_time() - began)
    except Exception:  # noqa: BLE001 - the controller logs it, and decides what follows
        return Failed(traceback.format_exc())


def _apply(state: scheduler.State, event: scheduler.Event) -> None:
    with contextlib.suppress(GpuQuotaError):  # the controller's state has refused it as well, and has logged it
        state.apply(event)
