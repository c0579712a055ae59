"""Which uses of a record somebody means who names a pod, a claim or a device. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agent.cli.explain.find import title

if TYPE_CHECKING:
    from agent.model.uses import DeviceUsage


def pod_names(use: DeviceUsage) -> Iterator[str]:
    """What the pod is called: namespace/name, name, UID; and the names that it may have."""
    if use.pod.name:
        yield str(use.pod)
        yield use.pod.name
    yield from filter(None, [use.pod.uid])
    for name in use.maybe:
        yield name
        yield name.partition("/")[2]


def claim_names(use: DeviceUsage) -> Iterator[str]:
    """What the claim is called likewise."""
    yield str(use.claim)
    yield use.claim.name
    yield from filter(None, [use.claim.uid])


def device_names(use: DeviceUsage) -> Iterator[str]:
    """What the device is called: with its driver and pool, with its pool, and by its name alone."""
    yield title(use.device)
    yield f"{use.device.pool}/{use.device.device}"
    yield use.device.device
