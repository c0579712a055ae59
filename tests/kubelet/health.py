"""What the kubelet believes of devices: its cache of health, with leases that run out when somebody looks.

Source: kubelet ``cm/dra/healthinfo.go``, and ``manager.go`` for what a message says. Not here: streams, pods.
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
"""By the number on the wire; any other is Unknown."""


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """What the cache holds of a device."""

    pool: str
    device: str
    health: str = "Unknown"
    updated_ns: int = 0
    """When the kubelet received it, since 1970."""
    lease_ns: int = 0
    message: str = ""
    """The bytes of a character cut in two stand as lone surrogates; Go's string keeps them, too."""

    @property
    def key(self) -> str:
        """By which a driver's devices are told apart."""
        return f"{self.pool}/{self.device}"

    @property
    def said(self) -> tuple[str, str, int]:
        """What makes a difference."""
        return self.health, self.message, self.lease_ns

    def stale(self, now_ns: int) -> bool:
        """Nobody said anything of it for longer than its lease."""
        return now_ns - self.updated_ns > (self.lease_ns or LEASE_NS)


def read_device(entry: Any, version: Version) -> DeviceHealth:
    """An entry of a health list, as the kubelet takes it. Nothing in it is ever refused.

    Its own time is dropped: the time of receipt replaces it.
    """
    seconds = entry.health_check_timeout_seconds if version.reads_timeout else 0
    return DeviceHealth(
        pool=entry.device.pool_name,
        device=entry.device.device_name,
        health=HEALTH.get(entry.health, "Unknown"),
        lease_ns=_wrapped(seconds * NS) if seconds > 0 else LEASE_NS,
        message=cut_message(entry.message) if version.reads_message else "",
    )


def cut_message(message: str) -> str:
    """At most 1,024 bytes; a longer one is cut after 1,021, between any two bytes, and gets three dots."""
    data = message.encode()
    if len(data) > MESSAGE_LIMIT:
        data = data[: MESSAGE_LIMIT - 3] + b"..."
    return data.decode(errors="surrogateescape")


class HealthCache:
    """Of all drivers. Any thread may call any method."""

    def __init__(self, file: Path | None, now_ns: Callable[[], int]) -> None:
        """
        Args:
            file: Where it is kept over a crash of the kubelet; read now, if it can be.
            now_ns: The time since 1970, which a test may put forward.
        """
        self._file = file
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._drivers: dict[str, dict[str, DeviceHealth]] = {}
        self.saves = 0
        """How often the file was written."""
        if file is not None and file.exists():
            try:
                self._drivers = _from_json(file.read_bytes())
            except (ValueError, KeyError, TypeError, AttributeError):
                self._drivers = {}  # the kubelet logs it, and starts with an empty one

    def get(self, driver: str, pool: str, device: str) -> DeviceHealth:
        """What is believed now. Looking changes nothing, and tells nobody that a lease ran out."""
        unknown = DeviceHealth(pool, device)
        with self._lock:
            found = self._drivers.get(driver, {}).get(unknown.key)
            return unknown if found is None or found.stale(self._now_ns()) else found

    def update(self, driver: str, devices: Sequence[DeviceHealth]) -> list[DeviceHealth]:
        """Takes a health list.

        Returns:
            What it takes as changed, in the order in which that was found: entries that are new, or differ in
            health, message or lease from what was held, be it stale or not; then devices that were not in the
            list and whose lease is over, which are Unknown from now on.
        """
        with self._lock:
            now_ns = self._now_ns()
            held = self._drivers.setdefault(driver, {})
            changed = []
            for device in devices:
                taken = replace(device, updated_ns=now_ns)
                before = held.get(taken.key)
                if before is None or before.said != taken.said:
                    changed.append(taken)
                held[taken.key] = taken
            told = {device.key for device in devices}
            for key, device in held.items():
                if key not in told and device.health != "Unknown" and device.stale(now_ns):
                    held[key] = replace(device, health="Unknown", message="", updated_ns=now_ns)
                    changed.append(held[key])
            if changed:
                self._save()
            return changed

    def clear(self, driver: str) -> None:
        """Forgets a driver."""
        with self._lock:
            self._drivers.pop(driver, None)
            self._save()

    def devices(self, driver: str) -> Iterable[DeviceHealth]:
        """All that is held of a driver, be it stale or not."""
        with self._lock:
            return list(self._drivers.get(driver, {}).values())

    def _save(self) -> None:
        self.saves += 1
        if self._file is not None:
            new = self._file.with_name(f"{self._file.name}.tmp")
            new.write_text(_to_json(self._drivers))
            new.rename(self._file)


def _wrapped(number: int) -> int:
    """As a signed 64-bit integer has it. Inferred: a lease of 292 years is negative, and always over."""
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
                        "Message": shown(device.message),
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


def shown(message: str) -> str:
    """As it stands in JSON and in a pod's status: half a character becomes the replacement character."""
    return message.encode(errors="surrogateescape").decode(errors="replace")


def _write_time(at_ns: int) -> str:
    second = datetime.fromtimestamp(at_ns // NS, UTC)
    return f"{second:%Y-%m-%dT%H:%M:%S}.{at_ns % NS:09}Z"


def _read_time(text: str) -> int:
    match = re.fullmatch(r"(.+)\.(\d{9})Z", text)
    if match is None:
        raise ValueError(f"{text!r} is no time")
    second = datetime.strptime(match[1], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC)
    return int(second.timestamp()) * NS + int(match[2])
