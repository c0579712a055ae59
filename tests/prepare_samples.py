"""Sample claims, verdicts and health, and a fake health engine, for tests of prepares."""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from agent.model.claim import Claim, ClaimConfig, ClaimDevice, DeviceRef
from agent.model.health import Blame, Cause, DeviceHealth, Health, Severity
from agent.model.prepare import DriverFault, ErrorClass, PrepareVerdict, Scope
from agent.model.time import Instant
from agent.prepare.failure_kinds import NEGATIVE_CACHE_S

DRIVER = "gpu.example.com"
NOW = 1_790_000_000.0


def ref(name: str = "gpu-0") -> DeviceRef:
    return DeviceRef(DRIVER, "node-1", name)


def claim(name: str = "a", *devices: str, mode: str = "shared") -> Claim:
    """Return a claim of these devices, by default of ``gpu-0``."""
    given = tuple(ClaimDevice("gpus", *ref(device)) for device in devices or ("gpu-0",))
    return Claim(
        "team", name, f"uid-{name}", devices=given, configs=(ClaimConfig("FromClaim", (), {"mode": mode}),)
    )


def verdict(
    error_class: ErrorClass = ErrorClass.BAD_CONFIG, code: str = "config.invalid", of: Claim | None = None
) -> PrepareVerdict:
    """Return a verdict like those of the classification; a failed device is the claim's first one."""
    failed = of or claim()
    blamed = failed.devices[:1] if error_class is ErrorClass.FAILED_DEVICE else failed.devices
    return PrepareVerdict(
        error_class,
        code,
        Scope.CLAIM,
        failed.ref,
        "what it is, 3 of 4",
        devices=tuple(device.ref for device in blamed),
        sticky_s=NEGATIVE_CACHE_S[error_class],
        advice="what to do",
    )


def health(
    *causes: tuple[str, Severity], device: str = "gpu-0", driver_reported: bool = False
) -> DeviceHealth:
    """Return the health of a device with these causes."""
    worst = max((severity for _, severity in causes), default=Severity.OK)
    states = {Severity.UNHEALTHY: Health.UNHEALTHY, Severity.UNKNOWN: Health.UNKNOWN}
    at = Instant(1, NOW)
    return DeviceHealth(
        pool="node-1",
        device=device,
        kind="gpu",
        health=states.get(worst, Health.HEALTHY),
        severity=worst,
        message="; ".join(code for code, _ in causes),
        since=at,
        verified=at,
        timeout_s=30,
        causes=tuple(
            Cause(code, severity, Blame.HARDWARE, f"{code} holds", "", at, driver_reported)
            for code, severity in causes
        ),
        driver=DRIVER,
    )


@dataclass
class FakeEngine:
    """Health engine with a fixed state, which reports driver-reported faults Unhealthy like the real one."""

    known: Mapping[DeviceRef, DeviceHealth] = field(default_factory=lambda: {ref(): health()})
    is_up: bool = True
    delivers: bool = True
    """False: faults are never delivered to all readers."""
    publishes: bool = True
    """False: taints are never published."""
    events: list[str] = field(default_factory=list)
    faults: tuple[DriverFault, ...] = ()
    newer: Mapping[DeviceRef, DeviceHealth] = field(default_factory=dict)
    """State after the next evaluation; empty: unchanged."""
    evaluated: list[list[DeviceRef]] = field(default_factory=list)
    """Devices of each wait for an evaluation."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def health_of(self, device: DeviceRef) -> DeviceHealth | None:
        found = self.known.get(device)
        reported = [
            (fault.code, Severity.UNHEALTHY)
            for fault in self.faults
            if fault.device == device and not fault.expired_wall_s
        ]
        if found is None or not reported:
            return found
        unhealthy = health(*reported, device=device.device, driver_reported=True)
        return unhealthy._replace(causes=(*unhealthy.causes, *found.causes))

    def report_faults(self, faults: Sequence[DriverFault]) -> None:
        with self.changed:
            self.faults = tuple(faults)
            self.events.append("report")
            self.changed.notify_all()

    def wait_delivered(self, faults: Sequence[DriverFault], timeout_s: float) -> bool:
        assert set(faults) <= set(self.faults)
        self.events.append("wait")
        return self.delivers

    def wait_evaluated(self, devices: Collection[DeviceRef], timeout_s: float) -> None:
        self.evaluated.append(sorted(devices))
        self.known = self.newer or self.known

    def wait_tainted(self, devices: Collection[DeviceRef], timeout_s: float) -> bool:
        if timeout_s:
            self.events.append("taint")
        return self.publishes
