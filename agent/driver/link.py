"""One driver that is linked to the agent over its socket: what it says, and what it is told.

Put together from the same parts as inside a driver: the desk judges and remembers its prepares, the publisher
decides its taints. Made when the driver first says something, or when it has a memory of before.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from agent.config.config import Config
from agent.devices.taints import devices_of
from agent.driver.declare import declare
from agent.driver.prepare_tracker import PrepareTracker
from agent.driver.report_hub import ReportHub
from agent.driver.taint_publisher import TaintPublisher, policy_of
from agent.model.claim import Claim, DeviceRef
from agent.model.declared import Declarations
from agent.model.health import DeviceHealth
from agent.model.prepare import DriverFault, PrepareVerdict
from agent.model.report import Report
from agent.model.taint import Taints
from agent.model.time import NS, Instant
from agent.prepare.evidence import Evidence
from agent.serve.driver_link.service import HandlerGone, NoRoom, Row, Synced
from agent.sources.declared import DIRECTORY
from agent.sources.declared_file import DEVICES_MAX
from agent.store import taints as taint_store
from agent.system.threads.latest import Latest

JUDGED_S: Final = 2.0
"""How long a driver that declares its devices waits for their first verdicts [s]."""


class DriverSession:
    """What the agent does for one driver. From any thread but the core's; a call may wait for a disk."""

    def __init__(
        self,
        driver: str,
        config: Config,
        board: ReportHub,
        *,
        state_dir: Path,
        declarations: Callable[[], Declarations],
        tell: Callable[[str, Sequence[DriverFault]], None],
        clock: Callable[[], Instant],
    ) -> None:
        """Reads what is remembered of the driver, which can take as long as a disk takes.

        Args:
            driver: Its name.
            config: The agent's.
            board: Where the newest report stands.
            state_dir: Of what outlives the agent, of this driver.
            declarations: What all drivers declare, as it was read last.
            tell: Takes what a driver found broken to the core.
            clock: Now, on both clocks.
        """
        self._driver = driver
        self._board = board
        self._node = config.node_name
        self._lease_ns = config.lease_s * NS
        self._declared_dir = config.runtime_dir / DIRECTORY
        self._declarations = declarations
        self._tell = tell
        self._latest: Latest[Taints] = Latest()
        self._desk = PrepareTracker(driver, state_dir, self, patterns=config.prepare_patterns)
        path = state_dir / taint_store.FILE
        self._publisher = TaintPublisher(
            self._publish, driver=driver, policy=policy_of(config), path=path, clock=clock
        )

    # --- what a driver says and asks ---------------------------------------------------------------------

    def sync(self, rows: Sequence[Row]) -> Synced:
        """Declares the driver's devices: all of them. Waits a moment for the first verdicts.

        Raises:
            ConfigError: Names the device, the key, and the value with its limit.
            NoRoom: Other drivers declare so many that these are too many.
            Busy: Somebody else wrote the file of what the driver declares.
            NotKept: The disk does not take it.
        """
        others = sum(len(one.devices) for one in self._declarations() if one.driver != self._driver)
        if len(rows) + others > DEVICES_MAX:
            raise NoRoom(f"{len(rows)} devices and {others} of other drivers, limit {DEVICES_MAX}")
        devices = declare(self._declared_dir, self._driver, self._node, rows)
        wanted = {DeviceRef(self._driver, row.pool or self._node, str(row.keys["name"])) for row in rows}

        def is_judged() -> bool:
            report = self._board.report
            if report is None or self._driver not in report.declaring:
                return False
            return wanted == {DeviceRef(*one.key) for one in devices_of(report, self._driver)}

        return Synced(devices, self._board.wait_until(is_judged, JUDGED_S))

    def check(self, claims: Sequence[Claim]) -> list[PrepareVerdict | None]:
        """What is known against preparing each of these claims."""
        return [self._desk.known_blocker(claim) for claim in claims]

    def classify(self, claim: Claim, evidence: Sequence[Evidence]) -> PrepareVerdict:
        """Of what kind a failure is; nothing follows from that."""
        return self._desk.judge(claim, evidence)

    def prepared(self, ended: Sequence[HandlerGone]) -> list[PrepareVerdict | None]:
        """How prepares have ended. Waits until everybody knows of the devices that are broken."""
        verdicts = [self._prepared(one) for one in ended]
        self._desk.wait_delivered([one for one in verdicts if one is not None])  # once for all
        return verdicts

    def unprepared(self, ended: Sequence[HandlerGone]) -> list[PrepareVerdict | None]:
        """How unprepares have ended. None for one that failed: let it succeed."""
        return [self._unprepared(one) for one in ended]

    @property
    def taints(self) -> Latest[Taints]:
        """The taints that the devices should have now."""
        return self._latest

    def _prepared(self, one: HandlerGone) -> PrepareVerdict | None:
        if one.evidence is None:
            self._desk.succeeded(one.claim)
            return None
        return self._desk.note_failed(one.claim, self._desk.judge(one.claim, one.evidence))

    def _unprepared(self, one: HandlerGone) -> PrepareVerdict | None:
        if one.evidence is None:
            self._desk.unprepared(one.claim.ref)
            return None
        return self._desk.unprepare_failed(one.claim.ref, one.evidence, one.claim.devices)

    # --- for the core: in its thread ---------------------------------------------------------------------

    def take(self, report: Report, now: Instant) -> None:
        """A newer report; its taints are decided before anybody reads it."""
        self._publisher.take(report, now)

    async def run(self) -> None:
        """Publishes taints and keeps them, until cancelled."""
        await self._publisher.run()

    def close(self, timeout_s: float) -> bool:
        """Writes what is not yet written. False if it is not kept in the end, or not in time."""
        return self._desk.close(timeout_s)

    async def _publish(self, taints: Taints) -> None:
        self._latest.publish(taints)

    # --- for the desk --------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether what is said now is what is known now: the core has spoken within a lease."""
        report = self._board.report
        return report is not None and time.monotonic_ns() - report.at.mono_ns <= self._lease_ns

    def health_of(self, device: DeviceRef) -> DeviceHealth | None:
        """What the driver's stream says of a device, one of the host's own until it declares others; None:
        nothing.
        """
        report = self._board.report
        if report is not None and self._driver not in report.declaring:
            device = device._replace(driver="")
        return self._board.health_of(device)

    def tell(self, faults: Sequence[DriverFault]) -> None:
        """All devices that the driver found broken."""
        self._tell(self._driver, faults)

    def wait_delivered(self, faults: Sequence[DriverFault], timeout_s: float) -> bool:
        """Blocks until a report says it of these devices, taints are decided, and streams have taken it.

        Returns:
            Whether that is so. A device that nobody declares is not waited for: nothing is said of it.
        """
        declared = [one for one in faults if self._board.health_of(one.device)]
        return self._board.wait_delivered(declared, timeout_s)
