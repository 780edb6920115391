"""Exceptions: one class per status of the daemon's contract."""

from __future__ import annotations


class WaveKVError(RuntimeError):
    """A call failed. `code` is the gRPC status code; the text says what was expected and found."""

    code = 2


class InvalidArgumentError(WaveKVError, ValueError):
    """The request can never succeed as it is: wrong shape, dtype, NaN, unknown option."""

    code = 3


class DeadlineExceededError(WaveKVError, TimeoutError):
    """No answer within the deadline; the daemon may be stopped."""

    code = 4


class NotFoundError(WaveKVError, LookupError):
    """No such sequence, or one of another tenant."""

    code = 5


class ResourceExhaustedError(WaveKVError):
    """A limit: pool, tenant, message, queue. The text names it and the flag to change."""

    code = 8


class FailedPreconditionError(WaveKVError):
    """Wrong state: a gap in positions, a stale generation, a daemon that was restarted."""

    code = 9


class AbortedError(WaveKVError):
    """The same range was stored before with other bytes."""

    code = 10


class UnimplementedError(WaveKVError, NotImplementedError):
    """The daemon is of an older version."""

    code = 12


class UnavailableError(WaveKVError, ConnectionError):
    """The daemon is away."""

    code = 14


class UnauthenticatedError(WaveKVError, PermissionError):
    """The token or the lease's secret is not known."""

    code = 16


_BY_CODE = {
    cls.code: cls
    for cls in (
        InvalidArgumentError,
        DeadlineExceededError,
        NotFoundError,
        ResourceExhaustedError,
        FailedPreconditionError,
        AbortedError,
        UnimplementedError,
        UnavailableError,
        UnauthenticatedError,
    )
}


def from_status(code: int, message: str) -> WaveKVError:
    """Returns the exception that belongs to a status code, ready to be raised."""
    error = _BY_CODE.get(code, WaveKVError)(message)
    error.code = code
    return error
