"""Claims, verdicts, what is known of devices, and an engine that knows it: for tests of prepares."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent.model.claim import Claim, ClaimConfig, ClaimDevice, DeviceRef
from agent.model.health import Blame, Cause, DeviceHealth, Health, Severity
from agent.model.prepare import DriverFault, ErrorClass, PrepareVerdict, Scope
from agent.model.time import Instant
from agent.prepare.taxonomy import NEGATIVE_CACHE_S

DRIVER = "gpu.example.com"
NOW = 1_790_000_000.0


def ref(name: str = "gpu-0") -> DeviceRef:
    return DeviceRef(DRIVER, "node-1", name)


def claim(name: str = "a", *devices: str, mode: str = "shared") -> Claim:
    """A claim of these devices, of ``gpu-0`` unless said."""
    given = tuple(ClaimDevice("gpus", *ref(device)) for device in devices or ("gpu-0",))
    return Claim("team", name, f"uid-{name}", given, (ClaimConfig("FromClaim", (), {"mode": mode}),))


def verdict(
    error_class: ErrorClass = ErrorClass.BAD_CONFIG, code: str = "config.invalid", of: Claim | None = None
) -> PrepareVerdict:
    """As the classification makes them: of the first device if one is to blame."""
    whose = of or claim()
    blamed = whose.devices[:1] if error_class is ErrorClass.FAILED_DEVICE else whose.devices
    return PrepareVerdict(
        error_class,
        code,
        Scope.CLAIM,
        whose.ref,
        "what it is, 3 of 4",
        devices=tuple(device.ref for device in blamed),
        sticky_s=NEGATIVE_CACHE_S[error_class],
        advice="what to do",
    )


def health(*causes: tuple[str, Severity], device: str = "gpu-0", told: bool = False) -> DeviceHealth:
    """What is known of a device that has these causes; told of by its driver if that is said."""
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
            Cause(code, severity, Blame.HARDWARE, f"{code} is so", "", at, told) for code, severity in causes
        ),
        driver=DRIVER,
    )


@dataclass
class PaperEngine:
    """Knows what is written in it, and holds Unhealthy what it is told of, as the real one does."""

    known: Mapping[DeviceRef, DeviceHealth] = field(default_factory=lambda: {ref(): health()})
    is_up: bool = True
    hears: bool = True
    """False: whoever waits until it has heard waits in vain."""
    events: list[str] = field(default_factory=list)
    told: tuple[DriverFault, ...] = ()
    changed: threading.Condition = field(default_factory=threading.Condition)

    def health_of(self, device: DeviceRef) -> DeviceHealth | None:
        found = self.known.get(device)
        mine = [
            (one.code, Severity.UNHEALTHY)
            for one in self.told
            if one.device == device and not one.excused_wall_s
        ]
        if found is None or not mine:
            return found
        told = health(*mine, device=device.device, told=True)
        return told._replace(causes=(*told.causes, *found.causes))

    def tell(self, faults: Sequence[DriverFault]) -> None:
        with self.changed:
            self.told = tuple(faults)
            self.events.append("tell")
            self.changed.notify_all()

    def wait_delivered(self, faults: Sequence[DriverFault], timeout_s: float) -> bool:
        assert set(faults) <= set(self.told)
        self.events.append("wait")
        return self.hears
