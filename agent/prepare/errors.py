"""What a driver raises to say itself of what kind a failure is.

Any other exception is judged by what it is (:mod:`agent.prepare.classify`).
"""

from collections.abc import Sequence

from agent.model.claim import ClaimDevice, DeviceRef
from agent.model.prepare import PrepareVerdict, Scope


class DriverError(Exception):
    """A failure whose kind the driver knows.

    Args:
        summary: One line for people, with the numbers that were compared. No times, addresses or counters:
            the same facts must give the same text, or Kubernetes' events are throttled.
        code: Stable dotted code in the driver's own words, e.g. ``fpga.bank_locked``; what is none counts as
            not said.
        detail: More, likewise stable.
        requests: Of the claim, those that failed; none: all.
        retry_after_s: When trying again can help at the earliest.
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
    """Trying again can help; it is tried again within the same call, then by the kubelet.

    Args: those of :class:`DriverError`.
    """

    default_code = "driver.transient"


class BadConfig(DriverError):
    """What the user asked for can never be had.

    Args: those of :class:`DriverError`.
    """

    default_code = "config.invalid"


class FailedDevice(DriverError):
    """A device of the claim is broken.

    It is believed for this claim whatever the health engine says; the device becomes Unhealthy.

    Args:
        device: Which; a name alone is looked up among the claim's devices. What the claim does not have is
            not believed: nothing shows then of what kind the failure is.
        summary: This and the rest are those of :class:`DriverError`.
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
    """Neither the claim nor a device is at fault: the node or the driver must change.

    Args:
        summary: This and the rest are those of :class:`DriverError`.
        scope: How much else fails alike: with ``NODE`` or ``DRIVER`` other claims, too.
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
    """A claim that could not be prepared, judged. Its text is what the kubelet is told."""

    def __init__(self, verdict: PrepareVerdict, text: str) -> None:
        super().__init__(text)
        self.verdict = verdict
        self.text = text
