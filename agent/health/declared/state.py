"""What drivers declare now, and what they declared until a moment ago."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.devices.inventory import Device, Kind, declared_device
from agent.model.declared import Declarations, Declared
from agent.model.time import NS, Instant

GONE_NS: Final = 600 * NS
"""A device that is declared no more is told of for so long: its pod's status must not freeze."""
GONE_KEPT: Final = 4096
"""As many as can be declared: a driver that names its devices anew each time must not fill the memory."""


class Gone(NamedTuple):
    """A device that is declared no more."""

    device: Declared
    since: Instant


class Wrong(NamedTuple):
    """A driver's file that cannot be believed."""

    error: str
    since: Instant


@dataclass(frozen=True, slots=True)
class DeclaredPast:
    """Everything that is known of declarations."""

    declarations: Declarations = ()
    """What the rest was made of."""
    devices: Mapping[str, Declared] = field(default_factory=dict)
    """By subject."""
    since: Mapping[str, Instant] = field(default_factory=dict)
    """When each was declared to be what it is, likewise."""
    gone: Mapping[str, Gone] = field(default_factory=dict)
    """Likewise."""
    wrong: Mapping[str, Wrong] = field(default_factory=dict)
    """By driver."""
    declaring: tuple[str, ...] = ()
    """Drivers that have declared their devices since the agent started, if only that they have none."""
    known: Mapping[str, Device] = field(default_factory=dict)
    """All that are told of, gone ones too: by subject, in the order of a report."""
    kinds: Mapping[Kind, Device] = field(default_factory=dict)
    """One of each kind among them."""


def remember_declared(past: DeclaredPast, declarations: Declarations, now: Instant) -> DeclaredPast:
    """The past after a snapshot. The same if nothing was declared anew, and nothing is to be forgotten."""
    over = any(now.mono_ns - one.since.mono_ns >= GONE_NS for one in past.gone.values())
    if declarations == past.declarations and not over:
        return past
    devices = {device.subject: device for file in declarations for device in file.devices}
    gone = {subject: Gone(device, now) for subject, device in past.devices.items() if subject not in devices}
    before = {
        subject: one
        for subject, one in past.gone.items()
        if subject not in devices and now.mono_ns - one.since.mono_ns < GONE_NS
    }
    gone = dict([*before.items(), *gone.items()][-GONE_KEPT:])
    wrong = {
        file.driver: _wrong(past.wrong.get(file.driver), file.error, now)
        for file in declarations
        if file.error
    }
    declaring = {*past.declaring, *(file.driver for file in declarations if file.devices or not file.error)}
    changed = redeclared(past.devices, devices)
    since = {subject: now if subject in changed else past.since.get(subject, now) for subject in devices}
    every = {subject: one.device for subject, one in gone.items()} | devices
    known = sorted((declared_device(one) for one in every.values()), key=Device.sort_key)
    return DeclaredPast(
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
    """The devices that are declared to be something else than before: nothing that was known is of them."""
    if before is devices:
        return frozenset()
    return frozenset(
        subject
        for subject, device in devices.items()
        if subject in before and before[subject].what != device.what
    )


def _wrong(before: Wrong | None, error: str, now: Instant) -> Wrong:
    return before if before and before.error == error else Wrong(error, now)
