"""Devices that drivers declare, and devices that drivers removed recently."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.devices.inventory import Device, DeviceKind, declared_device
from agent.model.declared import Declarations, Declared
from agent.model.time import NS, Instant

REMOVED_REPORT_NS: Final = 600 * NS
"""Time for which a removed device is reported as Unknown, so that its pods do not stay Healthy [ns]."""
REMOVED_MAX: Final = 4096
"""Largest number of removed devices that are kept, equal to the limit of declared devices.

Without a limit, a driver that always renames its devices would use unlimited memory.
"""


class RemovedDevice(NamedTuple):
    """A device that its driver no longer declares."""

    device: Declared
    since: Instant


class InvalidFile(NamedTuple):
    """A driver's invalid declaration file."""

    error: str
    since: Instant


@dataclass(frozen=True, slots=True)
class DeclaredState:
    """Devices that all drivers declare, with the recently removed devices and invalid files."""

    declarations: Declarations = ()
    """Declarations from which this state was derived."""
    devices: Mapping[str, Declared] = field(default_factory=dict)
    """Declared devices by subject (name of the device)."""
    since: Mapping[str, Instant] = field(default_factory=dict)
    """Time of the last change of each declaration, by subject."""
    removed: Mapping[str, RemovedDevice] = field(default_factory=dict)
    """Removed devices by subject."""
    invalid: Mapping[str, InvalidFile] = field(default_factory=dict)
    """Invalid declaration files by driver."""
    declaring: tuple[str, ...] = ()
    """Drivers that have sent a declaration, possibly an empty one, since the agent started."""
    known: Mapping[str, Device] = field(default_factory=dict)
    """All reported devices, including removed ones, by subject in report order."""
    kinds: Mapping[DeviceKind, Device] = field(default_factory=dict)
    """One reported device of each kind."""


def update_declared(past: DeclaredState, declarations: Declarations, now: Instant) -> DeclaredState:
    """Return the state of declarations after a snapshot; the same object if nothing changed."""
    over = any(now.mono_ns - one.since.mono_ns >= REMOVED_REPORT_NS for one in past.removed.values())
    if declarations == past.declarations and not over:
        return past
    devices = {device.subject: device for file in declarations for device in file.devices}
    gone = {
        subject: RemovedDevice(device, now)
        for subject, device in past.devices.items()
        if subject not in devices
    }
    before = {
        subject: one
        for subject, one in past.removed.items()
        if subject not in devices and now.mono_ns - one.since.mono_ns < REMOVED_REPORT_NS
    }
    gone = dict([*before.items(), *gone.items()][-REMOVED_MAX:])
    wrong = {
        file.driver: _invalid_file(past.invalid.get(file.driver), file.error, now)
        for file in declarations
        if file.error
    }
    declaring = {*past.declaring, *(file.driver for file in declarations if file.devices or not file.error)}
    changed = redeclared(past.devices, devices)
    since = {subject: now if subject in changed else past.since.get(subject, now) for subject in devices}
    every = {subject: one.device for subject, one in gone.items()} | devices
    known = sorted((declared_device(one) for one in every.values()), key=Device.sort_key)
    return DeclaredState(
        declarations,
        devices,
        since,
        gone,
        wrong,
        tuple(sorted(declaring)),
        {device.subject: device for device in known},
        {device.kind: device for device in known},
    )


def redeclared(before: Mapping[str, Declared], devices: Mapping[str, Declared]) -> frozenset[str]:
    """Return the devices for which drivers now declare another part; their earlier state is invalid."""
    if before is devices:
        return frozenset()
    return frozenset(
        subject
        for subject, device in devices.items()
        if subject in before and before[subject].part != device.part
    )


def _invalid_file(before: InvalidFile | None, error: str, now: Instant) -> InvalidFile:
    return before if before and before.error == error else InvalidFile(error, now)
