"""Exceptions that describe a driver's failures, and the operation during which an exception was raised.

A driver raises a :class:`DriverError` to name the class of a failure itself. Any other exception is
classified by its type and its numbers (:mod:`agent.prepare.classify`). The same errno means something else in
each operation, so :class:`doing` marks an exception with the operation; the innermost mark counts. The mark
is an attribute of the exception, so nothing has to be stored elsewhere.
"""

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, NamedTuple

from agent.model.claim import ClaimDevice, DeviceRef
from agent.model.prepare import Operation, PrepareVerdict, Scope


class DriverError(Exception):
    """A failure that the driver describes itself.

    Args:
        summary: One line for operators, with the numbers that were compared. No times, addresses or counters:
            the same facts must give the same text, or Kubernetes throttles the events.
        code: Stable dotted code of the driver, e.g. ``fpga.bank_locked``; an invalid code is ignored.
        detail: Further text, equally stable.
        requests: Failed requests of the claim; none: all.
        retry_after_s: Earliest time at which a retry can help [s].
    """

    default_code = "driver.error"

    def __init__(
        self,
        summary: str,
        *,
        code: str = "",
        detail: str = "",
        requests: Sequence[str] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(summary)
        self.summary = summary
        self.code = code or self.default_code
        self.detail = detail
        self.requests = tuple(requests)
        self.retry_after_s = retry_after_s


class TransientError(DriverError):
    """A failure that a retry can solve; it is retried within the same call, then by the kubelet.

    Args: those of :class:`DriverError`.
    """

    default_code = "driver.transient"


class BadConfig(DriverError):
    """A request of the user that can never be satisfied.

    Args: those of :class:`DriverError`.
    """

    default_code = "config.invalid"


class FailedDevice(DriverError):
    """A broken device of the claim.

    The report counts for this claim whatever the health engine found; the device becomes Unhealthy.

    Args:
        device: The broken device; a name alone is looked up among the claim's devices. If the claim does not
            have the device, the failure is of class unknown.
        summary: As for :class:`DriverError`, like all further arguments.
    """

    default_code = "driver.failed_device"

    def __init__(
        self,
        device: DeviceRef | ClaimDevice | str,
        summary: str,
        *,
        code: str = "",
        detail: str = "",
        requests: Sequence[str] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(summary, code=code, detail=detail, requests=requests, retry_after_s=retry_after_s)
        self.device = device.ref if isinstance(device, ClaimDevice) else device


class PermanentError(DriverError):
    """A failure that lasts until the node or driver is fixed; neither the claim nor a device caused it.

    Args:
        summary: This and the rest are those of :class:`DriverError`.
        scope: Reach of the failure: with ``NODE`` or ``DRIVER`` other claims fail, too.
    """

    default_code = "driver.permanent"

    def __init__(
        self,
        summary: str,
        *,
        code: str = "",
        detail: str = "",
        requests: Sequence[str] = (),
        scope: Scope = Scope.NODE,
    ) -> None:
        super().__init__(summary, code=code, detail=detail, requests=requests)
        self.scope = scope


class PrepareError(Exception):
    """Failed prepare with its verdict; the exception's text is the error that the kubelet gets."""

    def __init__(self, verdict: PrepareVerdict, text: str) -> None:
        super().__init__(text)
        self.verdict = verdict
        self.text = text


_ATTRIBUTE: Final = "_drahealth_doing"


class OperationMark(NamedTuple):
    """Operation during which an exception was raised, and the file or device that it concerned."""

    operation: Operation
    path: str = ""
    """Path of the file or name of the device; empty: unknown."""


class doing:
    """Context manager that records the operation in an exception that leaves the block::

        with doing(Operation.CDI, path):
            path.write_text(spec)

    Args:
        path: Object of the operation: a file, or with ``Operation.DEVICE`` the name of a device of the claim.

    Raises:
        ValueError: The operation is unknown.
    """

    # Not a contextlib.contextmanager: that assigns to the exception, and a frozen exception refuses it.

    def __init__(self, operation: Operation, path: object = "") -> None:
        self._doing = OperationMark(Operation(operation), str(path))

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and operation_of(error) is None:
            with suppress(Exception):  # an exception without attributes stays unmarked
                setattr(error, _ATTRIBUTE, self._doing)


def operation_of(error: BaseException) -> OperationMark | None:
    """Return the operation that :class:`doing` recorded in an exception; None: no operation was recorded."""
    mark = getattr(error, _ATTRIBUTE, None)
    return mark if isinstance(mark, OperationMark) else None
