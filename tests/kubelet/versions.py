"""How releases of the kubelet differ in their use of a plugin's health service, as data."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    validates_input: bool = False
    """Whether registrations with invalid driver names or endpoints are refused, since 1.38."""

    def health_service(self, advertised: Sequence[str]) -> str | None:
        """Returns the service to call. The kubelet's preference decides, not the order of the plugin's
        list.
        """
        if not self.requires_advertised:
            return self.health_services[0]
        return next((service for service in self.health_services if service in advertised), None)


VERSIONS: Final = {
    "1.34": Version(False, (HEALTH_V1ALPHA1,), False, False, reads_timeout=False, reads_message=False),
    "1.35": Version(False, (HEALTH_V1ALPHA1,), False, False, reads_timeout=True, reads_message=False),
    "1.36": Version(True, (HEALTH_V1ALPHA1,), False, False, reads_timeout=True, reads_message=True),
    "1.37": Version(True, (HEALTH_V1, HEALTH_V1ALPHA1), True, True, reads_timeout=True, reads_message=True),
    "1.38": Version(
        True,
        (HEALTH_V1, HEALTH_V1ALPHA1),
        True,
        True,
        reads_timeout=True,
        reads_message=True,
        validates_input=True,
    ),
}


def plugin_service(advertised: Sequence[str]) -> str:
    """Returns the DRAPlugin service to call: the first in the plugin's list that the kubelet supports.

    Raises:
        ValueError: no service matches. The text is the kubelet's.
    """
    if not advertised:
        raise ValueError("empty list of supported gRPC services (aka supported versions)")
    for service in advertised:
        if service in PLUGIN_SERVICES:
            return service
    advertised_text, supported_text = (
        " ".join(f'"{one}"' for one in names) for names in (advertised, PLUGIN_SERVICES)
    )
    raise ValueError(
        f"none of services supported by the plugin ([{advertised_text}]) are supported by the kubelet"
        f" ([{supported_text}])"
    )
