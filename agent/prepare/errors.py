"""Exceptions that a driver raises to classify a failure, and ``doing``, which records the failed operation.

A driver raises a :class:`DriverError` to name the class of a failure itself. Other exceptions are classified
by type and error number (:mod:`agent.prepare.classify`). An errno has another meaning in each operation, so
:class:`doing` stores the operation as an attribute of the exception. Of nested operations, the innermost one
counts.
"""

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, NamedTuple, Protocol

from agent.errors import CopyableError
from agent.model.claim import ClaimDevice, DeviceRef
from agent.model.prepare import Operation, PrepareVerdict, Scope


class DriverError(CopyableError):
    """Failure of a prepare that the driver describes itself. The error class of the failure is unknown.

    Args:
        summary: One line for operators, with the numbers that were compared. No times, addresses or counters:
            the same facts must give the same text, or Kubernetes throttles the events.
        code: Stable dotted code of the driver, e.g. ``fpga.bank_locked``; an invalid code is ignored.
        detail: Further text; like the summary, the same for the same facts.
        requests: Failed request, or failed requests, of the claim; empty: all.
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
        self.requests = (requests,) if isinstance(requests, str) else tuple(requests)
        self.retry_after_s = retry_after_s


class TransientError(DriverError):
    """Failure that a retry can solve; it is retried within the same call, then by the kubelet."""

    default_code = "driver.transient"


class BadConfigError(DriverError):
    """Error in the claim: the user's request can never be satisfied."""

    default_code = "config.invalid"


class NamedDevice(Protocol):
    """Object with the name of a device, such as a drahealth.Device."""

    @property
    def name(self) -> str: ...


class FailedDeviceError(DriverError):
    """Failure because a device is broken; the device becomes Unhealthy.

    Args:
        device: The broken device. A name must be that of a device of the claim, else the failure is of class
            unknown. A DeviceRef may name another device of the driver, such as the GPU of a MIG instance.
        summary: See :class:`DriverError`, also for all further arguments.
    """

    default_code = "driver.failed_device"

    def __init__(
        self,
        device: DeviceRef | ClaimDevice | NamedDevice | str,
        summary: str,
        *,
        code: str = "",
        detail: str = "",
        requests: Sequence[str] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(summary, code=code, detail=detail, requests=requests, retry_after_s=retry_after_s)
        ref = device.ref if isinstance(device, ClaimDevice) else device
        self.device: DeviceRef | str = ref if isinstance(ref, DeviceRef | str) else ref.name


class PermanentError(DriverError):
    """Failure that lasts until the Kubernetes node or the driver is fixed.

    Args:
        summary: See :class:`DriverError`, also for ``code``, ``detail`` and ``requests``.
        scope: Part at fault; with ``NODE`` or ``DRIVER``, other claims fail, too.
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


class PrepareError(CopyableError):
    """Classified failure of a prepare; the exception's text is the error that the kubelet gets."""

    def __init__(self, verdict: PrepareVerdict, text: str) -> None:
        super().__init__(text)
        self.verdict = verdict
        self.text = text


_ATTRIBUTE: Final = "_drahealth_doing"


class RecordedOperation(NamedTuple):
    """Operation during which an exception was raised, and the file or device that it concerned."""

    operation: Operation
    path: str = ""
    """Path of the file, or name of the device, that the operation concerned; empty: unknown."""


class doing:
    """Context manager that records the failed operation in an exception that leaves the block::

        with doing(Operation.CDI, path):
            path.write_text(spec)

    Args:
        path: File, or with ``Operation.DEVICE`` name of the claim's device, that the operation concerns.

    Raises:
        ValueError: ``operation`` is not an :class:`Operation`.
    """

    # Not a contextlib.contextmanager: that assigns to the exception, and a frozen exception refuses it.

    def __init__(self, operation: Operation, path: object = "") -> None:
        self._doing = RecordedOperation(Operation(operation), str(path))

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and recorded_operation(error) is None:
            with suppress(Exception):  # an exception without attributes stays unmarked
                setattr(error, _ATTRIBUTE, self._doing)


def recorded_operation(error: BaseException) -> RecordedOperation | None:
    """Return the operation that :class:`doing` recorded in an exception; None: it recorded none."""
    mark = vars(error).get(_ATTRIBUTE)  # not getattr(): the exception's own __getattr__ may raise
    return mark if isinstance(mark, RecordedOperation) else None
