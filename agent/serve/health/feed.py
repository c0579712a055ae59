"""Pending devices of each health stream. Pure: reports go in, encoded lists come out.

The kubelet keeps a verdict until the device's lease ends. So a list need not be complete, and must not be:
repeating an old verdict would renew the lease without a new reading. A device is pending for a subscriber
if, since that subscriber's last list, its sources were read again, its verdict changed, or it was reported
Unknown, which needs no reading.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final

from agent.model.health import DeviceHealth, Health
from agent.model.report import Report

EncodeDevices = Callable[[Sequence[DeviceHealth], int], list[bytes]]
"""Function that encodes a list of devices as one or more messages within the size limit. The number is
added to each lease [s]."""
DeviceKey = tuple[str, str, str]
"""Key that identifies the device of a :class:`DeviceHealth`."""
_key_of: Final[Callable[[DeviceHealth], DeviceKey]] = attrgetter("driver", "pool", "device")
"""Faster getter of a device's ``key``: every publication reads a thousand devices."""


def devices_for(report: Report, driver: str) -> Sequence[DeviceHealth]:
    """Return the devices to send on a driver's socket: those that it declared; before that, the host's
    devices."""
    whose = driver if driver in report.declaring else ""
    return [device for device in report.devices if device.driver == whose]


class Feed:
    """Newest health of the devices, each with the number of the publication that last changed it.

    Publications are numbered from 1. A subscriber remembers only the number of the last list it received, 0
    if none. Skipped lists lose nothing: what is pending since ``m`` contains everything that was pending in
    any publication after ``m`` and is still true.
    """

    def __init__(self, encode: EncodeDevices) -> None:
        self.number = 0
        self._encode = encode
        self._devices: dict[DeviceKey, DeviceHealth] = {}
        self._numbers: dict[DeviceKey, int] = {}
        """Number of the last publication in which each device was pending."""
        self._encoded: dict[tuple[int, int], tuple[bytes, ...]] = {}

    def publish(self, reported: Sequence[DeviceHealth]) -> int:
        """Replace the devices by those of the next report.

        Returns:
            The number of the publication.

        Raises:
            ValueError: The report names a device twice; the feed is unchanged.
        """
        devices = dict(zip(map(_key_of, reported), reported, strict=True))
        if len(devices) < len(reported):
            keys = Counter(device.key for device in reported)
            _, pool, name = next(key for key in keys if keys[key] > 1)
            raise ValueError(f"report names device {name!r} of pool {pool!r} twice")
        number, before, numbers = self.number + 1, self._devices, self._numbers
        self._numbers = {
            key: number if key not in before or _is_changed(before[key], device) else numbers[key]
            for key, device in devices.items()
        }
        self.number, self._devices = number, devices
        self._encoded.clear()
        return number

    def pending_for(self, since: int, extra_s: int = 0) -> tuple[bytes, ...]:
        """Return the messages for a subscriber whose last list was that of publication ``since``.

        Devices have the order of the report; empty: no device is pending; each lease is ``extra_s`` longer.
        Encoded once for all subscribers of the same number.
        """
        messages = self._encoded.get((since, extra_s))
        if messages is None:
            numbered = zip(self._devices.values(), self._numbers.values(), strict=True)
            devices = [device for device, number in numbered if number > since]
            messages = tuple(self._encode(devices, extra_s)) if devices else ()
            self._encoded[since, extra_s] = messages
        return messages


def _is_changed(before: DeviceHealth, now: DeviceHealth) -> bool:
    return (
        now.verified.mono_ns != before.verified.mono_ns
        or now.health is Health.UNKNOWN
        or (now.health, now.message, now.timeout_s) != (before.health, before.message, before.timeout_s)
    )
