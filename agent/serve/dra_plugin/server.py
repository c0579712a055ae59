"""Everything that a driver serves, put together: services, sockets, its turn to speak, one end for all.

On the service socket: DRAPlugin v1 and v1beta1 beside the health API in both versions, because the kubelet
makes one connection for all. On the registration socket: how the kubelet finds the other. What is served no
disk holds up.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from agent.model.report import Report
from agent.prepare.wire import WireMode
from agent.serve.dra_plugin.leader import Instances
from agent.serve.dra_plugin.paths import PluginPaths
from agent.serve.dra_plugin.registration import OnStatus, Registration
from agent.serve.dra_plugin.service import ENTRIES_LIMIT, Claims, DraPlugin, RequestStream
from agent.serve.dra_plugin.sockets import PluginSockets
from agent.serve.grpc.codec import Codec
from agent.serve.grpc.server import Server
from agent.serve.health.service import HealthPublisher, HealthService, SubscriberSet
from agent.serve.servers import encode_devices
from agent.serve.sockets import make_directory
from agent.system.rate_limit import RateLimiter
from agent.system.threads.latest import Latest
from agent.system.threads.serial_worker import SerialWorker

SHUTTING_DOWN: Final = "driver shutting down"
"""What clients read when it ends; the status is UNAVAILABLE."""

LOOK_S: Final = 2.0
"""How often sockets and other instances are looked for [s]..."""
LOOK_BESIDE_S: Final = 1.0
"""...and while there is another instance: the kubelet forgets the driver's health when that one ends."""

log = logging.getLogger(__name__)


class Plugin:
    """What one instance of a driver serves, once :meth:`run` runs in some loop."""

    def __init__(
        self,
        latest: Latest[Report],
        claims: Claims,
        *,
        driver: str,
        paths: PluginPaths,
        pod_uid: str = "",
        wire: WireMode = WireMode.NONE,
        on_status: OnStatus | None = None,
    ) -> None:
        self.finish_s = 0.0
        """How long the end waits for the answers of calls that are under way [s]."""
        self._latest = latest
        self._claims = claims
        self._driver = driver
        self._paths = paths
        self._pod_uid = pod_uid
        self._wire = wire
        self._on_status = on_status

    async def run(self, ready: Callable[[], None]) -> None:
        """Serves in the running loop until cancelled; then ends in the order that the kubelet wants.

        ``ready`` is called when the kubelet can find the driver. The end takes :attr:`finish_s` and less than
        two seconds more; if a disk hangs, files go when it answers.

        Raises:
            Busy: another instance serves one of the sockets.
            ConfigError: a directory or socket cannot be used.
            PermissionDenied: we may not make one.
            ValueError: a report that cannot be told.
        """
        make_directory(self._paths.plugin_dir, flag="--plugin-dir")
        instances = Instances(self._paths.plugin_dir, self._pod_uid)
        files = SerialWorker()
        try:
            await self._serve(instances, files, ready)
        finally:
            try:
                await files.finish(instances.leave)
            finally:
                files.close()

    async def _serve(self, instances: Instances, files: SerialWorker, ready: Callable[[], None]) -> None:
        publications = HealthPublisher(self._latest, encode_devices, [self._driver])
        plugin = DraPlugin(self._claims, self._wire)
        registration = Registration(self._driver, str(self._paths.service), self._on_status)
        sockets = PluginSockets(
            self._paths,
            Server(
                [plugin, HealthService(publications.of(self._driver))],
                codec=Codec(ENTRIES_LIMIT),
                stream_class=RequestStream,
            ),
            Server([registration]),
            files,
        )
        try:
            await sockets.open()
            ready()
            turns = _Turns(instances, files, publications.of(self._driver))
            await asyncio.gather(publications.run(), self._look(sockets, turns))
        finally:
            try:
                await sockets.unregister(SHUTTING_DOWN)
                if not await plugin.close(SHUTTING_DOWN, self.finish_s):
                    log.warning("%s: calls end without an answer, after %g s", self._driver, self.finish_s)
            finally:  # also if somebody will not wait for those calls any longer
                await sockets.close(SHUTTING_DOWN)

    async def _look(self, sockets: PluginSockets, turns: "_Turns") -> None:
        while True:
            await sockets.look()
            await asyncio.sleep(await turns.look())


class _Turns:
    """Hushes this instance's health streams, and lets them speak again, as others come and go."""

    def __init__(self, instances: Instances, files: SerialWorker, audience: SubscriberSet) -> None:
        self._instances = instances
        self._files = files
        self._audience = audience
        self._speaks = True
        self._repeats = 0
        self._complaints = RateLimiter()

    async def look(self) -> float:
        """Looks who else lives, and acts on it; returns when to look again [s]."""
        try:
            turn = await self._files.call(self._instances.look)
        except OSError as error:
            if count := self._complaints.tick():
                log.warning("cannot look for other instances of the driver: %s; %d times", error, count)
            return LOOK_BESIDE_S
        if turn.speaks and (turn.gone or not self._speaks):
            # The kubelet forgets a driver's health when one of its streams ends, and may do so a moment after
            # we have seen that the other instance is gone. So it is all said now, and once more.
            self._repeats = 2
        if not turn.speaks:
            if self._speaks:
                log.info("a newer instance of the driver speaks for it from now on")
            self._repeats = 0
            self._audience.mute()
        elif self._repeats:
            self._repeats -= 1
            self._audience.resend_all()
        self._speaks = turn.speaks
        return LOOK_BESIDE_S if turn.others or self._repeats else LOOK_S
