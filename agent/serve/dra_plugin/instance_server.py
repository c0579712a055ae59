"""Plugin server of one instance of a DRA driver: prepare, health, registration and leader election.

The service socket has DRAPlugin v1 and v1beta1 and the health API v1 and v1alpha1. Through the registration
socket the kubelet finds the service socket.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from agent.model.report import Report
from agent.serve.agent_servers import encode_device_health
from agent.serve.dra_plugin.leader import LeaderElection
from agent.serve.dra_plugin.prepared_devices import WireMode
from agent.serve.dra_plugin.service import (
    ENTRIES_LIMIT,
    ClaimHandler,
    DraPluginService,
    SizeLimitedDraPluginStream,
)
from agent.serve.dra_plugin.sockets import PluginPaths, PluginSockets
from agent.serve.grpc.codec import Codec
from agent.serve.grpc.gen.registration_v1 import pluginregistration as wire
from agent.serve.grpc.server import HardenedServer
from agent.serve.health.embedded_service import SERVICES
from agent.serve.health.service import HealthPublisher, HealthService, HealthSubscribers
from agent.serve.sockets import make_socket_directory
from agent.system.threads.latest_value import LatestValue
from agent.system.threads.worker_pool import SerialWorker
from agent.system.timing import LogRateLimiter

PLUGIN_TYPE: Final = "DRAPlugin"

SUPPORTED: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin", *SERVICES)
"""gRPC services of a driver for its registration. The kubelet uses the first plugin service that it knows, so
the newest is first, and requests health, since 1.37, only if the list has a health service."""

OnRegistration = Callable[[bool, str], None]
"""Callback after a registration with True, or with False and the kubelet's error text. Must not block."""


class RegistrationService(wire.RegistrationBase):
    """Service ``pluginregistration.Registration`` of a driver's registration socket.

    The driver is registered while the socket's file exists. Never blocks: the kubelet waits one second for
    the first answer.

    Args:
        driver: Name of the driver.
        endpoint: Path of the driver's service socket.
        on_status: Called with the result of each registration.
    """

    def __init__(self, driver: str, endpoint: str, on_status: OnRegistration | None = None) -> None:
        self._info = wire.PluginInfo(PLUGIN_TYPE, driver, endpoint, list(SUPPORTED))
        self._on_status = on_status

    async def get_info(self, info_request: wire.InfoRequest) -> wire.PluginInfo:
        """Answer the kubelet with the driver's name, the path of its service socket, and its services."""
        return self._info

    async def notify_registration_status(
        self, registration_status: wire.RegistrationStatus
    ) -> wire.RegistrationStatusResponse:
        """Log the result of a registration and call the callback. The kubelet itself retries after a
        failure."""
        registered, error = registration_status.plugin_registered, registration_status.error
        if registered:
            log.info("driver %s: registered with the kubelet", self._info.name)
        else:
            log.warning(
                "driver %s: registration failed: %s; the kubelet will retry",
                self._info.name,
                error or "no reason given",
            )
        if self._on_status is not None:
            try:
                self._on_status(registered, error)
            except BaseException:  # also SystemExit, which would end the server
                log.exception("driver %s: callback on_status raised an exception; ignored", self._info.name)
        return wire.RegistrationStatusResponse()


SHUTTING_DOWN: Final = "driver shutting down"
"""Text of the UNAVAILABLE status with which streams end when the driver ends."""

SOCKETS: Final = 2
"""Number of sockets of an instance: the service and the registration."""
CHECK_S: Final = 2.0
"""Interval of checks of the driver's sockets and its other instances [s]."""
CHECK_WITH_OTHERS_S: Final = 1.0
"""Shorter interval of these checks while another instance of the driver runs [s].

When that instance ends, the kubelet forgets the driver's health.
"""

log = logging.getLogger(__name__)


