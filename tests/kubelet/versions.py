"""Differences between kubelet releases in their use of a plugin's health service, as data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

PLUGIN_SERVICES: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
HEALTH_V1: Final = "v1.DRAResourceHealth"
HEALTH_V1ALPHA1: Final = "v1alpha1.DRAResourceHealth"


@dataclass(frozen=True, slots=True)
class Version:
    """One release of the kubelet."""

    health_on: bool
    """The default of the feature gate ResourceHealthStatus."""
    health_services: tuple[str, ...]
    """The supported health services, the preferred one first."""
    requires_advertised: bool
    """Whether the kubelet opens the stream only for a plugin that advertises the service. Older ones always
    open it."""
    unimplemented_ends: bool
    """Whether UNIMPLEMENTED is final until the plugin registers again. Older kubelets always retry."""
    reads_timeout: bool
    """Whether ``health_check_timeout_seconds`` is read, since 1.35."""
    reads_message: bool
    """Whether ``message`` is read and shown in the pod's status, since 1.36."""
    validates_input: bool
    """Whether registrations with invalid driver names or endpoints are refused, since 1.38."""
    replaces_devices: bool
    """Whether the devices of a prepare replace those of an earlier one. Older kubelets append."""
    checks_pod: bool
    """Whether an unprepare skips claims that the pod does not use, and a claim that is being unprepared
    refuses new pods."""
    device_limit: int | None
    """Devices per driver in the health cache; further ones are ignored. Such a kubelet also removes devices
    that a list lacks after their lease."""

    def health_service(self, advertised: Sequence[str]) -> str | None:
        """Return the service to call. The kubelet's preference decides, not the order of the plugin's
        list.
        """
        if not self.requires_advertised:
            return self.health_services[0]
        return next((service for service in self.health_services if service in advertised), None)


_V1_34: Final = Version(
    health_on=False,
    health_services=(HEALTH_V1ALPHA1,),
    requires_advertised=False,
    unimplemented_ends=False,
    reads_timeout=False,
    reads_message=False,
    validates_input=False,
    replaces_devices=False,
    checks_pod=False,
    device_limit=None,
)
_V1_35: Final = replace(_V1_34, reads_timeout=True)
_V1_36: Final = replace(_V1_35, health_on=True, reads_message=True)
_V1_37: Final = replace(
    _V1_36,
    health_services=(HEALTH_V1, HEALTH_V1ALPHA1),
    requires_advertised=True,
    unimplemented_ends=True,
    replaces_devices=True,
    checks_pod=True,
    device_limit=16_384,
)
VERSIONS: Final = {
    "1.34": _V1_34,
    "1.35": _V1_35,
    "1.36": _V1_36,
    "1.37": _V1_37,
    "1.38": replace(_V1_37, validates_input=True),
}


def plugin_service(advertised: Sequence[str]) -> str:
    """Return the DRAPlugin service to call: the first in the plugin's list that the kubelet supports.

    Raises:
        ValueError: no service matches. The text is the kubelet's.
    """
    if not advertised:
        raise ValueError("empty list of supported gRPC services (aka supported versions)")
    for service in advertised:
        if service in PLUGIN_SERVICES:
            return service
    advertised_text, supported_text = (
        " ".join(f'"{name}"' for name in names) for names in (advertised, PLUGIN_SERVICES)
    )
    raise ValueError(
        f"none of services supported by the plugin ([{advertised_text}]) are supported by the kubelet"
        f" ([{supported_text}])"
    )
