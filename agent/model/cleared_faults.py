"""Requests of operators to clear stored (latched) faults of devices, the agent's answers, and the cleared
faults."""

from enum import StrEnum
from typing import Final, NamedTuple

from agent.model.prepare import DriverFault

NO_LOGIN_UID: Final = -1
"""Login uid of a process that no login started, or whose login uid is not readable."""


class Operator(NamedTuple):
    """Process that requests a clear of faults, as the kernel identifies it."""

    uid: int
    pid: int
    login_uid: int = NO_LOGIN_UID
    """Uid of the user who logged in and then, for example, used sudo; NO_LOGIN_UID: not known."""

    def __str__(self) -> str:
        login = "" if self.login_uid == NO_LOGIN_UID else f", login uid {self.login_uid}"
        return f"uid {self.uid} (pid {self.pid}{login})"


class ClearRequest(NamedTuple):
    """Statement of an operator that the latched faults of a device were repaired."""

    number: int
    """Number of the request, by which its answer is found; later requests have greater numbers."""
    device: str
    """Device that the operator names: device name, UUID, PCI address, or ``driver/pool/name``."""
    code: str
    """Finding code of the only fault to clear; empty: all latched faults of the device."""
    operator: Operator


class ClearRefusal(StrEnum):
    """Reason why a request clears no fault."""

    UNKNOWN = "unknown"
    """The device is not known, or has no fault with the requested code."""
    NOT_LATCHED = "not-latched"
    """The fault is not latched: a present reading decides it, so that it ends with the reading."""
    STILL_PRESENT = "still-present"
    """A reading still shows a fault of the device."""


class ClearedFault(NamedTuple):
    """Record of a latched fault of one device that an operator cleared."""

    device: str
    code: str
    at_wall_s: float
    """Time of the clear [s since 1970]."""
    uid: int
    pid: int
    login_uid: int = NO_LOGIN_UID

    @property
    def operator(self) -> Operator:
        """Process that requested the clear of the fault."""
        return Operator(self.uid, self.pid, self.login_uid)


class ClearResult(NamedTuple):
    """Answer of the health engine to one request of an operator to clear faults."""

    number: int
    """Number of the answered request."""
    cleared: tuple[ClearedFault, ...] = ()
    """Faults that the request cleared; empty: the request is refused."""
    driver_faults: tuple[DriverFault, ...] = ()
    """Driver-reported faults among the cleared ones, which must end in the prepare ledgers, too."""
    refusal: ClearRefusal | None = None
    """Reason why the request clears no fault; None: the faults are cleared."""
    reason: str = ""
    """Explanation of the refusal for the operator; empty: the faults are cleared."""
