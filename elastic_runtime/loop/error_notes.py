"""Notes for errors whose own words name no cause: about None where there are no gradients, of batch normalization that
got one sample, and of Lightning's loops.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING

from elastic_runtime.process.replacement import Replacement

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from elastic_runtime.loop.session import Session

    Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_WITHOUT_GRADIENTS = (
    "elastic_runtime: this iteration does not complete a step, so that parameter.grad is None on all parameters; put "
    "what reads gradients under `if job.applied:`"
)
_ONE_SAMPLE = (
    "elastic_runtime: this iteration has one sample of the global batch, and its statistics need two: give "
    "DataLoader(drop_last=True), a larger global_batch_size, with reduction='exact' fewer shards, or SyncBatchNorm"
)
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def explain_errors(session: Session) -> None:
    """Add a note to an error that ends the script within such an iteration of the session."""
    _sessions.add(session)
    _hook.begin()


def explain_no_more(session: Session) -> None:
    """Release the interpreter's hook, after the last training."""
    _sessions.discard(session)
    if not _sessions:
        _hook.end()


def _explaining(before: Hook) -> Hook:
    def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _add_notes(kind, error)
        before(kind, error, trace)

    return explain


_hook = Replacement(sys, "excepthook", _explaining)


def _add_notes(kind: type[BaseException], error: BaseException) -> None:
    about_none = issubclass(kind, AttributeError | TypeError) and "None" in str(error)
    if about_none and any(session.without_gradients for session in _sessions):
        _add(error, _WITHOUT_GRADIENTS)
    if "more than 1 value per channel" in str(error) and any(session.newest_samples == 1 for session in _sessions):
        _add(error, _ONE_SAMPLE)


def _add(error: BaseException, note: str) -> None:
    if note not in getattr(error, "__notes__", []):
        error.add_note(note)


def note_on_lightning() -> str:
    """Return what to add to an error about a missing loop, if the script uses Lightning; else nothing."""
    if not {"lightning", "pytorch_lightning"} & set(sys.modules):
        return ""
    return (
        ". Lightning's Trainer iterates by a loop of its own: give it strategy=ElasticStrategy() of "
        "elastic_runtime.integrations.lightning in place of elastic_runtime.init()"
    )
