"""The kubelet's cache of device health. An expired lease takes effect when the entry is read.

It follows kubelet ``cm/dra/healthinfo.go``, and ``manager.go`` for the conversion of a message. Streams and
pods are in other modules.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from kubelet.pace import NS
from kubelet.versions import Version

LEASE_NS: Final = 30 * NS
MESSAGE_LIMIT: Final = 1024
HEALTH: Final = {1: "Healthy", 2: "Unhealthy"}
"""Health by its number on the wire. Every other number means Unknown."""


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """A device's entry in the cache."""

    pool: str
    device: str
    health: str = "Unknown"
    updated_ns: int = 0
    """Time when the kubelet received the entry, since 1970."""
    lease_ns: int = 0
    message: str = ""
    """Bytes of a character that was cut are lone surrogates here. A Go string keeps such bytes too."""

    @property
    def key(self) -> str:
        """Identifies a device among a driver's devices."""
        return f"{self.pool}/{self.device}"

    @property
    def compared(self) -> tuple[str, str, int]:
        """The fields whose difference makes a change."""
        return self.health, self.message, self.lease_ns

    def stale(self, now_ns: int) -> bool:
        """Whether the lease has expired."""
        return now_ns - self.updated_ns > (self.lease_ns or LEASE_NS)


def read_device(entry: Any, version: Version) -> DeviceHealth:
    """Convert an entry of a health list as the kubelet does. No entry is rejected.

    The kubelet ignores the entry's own time and uses the time of receipt.
    """
    seconds = entry.health_check_timeout_seconds if version.reads_timeout else 0
    return DeviceHealth(
        pool=entry.device.pool_name,
        device=entry.device.device_name,
        health=HEALTH.get(entry.health, "Unknown"),
        lease_ns=_wrap_int64(seconds * NS) if seconds > 0 else LEASE_NS,
        message=cut_message(entry.message) if version.reads_message else "",
    )


def cut_message(message: str) -> str:
    """Cut a message to 1,024 bytes: after byte 1,021, possibly within a character, and add three dots."""
    data = message.encode()
    if len(data) > MESSAGE_LIMIT:
        data = data[: MESSAGE_LIMIT - 3] + b"..."
    return data.decode(errors="surrogateescape")


class HealthCache:
    """The health of all drivers' devices. Every method is thread-safe."""

    def __init__(self, file: Path | None, now_ns: Callable[[], int], device_limit: int | None = None) -> None:
        """Args:
        file: Keeps the cache when the kubelet ends. A readable file is loaded.
        now_ns: Returns the time since 1970. A test may advance it.
        device_limit: See :class:`kubelet.versions.Version`.
        """
        self._file = file
        self._device_limit = device_limit
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._drivers: dict[str, dict[str, DeviceHealth]] = {}
        self.saves = 0
        """The number of times the file was written."""
        if file is not None and file.exists():
            try:
                self._drivers = _from_json(file.read_bytes())
            except (ValueError, KeyError, TypeError, AttributeError):
                self._drivers = {}  # the kubelet logs the error and starts with an empty cache

    def get(self, driver: str, pool: str, device: str) -> DeviceHealth:
        """Return the current health. A read changes nothing and notifies no pod of an expired lease."""
        unknown = DeviceHealth(pool, device)
        with self._lock:
            found = self._drivers.get(driver, {}).get(unknown.key)
            return unknown if found is None or found.stale(self._now_ns()) else found

    def update(
        self,
        driver: str,
        devices: Sequence[DeviceHealth],
        on_change: Callable[[list[DeviceHealth]], None] = lambda _: None,
    ) -> list[DeviceHealth]:
        """Store a health list.

        Args:
            driver: The name of the driver.
            devices: The entries of the list.
            on_change: Called with the changed entries, if any, before :meth:`get` returns them.

        Returns:
            The changed entries in the order of discovery. First come entries that are new or whose health,
            message or lease differs from the stored one, stale or not. Then come devices missing in the
            list whose lease has expired and that were not Unknown; they become Unknown.
        """
        with self._lock:
            now_ns = self._now_ns()
            held = self._drivers.setdefault(driver, {})
            changed = []
            for device in devices:
                taken = replace(device, updated_ns=now_ns)
                before = held.get(taken.key)
                if before is None and self._device_limit is not None and len(held) >= self._device_limit:
                    continue
                if before is None or before.compared != taken.compared:
                    changed.append(taken)
                held[taken.key] = taken
            listed = {device.key for device in devices}
            removed = 0
            for key, device in list(held.items()):
                if key in listed or not device.stale(now_ns):
                    continue
                if device.health != "Unknown":
                    held[key] = replace(device, health="Unknown", message="", updated_ns=now_ns)
                    changed.append(held[key])
                if self._device_limit is not None:
                    del held[key]
                    removed += 1
            if changed or removed:
                self._save()
            if changed:
                on_change(changed)
            return changed

    def clear(self, driver: str, on_clear: Callable[[], None] = lambda: None) -> None:
        """Remove a driver's entries. ``on_clear`` is called before :meth:`get` shows that."""
        with self._lock:
            self._drivers.pop(driver, None)
            self._save()
            on_clear()

    def devices(self, driver: str) -> Iterable[DeviceHealth]:
        """Return a driver's entries, stale or not."""
        with self._lock:
            return list(self._drivers.get(driver, {}).values())

    def _save(self) -> None:
        self.saves += 1
        if self._file is not None:
            new = self._file.with_name(f"{self._file.name}.tmp")
            new.write_text(_to_json(self._drivers))
            new.rename(self._file)


def _wrap_int64(number: int) -> int:
    """Wrap a number to a signed 64-bit integer. Assumed: a lease above 292 years is negative, so always
    expired.
    """
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _to_json(drivers: dict[str, dict[str, DeviceHealth]]) -> str:
    return json.dumps(
        {
            driver: {
                "Devices": {
                    key: {
                        "PoolName": device.pool,
                        "DeviceName": device.device,
                        "Health": device.health,
                        "LastUpdated": _write_time(device.updated_ns),
                        "HealthCheckTimeout": device.lease_ns,
                        "Message": message_in_status(device.message),
                    }
                    for key, device in devices.items()
                }
            }
            for driver, devices in drivers.items()
        }
    )


def _from_json(data: bytes) -> dict[str, dict[str, DeviceHealth]]:
    return {
        driver: {
            key: DeviceHealth(
                pool=entry["PoolName"],
                device=entry["DeviceName"],
                health=entry["Health"],
                updated_ns=_read_time(entry["LastUpdated"]),
                lease_ns=entry["HealthCheckTimeout"],
                message=entry["Message"],
            )
            for key, entry in held["Devices"].items()
        }
        for driver, held in json.loads(data).items()
    }


def message_in_status(message: str) -> str:
    """Return a message as JSON and the pod status show it: a cut character becomes the replacement
    character.
    """
    return message.encode(errors="surrogateescape").decode(errors="replace")


def _write_time(at_ns: int) -> str:
    second = datetime.fromtimestamp(at_ns // NS, UTC)
    return f"{second:%Y-%m-%dT%H:%M:%S}.{at_ns % NS:09}Z"


def _read_time(text: str) -> int:
    match = re.fullmatch(r"(.+)\.(\d{9})Z", text)
    if match is None:
        raise ValueError(f"{text!r} is not a time")
    second = datetime.strptime(match[1], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC)
    return int(second.timestamp()) * NS + int(match[2])
