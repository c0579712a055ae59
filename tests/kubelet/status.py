"""``status.containerStatuses[].allocatedResourcesStatus`` of a pod: the health of the containers' devices.

It follows kubelet ``cm/dra/manager.go``. Only containers that use a claim have an entry. The API server's
validation is left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kubelet.claims import ClaimInfo, PreparedDevice
from kubelet.health import DeviceHealth, HealthCache, message_in_status


class ResourceHealth(NamedTuple):
    """The health of one device, or of all devices with the same first CDI id."""

    resource_id: str
    health: str
    message: str = ""


def allocated_resources(
    uses: Sequence[str], claims: Mapping[str, ClaimInfo], cache: HealthCache, *, messages: bool
) -> dict[str, tuple[ResourceHealth, ...]]:
    """Return the entries of one container.

    Args:
        uses: The container's resources.claims: ``<local name>`` or ``<local name>/<request>``.
        claims: The stored claims by the pod's local name.
        cache: The health of devices.
        messages: The feature gate ResourceHealthStatusMessage.

    Returns:
        Entries by name, ``claim:<use>``, without those that have no device.
    """
    found = {}
    for use in uses:
        name, _, request = use.partition("/")
        if name in claims:
            resources = _resources(claims[name].drivers, request, cache, messages)
            if resources:
                found[f"claim:{use}"] = resources
    return found


def _resources(
    drivers: Mapping[str, Iterable[PreparedDevice]], request: str, cache: HealthCache, messages: bool
) -> tuple[ResourceHealth, ...]:
    found: dict[str, ResourceHealth] = {}
    base_request = request.partition("/")[0]  # drivers return request names without subrequests
    for driver, devices in drivers.items():
        for device in devices:
            if base_request and device.requests and base_request not in device.requests:
                continue
            entry = resource_health(driver, device, cache.get(driver, device.pool, device.device), messages)
            found.setdefault(entry.resource_id, entry)  # the first one wins
    return tuple(found.values())


def resource_health(
    driver: str, device: PreparedDevice, health: DeviceHealth, messages: bool
) -> ResourceHealth:
    """Return the entry of one device, under its first CDI id if it has one."""
    name = device.cdi_ids[0] if device.cdi_ids else f"{driver}/{device.pool}/{device.device}"
    return ResourceHealth(name, health.health, message_in_status(health.message) if messages else "")
