"""How the kubelet learns of a driver: ``pluginregistration.Registration``, on a socket of its own.

The socket is the registration: while its file is there the driver is registered. The kubelet waits one
second for the first answer, so nothing here waits for anything.
"""

import logging
from collections.abc import Callable
from typing import Final

from agent.serve.grpc.gen.registration_v1 import pluginregistration as wire
from agent.serve.health.embedded_service import SERVICES

PLUGIN_TYPE: Final = "DRAPlugin"

SUPPORTED: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin", *SERVICES)
"""What a driver serves, the newest first: the kubelet takes the first plugin service that it knows. A list
without a plugin service would be refused, and from 1.37 one without a health service is asked for none."""

OnStatus = Callable[[bool, str], None]
"""Called with whether the kubelet registered the driver, and its words if it did not. Must return at once."""

log = logging.getLogger(__name__)


class Registration(wire.RegistrationBase):
    """The service of a driver's registration socket.

    Args:
        driver: Its name.
        endpoint: Path of the socket that its services are on.
        on_status: Told how each registration ended.
    """

    def __init__(self, driver: str, endpoint: str, on_status: OnStatus | None = None) -> None:
        self._info = wire.PluginInfo(PLUGIN_TYPE, driver, endpoint, list(SUPPORTED))
        self._on_status = on_status

    async def get_info(self, info_request: wire.InfoRequest) -> wire.PluginInfo:
        """What the driver is, and where."""
        return self._info

    async def notify_registration_status(
        self, registration_status: wire.RegistrationStatus
    ) -> wire.RegistrationStatusResponse:
        """Takes note. After a failure the kubelet tries again by itself, so the socket stays."""
        registered, error = registration_status.plugin_registered, registration_status.error
        if registered:
            log.info("%s: registered with the kubelet", self._info.name)
        else:
            log.warning(
                "%s: the kubelet did not register the driver: %s", self._info.name, error or "no reason"
            )
        if self._on_status is not None:
            try:
                self._on_status(registered, error)
            except BaseException:  # the driver's own; SystemExit, too, would end more than this call
                log.exception("%s: on_status raised", self._info.name)
        return wire.RegistrationStatusResponse()