class DriverInstanceServer:
    """Plugin server of one instance of a driver; :meth:`run` serves."""

    def __init__(
        self,
        latest: LatestValue[Report],
        claims: ClaimHandler,
        *,
        driver: str,
        paths: PluginPaths,
        pod_uid: str = "",
        wire: WireMode = WireMode.NONE,
        on_status: OnRegistration | None = None,
    ) -> None:
        self.drain_s = 0.0
        """Time that the shutdown waits for open calls of the kubelet to be answered [s]."""
        self._latest = latest
        self._claims = claims
        self._driver = driver
        self._paths = paths
        self._pod_uid = pod_uid
        self._wire = wire
        self._on_status = on_status

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until cancelled; then unregister, wait for open calls, and remove the sockets.

        ``ready`` is called when the kubelet can find the driver. The shutdown takes at most :attr:`drain_s`
        and two seconds more, even if a disk hangs.

        Raises:
            ResourceBusyError: Another instance serves one of the sockets.
            ConfigError: A directory or socket cannot be used.
            PermissionDeniedError: This process may not create a directory or socket.
            ValueError: A report names a device twice.
        """
        make_socket_directory(self._paths.plugin_dir, flag="--plugin-dir")
        election = LeaderElection(self._paths.plugin_dir, self._pod_uid)
        files = SerialWorker()
        try:
            await self._serve(election, files, ready)
        finally:
            try:
                await files.finish(election.leave)
            finally:
                files.close()

    async def _serve(self, election: LeaderElection, files: SerialWorker, ready: Callable[[], None]) -> None:
        publisher = HealthPublisher(self._latest, encode_device_health, [self._driver])
        plugin = DraPluginService(self._claims, self._wire)
        registration = RegistrationService(self._driver, str(self._paths.service), self._on_status)
        sockets = PluginSockets(
            self._paths,
            HardenedServer(
                [plugin, HealthService(publisher.subscribers_of(self._driver))],
                codec=Codec(ENTRIES_LIMIT),
                stream_class=SizeLimitedDraPluginStream,
                sockets=SOCKETS,
            ),
            HardenedServer([registration], sockets=SOCKETS),
            files,
        )
        try:
            await sockets.open()
            ready()
            leadership = _Leadership(election, files, publisher.subscribers_of(self._driver))
            await asyncio.gather(publisher.run(), self._run_checks(sockets, leadership))
        finally:
            try:
                await sockets.unregister(SHUTTING_DOWN)
                if not await plugin.close(SHUTTING_DOWN, self.drain_s):
                    log.warning(
                        "driver %s: shutdown: calls of the kubelet not answered within %g s; the calls were "
                        "cancelled",
                        self._driver,
                        self.drain_s,
                    )
            finally:  # also if the wait for the calls is cancelled
                await sockets.close(SHUTTING_DOWN)

    async def _run_checks(self, sockets: PluginSockets, leadership: "_Leadership") -> None:
        while True:
            await sockets.restore_missing()
            await asyncio.sleep(await leadership.check())


class _Leadership:
    """Check of leader election that mutes the health streams of a driver instance which is not the leader."""

    def __init__(self, election: LeaderElection, files: SerialWorker, subscribers: HealthSubscribers) -> None:
        self._election = election
        self._files = files
        self._subscribers = subscribers
        self._was_leader = True
        self._repeats = 0
        self._log_limit = LogRateLimiter()

    async def check(self) -> float:
        """Check the driver's other instances; return the time until the next check [s].

        The health streams are muted if this instance is not the leader. They send all devices again if it has
        become the leader, or another instance has ended.
        """
        try:
            state = await self._files.call(self._election.check_instances)
        except OSError as error:
            if count := self._log_limit.tick():
                log.warning(
                    "leader election: other instances of the driver cannot be checked: %s; %d failures; will "
                    "retry",
                    error,
                    count,
                )
            return CHECK_WITH_OTHERS_S
        if state.is_leader and (state.has_any_ended or not self._was_leader):
            # The kubelet forgets the driver's health when the other instance's stream ends, possibly a moment
            # after this check. So all devices are sent now and at the next check.
            self._repeats = 2
        if not state.is_leader:
            if self._was_leader:
                log.info("leader election: a newer instance of the driver leads; this one sends no health")
            self._repeats = 0
            self._subscribers.mute()
        elif self._repeats:
            self._repeats -= 1
            self._subscribers.resend_all()
        self._was_leader = state.is_leader
        return CHECK_WITH_OTHERS_S if state.other_count or self._repeats else CHECK_S
