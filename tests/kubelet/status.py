"""``status.containerStatuses[].allocatedResourcesStatus`` of a pod: the health of what its containers use.

Source: kubelet ``cm/dra/manager.go``. Only containers that name a claim get one. Left out: what the API
server would refuse of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kubelet.claims import ClaimInfo, PreparedDevice
from kubelet.health import DeviceHealth, HealthCache, shown


class ResourceHealth(NamedTuple):
    """One device, or all that share a first CDI id."""

    resource_id: str
    health: str
    message: str = ""


def allocated_resources(
    uses: Sequence[str], claims: Mapping[str, ClaimInfo], cache: HealthCache, *, messages: bool
) -> dict[str, tuple[ResourceHealth, ...]]:
    """Of one container.

    Args:
        uses: What its resources.claims say: ``<pod's name of the claim>`` or ``<that>/<request>``.
        claims: By the pod's name; those that are noted.
        cache: What is believed of devices.
        messages: Whether the feature gate ResourceHealthStatusMessage is on.

    Returns:
        By the entry's name, ``claim:<use>``; without those that have no device.
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
    base = request.partition("/")[0]  # the driver returns requests without their subrequests
    for driver, devices in drivers.items():
        for device in devices:
            if base and device.requests and base not in device.requests:
                continue
            entry = resource_health(driver, device, cache.get(driver, device.pool, device.device), messages)
            found.setdefault(entry.resource_id, entry)  # the first one wins
    return tuple(found.values())


def resource_health(
    driver: str, device: PreparedDevice, health: DeviceHealth, messages: bool
) -> ResourceHealth:
    """Of one device, by its first CDI id if it has one."""
    name = device.cdi_ids[0] if device.cdi_ids else f"{driver}/{device.pool}/{device.device}"
    return ResourceHealth(name, health.health, shown(health.message) if messages else "")
