"""What the kubelets of different releases do differently with a plugin's health service, as data.

Not here: what they all do alike.
"""

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
    """Whether the feature gate ResourceHealthStatus is on unless somebody says otherwise."""
    health_services: tuple[str, ...]
    """Those it speaks, the preferred one first."""
    asks_first: bool
    """Opens the stream only where the plugin advertises the service. Else always, at every plugin."""
    unimplemented_ends: bool
    """UNIMPLEMENTED is final until the plugin registers again. Else it is tried again for ever."""
    reads_timeout: bool
    """``health_check_timeout_seconds``, since 1.35."""
    reads_message: bool
    """``message``, and shows it in the pod's status; since 1.36."""

    def health_service(self, advertised: Sequence[str]) -> str | None:
        """The service to be called, by the kubelet's preference and not by the order of the plugin's list."""
        if not self.asks_first:
            return self.health_services[0]
        return next((service for service in self.health_services if service in advertised), None)


VERSIONS: Final = {
    "1.34": Version(False, (HEALTH_V1ALPHA1,), False, False, reads_timeout=False, reads_message=False),
    "1.35": Version(False, (HEALTH_V1ALPHA1,), False, False, reads_timeout=True, reads_message=False),
    "1.36": Version(True, (HEALTH_V1ALPHA1,), False, False, reads_timeout=True, reads_message=True),
    "1.37": Version(True, (HEALTH_V1, HEALTH_V1ALPHA1), True, True, reads_timeout=True, reads_message=True),
}


def plugin_service(advertised: Sequence[str]) -> str:
    """The DRAPlugin service to be called: the first of the plugin's list that the kubelet knows.

    Raises:
        ValueError: there is none. The words are the kubelet's.
    """
    if not advertised:
        raise ValueError("empty list of supported gRPC services (aka supported versions)")
    for service in advertised:
        if service in PLUGIN_SERVICES:
            return service
    theirs, ours = (" ".join(f'"{one}"' for one in names) for names in (advertised, PLUGIN_SERVICES))
    raise ValueError(
        f"none of services supported by the plugin ([{theirs}]) are supported by the kubelet ([{ours}])"
    )
