"""Every error that elastic_runtime raises, as one tree.

    ElasticError
    ├── UsageError                 the script's mistake: exit code 2
    │   ├── BatchPlanError         the global batch cannot be split as asked
    │   ├── LoopError              the loop calls things in an order that has no meaning
    │   ├── ModelMismatchError     the workers do not train the same model: exit code 1, it may be the machine's fault
    │   ├── SettingsError          an environment variable or argument is out of its range
    │   └── StateError             something cannot be saved, or does not fit what was saved
    └── RunError                   the world's failure: exit code 1
        ├── CheckpointError        no checkpoint could be read or written
        ├── CollectiveError        a peer was lost in the middle of a collective; handled inside
        └── CoordinatorError       the coordinator refused this worker

A message names what, the rank or value, and the remedy.
"""

from __future__ import annotations

from typing import ClassVar


class ElasticError(Exception):
    """Base of all errors of this package; `exit_code` is that of a process that it ends."""

    exit_code: ClassVar[int] = 1


class UsageError(ElasticError):
    """The script asks for something that cannot be."""

    exit_code = 2


class BatchPlanError(UsageError):
    """The global batch cannot be split as asked."""


class LoopError(UsageError):
    """The loop calls things in an order that has no meaning."""


class ModelMismatchError(UsageError):
    """The workers do not train the same model: by the script, or since a device computes wrongly."""

    exit_code = 1


class SettingsError(UsageError):
    """An environment variable or argument is out of its range."""


class StateError(UsageError):
    """Something cannot be saved, or does not fit what was saved."""


class RunError(ElasticError):
    """Something outside the script's control failed."""


class CheckpointError(RunError):
    """No checkpoint could be read or written."""


class CollectiveError(RunError):
    """A peer was lost in the middle of a collective. The runtime recovers from it; scripts do not see it."""


class CoordinatorError(RunError):
    """The coordinator refused this worker."""
