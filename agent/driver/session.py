"""Session of one driver that is linked to the agent over its socket.

Built from the same parts as a monitor inside a driver: the tracker classifies and records prepares, the
publisher decides taints. A session is opened at the driver's first call, or at start if it has saved state.

What a driver declares over its socket is written as a file into ``devices.d``, as if the driver had written
the file itself. So there is one way into the agent for declarations, one set of limits and one place for
operators, and declarations outlive the agent. agent.sources.declared_file owns the file's format.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from errno import EISDIR
from pathlib import Path
from typing import Final

from agent.config.config import Config
from agent.devices.taints import devices_of
from agent.driver.prepare_tracker import PrepareTracker
from agent.driver.report_hub import ReportHub
from agent.driver.taint_publisher import TaintPublisher, policy_of
from agent.errors import Busy, ConfigError
from agent.model.claim import Claim, DeviceRef
from agent.model.declared import Declarations
from agent.model.health import DeviceHealth
from agent.model.prepare import DriverFault, PrepareVerdict
from agent.model.reading import Absence
from agent.model.report import Report
from agent.model.taint import Taints
from agent.model.time import NS, Instant
from agent.prepare.evidence import Evidence
from agent.serve.driver_link.types import ClaimResult, DeviceDeclaration, SyncResult, TooManyDevices
from agent.sources.declared import DIRECTORY, FILE_BYTES, SUFFIX
from agent.sources.declared_file import DEVICES_MAX, LINE_BYTES, VERSION, device_label, parse_declaration
from agent.store import taints as taint_store
from agent.store.files import WriteError, make_directory, write_and_rename
from agent.system.files import ReadError, read_bounded
from agent.system.threads.latest import Latest

MARK: Final = "# Written by drahealth: "
"""First bytes of a declaration file that the agent wrote and may replace."""
MODE: Final = 0o644
DIRECTORY_MODE: Final = 0o755


def write_declaration(directory: Path, driver: str, node: str, rows: Iterable[DeviceDeclaration]) -> int:
    """Write the driver's declaration file, unless it is up to date. Blocks while a disk hangs.

    Args:
        directory: ``devices.d`` of the runtime directory.
        driver: Name of the driver.
        node: Pool of devices that name none.
        rows: All devices of the driver.

    Returns:
        Number of declared devices.

    Raises:
        ConfigError: A value is wrong; names the device, the key, the value and its limit.
        Busy: The driver's file was not written by the agent.
        WriteError: The file could not be written.
    """
    path = directory / f"{driver}{SUFFIX}"
    data = declaration_text(driver, rows)
    if len(data) > FILE_BYTES:
        raise ConfigError(f"the devices take {len(data)} bytes as a file, limit {FILE_BYTES}")
    devices = parse_declaration(data, driver, node)
    try:
        if _found(path) != data:
            make_directory(directory, DIRECTORY_MODE)
            write_and_rename(path, data, new=path.with_name(f".{path.name}.new"), mode=MODE)
    except OSError as error:
        raise WriteError(path, len(data), error.errno or 0, error.strerror or str(error)) from None
    return len(devices)


def _found(path: Path) -> bytes:
    """Return the declaration file's bytes; empty: there is no file. Raises Busy if the agent did not write
    it, and OSError."""
    try:
        found = read_bounded(path, FILE_BYTES).data
    except ReadError as error:
        if error.absence is Absence.ABSENT:
            return b""
        if error.errno not in {0, EISDIR}:
            raise OSError(error.errno, error.reason) from None
        found = b""
    if path.is_symlink() or not found.startswith(MARK.encode()):
        raise Busy(f"{path}: not written by drahealth; remove it to declare devices over the socket")
    return found


def declaration_text(driver: str, rows: Iterable[DeviceDeclaration]) -> bytes:
    """Return the text of a declaration file with these devices.

    Raises:
        ConfigError: A value is longer than a line of the file; names the device, the key and the limit.
    """
    lines = [
        f"{MARK}devices that {driver} declared over its socket; its next declaration replaces them.",
        f"version = {VERSION}",
    ]
    for number, row in enumerate(rows, start=1):
        lines += ["", "[[device]]"]
        keys = {**row.keys, "pool": row.pool} if row.pool else row.keys
        for key, value in keys.items():
            line = _line(key, value)
            if (size := len(line.encode())) > LINE_BYTES:
                subject = f"{device_label(number, row.keys.get('name'))}: {key}"
                raise ConfigError(f"{subject}: takes a line of {size} bytes, limit {LINE_BYTES}")
            lines.append(line)
    return ("\n".join(lines) + "\n").encode()


def _line(key: str, value: object) -> str:
    """Return a TOML line; JSON's strings, numbers and booleans are valid TOML, except for the character
    DEL."""
    return f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")


EVALUATED_S: Final = 2.0
"""Time that a declaring driver waits for the first verdicts of its devices [s]."""


class DriverSession:
    """Handler of one driver's calls. Thread-safe, but not for the core thread: a call may block on a disk."""

    def __init__(
        self,
        driver: str,
        config: Config,
        hub: ReportHub,
        *,
        state_dir: Path,
        declarations: Callable[[], Declarations],
        on_faults: Callable[[str, Sequence[DriverFault]], None],
        clock: Callable[[], Instant],
    ) -> None:
        """Load the driver's saved state. Blocks while a disk hangs.

        Args:
            driver: Name of the driver.
            config: Configuration of the agent.
            hub: Hub of the newest report.
            state_dir: Directory of this driver's saved state.
            declarations: Returns the devices that all drivers declare.
            on_faults: Called with a driver's name and all its reported faults.
            clock: Returns the time on both clocks.
        """
        self._driver = driver
        self._hub = hub
        self._node = config.node_name
        self._lease_ns = config.lease_s * NS
        self._declared_dir = config.runtime_dir / DIRECTORY
        self._declarations = declarations
        self._on_faults = on_faults
        self._taints: Latest[Taints] = Latest()
        self._tracker = PrepareTracker(driver, state_dir, self, patterns=config.prepare_patterns)
        path = state_dir / taint_store.FILE
        self._publisher = TaintPublisher(
            self._publish, driver=driver, policy=policy_of(config), path=path, clock=clock
        )

    # --- calls of the driver -----------------------------------------------------------------------------

    def sync(self, rows: Sequence[DeviceDeclaration]) -> SyncResult:
        """Replace the driver's declared devices. Blocks up to 2 s for their first verdicts.

        Raises:
            ConfigError: A value is wrong; names the device, the key, the value and its limit.
            TooManyDevices: All drivers together declare too many devices.
            Busy: The driver's file was not written by the agent.
            WriteError: The file could not be written.
        """
        others = sum(len(file.devices) for file in self._declarations() if file.driver != self._driver)
        if len(rows) + others > DEVICES_MAX:
            raise TooManyDevices(f"{len(rows)} devices and {others} of other drivers, limit {DEVICES_MAX}")
        devices = write_declaration(self._declared_dir, self._driver, self._node, rows)
        wanted = {DeviceRef(self._driver, row.pool or self._node, str(row.keys["name"])) for row in rows}

        def is_evaluated() -> bool:
            report = self._hub.report
            if report is None or self._driver not in report.declaring:
                return False
            return wanted == {DeviceRef(*device.key) for device in devices_of(report, self._driver)}

        return SyncResult(devices, self._hub.wait_until(is_evaluated, EVALUATED_S))

    def check(self, claims: Sequence[Claim]) -> list[PrepareVerdict | None]:
        """Return for each claim why preparing it would fail; None: no cause is known."""
        return [self._tracker.known_blocker(claim) for claim in claims]

    def classify(self, claim: Claim, evidence: Sequence[Evidence]) -> PrepareVerdict:
        """Classify a failure without recording it."""
        return self._tracker.classify(claim, evidence)

    def prepared(self, results: Sequence[ClaimResult]) -> list[PrepareVerdict | None]:
        """Record the results of prepares, and wait until the health of broken devices is delivered."""
        verdicts = [self._prepared(result) for result in results]
        self._tracker.wait_delivered([verdict for verdict in verdicts if verdict is not None])
        return verdicts

    def unprepared(self, results: Sequence[ClaimResult]) -> list[PrepareVerdict | None]:
        """Record the results of unprepares. Returns their verdicts; None: the driver reports success."""
        return [self._unprepared(result) for result in results]

    @property
    def taints(self) -> Latest[Taints]:
        """Newest-value cell with the taints that the driver's devices should have."""
        return self._taints

    def _prepared(self, result: ClaimResult) -> PrepareVerdict | None:
        if result.evidence is None:
            self._tracker.succeeded(result.claim)
            return None
        return self._tracker.record_failure(
            result.claim, self._tracker.classify(result.claim, result.evidence)
        )

    def _unprepared(self, result: ClaimResult) -> PrepareVerdict | None:
        if result.evidence is None:
            self._tracker.unprepared(result.claim.ref)
            return None
        return self._tracker.unprepare_failed(result.claim.ref, result.evidence, result.claim.devices)

    # --- core thread only --------------------------------------------------------------------------------

    def update_taints(self, report: Report, now: Instant) -> None:
        """Decide the taints for a new report, before the report is published."""
        self._publisher.update(report, now)

    async def run(self) -> None:
        """Publish and save taints until cancelled."""
        await self._publisher.run()

    def close(self, timeout_s: float) -> bool:
        """Save the prepare ledger. Returns True if it was on disk in time."""
        return self._tracker.close(timeout_s)

    async def _publish(self, taints: Taints) -> None:
        self._taints.publish(taints)

    # --- health engine of the tracker ----------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """True if the newest report is younger than a lease, so that its verdicts are valid."""
        report = self._hub.report
        return report is not None and time.monotonic_ns() - report.at.mono_ns <= self._lease_ns

    def health_of(self, device: DeviceRef) -> DeviceHealth | None:
        """Return a device's health, the host's own until the driver declares devices; None: unknown."""
        report = self._hub.report
        if report is not None and self._driver not in report.declaring:
            device = device._replace(driver="")
        return self._hub.health_of(device)

    def report_faults(self, faults: Sequence[DriverFault]) -> None:
        """Pass all driver-reported faults to the core."""
        self._on_faults(self._driver, faults)

    def wait_delivered(self, faults: Sequence[DriverFault], timeout_s: float) -> bool:
        """Block until a report has these faults, taints are decided and the streams have taken the report.

        Returns:
            True if the report was delivered in time. Undeclared devices are ignored: no report has them.
        """
        declared = [fault for fault in faults if self._hub.health_of(fault.device)]
        return self._hub.wait_delivered(declared, timeout_s)
