"""Server of one instance of an embedded driver: services, sockets, registration, leadership, and a common
end.

The service socket has DRAPlugin v1 and v1beta1 and the health API in both versions, because the kubelet
makes one connection for all. The registration socket lets the kubelet find the service socket. No disk
delays what is served.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from agent.model.report import Report
from agent.serve.dra_plugin.leader import LeaderElection
from agent.serve.dra_plugin.result import WireMode
from agent.serve.dra_plugin.service import ENTRIES_LIMIT, ClaimHandler, DraPluginService, RequestStream
from agent.serve.dra_plugin.sockets import PluginPaths, PluginSockets
from agent.serve.grpc.codec import Codec
from agent.serve.grpc.gen.registration_v1 import pluginregistration as wire
from agent.serve.grpc.server import Server
from agent.serve.health.embedded_service import SERVICES
from agent.serve.health.service import HealthPublisher, HealthService, SubscriberSet
from agent.serve.servers import encode_devices
from agent.serve.sockets import make_directory
from agent.system.threads.latest import Latest
from agent.system.threads.worker_pool import SerialWorker
from agent.system.timing import RateLimiter

PLUGIN_TYPE: Final = "DRAPlugin"

SUPPORTED: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin", *SERVICES)
"""gRPC services of a driver, the newest first: the kubelet uses the first plugin service that it knows. It
refuses a list without a plugin service, and from 1.37 on it requests health only if the list has a health
service."""

OnStatus = Callable[[bool, str], None]
"""Callback for a registration: whether it succeeded, and the kubelet's error text if not. Must return at
once."""


class RegistrationService(wire.RegistrationBase):
    """Service ``pluginregistration.Registration`` of a driver's registration socket.

    The socket is the registration: while its file exists the driver is registered. The kubelet waits one
    second for the first answer. Never blocks.

    Args:
        driver: Name of the driver.
        endpoint: Path of the driver's service socket.
        on_status: Called with the result of each registration.
    """

    def __init__(self, driver: str, endpoint: str, on_status: OnStatus | None = None) -> None:
        self._info = wire.PluginInfo(PLUGIN_TYPE, driver, endpoint, list(SUPPORTED))
        self._on_status = on_status

    async def get_info(self, info_request: wire.InfoRequest) -> wire.PluginInfo:
        """Return name, endpoint and services of the driver."""
        return self._info

    async def notify_registration_status(
        self, registration_status: wire.RegistrationStatus
    ) -> wire.RegistrationStatusResponse:
        """Log the result of the registration. After a failure the kubelet retries by itself, so the socket
        stays."""
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
            except BaseException:  # of the driver's callback; SystemExit would end more than this call
                log.exception("driver %s: on_status raised an exception; ignored", self._info.name)
        return wire.RegistrationStatusResponse()


SHUTTING_DOWN: Final = "driver shutting down"
"""Text for clients when the instance ends; the status is UNAVAILABLE."""

CHECK_S: Final = 2.0
"""Interval at which sockets and other instances are checked [s]."""
CHECK_WITH_OTHERS_S: Final = 1.0
"""Interval of the checks while another instance runs [s]: the kubelet forgets the driver's health when that
instance ends."""

log = logging.getLogger(__name__)


class InstanceServer:
    """Server of one instance of a driver; serves while :meth:`run` runs in an event loop."""

    def __init__(
        self,
        latest: Latest[Report],
        claims: ClaimHandler,
        *,
        driver: str,
        paths: PluginPaths,
        pod_uid: str = "",
        wire: WireMode = WireMode.NONE,
        on_status: OnStatus | None = None,
    ) -> None:
        self.finish_s = 0.0
        """Time that the shutdown waits for the answers of open calls [s]."""
        self._latest = latest
        self._claims = claims
        self._driver = driver
        self._paths = paths
        self._pod_uid = pod_uid
        self._wire = wire
        self._on_status = on_status

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve in the running loop until cancelled; then end in the order that the kubelet requires.

        ``ready`` is called when the kubelet can find the driver. The shutdown takes :attr:`finish_s` and less
        than two seconds more; files on a disk that hangs are removed when it answers.

        Raises:
            Busy: Another instance serves one of the sockets.
            ConfigError: A directory or socket cannot be used.
            PermissionDenied: A directory or socket may not be created.
            ValueError: A report is not valid.
        """
        make_directory(self._paths.plugin_dir, flag="--plugin-dir")
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
        publisher = HealthPublisher(self._latest, encode_devices, [self._driver])
        plugin = DraPluginService(self._claims, self._wire)
        registration = RegistrationService(self._driver, str(self._paths.service), self._on_status)
        sockets = PluginSockets(
            self._paths,
            Server(
                [plugin, HealthService(publisher.subscribers_of(self._driver))],
                codec=Codec(ENTRIES_LIMIT),
                stream_class=RequestStream,
            ),
            Server([registration]),
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
                if not await plugin.close(SHUTTING_DOWN, self.finish_s):
                    log.warning(
                        "driver %s: shutdown: open calls not answered within %g s; cancelled",
                        self._driver,
                        self.finish_s,
                    )
            finally:  # also if the waiting for those calls is cancelled
                await sockets.close(SHUTTING_DOWN)

    async def _run_checks(self, sockets: PluginSockets, leadership: "_Leadership") -> None:
        while True:
            await sockets.restore_missing()
            await asyncio.sleep(await leadership.check())


class _Leadership:
    """Mutes this instance's health streams while it is not the leader."""

    def __init__(self, election: LeaderElection, files: SerialWorker, subscribers: SubscriberSet) -> None:
        self._election = election
        self._files = files
        self._subscribers = subscribers
        self._was_leader = True
        self._repeats = 0
        self._log_limit = RateLimiter()

    async def check(self) -> float:
        """Check the other instances; mute the health streams or resend all devices. Return the time until the
        next check [s]."""
        try:
            state = await self._files.call(self._election.check)
        except OSError as error:
            if count := self._log_limit.tick():
                log.warning("leader election: cannot check other instances: %s; %d failures", error, count)
            return CHECK_WITH_OTHERS_S
        if state.is_leader and (state.departed or not self._was_leader):
            # The kubelet forgets a driver's health when one of its streams ends, possibly a moment after this
            # check found the other instance ended. So all devices are sent now, and once more.
            self._repeats = 2
        if not state.is_leader:
            if self._was_leader:
                log.info("leader election: a newer instance of the driver is the leader; health muted here")
            self._repeats = 0
            self._subscribers.mute()
        elif self._repeats:
            self._repeats -= 1
            self._subscribers.resend_all()
        self._was_leader = state.is_leader
        return CHECK_WITH_OTHERS_S if state.others or self._repeats else CHECK_S
