"""Session of one DRA driver: handles the driver's calls over its socket, and keeps the driver's state.

The prepare tracker classifies and records prepares; the taint publisher decides taints. A session is opened
at the driver's first call, or when the agent starts if the driver has saved state.

Devices that a driver declares over its socket are written to a file in ``devices.d``, so that declarations
outlive the agent and all drivers have the same limits. agent.sources.declaration_file defines the format.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from errno import EISDIR
from pathlib import Path
from typing import Final

from agent.config.config import CHECKPOINT, Config
from agent.config.files import LINE_BYTES
from agent.devices.taints import reported_devices
from agent.driver.check_results import ReportedChecks
from agent.driver.prepare_failure_tracker import PrepareFailureTracker
from agent.driver.taint_callback_publisher import TaintCallbackPublisher, taint_policy
from agent.engine.loop import ReportHub
from agent.errors import ConfigError, ResourceBusyError
from agent.model.claim import Claim, ClaimRef, DeviceRef
from agent.model.declared_devices import (
    Declarations,
    DeclaredFile,
    DeclaredPart,
    DriverCheckSample,
    DriverDevice,
)
from agent.model.health import DeviceHealth, Health, Taints
from agent.model.prepare import DriverFault, OtherDriverFailure, PrepareVerdict
from agent.model.reading import Absence
from agent.model.report import Report
from agent.model.time import NS, Instant
from agent.prepare.evidence import Evidence
from agent.serve.driver_link.handler_interface import (
    DeviceDeclaration,
    DriverCheckResult,
    ReportedClaimResult,
    SyncDevicesResult,
    TooManyDevices,
)
from agent.sources.declaration_file import (
    DEVICES_MAX,
    DIRECTORY,
    DIRECTORY_MODE,
    FILE_BYTES,
    SUFFIX,
    VERSION,
    device_label,
    parse_declaration,
)
from agent.store import driver_files
from agent.store.state_files import StateWriteError, write_and_rename
from agent.system.files import ReadError, make_directory, read_bounded
from agent.system.threads.latest_value import LatestValue

OWN_FILE_MARK: Final = "# Written by drahealth: "
"""First bytes of a declaration file that the agent wrote, and therefore may replace."""
FILE_MODE: Final = 0o644


def write_declaration(
    directory: Path, driver: str, default_pool: str, devices: Iterable[DeviceDeclaration]
) -> tuple[DriverDevice, ...]:
    """Write a driver's declaration file, unless it has the same content. Blocks while a disk hangs.

    Args:
        directory: Directory ``devices.d``, created if it does not exist.
        driver: Name of the driver.
        default_pool: Resource pool of devices that name no pool.
        devices: All devices of the driver.

    Returns:
        Declared devices, as the agent reads them from the file.

    Raises:
        ConfigError: A value is wrong; the error names the device, the key, the value and its limit.
        ResourceBusyError: The driver's declaration file exists, and the agent did not write it.
        StateWriteError: The file could not be written.
    """
    path = directory / f"{driver}{SUFFIX}"
    data = declaration_text(driver, devices)
    if len(data) > FILE_BYTES:
        raise ConfigError(
            f"driver {driver}: declaration takes {len(data)} bytes, limit {FILE_BYTES}; declare fewer devices"
        )
    declared = parse_declaration(data, driver, default_pool)
    try:
        if _read_own_file(path) != data:
            make_directory(directory, DIRECTORY_MODE)
            write_and_rename(path, data, temporary=path.with_name(f".{path.name}.new"), mode=FILE_MODE)
    except OSError as error:
        raise StateWriteError(path, len(data), error.errno or 0, error.strerror or str(error)) from None
    return declared


def _read_own_file(path: Path) -> bytes:
    """Return the content of a declaration file that the agent wrote; empty: there is no file.

    Raises OSError, or ResourceBusyError if the agent did not write the file.
    """
    try:
        found = read_bounded(path, FILE_BYTES).data
    except ReadError as error:
        if error.absence is Absence.ABSENT:
            return b""
        if error.errno not in {0, EISDIR}:
            raise OSError(error.errno, error.reason) from None
        found = b""
    if path.is_symlink() or not found.startswith(OWN_FILE_MARK.encode()):
        raise ResourceBusyError(
            f"declaration file {path}: not written by drahealth; remove it to declare devices over the socket"
        )
    return found


def declaration_text(driver: str, devices: Iterable[DeviceDeclaration]) -> bytes:
    """Return the content of the declaration file of a driver's devices, in TOML.

    Raises:
        ConfigError: A value is longer than a line of the file; the error names the device, the key and the
            limit.
    """
    lines = [
        f"{OWN_FILE_MARK}devices that {driver} declared over its socket; its next declaration replaces them.",
        f"version = {VERSION}",
    ]
    for number, device in enumerate(devices, start=1):
        lines += ["", "[[device]]"]
        keys = {**device.keys, "pool": device.pool} if device.pool else device.keys
        for key, value in keys.items():
            # strings, numbers and booleans of JSON are valid TOML, except for the character DEL
            line = f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
            if (size := len(line.encode())) > LINE_BYTES:
                subject = f"{device_label(number, device.keys.get('name'))}: {key}"
                raise ConfigError(
                    f"{subject}: the value makes a line of {size} bytes, limit {LINE_BYTES}; shorten it"
                )
            lines.append(line)
    return ("\n".join(lines) + "\n").encode()


def _ref_of(device: DriverDevice) -> DeviceRef:
    return DeviceRef(device.driver, device.pool, device.name)


FIRST_VERDICTS_S: Final = 2.0
"""Longest time that a driver waits for the first verdicts on the devices that it declares [s]."""


class DriverSession:
    """Handler of one driver's calls over its socket. Thread-safe. Calls may block."""

    def __init__(
        self,
        driver: str,
        config: Config,
        hub: ReportHub,
        *,
        state_dir: Path,
        declarations: Callable[[], Declarations],
        on_faults: Callable[[str, Sequence[DriverFault]], None],
        on_checks: Callable[[str, Sequence[DriverCheckSample], bool], None],
        other_failures: Callable[[str, ClaimRef], Sequence[OtherDriverFailure]],
        clock: Callable[[], Instant],
    ) -> None:
        """Load the driver's saved prepare ledger and taints. Blocks while a disk hangs.

        Args:
            driver: Name of the driver.
            config: Configuration of the agent.
            hub: Hub with the newest report.
            state_dir: Directory of this driver's saved state.
            declarations: Returns the devices that all drivers declare.
            on_faults: Called with a driver's name and all its reported faults.
            on_checks: Called with a driver's name, the newest results of all checks that it reports, and True
                if the engine must evaluate them at once.
            other_failures: Returns the failures of other drivers for the pods that use a driver's claim.
            clock: Returns the time on the monotonic and the wall clock.
        """
        self._driver = driver
        self._hub = hub
        self._node = config.node_name
        self._lease_ns = config.lease_s * NS
        self._declared_dir = config.runtime_dir / DIRECTORY
        self._declarations = declarations
        self._on_faults = on_faults
        self._other_failures = other_failures
        self._checks = ReportedChecks(driver, config.node_name, on_checks)
        self._taints: LatestValue[Taints] = LatestValue()
        self.prepare_counts: Counter[tuple[str, str]] = Counter()
        """Number of reported prepares by error class and code; class ``ok``: they succeeded."""
        self._parts: dict[DeviceRef, DeclaredPart] = {}
        """Newest declared hardware of devices that were faulty at the last declaration.

        Such a device may be removed, and declared again later.
        """
        self._tracker = PrepareFailureTracker(
            driver,
            state_dir,
            self,
            patterns=config.prepare_patterns,
            claims_file=config.kubelet_dir / CHECKPOINT,
        )
        path = state_dir / driver_files.TAINTS_FILE
        self._publisher = TaintCallbackPublisher(
            self._publish, driver=driver, policy=taint_policy(config), path=path, clock=clock
        )

    # --- calls of the driver -----------------------------------------------------------------------------

    def sync(self, devices: Sequence[DeviceDeclaration]) -> SyncDevicesResult:
        """Replace the driver's declared devices, and wait up to 2 s until their health is known.

        Driver-reported faults end on a device that is declared with other hardware.

        Raises:
            ConfigError: A value is wrong; the error names the device, the key, the value and its limit.
            TooManyDevices: All drivers together declare too many devices.
            ResourceBusyError: The driver's declaration file exists, and the agent did not write it.
            StateWriteError: The file could not be written.
        """
        others = sum(len(file.devices) for file in self._declarations() if file.driver != self._driver)
        if len(devices) + others > DEVICES_MAX:
            raise TooManyDevices(
                f"driver {self._driver}: declares {len(devices)} devices, other drivers {others}, limit "
                f"{DEVICES_MAX} in total; declare fewer devices"
            )
        before = [old for file in self._declarations() if file.driver == self._driver for old in file.devices]
        declared = write_declaration(self._declared_dir, self._driver, self._node, devices)
        self._end_faults_of_former_hardware(before, declared)
        file = DeclaredFile(self._driver, declared)
        wanted = {_ref_of(device) for device in declared}

        def is_evaluated() -> bool:
            report, evaluated = self._hub.report, self._hub.evaluated
            if report is None or evaluated is None or file not in evaluated.declarations:
                return False
            return wanted == {DeviceRef(*device.key) for device in reported_devices(report, self._driver)}

        return SyncDevicesResult(len(declared), self._hub.wait_until(is_evaluated, FIRST_VERDICTS_S))

    def _end_faults_of_former_hardware(
        self, before: Iterable[DriverDevice], declared: Iterable[DriverDevice]
    ) -> None:
        """End driver-reported faults of devices that a new declaration makes of other hardware.

        Only faults of broken devices end. Faults of the driver or the node do not depend on the hardware.

        Args:
            before: The driver's devices before the declaration.
            declared: The driver's devices in the new declaration.
        """
        faults = [
            fault
            for fault in self._tracker.driver_faults()
            if fault.health is Health.UNHEALTHY and not fault.expired_wall_s
        ]
        faulty = {fault.device for fault in faults}
        former = {_ref_of(device): device.part for device in before} | self._parts
        parts = former | {_ref_of(device): device.part for device in declared}
        self._parts = {ref: part for ref, part in parts.items() if ref in faulty}
        replaced = {ref for ref, part in self._parts.items() if former.get(ref, part) != part}
        if replaced:
            self._tracker.end_faults([fault for fault in faults if fault.device in replaced])

    def report_checks(self, results: Sequence[DriverCheckResult]) -> None:
        """Replace the newest results of the driver's own checks. Never blocks.

        Raises:
            ConfigError: A name or a finding is not valid; the error names the result and the value.
        """
        self._checks.report(results)

    def check_claims(self, claims: Sequence[Claim]) -> list[PrepareVerdict | None]:
        """Return, for each claim, the error with which its prepare is known to fail; None: it may succeed."""
        return [self._tracker.known_blocker(claim) for claim in claims]

    def classify(self, claim: Claim, evidence: Sequence[Evidence]) -> PrepareVerdict:
        """Classify the failed prepare of a claim by its evidence, without recording it."""
        return self._tracker.classify(claim, evidence)

    def record_prepares(self, results: Sequence[ReportedClaimResult]) -> list[PrepareVerdict | None]:
        """Record the results of prepares, and wait until broken devices are reported. Blocks up to 1.5 s.

        Returns:
            Verdict on each failure; None: the prepare succeeded.
        """
        verdicts = [self._record_prepare(result) for result in results]
        self._tracker.wait_delivered([verdict for verdict in verdicts if verdict is not None])
        return verdicts

    def record_unprepares(self, results: Sequence[ReportedClaimResult]) -> list[PrepareVerdict | None]:
        """Record the results of unprepares.

        Returns:
            Verdict on each unprepare that the driver reports as failed; None: the driver reports success to
            the kubelet.
        """
        return [self._record_unprepare(result) for result in results]

    def recorded_failures(self, uids: Iterable[str]) -> list[PrepareVerdict]:
        """Return the verdicts on the claims with these UIDs whose last prepare failed."""
        return self._tracker.recorded_failures(uids)

    def failures_at_other_drivers(self, claim: ClaimRef) -> Sequence[OtherDriverFailure]:
        """Return recent failures of other drivers for the pods that use a claim."""
        return self._other_failures(self._driver, claim)

    def recent_failures(self, uids: Iterable[str]) -> list[PrepareVerdict]:
        """Return the verdicts on recently failed prepares of the claims with these UIDs.

        Only the last prepare of each claim counts.
        """
        return self._tracker.recent_failures(uids)

    @property
    def taints(self) -> LatestValue[Taints]:
        """Cell (holder of one value) with the newest taints that the driver's devices should have."""
        return self._taints

    def _record_prepare(self, result: ReportedClaimResult) -> PrepareVerdict | None:
        if result.evidence is None:
            self._tracker.record_success(result.claim)
            self.prepare_counts["ok", ""] += 1
            return None
        verdict = self._tracker.classify(result.claim, result.evidence)
        self.prepare_counts[verdict.error_class, verdict.code] += 1
        return self._tracker.record_failure(result.claim, verdict)

    def _record_unprepare(self, result: ReportedClaimResult) -> PrepareVerdict | None:
        if result.evidence is None:
            self._tracker.unprepared(result.claim.ref)
            return None
        return self._tracker.unprepare_failed(
            result.claim.ref, result.evidence, result.claim.devices, reads_checkpoint=self._is_declaring
        )

    # --- core thread only --------------------------------------------------------------------------------

    def update_taints(self, report: Report, now: Instant) -> None:
        """Update the driver's taints for a new report, before the report is published."""
        self._publisher.update(report, now)

    def reconfigure(self, config: Config) -> None:
        """Apply a reloaded configuration: lease of health reports, patterns of prepare errors, taints.

        Thread-safe. Never blocks.
        """
        self._lease_ns = config.lease_s * NS
        self._tracker.set_patterns(config.prepare_patterns)
        self._publisher.set_policy(taint_policy(config))

    def record_clear(self, cleared: Sequence[DriverFault]) -> None:
        """End faults that the driver reported and an operator cleared. Never blocks."""
        self._tracker.end_faults(cleared)

    async def run(self) -> None:
        """Put changed taints into the :attr:`taints` cell, and save them, until cancelled."""
        await self._publisher.run()

    def close(self, timeout_s: float) -> bool:
        """Save the prepare ledger. Returns False if the write has not ended within ``timeout_s``."""
        return self._tracker.close(timeout_s)

    async def _publish(self, taints: Taints) -> None:
        self._taints.publish(taints)

    # --- health engine of the tracker ----------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether the newest health report is younger than a lease, the time for which it is valid."""
        report = self._hub.report
        return report is not None and time.monotonic_ns() - report.at.mono_ns <= self._lease_ns

    def health_of(self, device: DeviceRef) -> DeviceHealth | None:
        """Return a device's health; None: no device of this name is known."""
        return self._hub.health_of(self._reported_device(device))

    def _reported_device(self, device: DeviceRef) -> DeviceRef:
        """Return the name that a device of the driver has in the report.

        Until the driver declares devices, ``device`` names a device that the agent found itself.
        """
        return device if self._is_declaring else device._replace(driver="")

    @property
    def _is_declaring(self) -> bool:
        """Whether the newest report is made with devices that the driver declared."""
        report = self._hub.report
        return report is not None and self._driver in report.declaring

    def report_faults(self, faults: Sequence[DriverFault]) -> None:
        """Pass all faults that the driver reported to the engine."""
        self._on_faults(self._driver, faults)

    def wait_delivered(self, faults: Sequence[DriverFault], timeout_s: float) -> bool:
        """Block until all health streams have a report with these faults; returns False on timeout.

        Faults of devices that no report has are ignored.
        """
        named = [fault._replace(device=self._reported_device(fault.device)) for fault in faults]
        return self._hub.wait_delivered([bad for bad in named if self._hub.health_of(bad.device)], timeout_s)

    def wait_evaluated(self, devices: Collection[DeviceRef], timeout_s: float) -> None:
        """Return at once, because a driver waits only half a second for an answer over its socket."""

    def wait_tainted(self, devices: Collection[DeviceRef], timeout_s: float) -> bool:
        """Put the current taints of devices into the :attr:`taints` cell at once; return False on timeout."""
        return self._publisher.wait_published(devices, timeout_s)
