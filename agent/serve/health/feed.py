"""Selection of the devices that each health stream must send next. Pure: reports in, encoded lists out.

The kubelet keeps a device's verdict until its lease (health_check_timeout_seconds) ends. A list must not
repeat an old verdict, because that would renew the lease although no sensor was read. A device is pending for
a subscriber if one of three things happened since the subscriber's last list: the agent read the device's
sources again, the verdict changed, or the device was reported Unknown.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final

from agent.model.health import DeviceHealth, Health
from agent.model.report import Report

HealthListEncoder = Callable[[Sequence[DeviceHealth], int], list[bytes]]
"""Function that encodes devices as health list messages within the size limit.

Its second argument is added to each device's lease [s].
"""
DEFAULT_LEASE_S: Final = 30
"""Lease that the kubelet uses for a device whose list entry has none [s]."""
DeviceKey = tuple[str, str, str]
"""Identity of a device: driver, pool and name."""
_key_of: Final[Callable[[DeviceHealth], DeviceKey]] = attrgetter("driver", "pool", "device")
"""Getter of a device's key; faster than the property ``key``, because it runs for all devices of a report."""


def devices_of_socket(report: Report, driver: str) -> Sequence[DeviceHealth]:
    """Return the devices of a report that a driver's socket serves: those that the driver declared.

    A driver that has not declared any gets the host's own devices.
    """
    owner = driver if driver in report.declaring else ""
    return [device for device in report.devices if device.driver == owner]


class HealthFeed:
    """Newest health of one socket's devices, and the publication in which each last became pending: read
    again, changed or Unknown.

    Publications are numbered from 1. A subscriber remembers only the number of the last publication that it
    received, 0 if none. A subscriber that skips publications still receives every verdict that is current.
    """

    def __init__(self, encode: HealthListEncoder) -> None:
        self.number = 0
        """Number of the last publication, which a subscriber remembers; 0: none."""
        self._encode = encode
        self._devices: dict[DeviceKey, DeviceHealth] = {}
        self._numbers: dict[DeviceKey, int] = {}
        """Number of the last publication in which each device was pending."""
        self._encoded: dict[tuple[int, int], tuple[bytes, ...]] = {}

    def publish(self, reported: Sequence[DeviceHealth]) -> int:
        """Replace the devices by those of the next report, and return the number of this publication.

        Raises:
            ValueError: The report names a device twice; the feed is unchanged.
        """
        devices = dict(zip(map(_key_of, reported), reported, strict=True))
        if len(devices) < len(reported):
            keys = Counter(device.key for device in reported)
            _, pool, name = next(key for key in keys if keys[key] > 1)
            raise ValueError(f"health report names device {name!r} of pool {pool!r} twice")
        number, before, numbers = self.number + 1, self._devices, self._numbers
        self._numbers = {
            key: number if key not in before or _is_changed(before[key], device) else numbers[key]
            for key, device in devices.items()
        }
        self.number, self._devices = number, devices
        self._encoded.clear()
        return number

    def pending_messages(self, since_number: int, extra_lease_s: int = 0) -> tuple[bytes, ...]:
        """Return the encoded lists for a subscriber that last received publication ``since_number``.

        They hold the devices that have been pending since then, in the order of the report. Each lease
        (health_check_timeout_seconds) is ``extra_lease_s`` longer. Empty: no device is pending.
        """
        messages = self._encoded.get((since_number, extra_lease_s))
        if messages is None:
            numbered = zip(self._devices.values(), self._numbers.values(), strict=True)
            devices = [device for device, number in numbered if number > since_number]
            messages = tuple(self._encode(devices, extra_lease_s)) if devices else ()
            self._encoded[since_number, extra_lease_s] = messages
        return messages

    def is_current(self, age_s: float) -> bool:
        """Return whether the last report may be sent to a new stream, ``age_s`` after its publication.

        It may before the smallest lease (validity of a verdict) ends: later, clients would take the old
        verdicts of a hanging engine loop for new ones.
        """
        leases = (device.timeout_s or DEFAULT_LEASE_S for device in self._devices.values())
        return age_s < min(leases, default=0)

    def is_repeatable(self, age_s: float) -> bool:
        """Return whether the last report may be sent again, ``age_s`` seconds after its publication.

        It may before half of the smallest lease (validity of a verdict) has passed. To clients a repeated
        list is a sign of life, and a longer silence means that the engine loop hangs.
        """
        leases = (device.timeout_s or DEFAULT_LEASE_S for device in self._devices.values())
        return age_s < min(leases, default=0) / 2


def _is_changed(before: DeviceHealth, now: DeviceHealth) -> bool:
    return (
        now.verified.mono_ns != before.verified.mono_ns
        or now.health is Health.UNKNOWN
        or (now.health, now.message, now.timeout_s) != (before.health, before.message, before.timeout_s)
    )
