"""State of declarations between evaluations: declared devices, removed devices, and invalid files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.devices.inventory import DeviceKind, InventoryDevice, declared_device
from agent.model.declared_devices import Declarations, DriverDevice
from agent.model.time import NS, Instant

REMOVED_REPORT_NS: Final = 600 * NS
"""Time for which a removed device is reported [ns], so that its pods are not shown as Healthy.

It is Unknown, or Unhealthy if the driver had reported a fault.
"""
REMOVED_MAX: Final = 4096
"""Largest number of removed devices that are kept, in case a driver keeps renaming its devices."""


class RemovedDevice(NamedTuple):
    """Device that its driver no longer declares, and the time since then."""

    device: DriverDevice
    since: Instant


class InvalidDeclarationFile(NamedTuple):
    """Error in a driver's declaration file, and the time since which it is known."""

    error: str
    since: Instant


@dataclass(frozen=True, slots=True)
class DeclaredState:
    """Declared devices of all drivers, with recently removed devices and invalid files."""

    declarations: Declarations = ()
    """Contents of the declaration files from which this state was derived."""
    devices: Mapping[str, DriverDevice] = field(default_factory=dict)
    """Declared devices by subject (the device's name in reports)."""
    since: Mapping[str, Instant] = field(default_factory=dict)
    """Time of the last change of each declaration, by subject."""
    removed: Mapping[str, RemovedDevice] = field(default_factory=dict)
    """Removed devices that are still reported, by subject."""
    invalid: Mapping[str, InvalidDeclarationFile] = field(default_factory=dict)
    """Declaration files that cannot be used, by driver, with the error."""
    declaring: tuple[str, ...] = ()
    """Names of the drivers with a valid declaration, possibly an empty one, since the agent started."""
    known: Mapping[str, InventoryDevice] = field(default_factory=dict)
    """All reported devices, including removed ones, by subject in report order."""
    kinds: Mapping[DeviceKind, InventoryDevice] = field(default_factory=dict)
    """One of the reported devices of each kind, for queries about the kind."""
    checked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the checks whose results drivers report over their sockets, by subject."""


def update_declared(past: DeclaredState, declarations: Declarations, now: Instant) -> DeclaredState:
    """Return the state of declarations after a snapshot; ``past`` itself if nothing changed."""
    times_ns = [now.mono_ns - removed.since.mono_ns for removed in past.removed.values()]
    if declarations == past.declarations and max(times_ns, default=0) < REMOVED_REPORT_NS:
        return past
    devices = {device.subject: device for file in declarations for device in file.devices}
    gone = {
        subject: RemovedDevice(device, now)
        for subject, device in past.devices.items()
        if subject not in devices
    }
    before = {
        subject: removed
        for subject, removed in past.removed.items()
        if subject not in devices and now.mono_ns - removed.since.mono_ns < REMOVED_REPORT_NS
    }
    gone = dict([*before.items(), *gone.items()][-REMOVED_MAX:])
    wrong = {
        file.driver: _invalid_file(past.invalid.get(file.driver), file.error, now)
        for file in declarations
        if file.error
    }
    declaring = {*past.declaring, *(file.driver for file in declarations if file.devices or not file.error)}
    changed = redeclared_devices(past.devices, devices)
    since = {subject: now if subject in changed else past.since.get(subject, now) for subject in devices}
    reported = {subject: removed.device for subject, removed in gone.items()} | devices
    known = sorted((declared_device(device) for device in reported.values()), key=InventoryDevice.sort_key)
    return DeclaredState(
        declarations,
        devices,
        since,
        gone,
        wrong,
        tuple(sorted(declaring)),
        {device.subject: device for device in known},
        {device.kind: device for device in known},
        {subject: device.checks for subject, device in devices.items() if device.checks},
    )


def redeclared_devices(
    before: Mapping[str, DriverDevice], devices: Mapping[str, DriverDevice]
) -> frozenset[str]:
    """Return the names of devices whose hardware drivers declare differently now; their state is invalid."""
    if before is devices:
        return frozenset()
    return frozenset(
        subject
        for subject, device in devices.items()
        if subject in before and before[subject].part != device.part
    )


def _invalid_file(before: InvalidDeclarationFile | None, error: str, now: Instant) -> InvalidDeclarationFile:
    return before if before and before.error == error else InvalidDeclarationFile(error, now)
