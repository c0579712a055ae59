"""What each subscriber is owed. Pure: reports go in, encoded lists come out.

The kubelet keeps what it was told of a device until the device's lease ends. So a list need not
be complete, and must not be: to repeat an old verdict would renew a lease that nobody has earned.
A device is owed to a subscriber if, since that subscriber's last list, its sources were read again,
or its verdict changed, or it was stated Unknown, which needs no reading.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final

from agent.model.health import DeviceHealth, Health
from agent.model.report import Report

Encode = Callable[[Sequence[DeviceHealth], int], list[bytes]]
"""Makes one or more messages of a list of devices, none of them too large to send. The number is added to
each lease [s]."""
Key = tuple[str, str, str]
"""As of :class:`DeviceHealth`."""
_key_of: Final[Callable[[DeviceHealth], Key]] = attrgetter("driver", "pool", "device")
"""Their ``key``, at half its cost: every publication asks a thousand devices."""


def devices_for(report: Report, driver: str) -> Sequence[DeviceHealth]:
    """What a driver's socket tells: its own devices once it has declared them, until then the host's."""
    whose = driver if driver in report.declaring else ""
    return [device for device in report.devices if device.driver == whose]


class Feed:
    """The newest report, and for each of its devices the publication that last said something new.

    Reports are numbered as they are published, from 1. A subscriber remembers only the number of
    the last list it got, 0 if none. Reports or lists that are skipped lose nothing: what is owed
    since ``m`` contains all that was owed in any publication after ``m`` and is still true.
    """

    def __init__(self, encode: Encode) -> None:
        self.number = 0
        self._encode = encode
        self._devices: dict[Key, DeviceHealth] = {}
        self._numbers: dict[Key, int] = {}
        """The last publication in which each device was owed."""
        self._encoded: dict[tuple[int, int], tuple[bytes, ...]] = {}

    def publish(self, told: Sequence[DeviceHealth]) -> int:
        """Takes the devices of the next report.

        Returns:
            Its number.

        Raises:
            ValueError: it names a device twice; the feed is as it was before.
        """
        devices = dict(zip(map(_key_of, told), told, strict=True))
        if len(devices) < len(told):
            keys = Counter(device.key for device in told)
            _, pool, name = next(key for key in keys if keys[key] > 1)
            raise ValueError(f"report names device {name!r} of pool {pool!r} twice")
        number, before, numbers = self.number + 1, self._devices, self._numbers
        self._numbers = {
            key: number if key not in before or _is_news(before[key], device) else numbers[key]
            for key, device in devices.items()
        }
        self.number, self._devices = number, devices
        self._encoded.clear()
        return number

    def pending_for(self, since: int, extra_s: int = 0) -> tuple[bytes, ...]:
        """The messages for a subscriber whose last list was that of publication ``since``.

        In the order of the report; none if nothing is owed; with leases that are ``extra_s`` longer.
        Encoded once for all subscribers that are equally far.
        """
        messages = self._encoded.get((since, extra_s))
        if messages is None:
            owing = zip(self._devices.values(), self._numbers.values(), strict=True)
            devices = [device for device, number in owing if number > since]
            messages = tuple(self._encode(devices, extra_s)) if devices else ()
            self._encoded[since, extra_s] = messages
        return messages


def _is_news(before: DeviceHealth, now: DeviceHealth) -> bool:
    return (
        now.verified.mono_ns != before.verified.mono_ns
        or now.health is Health.UNKNOWN
        or (now.health, now.message, now.timeout_s) != (before.health, before.message, before.timeout_s)
    )
