"""Publisher to the API server with a clock of its own, and reports for it."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cluster_api import NAMESPACE, NODE, ClusterApi

from agent.cluster.cluster_publisher import ClusterPublisher
from agent.config.api_access import ApiAccess
from agent.config.config import Config
from agent.health.state_machine import HEALTH_OF_SEVERITY
from agent.model.consumers import ConsumerMap
from agent.model.declared_devices import DeclaredFile
from agent.model.health import Blame, Cause, DeviceHealth, Repair, Severity
from agent.model.reading import GPU_LIBRARY, SourceSample, SourceState
from agent.model.report import Report
from agent.model.time import NS, Instant
from agent.serve.kube_api.api_server import ApiServer

BOOT_S: Final = 1_790_000_000.0
DRIVER: Final = "gpu.example.com"
XID: Final = ("gpu.xid.79", Severity.UNHEALTHY)


class StepClock:
    """Clock that only a test moves."""

    def __init__(self) -> None:
        self.now = Instant(1000 * NS, BOOT_S)

    def __call__(self) -> Instant:
        return self.now

    def advance(self, seconds: float) -> None:
        """Move both clocks."""
        self.now = Instant(self.now.mono_ns + round(seconds * NS), self.now.wall_s + seconds)

    def step_wall(self, seconds: float) -> None:
        """Set the wall clock only."""
        self.now = replace(self.now, wall_s=self.now.wall_s + seconds)


def device(
    name: str = "gpu-0",
    *causes: tuple[str, Severity],
    kind: str = "gpu",
    driver: str = "",
    evidence: str = "seen",
) -> DeviceHealth:
    """Return a device with causes, worst first; healthy without."""
    at = Instant(NS, BOOT_S)
    found = tuple(
        Cause(code, severity, Blame.HARDWARE, evidence, "reset the GPU", at, repair=Repair.RESET_DEVICE)
        for code, severity in causes
    )
    worst = max((severity for _, severity in causes), default=Severity.OK)
    health = HEALTH_OF_SEVERITY[worst]
    return DeviceHealth(NODE, name, kind, health, worst, "", at, at, 30, causes=found, driver=driver)


def report_without_gpus(state: SourceState, passes: int = 0) -> Report:
    """Return a report of a CPU device alone, in which the GPU library has this state."""
    nvml = SourceSample(GPU_LIBRARY, state, 0, 1, 0, "", passes=passes)
    return replace(report(device("cpu-node0", kind="cpu")), sources=(nvml,))


def report(*devices: DeviceHealth, starting: bool = False) -> Report:
    """Return a report of devices; those of a driver are declared."""
    declaring = tuple(sorted({device.driver for device in devices if device.driver}))
    files = tuple(DeclaredFile(driver, ()) for driver in declaring)
    return Report(
        NODE, Instant(NS, BOOT_S), devices, starting=starting, declaring=declaring, declarations=files
    )


class SteppedAgent:
    """Publisher of one agent whose thread a test replaces."""

    def __init__(
        self, api: ClusterApi, *, identity: str = "agent-1", clock: StepClock | None = None, **settings: Any
    ) -> None:
        self.clock = clock or StepClock()
        self.consumers: ConsumerMap | None = None
        settings.setdefault("state_dir", Path(os.devnull) / "none")  # nothing is saved
        self.config = Config(node_name=NODE, k8s_enabled=True, **settings)
        self.publisher = ClusterPublisher(
            self.config,
            ApiServer(ApiAccess(api.url)),
            namespace=NAMESPACE,
            identity=identity,
            consumer_map=lambda: self.consumers,
            clock=self.clock,
            jitter=lambda: 0.5,
        )

    def show(self, *devices: DeviceHealth) -> float:
        """Give the publisher a report of devices, and run one step. Return the time until the next."""
        self.publisher.handle_report(report(*devices))
        return self.publisher.step()

    def run_for(self, seconds: float, each: Callable[[], Sequence[DeviceHealth]] | None = None) -> None:
        """Run all steps of a time, as the thread does; ``each`` returns the devices before each step."""
        end_ns = self.clock.now.mono_ns + round(seconds * NS)
        while self.clock.now.mono_ns < end_ns:
            pause_s = self.show(*each()) if each else self.publisher.step()
            rest_s = (end_ns - self.clock.now.mono_ns) / NS
            self.clock.advance(min(rest_s, max(pause_s, 0.001), 5.0 if each else rest_s))
