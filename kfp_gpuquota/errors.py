"""Every error that kfp_gpuquota raises, as one tree.

    GpuQuotaError
    ├── UsageError                 the caller's mistake: exit code 2, HTTP 4xx
    │   ├── InvalidFieldError      a value is out of its range or of the wrong shape
    │   ├── DefinitionError        a component or pipeline is put together in a way that cannot work
    │   ├── NotFoundError          the thing named does not exist
    │   ├── AlreadyExistsError     the name is taken
    │   ├── ConflictError          not now: the state of the thing forbids it
    │   └── UnauthorizedError      the token is missing or wrong
    │       └── ForbiddenError     this user may not do that
    └── RunError                   the world's failure: exit code 1, HTTP 5xx
        ├── ClusterUnavailableError  no answer within the time limit
        ├── ClusterStartError      the embedded cluster did not come up
        ├── StateFileError         the state file cannot be used
        ├── PlanningFailedError    several plans in a row raised an exception
        └── JobFailedError         the job ended with something other than success

A message names what, the value, the limit and the next step, and ends up before a user as it is.
"""

from __future__ import annotations

from typing import ClassVar


class GpuQuotaError(Exception):
    """Base of all errors of this package.

    `exit_code` is what the command line ends with, `http_status` what the server answers with, and `code` the
    stable word for programs.
    """

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return str(self.args[0]) if self.args else self.code


class UsageError(GpuQuotaError):
    """The caller asked for something that cannot be."""

    exit_code = 2
    http_status = 400
    code = "usage"


class InvalidFieldError(UsageError):
    """A field holds a value it may not hold."""

    http_status = 422
    code = "invalid-field"

    def __init__(self, field: str, value: object, rule: str, *, hint: str = "") -> None:
        self.field, self.value = field, value
        self.rule = f"{rule}; {hint}" if hint else rule
        super().__init__(f"{field} is {shortened(repr(as_typed(value)))}, but {self.rule}")


class DefinitionError(UsageError, TypeError):
    """A pipeline component or a pipeline is put together in a way that cannot work.

    Also a TypeError, as KFP's own errors at definition are: tools that ask a component for its signature expect that.
    """

    code = "definition"


class NotFoundError(UsageError):
    """The thing named does not exist."""

    http_status = 404
    code = "not-found"


class AlreadyExistsError(UsageError):
    """The name is taken."""

    http_status = 409
    code = "already-exists"


class ConflictError(UsageError):
    """The thing's present state forbids the request."""

    http_status = 409
    code = "conflict"


class UnauthorizedError(UsageError):
    """The token is missing or wrong."""

    http_status = 401
    code = "unauthorized"


class ForbiddenError(UnauthorizedError):
    """The user may not do that, on a cluster that several users share."""

    http_status = 403
    code = "forbidden"


class RunError(GpuQuotaError):
    """Something outside the caller's control failed."""

    code = "run"


class ClusterUnavailableError(RunError):
    """The cluster did not answer within the time limit."""

    http_status = 503
    code = "unavailable"


class ClusterStartError(RunError):
    """The embedded cluster did not come up."""

    code = "cluster-start"


class PlanningFailedError(RunError):
    """Several plans in a row raised an exception; the process ends, and starts again."""

    code = "planning-failed"


class StateFileError(RunError):
    """The state file cannot be read or written."""

    code = "state-file"


class DeviceError(RunError):
    """The driver of this machine's GPUs does not answer."""

    code = "device"


class JobFailedError(RunError):
    """A job ended with something other than success."""

    code = "job-failed"


def as_typed(value: object) -> object:
    """Return a whole number as one, whatever type it was converted to."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def shortened(text: str) -> str:
    """Return at most 80 characters of a value for a sentence."""
    return text if len(text) <= 80 else text[:77] + "..."


def _subclasses(root: type[GpuQuotaError]) -> list[type[GpuQuotaError]]:
    return [root, *(c for child in root.__subclasses__() for c in _subclasses(child))]


def by_code(code: str) -> type[GpuQuotaError]:
    """The error class for the stable word `code`; RunError for a word that this version does not know."""
    return next((c for c in _subclasses(GpuQuotaError) if c.code == code), RunError)
