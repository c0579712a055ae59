"""Fake claim handler behind a plugin service: prepares as configured, and records its calls."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path

from agent.model.claim import Claim, ClaimRef
from agent.model.prepare import PrepareVerdict
from agent.model.report import Report
from agent.prepare.classify import PrepareContext
from agent.prepare.classify import classify as classify_error
from agent.prepare.errors import PrepareError
from agent.prepare.kubelet_message import kubelet_text
from agent.serve.dra_plugin.instance_server import DriverInstanceServer, PluginPaths, plugin_paths
from agent.serve.dra_plugin.prepared_devices import PreparedDevice, WireMode
from agent.serve.dra_plugin.service import ClaimOperation
from agent.system.threads.latest_value import LatestValue
from agent.system.threads.loop_thread import AsyncioThread
from wire.serving import ServerThread

DRIVER = "gpu.example.com"

Behaviour = Callable[[ClaimOperation, ClaimRef], Awaitable[tuple[PreparedDevice, ...]]]


class FakeClaimHandler:
    """Handler that answers with one device of the claim's name, unless configured otherwise."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        """Kind and name of each call, in order."""
        self.finished: list[tuple[str, str]] = []
        self.maximum_running = 0
        """Maximum of concurrent calls."""
        self.behaviour: dict[str, Behaviour] = {}
        """Functions that handle claims, by the claim's name."""
        self.unavailable = ""
        self._running = 0

    async def run(
        self, kind: ClaimOperation, ref: ClaimRef, until_s: float, unawaited: threading.Event
    ) -> tuple[PreparedDevice, ...]:
        """Handle a claim as configured."""
        self.calls.append((str(kind), ref.name))
        self._running += 1
        self.maximum_running = max(self.maximum_running, self._running)
        try:
            behaviour = self.behaviour.get(ref.name)
            await asyncio.sleep(0)  # lets concurrent calls run
            if behaviour is not None:
                return await behaviour(kind, ref)
            if kind is ClaimOperation.UNPREPARE:
                return ()
            return (
                PreparedDevice(
                    requests=("r",), pool="pool", device=ref.name, cdi_ids=(f"example.com/gpu={ref.uid}",)
                ),
            )
        finally:
            self._running -= 1
            self.finished.append((str(kind), ref.name))

    def fail(self, name: str, error: Exception) -> None:
        """Make a claim fail like a driver that raises `error`."""

        async def handle(kind: ClaimOperation, ref: ClaimRef) -> tuple[PreparedDevice, ...]:
            verdict = self.classify(ref, error)
            raise PrepareError(verdict, kubelet_text(verdict))

        self.behaviour[name] = handle

    def hold(self, name: str) -> "Future[None]":
        """Make a claim take until the future has a result."""
        held: Future[None] = Future()

        async def handle(kind: ClaimOperation, ref: ClaimRef) -> tuple[PreparedDevice, ...]:
            await asyncio.shield(asyncio.wrap_future(held))
            return () if kind is ClaimOperation.UNPREPARE else (PreparedDevice(pool="pool", device=ref.name),)

        self.behaviour[name] = handle
        return held

    def classify(self, ref: ClaimRef, error: Exception) -> PrepareVerdict:
        """Classify like the PrepareFailureTracker without findings."""
        return classify_error(error, PrepareContext(Claim(*ref), {}))

    def unavailable_reason(self) -> str:
        """Return why no call is accepted now."""
        return self.unavailable


class DriverInstance(ServerThread):
    """Server of a driver's sockets."""

    def __init__(
        self,
        kubelet_dir: Path,
        *,
        pod_uid: str = "",
        wire: WireMode = WireMode.NONE,
    ) -> None:
        (kubelet_dir / "plugins_registry").mkdir(parents=True, exist_ok=True)
        self.claims = FakeClaimHandler()
        self.latest: LatestValue[Report] = LatestValue()
        self.failures = []
        self.paths: PluginPaths = plugin_paths(DRIVER, kubelet_dir=kubelet_dir, pod_uid=pod_uid)
        self.plugin = DriverInstanceServer(
            self.latest,
            self.claims,
            driver=DRIVER,
            paths=self.paths,
            pod_uid=pod_uid,
            wire=wire,
        )
        self.thread = AsyncioThread(self.plugin.run, on_failure=self.failures.append)
